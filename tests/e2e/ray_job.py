"""A run on a local Ray in a process of its own, watched through its ledger, and what happens to it.

Nodes are announced and killed from here, as soon as the ledger says that they work: a busy machine makes
everything late, never another test.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError
from spotlight_fleet.emulated import guard

PATIENCE_S = 240.0
"""For anything that should happen in a run: far more than it takes."""
LOOK_S = 0.03


@dataclass
class Running:
    """A process of ``spotlight train``."""

    run: Path
    process: subprocess.Popen[bytes]
    output: Path
    owner: str

    def ask(self, query: str) -> list[tuple[object, ...]]:
        """Rows of the ledger; none where there is no ledger yet."""
        return ask(self.run, query)

    def wait_for(self, query: str, rows: int = 1) -> list[tuple[object, ...]]:
        """Until the ledger answers a query with so many rows."""
        end_s = time.monotonic() + PATIENCE_S
        while len(found := self.ask(query)) < rows:
            assert self.process.poll() is None, f"ended before {query!r}:\n{self.printed}"
            assert time.monotonic() < end_s, f"no {query!r}:\n{self.printed}"
            time.sleep(LOOK_S)
        return found

    def end(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.printed}") from None

    @property
    def printed(self) -> str:
        """What it printed so far."""
        return self.output.read_text()

    @property
    def left(self) -> set[int]:
        """Processes of its Ray that live."""
        return guard.marked(f"{self.owner}.0/")

    def guard_pid(self) -> int | None:
        """The process that ends its Ray if it cannot."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = file.read_bytes().split(b"\0")
                if guard.__file__.encode() in words and f"{self.owner}.0".encode() in words:
                    return int(file.parent.name)
        return None

    # -- what happens to it -------------------------------------------------------------------------------

    def notice(self, node: int) -> None:
        """Announce the end of the ``node``-th node that was added, as Kubernetes does."""
        members = guard.marked(self._mark(node))
        base = next(guard_directories(self.owner))
        for file in base.glob("session_2*/spotlight_agent_*.pid"):
            if (pid := int(file.read_text())) in members:
                os.kill(pid, signal.SIGTERM)
                return
        raise AssertionError(f"node {node} has no agent: {members}")

    def kill(self, node: int) -> None:
        """SIGKILL a node, as a cloud takes a machine."""
        assert guard.marked(self._mark(node)), f"node {node} has no process"
        assert not guard.end(self._mark(node))

    def signal_daemon(self, name: str, number: signal.Signals) -> None:
        """Signal Ray's ``gcs_server``, or the ``raylet`` of the node of the process itself."""
        for pid in guard.marked(self._mark(0)):
            with suppress(OSError):
                program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
                if program.endswith(b"/" + name.encode()):
                    os.kill(pid, number)
                    return
        raise AssertionError(f"no {name} on the first node")

    def kill_learner(self) -> None:
        """SIGKILL the first rank of the learner."""
        logs = "".join(log.read_text() for log in self.run.glob("attempts/learner-*-rank-0.log"))
        alive = guard.marked(f"{self.owner}.0/")
        (process,) = (pid for pid in map(int, re.findall(r"in process (\d+)", logs)) if pid in alive)
        os.kill(process, signal.SIGKILL)

    def kill_head(self) -> None:
        """SIGKILL the process itself; its Ray ends with it."""
        self.process.kill()
        self.process.wait()
        self.require_nothing_left()

    def require_nothing_left(self) -> None:
        """Nothing of its Ray lives, or will in a moment."""
        end_s = time.monotonic() + 60
        while self.left and time.monotonic() < end_s:
            time.sleep(0.1)
        assert not self.left

    def _mark(self, node: int) -> str:
        return f"{self.owner}.0/{node}"


def guard_directories(owner: str) -> Iterator[Path]:
    """Of the local Ray of a process."""
    for parent in (Path(os.environ.get("TMPDIR", "/tmp")), Path("/tmp")):
        directory = parent / f"spotlight-{os.getuid()}" / f"{owner}.0"
        if directory.is_dir():
            yield directory


def ask(run: Path, query: str) -> list[tuple[object, ...]]:
    """Rows of a run's ledger; none where there is no ledger yet."""
    with (
        suppress(LedgerError, sqlite3.OperationalError),
        closing(queries.open_readonly(RunPaths(run).ledger)) as connection,
    ):
        return list(connection.execute(query))
    return []


@contextmanager
def running(run: Path, arguments: list[str]) -> Iterator[Running]:
    """Start ``spotlight train``; nothing of it is left after the block."""
    output = run.with_suffix(".out")
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "spotlight.cli", "train", "--plain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=Path(__file__).parent,
            env={**os.environ, "RAY_worker_niceness": "0"},
            start_new_session=True,
        )
    owner = guard.owner_of(process.pid)
    try:
        yield Running(run, process, output, owner)
    finally:
        process.kill()
        process.wait()
        guard.end(f"{owner}.0/")
