"""Runs the command ``spotlight`` as a user does, in a process of its own, and reads what it leaves.

What it prints goes to the suite's output as it comes.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.gpu.lab import Lab
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.metrics import MetricsRow, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError

_LOOK_S = 0.02


class TrainCommand:
    """A running ``spotlight train``; see :func:`training`.

    Attributes:
        run: its run directory.
    """

    def __init__(self, process: subprocess.Popen[bytes], run: Path) -> None:
        self.process, self.run = process, run

    def rows(self) -> list[MetricsRow]:
        """Its curves so far."""
        return read_metrics(self.run)

    def ask(self, query: str) -> list[tuple[object, ...]]:
        """Rows of its ledger; none where there is no ledger yet."""
        with suppress(LedgerError), closing(queries.open_readonly(RunPaths(self.run).ledger)) as ledger:
            return list(ledger.execute(query))
        return []

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Raises RuntimeError if it ends before."""
        while not happened():
            if self.process.poll() is not None:
                raise RuntimeError(f"spotlight train ended with {self.process.returncode} before {what}")
            time.sleep(_LOOK_S)

    def finish(self, *expected: int) -> None:
        """Wait for its end. Raises RuntimeError for another exit status than 0 and those expected."""
        if (status := self.process.wait()) not in (0, *expected):
            raise RuntimeError(f"spotlight train ended with {status}; its reason is above")

    def stop(self) -> None:
        """End it after its next checkpoint."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def training(runs: Path, name: str, arguments: list[str]) -> Iterator[TrainCommand]:
    """Start ``spotlight train``; neither it nor its run directory outlives the block."""
    where = f"name={name}", f"runs_dir={runs}", f"cache_dir={runs / 'cache'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "spotlight.cli", "train", "--plain", *arguments, *where],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield TrainCommand(process, runs / name)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(runs / name, ignore_errors=True)


def audit(run: Path) -> None:
    """``spotlight audit``. Raises RuntimeError if it finds anything."""
    done = subprocess.run(
        [sys.executable, "-m", "spotlight.cli", "audit", str(run)],
        capture_output=True,
        check=False,
        encoding="utf-8",
    )
    if done.returncode:
        raise RuntimeError(f"spotlight audit ended with {done.returncode}: {done.stdout[-500:]}{done.stderr}")


def trained_rows(command: TrainCommand) -> list[MetricsRow]:
    """Curves of the trained iterations."""
    return [row for row in command.rows() if "train/loss" in row.values]


def phases(row: MetricsRow) -> dict[str, float]:
    """Seconds by phase."""
    start = "seconds/"
    return {name.removeprefix(start): v for name, v in row.values.items() if name.startswith(start)}


@contextmanager
def peak_memory(lab: Lab) -> Iterator[Callable[[], int]]:
    """Yields a function: most bytes used on the device in the block, by anyone, beyond those before it.

    Contexts and what allocators hold in reserve count; 0 on a CPU.
    """
    peak, over = [0], threading.Event()

    def used() -> int:
        free, total = torch.cuda.mem_get_info(lab.device)
        return total - free

    def look() -> None:
        while not over.wait(_LOOK_S):
            peak[0] = max(peak[0], used() - before)

    if lab.device.type != "cuda":
        yield lambda: 0
        return
    before = used()
    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield lambda: peak[0]
    finally:
        over.set()
        watcher.join()
