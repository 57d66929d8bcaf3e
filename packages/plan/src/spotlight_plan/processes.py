"""One function on many arguments, in several processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def in_processes(
    function: Callable[[Argument], Result], arguments: Sequence[Argument], jobs: int
) -> Iterator[Result]:
    """Results in the arguments' order, of at most ``jobs`` processes; here if one would do.

    Whatever ends the loop over them, Ctrl-C too, ends the processes at once.
    """
    if (count := min(jobs, len(arguments))) <= 1:
        yield from map(function, arguments)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        # A terminal sends Ctrl-C to all: they start without hearing it, and this process ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            results = [pool.submit(function, argument) for argument in arguments]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for result in results:
                yield result.result()
        except BaseException:
            for process in [*pool._processes.values()]:  # Python 3.14 has terminate_workers
                process.terminate()
            raise
