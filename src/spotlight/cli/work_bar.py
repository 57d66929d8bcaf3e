"""A progress bar for single-task commands."""

from __future__ import annotations

from typing import Self

from rich.progress import TaskID

from spotlight.runtime.observer import Observer
from spotlight.scheduler.types import Phase
from spotlight_rewards.base.terminal import TextConsole, progress_bar


class WorkBar(Observer):
    """An ``Observer`` that draws one bar on stderr if it is a terminal. Use as a context manager."""

    def __init__(self) -> None:
        self._progress = progress_bar(TextConsole(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def work(self, phase: Phase, done: float, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(phase.value, total=total)
        self._progress.update(self._task, completed=done, total=total, description=phase.value)
