"""Progress display: live bars on a terminal, one line per event elsewhere and in the attempt's log.

Drawing never slows the run: events only set fields, and a thread redraws twice per second.

It also warns where rounding alone moves replayed log-probs by more than the ratio's clip.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import TaskID
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spotlight.report.wording import duration, money, score
from spotlight.runtime.observer import Observer
from spotlight.scheduler.types import Phase
from spotlight.store.metrics import JUDGED, STDERR
from spotlight_rewards.base.terminal import TextConsole, progress_bar

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


log = logging.getLogger("spotlight")

_REDRAWS_PER_S = 2
_PLAIN_WORK_EVERY_S = 30.0


@dataclass(slots=True)
class Facts:
    """The run's state so far.

    Attributes:
        done: iterations trained, including earlier attempts.
        begun: iterations trained before this attempt; None before its first.
        work: (phase, units done, total units).
        work_since, work_from: time and units of the phase's first report; ``work_at``: time of the latest.
        first, last: this attempt's validations.
        price_usd_h: of what is billed by this attempt's time; 0 where :meth:`RunProgress.billed` says it all.
        billed_usd: of earlier attempts, or of the run so far.
        clip_range: of ratios that rounding reaches; None without any.
        was_silent: in some iteration all rewards of each group were equal.
    """

    total: int
    price_usd_h: float
    clip_range: float | None = None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    begun: int | None = None
    trained_since: float = 0.0
    work: tuple[Phase, float, int] | None = None
    work_since: float = 0.0
    work_from: float = 0.0
    work_at: float = 0.0
    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, float] = field(default_factory=dict)
    billed_usd: float = 0.0
    was_silent: bool = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since this attempt began."""
        return time.monotonic() - self.started

    @property
    def seconds_per_iteration(self) -> float:
        """Mean over this attempt, evaluations included; NaN before two iterations."""
        if self.begun is None or self.done <= self.begun:
            return math.nan
        return (time.monotonic() - self.trained_since) / (self.done - self.begun)

    @property
    def left_s(self) -> float:
        """Estimated seconds left; NaN if unknown."""
        return (self.total - self.done) * self.seconds_per_iteration

    @property
    def cost_usd(self) -> float:
        """Of the run so far, all attempts together."""
        return self.billed_usd + self.elapsed_s * self.price_usd_h / 3600

    @property
    def rate(self) -> float:
        """Units of the phase per second; NaN at its beginning."""
        if self.work is None:
            return math.nan
        # From the first report to the latest, because the first unit's start time is unknown.
        spent, done = self.work_at - self.work_since, self.work[1] - self.work_from
        return done / spent if spent > 0.2 and done else math.nan

    def take_work(self, phase: Phase, done: float, total: int) -> None:
        self.work_at = time.monotonic()
        if self.work is None or self.work[0] is not phase or done <= self.work[1]:
            self.work_since, self.work_from = self.work_at, done
        self.work = (phase, done, total)

    def take_iteration(self, iteration: int, row: Mapping[str, float]) -> None:
        """Record that ``iteration`` (counted from 0) is trained."""
        self.done, self.row, self.work = iteration + 1, row, None
        if self.begun is None:
            # The first iteration includes warm-up, so rates are measured from its end.
            self.begun, self.trained_since = self.done, time.monotonic()

    def take_validation(self, row: Mapping[str, float]) -> None:
        self.first, self.last = self.first or row, row


def _is_silent(row: Mapping[str, float]) -> bool:
    """Whether an iteration taught nothing; where silent groups are left out, nothing was trained at all."""
    left_out = row.get("choice/silent", 0) > 0 and row.get("choice/trained") == 0
    return left_out or row.get("advantage/silent_groups_share", 0) > 0.999


