"""A comparison as a table and notes, shared by terminal and page. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from spotlight.scheduler.types import Filler, NodeKind, Phase
from spotlight_fleet.gpus import GPU_TYPES
from spotlight_plan.compare import PREVIEWS_WANTED, SimulationOutcome
from spotlight_plan.prices.quotes import OLD, age_of
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.pricing import PriceTag, crossing_of
from spotlight_plan.scenarios.profile import NamedFigure, assumptions
from spotlight_plan.scenarios.scenario_sections import Target
from spotlight_plan.scenarios.strategies import LEARNS_OTHERWISE, SpotPlaces, strategy_named
from spotlight_plan.scenarios.strategy_scenario import bytes_of_both
from spotlight_plan.strategy_runs import FigureRange, StrategyRuns
from spotlight_plan.traces.trace_statistics import statistics

_DROPPED_TOLD = 0.01


@dataclass(frozen=True, slots=True)
class TableLine:
    """A label and a cell per strategy; a heading without cells."""

    label: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PageNote:
    """Notes below the table, under a heading."""

    heading: str
    lines: tuple[str, ...]


def table_of(runs: Sequence[StrategyRuns]) -> tuple[TableLine, ...]:
    """The table: p50, p90 and range of times and costs, and one line per other metric of the first start."""
    starts = max((len(one.outcomes) for one in runs), default=1)
    rest = tuple(_lines([one.first for one in runs]))
    heading = (TableLine(f"the first of {starts} starts"),) if starts > 1 else ()
    return (*_ranged(runs), *heading, *rest)


def _ranged(runs: Sequence[StrategyRuns]) -> Iterator[TableLine]:
    def lines(
        label: str, show: Callable[[float], str], figures: Sequence[FigureRange], *ends: tuple[float, float]
    ) -> Iterator[TableLine]:
        several = any(len(one.outcomes) > 1 for one in runs)
        yield TableLine(f"{label}, p50" if several else label, tuple(show(one.p50) for one in figures))
        if several:
            yield TableLine("  p90", tuple(show(one.p90) for one in figures))
        ranges = ends or tuple((one.least, one.most) for one in figures)
        if several or any(least < most for least, most in ranges):
            yield TableLine("  range", tuple(between(show, *each) for each in ranges))

    yield from lines("time per iteration", seconds, [one.figure(lambda o: o.iteration_s) for one in runs])
    yield from lines("cost per iteration", usd, [one.figure(lambda o: o.iteration_usd) for one in runs])
    wanted = [one.iterations_to_target for one in runs]
    yield TableLine("iterations to target", tuple(_count(one.p50) for one in wanted))
    if any(one.least < one.most for one in wanted):
        yield TableLine("  range", tuple(between(_count, one.least, one.most) for one in wanted))
    yield from lines("time to target", hours, [one.target_h for one in runs], *(one.ends_h for one in runs))
    yield from lines("cost to target", usd, [one.target_usd for one in runs], *(one.ends_usd for one in runs))


def _lines(outcomes: Sequence[SimulationOutcome]) -> Iterator[TableLine]:
    def line(label: str, cell: Callable[[SimulationOutcome], str]) -> TableLine:
        return TableLine(label, tuple(cell(one) for one in outcomes))

    if any(not math.isnan(one.spot_idle_share) for one in outcomes):
        yield line("spot GPUs idle", lambda one: percent(one.spot_idle_share))
    yield line("preemptions", lambda one: str(one.preemptions))
    if any(one.on_demand for one in outcomes):
        yield line("nodes on demand taken", lambda one: str(one.on_demand) if one.on_demand else "-")
    yield from _others(outcomes)
    yield line("work lost", lambda one: f"{_three(one.lost_s / 3600)} GPU-h")
    if any(not math.isnan(one.preview_share) for one in outcomes):
        yield line("previews used", lambda one: percent(one.preview_share))
    if any(not math.isnan(one.contrast) for one in outcomes):
        yield line("contrast, of random groups'", lambda one: _times(one.contrast))
    yield TableLine("GPU-hours, and share")
    for phase in Phase:
        if any(one.seconds([phase]) for one in outcomes):
            cells = tuple(_spent(one, phase) for one in outcomes)
            yield TableLine(f"  {phase.value.replace('_', ' ')}", cells)
    yield line("  together", lambda one: _three(one.total_s / 3600))
    yield from _overlaps(outcomes)
    yield line("iterations simulated", lambda one: str(one.iterations))


def _others(outcomes: Sequence[SimulationOutcome]) -> Iterator[TableLine]:
    """Dollars per iteration beside machines with GPUs."""
    names = dict.fromkeys(name for one in outcomes for name, paid in one.other_usd.items() if paid)
    if names:
        yield TableLine("per iteration, beside GPUs")
    for name in names:
        paid = (one.other_usd.get(name, 0.0) / max(1, one.iterations) for one in outcomes)
        yield TableLine(f"  {name}", tuple(usd(each) if each else "-" for each in paid))


def _overlaps(outcomes: Sequence[SimulationOutcome]) -> Iterator[TableLine]:
    fillers = [filler for filler in Filler if any(filler in one.filled_s for one in outcomes)]
    if fillers:
        yield TableLine("GPU-hours that would have been idle")
    for filler in fillers:
        yield TableLine(f"  {filler.words}", tuple(_filled(one, filler) for one in outcomes))
    if any(one.overlapped_share for one in outcomes):
        yield TableLine(
            "trained before all were there", tuple(percent(one.overlapped_share) for one in outcomes)
        )
    if any(one.early_share for one in outcomes):
        yield TableLine("begun an iteration early", tuple(percent(one.early_share) for one in outcomes))


def _filled(one: SimulationOutcome, filler: Filler) -> str:
    return _three(one.filled_s[filler] / 3600) if filler in one.filled_s else "-"


def _spent(one: SimulationOutcome, phase: Phase) -> str:
    spent = one.seconds([phase])
    return f"{_three(spent / 3600)} {spent / one.total_s:>6.1%}" if spent else "-"


def notes_of(prepared: Prepared, runs: Sequence[StrategyRuns], now: datetime) -> tuple[PageNote, ...]:
    """Assumptions and sources behind the table."""
    outcomes = [one.first for one in runs]
    notes = [
        PageNote("Strategies", tuple(_abouts(outcomes))),
        PageNote("Iterations to target: an input, not a result", tuple(_targets(runs))),
        PageNote("Prices of a GPU-hour", tuple(_prices(prepared, now))),
        PageNote("Spot nodes", tuple(_trace(prepared))),
        *_decided(outcomes),
        PageNote("Assumed in the cost profile", tuple(_assumed(prepared))),
        PageNote(
            "How to read it", tuple(_reading(prepared, max((len(one.outcomes) for one in runs), default=1)))
        ),
    ]
    warnings = (
        *warnings_of(runs),
        *filter(None, [prepared.pricing.caveat]),
        *_unlike_targets(runs),
        *_far_away(prepared, runs),
        *_old_prices(prepared, now),
        *_too_short(prepared, runs),
        *_crowded(prepared, outcomes),
    )
    if warnings:
        notes.insert(0, PageNote("Mind", warnings))
    return tuple(notes)


def warnings_of(runs: Sequence[StrategyRuns]) -> Iterator[str]:
    """Caveats about single columns, each of the first start that it holds for."""

    def warned(
        one: StrategyRuns, of: Callable[[SimulationOutcome], bool]
    ) -> tuple[SimulationOutcome | None, str]:
        found = [outcome for outcome in one.outcomes if of(outcome)]
        several = f" from {len(found)} of {len(one.outcomes)} starts" if len(one.outcomes) > 1 else ""
        return (found[0] if found else None), one.strategy + several

    for each in runs:
        one, name = warned(each, lambda outcome: outcome.problem is not None)
        if one is not None:
            yield f"{name} did not come to its end: {one.problem}"
        one, name = warned(each, lambda outcome: outcome.preview_share < PREVIEWS_WANTED)
        if one is not None:
            yield (
                f"{name} chose among {percent(one.preview_share)} of the previews it was to make "
                "(others came too late, or were too few for their prompt): below "
                f"{PREVIEWS_WANTED:.0%}, nothing is promised for its target. Set fewer exploration.steps or "
                "seeds_per_prompt, or take more spot nodes."
            )
        one = each.first  # alike from all starts
        if one.dropped_share > _DROPPED_TOLD:
            yield (
                f"{one.strategy} left out {percent(one.dropped_share)} of its samples, because they do not "
                "divide by its learner GPUs: make prompts x group_size (or train_samples) a multiple of "
                "their number."
            )


def _unlike_targets(runs: Sequence[StrategyRuns]) -> Iterator[str]:
    """Strategies that learn alike, because their seeds are random, with different iterations to target."""
    names: dict[str, list[str]] = {}
    for one in runs:
        strategy, target = strategy_named(one.strategy), one.first.target
        if target is not None and strategy.explore is None and not strategy.parts & LEARNS_OTHERWISE:
            names.setdefault(_iterations(target), []).append(one.strategy)
    if len(names) > 1:
        text = "; ".join(f"{', '.join(alike)} {number}" for number, alike in names.items())
        yield (
            f"strategies with random seeds have different iterations to target ({text}), which decides their "
            "time and cost to target as much as the cluster does: state iterations_to_target of each alike, "
            "unless they were measured to differ."
        )


def _far_away(prepared: Prepared, runs: Sequence[StrategyRuns]) -> Iterator[str]:
    """Nodes on demand are simulated beside the learner."""
    fixed, coming = prepared.pricing.reserved, prepared.pricing.on_demand
    names = [one.strategy for one in runs if strategy_named(one.strategy).places.stays]
    if names and fixed is not None and coming is not None and crossing_of(fixed.place, coming.place):
        yield (
            f"{', '.join(names)}: prices on demand are of another place than those of the reserved GPUs, and "
            "traffic between is not counted: set cluster.reserved and cluster.spot to one place."
        )


def _old_prices(prepared: Prepared, now: datetime) -> Iterator[str]:
    old = [
        f"{name} {age_of(tag.as_of, now).days} d"
        for name, tag in prices_of(prepared).items()
        if tag.as_of is not None and age_of(tag.as_of, now) > OLD
    ]
    if old:
        newer = "" if prepared.file.prices.source == "skypilot" else "set prices.source=skypilot, or "
        yield f"prices are older than {OLD.days} days ({', '.join(old)}): {newer}state them in cluster."


def _crowded(prepared: Prepared, outcomes: Sequence[SimulationOutcome]) -> Iterator[str]:
    if prepared.profile.memory.bounds:
        return  # twice what a GPU has, whatever it needs
    crowded: dict[str, list[str]] = {}
    for one in outcomes:
        strategy = strategy_named(one.strategy)
        gpu, need = prepared.file.learner_gpu(strategy), bytes_of_both(prepared, strategy)
        if need > GPU_TYPES[gpu].vram_bytes:
            crowded.setdefault(gpu, []).append(f"{one.strategy} {math.ceil(need / 2**30)} GiB")
    for gpu, needs in crowded.items():
        has = GPU_TYPES[gpu].vram_bytes
        stay = any(not strategy_named(name.split(" ")[0]).switches for name in needs)
        resident = prepared.file.workload.resident and stay
        assumed = "as if they fitted" if resident else "as if what is not in use moved out and in again"
        yield (
            f"GPUs that train and roll out would hold, for both: {', '.join(needs)} each; {gpu} has "
            f"{has / 2**30:.0f}. Simulated {assumed} (workload.resident); the Ray driver keeps both there. "
            "Take larger GPUs, more that train, or a strategy where others roll out."
        )


def _too_short(prepared: Prepared, runs: Sequence[StrategyRuns]) -> Iterator[str]:
    spans = [
        sum(outcome.simulated_h for outcome in one.outcomes)
        for one in runs
        if strategy_named(one.strategy).places is SpotPlaces.SPOT
    ]
    stay_h = statistics(prepared.trace).uptime_mean_s / 3600  # NaN if no node ever leaves
    if spans and max(spans) < stay_h:
        stated = [one.first.target for one in runs if one.first.target]
        whole = max((target.iterations for target in stated), default=0)
        remedy = f"set run.iterations={whole} to simulate to the target" if whole else "raise run.iterations"
        yield (
            f"{hours(max(spans))} of spot nodes were simulated, and one stays {hours(stay_h)} on average, so "
            f"preemptions hardly show: {remedy}."
        )


def _decided(outcomes: Sequence[SimulationOutcome]) -> Iterator[PageNote]:
    for one in outcomes:
        if one.decisions:
            lines = (f"at {at_s / 3600:.2f} h: {text}" for at_s, text in one.decisions)
            yield PageNote(f"What {one.strategy} decided, from the first start", tuple(lines))


def _abouts(outcomes: Sequence[SimulationOutcome]) -> Iterator[str]:
    for one in outcomes:
        yield f"{one.strategy}: {strategy_named(one.strategy).about}"


def _targets(runs: Sequence[StrategyRuns]) -> Iterator[str]:
    by_source: dict[str, list[str]] = {}
    for one in (outcome for each in runs for outcome in each.outcomes):
        missing = one.no_target or "not given in iterations_to_target"
        chosen = f"{_iterations(one.target)}, {one.target.source}" if one.target else missing
        names = by_source.setdefault(chosen, [])
        if one.strategy not in names:
            names.append(one.strategy)
    for chosen, names in by_source.items():
        yield f"{', '.join(names)}: {chosen}"


def _prices(prepared: Prepared, now: datetime) -> Iterator[str]:
    for name, tag in prices_of(prepared).items():
        age = f", {age_of(tag.as_of, now).days} d old" if tag.as_of else ""
        yield f"{name}: ${tag.usd_gpu_h:.2f}{age}, {tag.source}"
    if prepared.pricing.spot is None and prepared.trace.prices:
        yield "spot: as the trace says, over time"
    elif prepared.trace.prices:
        yield "the trace has prices of its own; trace.use_prices=true takes them"


def _trace(prepared: Prepared) -> Iterator[str]:
    numbers, trace = statistics(prepared.trace), prepared.trace
    asked, rate = prepared.file.cluster.spot.nodes, numbers.preemptions_per_node_h
    preempted = "" if math.isnan(rate) else f", {rate:.2f} preemptions per node-hour"  # NaN: no node came
    yield (
        f"{trace.source}: of {asked} nodes asked for {numbers.nodes_mean:.1f} there on average{preempted}, "
        f"over {trace.horizon_s / 3600:,.0f} hours"
    )
    if numbers.noticed:
        yield f"notices {numbers.notice_lead_mean_s:.0f} s ahead on average"
    elif numbers.preemptions:
        yield "nodes vanish without notice"


def _assumed(prepared: Prepared) -> Iterator[str]:
    figures = assumed_of(prepared)
    yield f"{prepared.profile.name}: {len(figures)} figures are assumed; with other values the table differs"
    for figure in figures:
        yield f"{figure.key} = {figure.value:g}: {figure.source.removeprefix('assumed: ')}"


def _reading(prepared: Prepared, starts: int) -> Iterator[str]:
    run = prepared.file.run
    seeds = f"seed {run.seed}" if starts == 1 else f"seeds {run.seed} to {run.seed + starts - 1}"
    yield (
        f"{run.iterations} iterations simulated with {seeds} by the production controller; per "
        "iteration: mean without the first, which contains the start; to target: the first, plus that mean "
        "for each further one"
    )
    if starts > 1:
        yield (
            f"p50, p90: of {starts} starts, each with its own seed (noise, generated trace) or part of a "
            "trace file; one without the figure counts as the largest"
        )
    yield "range: of all starts; to target, also of the interval of the iterations"
    whole = "what is rented comes in whole machines"
    parts = "nodes may be parts of machines at their share of the price, which no cloud rents"
    yield f"prices are per GPU; {whole if prepared.file.prices.whole_machines else parts}"
    yield "idle: rented and waiting; lost: work done again, or cut off when an exploration window closed"


# -- numbers -------------------------------------------------------------------------------------------------


def between(show: Callable[[float], str], least: float, most: float) -> str:
    """``2.15-4.90 h``, ``$96-141``; one number if both look alike."""
    low, high = show(least), show(most)
    if low == high or "-" in (low, high):
        return low if low == high else f"{low} or more"
    value, _, unit = low.partition(" ")
    low = value if high.endswith(f" {unit}") else low
    return f"{low}-{high.removeprefix('$')}"


def _count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def _iterations(target: Target) -> str:
    least, most = target.ends
    interval = f" ({least} to {most})" if least < most else ""
    return f"{target.iterations}{interval}"


def _times(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _three(value: float) -> str:
    """Three significant digits, but all before the point: ``0.012``, ``3.86``, ``12,345``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """``96.8 s``, ``1,117 s``; a dash if unknown."""
    if math.isnan(value):
        return "-"
    return f"{value:,.1f} s" if value < 1000 else f"{value:,.0f} s"


