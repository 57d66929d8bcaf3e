"""Runs rows in a process that may hang, crash or lose its GPU context, and goes on without it.

The rows of a part share one process, which makes the model once. It is replaced when a row outlives its
limit, when it dies, and when a CUDA error has broken its context.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.gpu.suite import Outcome, Report, Result, Row, Verdict, result_of

START_S = 120.0
"""For a process to import torch, diffusers and peft on a slow disk."""
GRACE_S = 45.0
"""Beyond a row's budget: making the model, compiling."""
_TINY_FACTOR = 4
"""Of both: a tiny model runs where others compute, too."""
_SMALLEST_S = 5.0


class RowProcess:
    """A process that runs rows, and everything that it started."""

    def __init__(self, home: Path, device: str, tiny: bool, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(home, device, tiny, model, theirs))
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float) -> dict[str, object] | None:
        """The next message; None if none came in time.

        Raises:
            EOFError: the process ended.
        """
        if not self._pipe.poll(max(timeout_s, 0.0)):
            return None
        message: dict[str, object] = self._pipe.recv()
        return message

    def ask(self, row: Row) -> None:
        """Begin a row. Raises OSError if the process ended."""
        self._pipe.send(row)

    def end(self) -> None:
        """End the process and its children, if need be by force."""
        self._pipe.close()
        self.process.join(2.0)
        if self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have made its group yet
        self.process.join()


def _serve(home: Path, device: str, tiny: bool, model: str, pipe: Connection) -> None:
    from benchmarks.gpu import runner

    runner.serve(home, device, tiny, model, pipe)


def supervise(
    rows: Sequence[Row],
    report: Report,
    home: Path,
    *,
    device: str,
    tiny: bool,
    limit_s: float,
    model: str = "",
) -> None:
    """Run ``rows`` in order; each gets a result in ``report``.

    Args:
        home: for models and sockets of the row processes.
        limit_s: of all together. A row that would not fit is skipped.
    """
    ends, factor = time.monotonic() + limit_s, _TINY_FACTOR if tiny else 1
    process: RowProcess | None = None
    starts = True
    try:
        for row in rows:
            left = ends - time.monotonic()
            if left < (takes_s := max(0.0 if tiny else row.budget_s, _SMALLEST_S)):
                note = f"{max(0.0, left):.0f} s of {limit_s:.0f} s are left, it takes {takes_s:.0f} s"
                report.add(result_of(row, Verdict.SKIP, 0.0, tiny=tiny, note=note))
                continue
            if process is None and starts:
                process = RowProcess(home, device, tiny, model)
                starts = _begun(process, report, START_S * factor)
            if process is None or not starts:
                note = f"its process does not start on {device!r}: the reason is above"
                report.add(result_of(row, Verdict.FAIL, 0.0, tiny=tiny, note=note))
                continue
            result, broken = _run(process, row, min(row.budget_s + GRACE_S * factor, left), tiny)
            report.add(result)
            if broken:
                process.end()
                process = None
    finally:
        if process is not None:
            process.end()


def _begun(process: RowProcess, report: Report, timeout_s: float) -> bool:
    """Whether the process is there to run rows: torch, diffusers and the device are."""
    try:
        message = process.receive(timeout_s)
    except EOFError:
        return False
    if message is not None:
        report.machine = message["machine"]  # type: ignore[assignment]
    return message is not None


def _run(process: RowProcess, row: Row, limit_s: float, tiny: bool) -> tuple[Result, bool]:
    """The row's result, and whether its process must be replaced."""
    began = time.monotonic()

    def failed(note: str) -> tuple[Result, bool]:
        return result_of(row, Verdict.FAIL, time.monotonic() - began, tiny=tiny, note=note), True

    try:
        process.ask(row)
        message = process.receive(limit_s)
    except (EOFError, OSError):
        process.process.join(5.0)
        return failed(f"its process ended with exit code {process.process.exitcode}")
    if message is None:
        return failed(f"it did not end within {limit_s:.0f} s and was stopped")
    seconds, note = time.monotonic() - began, str(message.get("note", ""))
    if message["kind"] == "skip":
        return result_of(row, Verdict.SKIP, seconds, tiny=tiny, note=note), False
    if message["kind"] == "raised":
        return result_of(row, Verdict.FAIL, seconds, tiny=tiny, note=note), bool(message["broken"])
    outcome = message["outcome"]
    assert isinstance(outcome, Outcome)
    verdict = row.verdict(outcome.value, tiny=tiny)
    return result_of(row, verdict, seconds, tiny=tiny, outcome=outcome), bool(message.get("broken"))