class RunProgress(Observer):
    """An ``Observer`` of the run, which only logs; base of both displays. Use as a context manager."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.worked = False
        """Whether the run started working; before, nothing has been modified."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        """Give one line; the attempt's log, once it is open, has every one."""
        log.info(text)

    def note(self, text: str) -> None:
        self.say(text)

    def work(self, phase: Phase, done: float, total: int) -> None:
        self.worked = True
        self.facts.take_work(phase, done, total)

    def left_s(self) -> float:
        facts = self.facts
        return math.nan if facts.work is None else (facts.work[2] - facts.work[1]) / facts.rate

    def billed(self, cost_usd: float) -> None:
        self.facts.billed_usd = cost_usd

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        self.worked = True
        self.facts.take_validation(row)
        self.say(f"validation at iteration {iteration}: {scores(row)}")

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        self.worked = True
        if self.facts.begun is None and (note := replay_noise_note(row, self.facts.clip_range)):
            self.note(note)
        if not self.facts.was_silent and _is_silent(row):
            self.facts.was_silent = True
            self.note(
                f"in each group of iteration {iteration + 1} all rewards are equal: nothing is learnt from "
                "them. Check that `spotlight score` gives different scores for pictures that should differ; "
                "if it does, the prompts are too hard or too easy, or the reward is too coarse"
            )
        facts = self.facts
        facts.take_iteration(iteration, row)
        parts = [f"iteration {facts.done}/{facts.total}", training(row)]
        if math.isfinite(facts.left_s):
            parts.append(f"{facts.seconds_per_iteration:.1f} s each, {duration(facts.left_s)} left")
        parts.append(money(facts.cost_usd))
        self.say("  ".join(part for part in parts if part))


class RunConsole(TextConsole):
    """The terminal or pipe of a run, which goes on, silently, when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on."""
        with suppress(SystemExit):
            super().on_broken_pipe()

    def print(self, *objects: Any, **options: Any) -> None:
        """See ``Console``; a lost terminal is no error."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True


class PlainProgress(RunProgress):
    """One line per event."""

    def __init__(self, facts: Facts, console: TextConsole) -> None:
        super().__init__(facts)
        self._console = console
        self._said = time.monotonic()

    def work(self, phase: Phase, done: float, total: int) -> None:
        super().work(phase, done, total)
        if time.monotonic() - self._said > _PLAIN_WORK_EVERY_S:
            self.say(f"{phase.value} {done:.0f}/{total}{_rate(self.facts)}")

    def say(self, text: str) -> None:
        super().say(text)
        self._said = time.monotonic()
        self._console.print(Text(f"[{duration(self.facts.elapsed_s)}] {text}"), soft_wrap=True)


class LiveProgress(RunProgress):
    """Live progress bars below notes and validations."""

    def __init__(self, facts: Facts, console: TextConsole) -> None:
        super().__init__(facts)
        self._live = Live(
            console=console, get_renderable=self.draw, refresh_per_second=_REDRAWS_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # its terminal is gone
            self._live.stop()

    def note(self, text: str) -> None:
        super().note(text)
        self._keep(Text(text, style="dim"))

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        super().evaluated(iteration, row)
        self._keep(Text(f"validation at iteration {iteration:>4}: {scores(row)}"))

    def _keep(self, text: Text) -> None:
        self._live.console.print(text, soft_wrap=True)

    def draw(self) -> RenderableType:
        return drawn(self.facts)


def drawn(facts: Facts) -> RenderableType:
    """Bars of the run and of its phase, the last validation and the newest iteration."""
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    left = f", {duration(facts.left_s)} left" if math.isfinite(facts.left_s) else ""
    table.add_row(
        Text("iteration", style="bold"),
        ProgressBar(total=facts.total, completed=facts.done, width=32),
        f"{facts.done}/{facts.total}",
        f"{duration(facts.elapsed_s)}{left}, {money(facts.cost_usd)}",
    )
    if facts.work is not None:
        phase, done, total = facts.work
        table.add_row(
            phase.value,
            ProgressBar(total=max(total, 1), completed=done, width=32),
            f"{done:.0f}/{total}",
            _rate(facts).strip(),
        )
    lines: list[RenderableType] = [table]
    if facts.last:
        lines.append(Text(f"validation {gained(facts.first, facts.last)}", style="green"))
    if facts.row:
        lines.append(Text(training(facts.row), style="dim"))
    return Group(*lines)


def make_progress(config: RunConfig, plain: bool) -> RunProgress:
    """The display suited to the output; silent on ranks other than the first."""
    # Processes that this attempt's time is the bill of; on Ray the head tells what nodes cost.
    timed = 0 if config.fleet.driver == "ray" else int(os.environ.get("WORLD_SIZE", "1"))
    facts = Facts(config.iterations, config.fleet.price_usd_h * timed, noisy_clip_range(config))
    if int(os.environ.get("RANK", "0")) > 0:
        return RunProgress(facts)
    console = RunConsole()
    if console.is_jupyter and not plain:
        from spotlight.cli.runs.notebook_progress import NotebookProgress

        return NotebookProgress(facts)
    if plain or not sys.stdout.isatty() or not console.is_terminal:
        return PlainProgress(facts, console)
    return LiveProgress(facts, console)


def scores(row: Mapping[str, float]) -> str:
    """``strict 0.487 ± 0.025  graded 0.834 ± 0.006``."""
    return "  ".join(
        f"{name} {score(row[name], row.get(f'{name}{STDERR}'))}" for name in JUDGED if name in row
    )


def gained(first: Mapping[str, float], last: Mapping[str, float]) -> str:
    """``strict 0.487 -> 0.781``, or the first validation's scores."""
    if first is last:
        return scores(last)
    return "  ".join(
        f"{name} {score(first[name])} -> {score(last[name])}"
        for name in JUDGED
        if name in first and name in last
    )


