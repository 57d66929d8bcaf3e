"""``spotlight train --ranks N``: one process per rank on this machine, started and supervised.

Like ``torchrun``, which kills ranks that take longer than a limit to stop, and ends with status 1 then. Here
signals are passed on to all ranks, once each, nobody kills a rank that still works, and the command ends as
one process would.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from spotlight.runtime.signals import ending_at_once, on_signals, signals_that_end
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED, complain

FOLLOW_S = 30.0
"""When a rank failed, the others have so long to end by themselves."""
_TAIL = 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run_ranks(count: int, command: Sequence[str], follow_s: float = FOLLOW_S) -> int:
    """Run ``command`` as ``count`` ranks that meet at 127.0.0.1; the terminal is rank 0's.

    Returns:
        The exit status of the first rank that failed (128 + N for signal N), else that of a stop, else 0.
    """
    with ending_at_once(), _started(count, command) as (processes, logs):
        ends = queue.SimpleQueue[int]()
        for rank, process in enumerate(processes):
            threading.Thread(target=_report, args=(rank, process, ends), daemon=True).start()
        with _signals_passed_on(processes):
            return _supervise(processes, logs, ends, follow_s)


def run_in_turn(commands: Sequence[Sequence[str]]) -> int:
    """Run one after another; signals are passed on. Returns the first exit status that is not 0, else 0."""
    with ending_at_once():
        for command in commands:
            process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
            with _signals_passed_on([process]):
                code = process.wait()
            if code != 0:
                return _status(code)
    return 0


def _signals_passed_on(processes: Sequence[subprocess.Popen[bytes]]) -> AbstractContextManager[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    return on_signals((signal.SIGINT, *signals_that_end()), forward)


def _status(code: int) -> int:
    """As a shell has it: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def _supervise(
    processes: Sequence[subprocess.Popen[bytes]], logs: Path, ends: queue.SimpleQueue[int], follow_s: float
) -> int:
    failed, stopped, end_s = 0, False, math.inf
    for _ in processes:
        try:
            rank = ends.get(timeout=max(0.0, end_s - time.monotonic()) if failed else None)
        except queue.Empty:
            for process in processes:  # they wait for one that is gone
                process.kill()
            rank = ends.get()
        code = processes[rank].wait()
        stopped = stopped or code == EXIT_INTERRUPTED
        if code not in (0, EXIT_INTERRUPTED) and not failed:
            failed = _status(code)
            end_s = time.monotonic() + follow_s
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            complain(f"rank {rank} ended {how}, so the others end too.{_said(rank, logs)}")
    return failed or (EXIT_INTERRUPTED if stopped else 0)


def _said(rank: int, logs: Path) -> str:
    if rank == 0:
        return ""
    log = _log_of(rank, logs)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    return "\n".join([f" The end of {log}:", *lines])


def _report(rank: int, process: subprocess.Popen[bytes], ends: queue.SimpleQueue[int]) -> None:
    process.wait()
    ends.put(rank)


def end_with_parent() -> None:
    """Of a process that is just forked: a SIGTERM when the one that started it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _started(count: int, command: Sequence[str]) -> Iterator[tuple[list[subprocess.Popen[bytes]], Path]]:
    """The ranks, and the folder of the logs of all but rank 0, which stays if one failed."""
    logs = Path(tempfile.mkdtemp(prefix="spotlight-ranks-"))
    processes: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        for rank in range(count):
            world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "RANK": str(rank)}
            meeting = {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with ExitStack() as stack:
                log = None if rank == 0 else stack.enter_context(_log_of(rank, logs).open("wb"))
                processes.append(
                    subprocess.Popen(
                        command,
                        env={"OMP_NUM_THREADS": "1", **os.environ, **world, **meeting},
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # what a terminal signals is passed on, once
                        preexec_fn=end_with_parent,
                    )
                )
        yield processes, logs
    finally:
        for process in processes:
            process.kill()
            process.wait()
        if all(process.returncode in (0, EXIT_INTERRUPTED) for process in processes):
            shutil.rmtree(logs, ignore_errors=True)


def _log_of(rank: int, logs: Path) -> Path:
    return logs / f"rank-{rank}.log"
