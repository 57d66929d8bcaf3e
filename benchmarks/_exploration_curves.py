"""Learning curves of the exploration benchmark: smoothed, compared at equal scores, with their spread.

How many iterations a score takes is read off the mean curve over run seeds, because single runs of few
samples cross it by luck or never. Intervals are of resampled run seeds (bootstrap): the same ones for
all conditions, which share their prompts and evaluation seeds; the score to reach is that of the drawn runs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table

from benchmarks._exploration_figures import Spread, finite, spread, table_of
from benchmarks._exploration_settings import SHARES, Sizes
from benchmarks._record import Tree

Curve = Mapping[int, float]
"""Held-out score by iteration."""
Runs = Mapping[str, Mapping[int, Curve]]
"""By condition and run seed."""

CONTROL = "none"
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure of the mean curves.

    Attributes:
        value: of the runs; infinite: not reached.
        low: 5 % quantile over resampled run seeds.
        high: 95 % quantile.
    """

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """What was not reached is null."""
        return {"value": finite(self.value), "low": finite(self.low), "high": finite(self.high)}


def smoothed(curve: Curve) -> dict[int, float]:
    """Mean of each evaluation and its neighbours, the middle counting twice; ends have one neighbour."""
    at = sorted(curve)
    result: dict[int, float] = {}
    for place, iteration in enumerate(at):
        near = [(2.0 if other == place else 1.0, curve[at[other]]) for other in range(len(at))
                if abs(other - place) <= 1]  # fmt: skip
        result[iteration] = sum(weight * value for weight, value in near) / sum(weight for weight, _ in near)
    return result


def iterations_to(target: float, curve: Curve) -> float | None:
    """From when on a curve stays at the target or above, between evaluations on a straight line; None: it
    ends below. The first crossing would be an early one by luck."""
    points = sorted(curve.items(), reverse=True)
    if points[0][1] < target:
        return None
    for (right, high), (left, low) in pairwise(points):
        if low < target:
            return left + (target - low) / (high - low) * (right - left)
    return float(points[-1][0])


def seconds_at(iterations: float, ends_s: Sequence[float]) -> float | None:
    """When so many iterations are done; beyond those simulated, as fast as they were on the average."""
    if not ends_s:
        return None
    ends = [0.0, *ends_s]
    whole = min(int(iterations), len(ends_s) - 1)
    if iterations <= len(ends_s):
        return ends[whole] + (iterations - whole) * (ends[whole + 1] - ends[whole])
    return ends_s[-1] * iterations / len(ends_s)


def areas(curve: Curve) -> float:
    """Mean height of a curve (trapezoids): one number for how fast a run learnt."""
    at = sorted(curve)
    if len(at) < 2:
        return curve[at[0]] if at else math.nan
    area = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(at))
    return area / (at[-1] - at[0])


def by_iteration(curves: Sequence[Curve], change: Callable[[Curve], Curve]) -> dict[int, Spread]:
    """Every evaluation's spread over runs, each run's curve changed first."""
    changed = [change(curve) for curve in curves]
    return {at: spread(curve.get(at) for curve in changed) for at in sorted({i for c in changed for i in c})}


def mean_curve(curves: Sequence[Curve]) -> dict[int, float]:
    """Smoothed mean over runs, at the evaluations that all of them have."""
    common = set.intersection(*(set(curve) for curve in curves))
    return smoothed({at: sum(curve[at] for curve in curves) / len(curves) for at in common})


def paired(runs: Runs, condition: str, figure: Callable[[Curve], float]) -> Spread:
    """A figure's difference to the control, of the same run seeds."""
    both = sorted(set(runs[CONTROL]) & set(runs[condition]))
    return spread(figure(runs[condition][seed]) - figure(runs[CONTROL][seed]) for seed in both)


# -- equal scores ------------------------------------------------------------------------------------------


def needed(runs: Runs, after: float) -> tuple[float, dict[str, float]]:
    """The control's score after so many iterations, and how many it takes each condition; inf: more."""
    curves = {name: mean_curve(list(those.values())) for name, those in runs.items()}
    target = _height(curves[CONTROL], after)
    reached = {name: iterations_to(target, curve) for name, curve in curves.items()}
    found = {name: math.inf if at is None else at for name, at in reached.items()}
    return target, found | {CONTROL: after}


def _height(curve: Curve, at: float) -> float:
    points = sorted(curve)
    right = next(point for point in points if point >= at)
    left = max((point for point in points if point <= at), default=right)
    share = 0.0 if right == left else (at - left) / (right - left)
    return curve[left] + share * (curve[right] - curve[left])


def resampled(runs: Runs, after: float) -> dict[str, list[float]]:
    """What :func:`needed` says of resampled run seeds, the same for all conditions."""
    seeds = sorted(set.intersection(*(set(those) for those in runs.values())))
    draw = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_RESAMPLES):
        drawn = draw.choices(seeds, k=len(seeds))
        sample = {name: {n: those[seed] for n, seed in enumerate(drawn)} for name, those in runs.items()}
        for name, iterations in needed(sample, after)[1].items():
            found[name].append(iterations)
    return found


