"""The verdict of a page in one sentence, with ranges. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spotlight.planning.compare import SimulationOutcome
from spotlight.planning.explanation.levers import ALONE
from spotlight.planning.pages.comparison_summary import between, hours, percent, usd
from spotlight.planning.strategy_runs import StrategyRuns


def verdict_text(name: str, runs: StrategyRuns, base_name: str, base: StrategyRuns | None) -> str:
    """Time and cost to target of ``name``, and against the base; ranges are of all starts and intervals."""
    said = _reaches(name, runs)
    if base is None or math.isnan(base.target_h.p50):
        return f"{said}; {base_name} has no time to target to compare with."
    time = between(hours, *base.ends_h)
    cost = between(usd, *base.ends_usd)
    faster = between(_times, *ratios(base, runs, SimulationOutcome.hours_after))
    share = between(percent, *ratios(runs, base, SimulationOutcome.usd_after))
    return f"{said}: {faster} times as fast as {base_name} ({time}), and costs {share} of its {cost}."


def _reaches(name: str, runs: StrategyRuns) -> str:
    return f"{name} reaches the target in {between(hours, *runs.ends_h)} for {between(usd, *runs.ends_usd)}"


def ratios(
    above: StrategyRuns, below: StrategyRuns, of: Callable[[SimulationOutcome, int], float]
) -> tuple[float, float]:
    """Least and most of a figure to target over another's at the same start; NaN where a start has none."""
    found = [
        (of(one, one.target.ends[0]) / of(other, other.target.ends[1]),
         of(one, one.target.ends[1]) / of(other, other.target.ends[0]))
        if one.target and other.target
        else (math.nan, math.nan)
        for one, other in zip(above.outcomes, below.outcomes, strict=True)
    ]  # fmt: skip
    known = [pair for pair in found if not any(map(math.isnan, pair))]
    if not known:
        return math.nan, math.nan
    most = max(pair[1] for pair in known) if len(known) == len(found) else math.nan
    return min(pair[0] for pair in known), most


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
