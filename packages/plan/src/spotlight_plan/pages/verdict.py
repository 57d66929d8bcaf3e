"""The verdict of a page in one sentence, with ranges. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spotlight_plan.compare import SimulationOutcome
from spotlight_plan.explanation.levers import ALONE
from spotlight_plan.pages.comparison_summary import between, hours, percent, usd
from spotlight_plan.strategy_runs import StrategyRuns, known_or_inf


def verdict_text(name: str, runs: StrategyRuns, base_name: str, base: StrategyRuns | None) -> str:
    """Time and cost to target of ``name``, and against the base; ranges are of all starts and intervals."""
    said = _reaches(name, runs)
    if base is None or math.isnan(base.target_h.p50):
        return f"{said}; {base_name} has no time to target to compare with."
    time = between(hours, *base.ends_h)
    cost = between(usd, *base.ends_usd)
    faster = _spanned(_times, *ratios(base, runs, SimulationOutcome.hours_after))
    share = _spanned(percent, *ratios(runs, base, SimulationOutcome.usd_after))
    return f"{said}: {faster} times as fast as {base_name} ({time}), and costs {share} of its {cost}."


def _reaches(name: str, runs: StrategyRuns) -> str:
    return f"{name} reaches the target in {between(hours, *runs.ends_h)} for {between(usd, *runs.ends_usd)}"


def ratios(
    above: StrategyRuns, below: StrategyRuns, of: Callable[[SimulationOutcome, int], float]
) -> tuple[float, float]:
    """Least and most of a figure to target over another's at the same start.

    A start without a target counts as infinitely slow and dear: 0 where it is below, infinite where above.
    """
    found = [
        (_over(_end(one, 0, of), _end(other, 1, of)), _over(_end(one, 1, of), _end(other, 0, of)))
        for one, other in zip(above.outcomes, below.outcomes, strict=True)
    ]
    return min(least for least, _ in found), max(most for _, most in found)


def _end(one: SimulationOutcome, number: int, of: Callable[[SimulationOutcome, int], float]) -> float:
    return known_or_inf(of(one, one.target.ends[number])) if one.target else math.inf


def _over(above: float, below: float) -> float:
    if math.isinf(above):
        return math.inf
    return 0.0 if math.isinf(below) else above / below


def _spanned(show: Callable[[float], str], least: float, most: float) -> str:
    if math.isinf(most):
        return f"{show(least)} or more" if math.isfinite(least) else "-"
    return between(show, least, most) if least else f"up to {show(most)}"


def comparison_verdict(runs: Sequence[StrategyRuns]) -> str:
    """The strategy that costs least to target, against the reserved GPUs alone, or else the first column."""
    base = next((one for one in runs if one.strategy == ALONE), runs[0])
    others = [one for one in runs if one is not base and not math.isnan(one.target_usd.p50)]
    if not others:
        if math.isnan(base.target_usd.p50):
            return "No strategy has a time to target; see what to mind below."
        return f"{_reaches(base.strategy, base)}."
    best = min(others, key=lambda one: one.target_usd.p50)
    return verdict_text(best.strategy, best, base.strategy, base)


def _times(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
