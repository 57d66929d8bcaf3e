"""Keeps a guard (see ``guard.py``) beside this process for as long as its local Ray is there."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spotlight_fleet.emulated import guard

log = logging.getLogger("spotlight.fleet.emulated.guarded")

_RETRY_S = 1.0
_END_S = 5.0


@contextmanager
def guarded(cluster: str, directory: Path) -> Iterator[None]:
    """A guard of a cluster for the block. One that is killed or stopped is replaced at once, unless it had
    just been started: what ends every guard must not keep this process busy.
    """
    over = threading.Event()
    watch = _start(cluster, directory)

    def keep() -> None:
        nonlocal watch
        while True:
            began_s = time.monotonic()
            _until_it_ends_or_stands_still(watch)
            if over.is_set():
                return
            watch.kill()
            watch.wait()
            log.warning("the guard of the local Ray is gone (%s): another is started", watch.returncode)
            if time.monotonic() - began_s < _RETRY_S:
                over.wait(_RETRY_S)
            while not over.is_set():
                try:
                    watch = _start(cluster, directory)
                    break
                except OSError as error:  # no process or memory to be had
                    log.warning("no guard of the local Ray, tried again in %g s: %s", _RETRY_S, error)
                    over.wait(_RETRY_S)

    keeper = threading.Thread(target=keep, name="guard keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        assert watch.stdin is not None
        watch.stdin.close()  # EOF ends the guard, which finds nothing left to do
        keeper.join(_END_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            watch.wait(timeout=_END_S)


def _start(cluster: str, directory: Path) -> subprocess.Popen[bytes]:
    # Isolated, without site-packages: 10 MB instead of 60. Its own session: Ctrl-C must not reach it.
    command = [sys.executable, "-I", "-S", guard.__file__, cluster, str(directory)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/"
    )


def _until_it_ends_or_stands_still(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ChildProcessError):  # reaped already
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
