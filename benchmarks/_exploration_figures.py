"""From what the exploration benchmark measured to its figures: pure functions of plain values, and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table

from spotlight.core.fidelity import hit_rate, kendall_tau, spearman_rho
from spotlight.core.selection import SelectionPolicy, SelectionVerdict, sample_variance, select

Scores = Sequence[Sequence[float]]
"""Rewards of a pool, [prompts][seeds]."""
Tree = dict[str, Any]
"""Part of the file."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over run seeds.

    Attributes:
        stderr: of the mean; NaN of a single run.
        runs: that have the figure.
    """

    mean: float
    stderr: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.stderr:.3f}" if self.runs > 1 else f"{self.mean:.3f}"

    def as_json(self) -> dict[str, float | int | None]:
        """What is not a number is null."""
        return {"mean": _finite(self.mean), "stderr": _finite(self.stderr), "runs": self.runs}


def spread(values: Iterable[float | None]) -> Spread:
    """Of those values that there are."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, 0)
    deviation = statistics.stdev(known) if len(known) > 1 else math.nan
    return Spread(statistics.fmean(known), deviation / math.sqrt(len(known)), len(known))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- pools: fidelity and variance --------------------------------------------------------------------------


def fidelity_figures(previews: Scores, realised: Scores) -> dict[str, float]:
    """Means over prompts whose rewards differ: tau, rho, hits among the best and the worst quarter."""
    found: dict[str, list[float]] = {"tau": [], "rho": [], "top_quarter": [], "bottom_quarter": []}
    for x, y in _pairs(previews, realised):
        tau, rho = kendall_tau(x, y), spearman_rho(x, y)
        if tau is None or rho is None:
            continue
        quarter = max(1, len(x) // 4)
        found["tau"].append(tau)
        found["rho"].append(rho)
        found["top_quarter"].append(hit_rate(x, y, quarter, top=True))
        found["bottom_quarter"].append(hit_rate(x, y, quarter, top=False))
    return {name: statistics.fmean(values) for name, values in found.items() if values}


def variance_figures(
    previews: Scores, realised: Scores, count: int, group: int, policy: SelectionPolicy
) -> dict[str, float]:
    """Of groups chosen among the first ``count`` previews of each prompt, as regenerated.

    ``chosen`` and ``random``: mean variance; ``gain``: their ratio; ``best``: had the regenerated rewards
    themselves chosen; ``reward_shift``: mean reward of the chosen over that of all; ``flat``: share of the
    prompts whose previews have no contrast (they take random seeds and count as such).
    """
    chosen, random, best, shift, flat = [], [], [], [], 0
    for x, y in _pairs(previews, realised):
        x, y = x[:count], y[:count]
        picked = select(dict(enumerate(x)), group, policy)
        everything = sample_variance(y)
        random.append(everything)
        if picked.verdict is not SelectionVerdict.CHOSEN:
            flat += 1
            chosen.append(everything)
        else:
            kept = [y[seed] for seed in picked.seeds]
            chosen.append(sample_variance(kept))
            shift.append(statistics.fmean(kept) - statistics.fmean(y))
        ideal = select(dict(enumerate(y)), group, policy)
        best.append(sample_variance([y[seed] for seed in ideal.seeds]) if ideal.seeds else everything)
    mean = statistics.fmean
    return {
        "chosen": mean(chosen),
        "random": mean(random),
        "best": mean(best),
        "gain": mean(chosen) / mean(random) if mean(random) else math.nan,
        "reward_shift": mean(shift) if shift else 0.0,
        "flat": flat / len(random),
    }


def _pairs(previews: Scores, realised: Scores) -> Iterable[tuple[list[float], list[float]]]:
    """Rewards of each prompt, without seeds that lack one of them."""
    for x, y in zip(previews, realised, strict=True):
        sound = [at for at in range(len(x)) if math.isfinite(x[at]) and math.isfinite(y[at])]
        if len(sound) >= 2:
            yield [x[at] for at in sound], [y[at] for at in sound]


# -- curves ------------------------------------------------------------------------------------------------


def smoothed(curve: Mapping[int, float]) -> dict[int, float]:
    """Mean of each evaluation and its neighbours, the middle counting twice; ends have one neighbour."""
    at = sorted(curve)
    result: dict[int, float] = {}
    for place, iteration in enumerate(at):
        near = [(2.0 if other == place else 1.0, curve[at[other]]) for other in range(len(at))
                if abs(other - place) <= 1]  # fmt: skip
        result[iteration] = sum(weight * value for weight, value in near) / sum(weight for weight, _ in near)
    return result


def iterations_to(target: float, curve: Mapping[int, float]) -> float | None:
    """Where a curve first reaches the target, between evaluations on a straight line; None: it does not."""
    before: tuple[int, float] | None = None
    for iteration, value in sorted(curve.items()):
        if value >= target:
            if before is None or value == before[1]:
                return float(iteration)
            share = (target - before[1]) / (value - before[1])
            return before[0] + share * (iteration - before[0])
        before = iteration, value
    return None


def seconds_at(iterations: float, ends_s: Sequence[float]) -> float | None:
    """When so many iterations are done; beyond those simulated, as fast as they were on the average."""
    if not ends_s:
        return None
    ends = [0.0, *ends_s]
    whole = min(int(iterations), len(ends_s) - 1)
    if iterations <= len(ends_s):
        return ends[whole] + (iterations - whole) * (ends[whole + 1] - ends[whole])
    return ends_s[-1] * iterations / len(ends_s)


def areas(curve: Mapping[int, float]) -> float:
    """Mean height of a curve (trapezoids): one number for how fast a run learnt."""
    at = sorted(curve)
    if len(at) < 2:
        return curve[at[0]] if at else math.nan
    area = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(at))
    return area / (at[-1] - at[0])


def by_iteration(
    curves: Sequence[Mapping[int, float]], change: Callable[[Mapping[int, float]], Mapping[int, float]]
) -> dict[int, Spread]:
    """Every evaluation's spread over runs, each run's curve changed first."""
    changed = [change(curve) for curve in curves]
    return {at: spread(curve.get(at) for curve in changed) for at in sorted({i for c in changed for i in c})}


# -- tables ------------------------------------------------------------------------------------------------


def table_of(title: str, rows: Sequence[Tree]) -> Table:
    """Rows of equal keys; spreads as mean ± standard error."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        mean, error = value["mean"], value["stderr"]
        return "" if mean is None else f"{mean:.4g}" + ("" if error is None else f" ± {error:.2g}")
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def curve_tables(figures: Tree) -> list[Table]:
    """Scores by iteration, and what the target takes."""
    conditions = figures["conditions"]
    steps = sorted({int(at) for one in conditions.values() for at in one["curve"]})
    curves = [
        {"iteration": at, **{name: one["curve"].get(str(at)) for name, one in conditions.items()}}
        for at in steps
    ]
    to_target = [
        {
            "condition": name,
            "reached": f"{one['reached']} of {one['runs']}",
            "mean height": one["mean_height"],
        }
        | {kind: one[f"{kind}_to_target"] for kind in ("iterations", "seconds", "dollars")}
        for name, one in conditions.items()
    ]
    title = f"To a held-out score of {figures['target']:.3f} (seconds and dollars: emulated cluster)"
    return [table_of("Held-out score, smoothed", curves), table_of(title, to_target)]