def interval(value: float, draws: Sequence[float]) -> Interval:
    """Its 5 % and 95 % quantiles among the draws."""
    ranked = sorted(draws)
    return Interval(value, ranked[round(0.05 * (len(ranked) - 1))], ranked[round(0.95 * (len(ranked) - 1))])


def at_equal_score(runs: Runs, clocks: Mapping[str, Tree], after: float) -> Tree:
    """Iterations, seconds and dollars of each condition to the score of the control after so many iterations.

    Args:
        clocks: of each condition, ``iteration_ends_s`` and ``iteration_usd`` of the emulated cluster.
    """
    target, found = needed(runs, after)
    draws = resampled(runs, after)
    conditions: Tree = {}
    for name, iterations in found.items():
        clock = clocks[name]

        def seconds(n: float, ends: Sequence[float] = clock["iteration_ends_s"]) -> float:
            at = seconds_at(n, ends) if math.isfinite(n) else None
            return math.inf if at is None else at

        ratios = [_ratio(after, own) for own in draws[name]]
        usd = clock["iteration_usd"]
        conditions[name] = {
            "reached": sum(iterations_to(target, smoothed(run)) is not None for run in runs[name].values()),
            "runs": len(runs[name]),
            "iterations": interval(iterations, draws[name]).as_json(),
            "fewer": interval(_ratio(after, iterations), ratios).as_json(),
            "seconds": interval(seconds(iterations), [seconds(n) for n in draws[name]]).as_json(),
            "dollars": interval(iterations * usd, [n * usd for n in draws[name]]).as_json(),
        }
    return {"after": after, "target": target, "conditions": conditions}


def _ratio(control: float, own: float) -> float:
    """How many times fewer iterations; 0 where the condition did not get there."""
    if math.isinf(own):
        return 0.0
    return control / own if own > 0 else math.inf


def curve_figures(
    curves: Mapping[str, Mapping[int, Tree]], simulated: Mapping[str, Tree], sizes: Sizes, kind: str
) -> Tree:
    """(c): smoothed curves of the ``graded`` or ``strict`` score, and what equal scores take."""
    runs: Runs = {
        name: {seed: _curve(run, kind) for seed, run in each.items()} for name, each in curves.items()
    }
    figures: Tree = {"samples": sizes.prompts * sizes.group_size, "conditions": {}}
    for condition, each in curves.items():
        plain, clock = list(runs[condition].values()), simulated[condition]
        figures["conditions"][condition] = {
            "curve": {str(at): one.as_json() for at, one in by_iteration(plain, smoothed).items()},
            "wall_s": {
                str(at): seconds_at(at, clock["iteration_ends_s"]) for at in by_iteration(plain, dict)
            },
            "mean_height": spread(areas(curve) for curve in plain).as_json(),
            "height_gain": paired(runs, condition, areas).as_json(),
            "end_gain": paired(runs, condition, _end).as_json(),
            "contrast": spread(_contrast(run) for run in each.values()).as_json(),
            "tau": spread(
                _mean(run, "exploration/fidelity/reward/tau_by_slope") for run in each.values()
            ).as_json(),
            "grad_norm": spread(_known_mean(run["grad_norm"]) for run in each.values()).as_json(),
            "previews_in_time": clock["preview_share"],
        }
    figures["equal_scores"] = [at_equal_score(runs, simulated, share * sizes.iterations) for share in SHARES]
    return figures


def _curve(run: Tree, kind: str) -> dict[int, float]:
    return {int(at): row[kind] for at, row in run["validation"].items() if kind in row}


def _end(curve: Curve) -> float:
    return smoothed(curve)[max(curve)]


def _contrast(run: Tree) -> float | None:
    """Variance of regenerated groups over that of random ones."""
    realised, random = (_mean(run, f"exploration/contrast/{name}") for name in ("realised", "random"))
    return realised / random if realised is not None and random else None


def _mean(run: Tree, name: str) -> float | None:
    return _known_mean([row.get(name) for row in run["exploration"]])


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# -- tables ------------------------------------------------------------------------------------------------


def curve_tables(figures: Tree) -> list[Table]:
    """Scores by iteration, what exploration brought in the runs, and what equal scores take."""
    conditions = figures["conditions"]
    at = sorted({int(at) for one in conditions.values() for at in one["curve"]})
    curves = [
        {"iteration": n, "samples": n * figures["samples"]}
        | {name: one["curve"].get(str(n)) for name, one in conditions.items()}
        for n in at
    ]
    brought = [
        {"condition": name, "mean over none's": one["height_gain"], "end over none's": one["end_gain"]}
        | {key: one[key] for key in ("contrast", "tau", "grad_norm")}
        | {"in time": one["previews_in_time"]}
        for name, one in conditions.items()
    ]
    tables = [table_of("Held-out score, smoothed", curves), table_of("Of the runs", brought)]
    for one in figures["equal_scores"]:
        rows = [
            {
                "condition": name,
                "reached": f"{row['reached']} of {row['runs']}",
                **{key: row[key] for key in ("iterations", "fewer", "seconds", "dollars")},
            }
            for name, row in one["conditions"].items()
        ]
        title = f"To {one['target']:.3f}, where none is after {one['after']:g} iterations [90 % interval]"
        tables.append(table_of(title, rows))
    return tables