def hours(value: float) -> str:
    """``4.66 h``, ``149 h``."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f} h" if value < 100 else f"{value:,.0f} h"


def usd(value: float) -> str:
    """``$1.03``, ``$4,113``."""
    if math.isnan(value):
        return "-"
    return f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"


def percent(share: float) -> str:
    """``56 %``; a dash if unknown."""
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


PHASE_COLOURS: Mapping[Phase, str] = {
    Phase.SETUP: "#8c97a5",
    Phase.ROLLOUT: "#2563c9",
    Phase.EXPLORATION: "#1a9d8f",
    Phase.EVALUATION: "#6f9ae0",
    Phase.REWARD: "#c9a227",
    Phase.TRAINING: "#d9622b",
    Phase.WEIGHT_SYNC: "#8a4fbf",
    Phase.CHECKPOINT: "#5b4636",
    Phase.RECONFIGURATION: "#b58bd6",
    Phase.IDLE: "#e3e0d8",
    Phase.LOST: "#b3182c",
}
"""The same colour for a phase in every figure."""

KIND_NAMES: Mapping[NodeKind, str] = {
    NodeKind.RESERVED: "reserved or on demand",
    NodeKind.SPOT: "spot",
    NodeKind.ON_DEMAND: "on demand, for the learner",
}


def assumed_of(prepared: Prepared) -> tuple[NamedFigure, ...]:
    """Assumed profile figures that this scenario uses."""
    cluster = prepared.file.cluster
    return assumptions(prepared.profile, (cluster.reserved.gpu_type, cluster.spot.gpu_type))


def prices_of(prepared: Prepared) -> dict[str, PriceTag]:
    """GPU prices by rental kind."""
    pricing = prepared.pricing
    tags = {"reserved": pricing.reserved, "on demand": pricing.on_demand, "spot": pricing.spot}
    return {name: tag for name, tag in tags.items() if tag is not None}


def record_of(prepared: Prepared, runs: Sequence[StrategyRuns], now: datetime) -> dict[str, object]:
    """The ``--json`` output."""
    trace = prepared.trace
    return {
        "scenario": prepared.file.model_dump(mode="json"),
        "profile": prepared.profile.name,
        "prices": {
            name: {
                "usd_gpu_h": tag.usd_gpu_h,
                "source": tag.source,
                "as_of": tag.as_of.isoformat() if tag.as_of else None,
                "age_days": age_of(tag.as_of, now).days if tag.as_of else None,
            }
            for name, tag in prices_of(prepared).items()
        },
        "trace": {"source": trace.source} | finite(asdict(statistics(trace))),
        "assumed": [asdict(figure) for figure in assumed_of(prepared)],
        "strategies": [runs_record(one) for one in runs],
    }


def runs_record(runs: StrategyRuns) -> dict[str, object]:
    """The first start's metrics, with the ranges over all starts and each start's metrics."""
    wanted = {
        "iteration_s": runs.figure(lambda one: one.iteration_s),
        "iteration_usd": runs.figure(lambda one: one.iteration_usd),
        "iterations_to_target": runs.iterations_to_target,
        "target_h": runs.target_h,
        "target_usd": runs.target_usd,
    }
    ranges: dict[str, dict[str, object]] = {name: finite(asdict(one)) for name, one in wanted.items()}
    for name, (least, most) in (("target_h", runs.ends_h), ("target_usd", runs.ends_usd)):
        ranges[name] |= finite({"least_of_interval": least, "most_of_interval": most})
    starts = [outcome_record(one) for one in runs.outcomes]
    return outcome_record(runs.first) | {"ranges": ranges, "starts": starts}


def outcome_record(outcome: SimulationOutcome) -> dict[str, object]:
    """One strategy's metrics; unknown values are null."""
    names = set(SimulationOutcome.__slots__) - {"gpu_s", "target", "filled_s", "other_usd"}
    record = finite({name: getattr(outcome, name) for name in SimulationOutcome.__slots__ if name in names})
    target = outcome.target
    record["iterations_to_target"] = None
    if target is not None:
        ends = dict(zip(("fewest", "most"), target.ends, strict=True))
        record["iterations_to_target"] = {"value": target.iterations, **ends, "source": target.source}
    record["gpu_s"] = {
        kind.value: {phase.value: outcome.gpu_s.get((kind, phase), 0.0) for phase in Phase}
        for kind in NodeKind
    }
    record["other_usd"] = dict(outcome.other_usd)
    record["filled_s"] = {filler.value: seconds for filler, seconds in outcome.filled_s.items()}
    return record


def finite(numbers: dict[str, object]) -> dict[str, object]:
    """JSON has no NaN: replace it by null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in numbers.items()
    }
