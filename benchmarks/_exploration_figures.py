"""From what the exploration benchmark measured to its figures: pure functions of plain values, and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rich.table import Table

from benchmarks._exploration_settings import REWARD, SUCCESS, Sizes
from benchmarks._record import Tree
from spotlight.scheduler.policies.exploration.fidelity import hit_rate, kendall_tau, spearman_rho
from spotlight.scheduler.policies.selection import (
    SelectionPolicy,
    SelectionVerdict,
    sample_variance,
    select,
)

Scores = Sequence[Sequence[float]]
"""Rewards of a pool, [prompts][seeds]."""


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
        return {"mean": finite(self.mean), "stderr": finite(self.stderr), "runs": self.runs}


def spread(values: Iterable[float | None]) -> Spread:
    """Of those values that there are."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, 0)
    deviation = statistics.stdev(known) if len(known) > 1 else math.nan
    return Spread(statistics.fmean(known), deviation / math.sqrt(len(known)), len(known))


def finite(value: float) -> float | None:
    """For JSON, which has neither NaN nor infinity."""
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


def fidelity_rows(pools: Sequence[Tree]) -> list[Tree]:
    """(a): by age of the weights and steps, over run seeds."""
    rows = []
    for age, steps in _cells(pools):
        each = [
            fidelity_figures(_previews(pool, age, steps)[REWARD], pool["realised"][REWARD]) for pool in pools
        ]
        rows.append({"stale": age, "steps": steps, **_spreads(each)})
    return rows


def variance_rows(pools: Sequence[Tree], sizes: Sizes) -> list[Tree]:
    """(b): by previews and steps, of the ages that exploration has."""
    counts = [n * sizes.group_size for n in (1.5, 2, 3, 4, 6, 8, 12) if n * sizes.group_size <= sizes.pool]
    policy, group, rows = SelectionPolicy(sizes.policy), sizes.group_size, []
    for age, steps in _cells(pools):
        if age > 1:
            continue
        for count in dict.fromkeys([*map(int, counts), sizes.pool]):
            each = [
                variance_figures(
                    _previews(pool, age, steps)[REWARD], pool["realised"][REWARD], count, group, policy
                )
                for pool in pools
            ]
            rows.append({"stale": age, "steps": steps, "seeds": count, **_spreads(each)})
    return rows


def condition_rows(pools: Sequence[Tree], sizes: Sizes) -> list[Tree]:
    """(b): with all previews of full length, one version stale: by group size, and by kind of reward and how
    many of a prompt's pictures succeed."""
    policy, rows = SelectionPolicy(sizes.policy), []
    age, full = max(age for age in sizes.stale if age <= 1), sizes.rollout_steps
    groups = [size for factor in (0.5, 1, 2) if 2 <= (size := int(factor * sizes.group_size)) < sizes.pool]
    for group, kind, (low, high) in product(groups, pools[0]["realised"], SUCCESS):
        each = []
        for pool in pools:
            previews, realised = _previews(pool, age, full), pool["realised"]
            shares = [statistics.fmean(row) for row in realised.get("strict", realised[REWARD])]
            kept = [at for at, share in enumerate(shares) if low <= share <= high]
            x, y = ([scores[kind][at] for at in kept] for scores in (previews, realised))
            if kept:
                each.append(variance_figures(x, y, sizes.pool, group, policy) | {"prompts": len(kept)})
        if each:
            row = {"group": group, "reward": kind, "success": f"{low:g} to {high:g}"}
            rows.append({**row, **_spreads(each)})
    return rows


def _spreads(each: Sequence[Mapping[str, float]]) -> Tree:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: spread(one.get(name) for one in each).as_json() for name in names}


def _cells(pools: Sequence[Tree]) -> list[tuple[int, int]]:
    return sorted({(one["stale"], one["steps"]) for pool in pools for one in pool["previews"]})


def _previews(pool: Tree, age: int, steps: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]]
    (found,) = (one["rewards"] for one in pool["previews"] if (one["stale"], one["steps"]) == (age, steps))
    return found


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
    if isinstance(value, Mapping) and "low" in value:
        low, high = (_number(value[key]) for key in ("low", "high"))
        return f"{_number(value['value'])} [{low}, {high}]"
    if isinstance(value, Mapping):
        mean, error = value["mean"], value["stderr"]
        return "" if mean is None else f"{mean:.4g}" + ("" if error is None else f" ± {error:.2g}")
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _number(value: float | None) -> str:
    """Args: value: of an interval; None: beyond what was measured."""
    return "more" if value is None else f"{value:.3g}"
