"""Iterations to target: what can be promised of a simulated run. Pure.

With random seeds they are an input. With explored seeds they are fewer by the speed

    coverage * contrast ** exponent + 1 - coverage

of the groups and pools that the run had: ``contrast`` is the variance of its explored groups' rewards over
that of random groups of the same prompts, ``coverage`` the share of groups that were explored; all others
have random seeds. The exponent is fitted to arms of ``python -m benchmarks.exploration`` (docs/benchmarks.md,
2026-11-21), through 1 without contrast; its interval spans those of the arms. It rests on one tiny model over
16 iterations, in which random seeds hardly learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotlight_plan.scenarios.scenario_sections import CONTRAST_EXPONENT, Exponent, Target

PREVIEWS_WANTED = 0.8
"""Below this share of its previews, nothing is promised for a strategy that explores."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What exploration brought in a run: see the module's docstring."""

    contrast: float
    coverage: float

    def speed(self, exponent: float) -> float:
        """How many times fewer iterations than with random seeds."""
        gained: float = self.contrast**exponent
        return self.coverage * gained + 1 - self.coverage


def explored_of(reports: Iterable[Mapping[str, object]], prompts: int, windows: int) -> Explored | None:
    """From a run's exploration reports; None if no contrast could be measured.

    Args:
        reports: of each iteration the last counts.
        prompts: per iteration.
        windows: iterations that exploration could have chosen seeds for.
    """
    last = {report["iteration"]: report.get("contrast") for report in reports}
    found = [one for one in last.values() if isinstance(one, Mapping) and one.get("groups")]
    groups = sum(one["groups"] for one in found)
    random = sum(one["groups"] * one["random"] for one in found)
    if not found or random <= 0 or not windows:
        return None
    realised = sum(one["groups"] * one["realised"] for one in found)
    return Explored(max(0.0, realised / random), min(1.0, groups / (prompts * windows)))


def learned_target(
    random: Target | None, previews: float, explored: Explored | None, exponent: Exponent = CONTRAST_EXPONENT
) -> tuple[Target | None, str]:
    """Iterations with explored seeds that nobody stated, or why none can be promised.

    Args:
        random: with random seeds; None: not stated.
        previews: share that was made.
    """
    if random is None:
        return None, ""
    if (why := _too_few(previews)) is not None:
        return None, why
    if explored is None:
        return None, "no contrast could be measured; state its iterations in iterations_to_target"
    least, likely, most = sorted(exponent, key=explored.speed)
    fewest, value, longest = (
        math.ceil(number / explored.speed(power))
        for number, power in zip(
            (random.ends[0], random.iterations, random.ends[1]), (most, likely, least), strict=True
        )
    )
    source = (
        f"derived: {random.iterations} / {explored.speed(likely):.2f}; contrast {explored.contrast:.2f} of "
        f"random groups, to the power of {likely:.2f} [{least:.2f} to {most:.2f}], fitted on a tiny DiT, in "
        f"{explored.coverage:.0%} of the groups; random seeds: {random.source}"
    )
    return Target(value=(fewest, value, longest), source=source), ""


def honest_target(
    stated: Target | None, random: Target | None, previews: float, early: float
) -> tuple[Target | None, str]:
    """The stated iterations, as far as they can be promised, or why they cannot.

    Iterations with explored seeds are promised only where enough previews were made. Of a share ``early`` of
    the groups, which begin before exploration, seeds are random; each group then contributes to the way to
    the target what it does where all are alike: 1 / (early / random + (1 - early) / explored).

    Args:
        random: None: not stated, so that nothing can be promised where groups begin early.
        previews: share that was made; NaN: the strategy does not explore.
    """
    if stated is None:
        return None, ""
    if (why := _too_few(previews)) is not None:
        return None, why
    if math.isnan(previews) or not early:
        return stated, ""
    if random is None:
        reason = f"{early:.0%} of the groups begin early, with random seeds"
        return None, f"{reason}, and iterations_to_target has no strategy without exploration: state one"
    if random.iterations <= stated.iterations:
        return stated, ""

    def mixed(explored: int) -> int:
        return math.ceil(1 / (early / random.iterations + (1 - early) / explored))

    fewest, most = map(mixed, stated.ends)
    value = mixed(stated.iterations)
    source = (
        f"derived: {early:.0%} of the groups begin early, with random seeds: 1 / ({early:.2f} / "
        f"{random.iterations} + {1 - early:.2f} / {stated.iterations}); explored seeds: {stated.source}"
    )
    return Target(value=value if fewest == most else (fewest, value, most), source=source), ""


def _too_few(previews: float) -> str | None:
    if not previews < PREVIEWS_WANTED:
        return None
    usable = f"{previews:.0%} of the previews could be used: too little idle time for them"
    return f"only {usable}; its iterations to target are of at least {PREVIEWS_WANTED:.0%}"
