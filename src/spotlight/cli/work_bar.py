"""A progress bar for commands that do one thing."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, TaskID

from spotlight.scheduler.types import Phase


class WorkBar:
    """An ``Observer`` that draws one bar on stderr while there is a terminal. Use as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print it."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def work(self, phase: Phase, done: float, total: int) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._progress.add_task(phase.value, total=total)
        self._progress.update(self._task, completed=done, total=total, description=phase.value)

    def billed(self, cost_usd: float) -> None:
        """Nothing to draw."""

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        """Nothing to draw."""

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        """Nothing to draw."""