def training(row: Mapping[str, float]) -> str:
    """``reward 0.734 loss 0.0123 grad_norm 0.81``, and ``96 of 192 trained`` if some were left out."""
    shown = {"reward": "rollout/reward", "loss": "train/loss", "grad_norm": "train/grad_norm"}
    parts = [f"{name} {row[key]:.4g}" for name, key in shown.items() if key in row]
    choice = [
        row[f"choice/{name}"] for name in ("trained", "not_chosen", "silent") if f"choice/{name}" in row
    ]
    if choice:
        parts.append(f"{choice[0]:.0f} of {sum(choice):.0f} trained")
    return "  ".join(parts)


def _rate(facts: Facts) -> str:
    return f"  {facts.rate:.1f}/s" if math.isfinite(facts.rate) else ""


# -- how far rounding alone moves replayed log-probs from the rollouts', against the clip of the ratio -----


def noisy_clip_range(config: RunConfig) -> float | None:
    """The clip range of ratios that rounding reaches; None where all are 1, or none is of log-probs."""
    algorithm = config.algorithm
    old = getattr(algorithm, "old_log_probs", None)
    if old == "rollout" or (old == "recompute" and config.learner.updates_per_batch > 1):
        clip_range: float = getattr(algorithm, "clip_range")  # noqa: B009 - of those with old_log_probs
        return clip_range
    return None


def replay_noise_note(row: Mapping[str, float], clip_range: float | None) -> str | None:
    """What to say about an iteration's ``replay/`` metrics; None if :func:`noisy_clip_range` is.

    Log-probs are means over the latent, and so is ``clip_range``: where rounding exceeds it, noise decides
    which updates are clipped.
    """
    found = [value for name, value in row.items() if name.startswith("replay/")]
    if clip_range is None or not found:
        return None
    noise = max(found)
    note = f"rounding moves replayed log-probs by {noise:.1e} (algorithm.clip_range {clip_range:g})"
    if noise <= clip_range:
        return note
    return (
        f"WARNING: {note}: noise decides what is clipped. Set algorithm.old_log_probs=stop_gradient, a "
        "larger algorithm.clip_range, or learner.autocast=none with model.dtype=float32"
    )


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
