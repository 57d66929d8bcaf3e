"""How far each assumption of a scenario moves the answer: one at a time, the same starts, by the closed form.

An assumption without an interval of its own is divided and multiplied by :data:`FACTOR`. Iterations to target
have their interval; spot nodes are half. Notices move nothing here: the closed form does not see work lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from spotlight_plan.candidates import Candidate
from spotlight_plan.estimates import Estimates
from spotlight_plan.scenarios.prepared_scenario import Prepared, at_starts, with_file
from spotlight_plan.scenarios.profile import Profile
from spotlight_plan.scenarios.scenario_load import build_scenario
from spotlight_plan.scenarios.scenario_sections import AlwaysOn, GeneratedTrace, Target
from spotlight_plan.scenarios.strategies import SpotPlaces, strategy_named
from spotlight_plan.strategy_runs import StrategyRuns

FACTOR = 1.5
_STEPS = {
    "denoising step": ("gpus.*.denoise.*.ms",),
    "training step": ("gpus.*.train.*.s",),
    "decoding": ("gpus.*.decode_ms_per_megapixel.value",),
    "reward time": ("rewards.latency_s.value", "rewards.s_per_sample.value"),
    "optimizer and preparation": ("optimizer_step_s.value", "prepare_s.value"),
    "bytes published and pulled": (
        "weights.full_bytes.value",
        "weights.adapter_bytes.value",
        "weights.learner_state_bytes.value",
    ),
    "start of a worker": (
        "infrastructure.process_start_s.value",
        "infrastructure.imports_s.value",
        "infrastructure.model_load_s.value",
    ),
}
"""Figures of the cost profile that are varied together; more bytes take longer to publish and pull."""

Change: TypeAlias = Callable[[Prepared], Prepared]


@dataclass(frozen=True, slots=True)
class Assumption:
    """What is varied.

    Attributes:
        low, high: the changes, with what to call them; None: as it is.
    """

    name: str
    low: tuple[str, Change] | None
    high: tuple[str, Change] | None


@dataclass(frozen=True, slots=True)
class Swing:
    """An assumption's effect: p50 of hours and dollars to target at its ends; NaN: no target there."""

    name: str
    low_label: str
    high_label: str
    low: tuple[float, float]
    high: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Hours and dollars to target as assumed, and with each assumption changed: p50."""

    base: tuple[float, float]
    swings: tuple[Swing, ...]

    def ranked(self, axis: int) -> tuple[Swing, ...]:
        """Those that move hours (0) or dollars (1) most, first; an end without a target is the farthest."""

        def width(one: Swing) -> float:
            ends = (one.low[axis], one.high[axis], self.base[axis])
            return float("inf") if any(end != end for end in ends) else max(ends) - min(ends)

        return tuple(sorted(self.swings, key=width, reverse=True))


def sensitivity_of(estimates: Estimates, candidate: Candidate) -> Sensitivity:
    """Vary every assumption of a candidate, from every start.

    Raises:
        ConfigError, PriceError: the candidate cannot be simulated.
    """

    def runs_of(prepared: Prepared) -> StrategyRuns:
        starts = at_starts(prepared)
        return StrategyRuns(tuple(map(estimates.form(prepared, candidate, starts).outcome, starts)))

    prepared = estimates.prepared(candidate)
    base = runs_of(prepared)
    swings = [_to_target(base)] if base.first.target else []
    for one in assumptions_varied(prepared, candidate.strategy):
        labels = [end[0] if end else "as it is" for end in (one.low, one.high)]
        low, high = (_middle(runs_of(end[1](prepared)) if end else base) for end in (one.low, one.high))
        swings.append(Swing(one.name, labels[0], labels[1], low, high))
    return Sensitivity(_middle(base), tuple(swings))


def assumptions_varied(prepared: Prepared, strategy: str) -> Iterator[Assumption]:
    """The assumptions that this strategy rests on."""
    cluster, trace, places = prepared.file.cluster, prepared.file.trace, strategy_named(strategy).places
    if places is SpotPlaces.SPOT:
        if prepared.pricing.spot is not None:
            yield _by_factor("spot price", partial(_priced, "spot"))
        if cluster.spot.nodes > 1:
            half = (cluster.spot.nodes + 1) // 2
            yield Assumption("spot nodes to be had", ("half", _keyed("cluster.spot.nodes", half)), None)
        if isinstance(trace, GeneratedTrace):
            yield _of_key("time a spot node stays", "trace.mean_uptime_h", trace.mean_uptime_h)
            yield _of_key("time until it is replaced", "trace.mean_downtime_s", trace.mean_downtime_s)
            if trace.bursts_per_h:
                yield _of_key("joint preemptions", "trace.bursts_per_h", trace.bursts_per_h)
    if prepared.pricing.reserved is not None:
        yield _by_factor("price of reserved GPUs", partial(_priced, "reserved"))
    if prepared.pricing.on_demand is not None:
        yield _by_factor("on-demand price", partial(_priced, "on_demand"))
    machine = prepared.profile.infrastructure
    boots = [key for key in ("boot_s", "image_s") if getattr(machine, key) is not None]
    if places is SpotPlaces.SPOT and boots and cluster.boot_s is None and not isinstance(trace, AlwaysOn):
        paths = tuple(f"infrastructure.{key}.value" for key in boots)
        yield _by_factor("boot of a machine", partial(_profiled, paths))
    for name, paths in _STEPS.items():
        yield _by_factor(name, partial(_profiled, paths))


def _by_factor(name: str, change: Callable[[float], Change]) -> Assumption:
    return Assumption(name, (f"/ {FACTOR:g}", change(1 / FACTOR)), (f"x {FACTOR:g}", change(FACTOR)))


def _of_key(name: str, key: str, value: float) -> Assumption:
    return _by_factor(name, lambda factor: _keyed(key, value * factor))


def _keyed(key: str, value: float) -> Change:
    """Another value of a key of the scenario; prices stay those of the scenario as it is."""

    def change(prepared: Prepared) -> Prepared:
        tree = prepared.file.model_dump(mode="json")
        *sections, last = key.split(".")
        section: dict[str, Any] = tree
        for name in sections:
            section = section[name]
        section[last] = value
        return with_file(prepared, build_scenario(tree, f"{prepared.file.name} with {key}={value:g}"))

    return change


def _priced(which: str, factor: float) -> Change:
    def change(prepared: Prepared) -> Prepared:
        tag = getattr(prepared.pricing, which)
        dearer = replace(tag, usd_gpu_h=tag.usd_gpu_h * factor)
        return replace(prepared, pricing=replace(prepared.pricing, **{which: dearer}))

    return change


def _profiled(paths: Sequence[str], factor: float) -> Change:
    def change(prepared: Prepared) -> Prepared:
        tree = prepared.profile.model_dump(mode="json")
        for path in paths:
            _multiply(tree, path.split("."), factor)
        # As a file is read: strict, but lists are tuples.
        return replace(prepared, profile=Profile.model_validate_json(json.dumps(tree), strict=True))

    return change


def _multiply(node: Any, path: Sequence[str], factor: float) -> None:
    """Multiply the numbers at a dotted path; ``*`` is every entry of a list or mapping."""
    key, *rest = path
    every: Sequence[Any] = list(range(len(node))) if isinstance(node, list) else list(node)
    for place in every if key == "*" else [key]:
        if rest:
            _multiply(node[place], rest, factor)
        else:
            node[place] *= factor


def _to_target(base: StrategyRuns) -> Swing:
    """Iterations to target: the same simulations, up to the ends of the interval, or as many times more."""
    target = base.first.target
    assert target is not None, "asked for only where there is one"
    stated = not isinstance(target.value, int)
    labels = [f"{end}" for end in target.ends] if stated else [f"/ {FACTOR:g}", f"x {FACTOR:g}"]
    low, high = (_after(base, end, stated) for end in (0, 1))
    return Swing("iterations to target", labels[0], labels[1], low, high)


def _after(base: StrategyRuns, end: int, stated: bool) -> tuple[float, float]:
    def iterations(target: Target) -> int:
        return target.ends[end] if stated else max(1, round(target.iterations * FACTOR ** (2 * end - 1)))

    hours = base.figure(lambda one: one.hours_after(iterations(one.target)) if one.target else math.nan)
    usd = base.figure(lambda one: one.usd_after(iterations(one.target)) if one.target else math.nan)
    return hours.p50, usd.p50


def _middle(runs: StrategyRuns) -> tuple[float, float]:
    return runs.target_h.p50, runs.target_usd.p50
