"""Ends the processes of a local Ray whatever happened to their owner. Standard library only.

Every process carries ``SPOTLIGHT_LOCAL_RAY=PID.START.K/N`` in its environment: the owning process (with its
start time, since pids are reused), its K-th cluster, and the node. Child processes inherit the mark, so
orphans are found; children of a marked process count even if they have overwritten their environment.

As a program it guards an owner: it waits until the owner is gone, ends what is left and removes the
directory. So Ctrl-C, a crash and SIGKILL leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "SPOTLIGHT_LOCAL_RAY"
_PREFIX = f"{MARK}=".encode()
_PROC = Path("/proc")
_LOOK_AGAIN_S = 1.0
_SETTLE_S = 0.02


def owner_of(pid: int) -> str:
    """Name of a living process, unique on this machine even after pid reuse; empty if there is none."""
    fields = _stat(pid)
    return f"{pid}.{fields[19]}" if fields else ""


def is_alive(cluster: str) -> bool:
    """Whether the owner of a cluster still runs; ``cluster`` begins with its name (:func:`owner_of`)."""
    pid, start, *_ = [*cluster.split("."), ""]
    return pid.isdecimal() and owner_of(int(pid)) == f"{pid}.{start}"


def marked(mark: str) -> set[int]:
    """Processes that carry ``mark`` (``CLUSTER/N``: a node; ``CLUSTER/``: all), and their descendants."""
    wanted = mark.encode()
    exact = not mark.endswith("/")
    found, parents = set(), {}
    for pid in _pids():
        fields = _stat(pid)
        if not fields or fields[0] == "Z":
            continue
        parents[pid] = int(fields[1])
        if any(each == wanted or (not exact and each.startswith(wanted)) for each in _marks(pid)):
            found.add(pid)
    grown = True
    while grown:
        young = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        grown = bool(young)
        found |= young
    return found - {os.getpid()}


def clusters() -> set[str]:
    """Clusters (PID.START.K) of this user's living marked processes."""
    marks = (mark for pid in _pids() for mark in _marks(pid))
    return {mark.decode(errors="replace").partition("/")[0] for mark in marks}


def end(mark: str, timeout_s: float = 5.0) -> set[int]:
    """SIGKILL every process of ``mark``. Returns those still alive after ``timeout_s``.

    All are stopped first: a process that sees another die may start a third.
    """
    deadline_s = time.monotonic() + timeout_s
    while rest := marked(mark):
        _send(rest, signal.SIGSTOP)
        rest |= marked(mark)
        _send(rest, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return marked(mark)
        time.sleep(_SETTLE_S)
    return set()


def sweep(base: Path) -> int:
    """End local Rays whose owner is dead and remove their directories under ``base``; returns how many."""
    left = {cluster for cluster in clusters() if not is_alive(cluster)}
    for cluster in left:
        end(f"{cluster}/")
    with contextlib.suppress(OSError):
        for directory in list(base.iterdir()):
            if directory.is_dir() and not is_alive(directory.name):
                left.add(directory.name)
                shutil.rmtree(directory, ignore_errors=True)
    return len(left)


def _pids() -> Iterable[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _marks(pid: int) -> list[bytes]:
    """What a process's environment has after ``MARK=``; none: it is gone, or another user's."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
    return [entry.removeprefix(_PREFIX) for entry in entries if entry.startswith(_PREFIX)]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: 0 state, 1 parent, 19 start time; empty: no such process."""
    try:
        return (
            (_PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return []


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def main(cluster: str, directory: str) -> None:
    """Wait for the owner's end, then clean up. Standard input is a pipe that only the owner holds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while is_alive(cluster):
        # EOF on the pipe is immediate; polling covers an owner whose forks still hold the other end.
        if select.select([0], [], [], _LOOK_AGAIN_S)[0] and not os.read(0, 1):
            break
    end(f"{cluster}/")
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
