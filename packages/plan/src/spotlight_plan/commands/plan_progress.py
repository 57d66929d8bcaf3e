"""How far ``spotlight plan`` is, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from spotlight_rewards.base.terminal import TextConsole, progress_bar

if TYPE_CHECKING:
    from spotlight_plan.search import SearchStep

FIRST_S = 3.0
"""After so many seconds the best so far is named."""
EVERY_S = 10.0
"""And again."""


class PlanProgress:
    """A context manager; :meth:`step` is what a search calls.

    Args:
        console: of stderr.
        clock: seconds.
    """

    def __init__(
        self, console: TextConsole | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock = console or TextConsole(stderr=True), clock
        self._bar = progress_bar(self._console)
        self._task = self._bar.add_task("", total=None)
        self._what = ""
        self._since_s = self._next_s = 0.0

    def __enter__(self) -> PlanProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def step(self, step: SearchStep) -> None:
        """Show a step."""
        now_s = self._clock()
        begins = step.what != self._what
        if begins:
            self._what, self._since_s = step.what, now_s
            self._bar.reset(self._task)
            # Simulations begin with what is known, whenever that is.
            self._next_s = now_s + FIRST_S if step.what == "ranked" else now_s
        if self._console.is_terminal:
            self._bar.update(self._task, total=step.of, completed=step.done, description=said(step))
        elif now_s >= self._next_s and step.best is not None:
            self._next_s = now_s + EVERY_S
            left_s = (now_s - self._since_s) * (step.of - step.done) / step.done if step.done else None
            rest = "" if left_s is None else f", about {left_s:.0f} s left"
            self._console.print(f"{said(step)}{rest}", soft_wrap=True)


def said(step: SearchStep) -> str:
    """``14 of 86 clusters ranked; best so far: ...``."""
    from spotlight_plan.candidates import shape_of
    from spotlight_plan.pages.comparison_summary import hours, usd

    of = "clusters ranked" if step.what == "ranked" else "simulations of the best done"
    text = f"{step.done} of {step.of} {of}"
    if step.best is None:
        return text
    runs = step.best.runs
    figures = f"{hours(runs.target_h.p50)}, {usd(runs.target_usd.p50)}"
    return f"{text}; best so far, estimated: {figures}, {shape_of(step.best.candidate)}"
