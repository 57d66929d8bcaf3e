"""Progress in a notebook: one output that is drawn again in place, with notes below each other above it."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import Any, Self

from spotlight.cli.runs.progress import Facts, RunProgress, drawn
from spotlight.scheduler.types import Phase
from spotlight_rewards.base.terminal import TextConsole

_DRAWN_EVERY_S = 0.5
_COLUMNS = 110
_PRE = "<pre style='line-height:normal;white-space:pre-wrap'>{code}</pre>"


class NotebookProgress(RunProgress):
    """Bars, the last validation and what was said, as an output of the cell that trains."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._said: list[str] = []
        self._drawn_at = 0.0
        self._output: Any = None

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._output = display(HTML(self.html()), display_id=True)
        return self

    def say(self, text: str) -> None:
        """Keep a line above the bars."""
        super().say(text)
        self._said.append(text)
        self._draw(now=True)

    def work(self, phase: Phase, done: float, total: int) -> None:
        """Draw, twice a second at most."""
        super().work(phase, done, total)
        self._draw(now=False)

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        """Draw; a line for each iteration would fill the notebook, so only the newest stays."""
        super().iterated(iteration, row)
        self._said.pop()
        self._draw(now=True)

    def html(self) -> str:
        """What is shown."""
        console = TextConsole(
            file=io.StringIO(), record=True, width=_COLUMNS, force_jupyter=False, force_terminal=True
        )
        for text in self._said:
            console.print(text)
        console.print(drawn(self.facts))
        return console.export_html(inline_styles=True, code_format=_PRE)

    def _draw(self, *, now: bool) -> None:
        if self._output is None or not (now or time.monotonic() - self._drawn_at > _DRAWN_EVERY_S):
            return
        from IPython.display import HTML

        self._drawn_at = time.monotonic()
        self._output.update(HTML(self.html()))
