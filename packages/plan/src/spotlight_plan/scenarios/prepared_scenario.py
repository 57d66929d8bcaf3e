"""A scenario with its files read: profile, prices and the spot trace that all strategies share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from spotlight_fleet.traces.trace import Trace, TraceEvent, TraceEventKind
from spotlight_fleet.traces.trace_files import read_trace
from spotlight_fleet.traces.transforms import cut, limit, repeat, with_notices
from spotlight_plan.scenarios.fleet_events import SpotOffer, spot_events
from spotlight_plan.scenarios.presence import Presence, presence_of
from spotlight_plan.scenarios.pricing import Pricing
from spotlight_plan.scenarios.profile import Profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import AlwaysOn, GeneratedTrace, PublicTraceSection
from spotlight_plan.scenarios.strategies import Strategy
from spotlight_plan.simulation.scenario import NodeEvent
from spotlight_plan.traces.generator import TraceSpec, generate
from spotlight_plan.traces.public_traces import public_trace

SpotNodes: TypeAlias = tuple[tuple[float, NodeEvent], ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with its files read.

    Attributes:
        trace: limited to the spot nodes that roll out, and to the run time.
        later: a trace file begins this share of its length later.
    """

    file: ScenarioFile
    profile: Profile
    pricing: Pricing
    trace: Trace
    later: float = 0.0
    _traces: dict[int, Trace] = field(default_factory=dict, compare=False, repr=False)
    """Of other numbers of nodes, as asked for."""
    _spot_nodes: dict[tuple[int, SpotOffer], tuple[Trace, SpotNodes]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """What :meth:`spot_nodes` has answered, by the trace's identity: ways to run one cluster share it."""
    _presences: dict[tuple[int, float | None, float, float], tuple[Trace, Presence]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """What :meth:`presence` has answered, likewise."""

    def trace_of(self, strategy: Strategy) -> Trace:
        """The trace with as many nodes as the strategy asks for."""
        nodes = self.file.spot_nodes(strategy)
        if nodes == self.file.cluster.spot.nodes:
            return self.trace
        if nodes not in self._traces:
            self._traces[nodes] = trace_of_scenario(self.file, nodes, self.later)
        return self._traces[nodes]

    @property
    def spot_offer(self) -> SpotOffer:
        """What a spot node is."""
        spot, tag = self.file.cluster.spot, self.pricing.spot
        usd_h = None if tag is None else tag.usd_gpu_h * spot.gpus_per_node
        return SpotOffer(spot.gpu_type, spot.gpus_per_node, usd_h)

    def spot_nodes(self, strategy: Strategy) -> SpotNodes:
        """The spot nodes of the strategy's trace, as they come and go."""
        offer, trace = self.spot_offer, self.trace_of(strategy)
        of, found = self._spot_nodes.get((id(trace), offer), (None, ()))
        if of is not trace:
            found = spot_events(trace, offer)
            self._spot_nodes[id(trace), offer] = trace, found
        return found

    def presence(self, strategy: Strategy, joins_s: float, until_s: float) -> Presence:
        """How many spot nodes of the strategy's trace work; see :func:`presence_of`."""
        trace, usd_h = self.trace_of(strategy), self.spot_offer.usd_h
        key = id(trace), usd_h, joins_s, until_s
        of, found = self._presences.get(key, (None, None))
        if found is None or of is not trace:
            found = presence_of(trace, usd_h, joins_s, until_s)
            self._presences[key] = trace, found
        return found


def at_starts(prepared: Prepared) -> tuple[Prepared, ...]:
    """The scenario from each of its ``run.starts`` starts, its own first.

    Start k has the seed + k, so that generated traces are others, and a trace file begins k / starts later.
    """
    run = prepared.file.run
    return (prepared, *(_at_start(prepared, turn) for turn in range(1, run.starts)))


def _at_start(prepared: Prepared, turn: int) -> Prepared:
    run = prepared.file.run.model_copy(update={"seed": prepared.file.run.seed + turn})
    return with_file(prepared, prepared.file.model_copy(update={"run": run}), turn / run.starts)


def with_file(prepared: Prepared, file: ScenarioFile, later: float = 0.0) -> Prepared:
    """Another file with the profile and prices of this one; a trace file begins this share of it later."""
    trace = trace_of_scenario(file, file.cluster.spot.nodes, later)
    return replace(prepared, file=file, trace=trace, later=later, _traces={})


def trace_of_scenario(file: ScenarioFile, nodes: int, later: float = 0.0) -> Trace:
    """The scenario's trace, of so many nodes; one of a file begins this share of its length later."""
    spot, section, horizon_s = file.cluster.spot, file.trace, file.run.until_h * 3600
    if nodes == 0 or isinstance(section, AlwaysOn):
        gpus = spot.gpus_per_node
        added = (TraceEvent(0.0, TraceEventKind.ADD, str(n), gpus) for n in range(nodes))
        return Trace(tuple(added), horizon_s, "always on")
    if isinstance(section, GeneratedTrace):
        return _generated(
            TraceSpec(
                seed=file.run.seed,
                horizon_s=horizon_s,
                nodes=nodes,
                gpus_per_node=spot.gpus_per_node,
                mean_uptime_s=section.mean_uptime_h * 3600,
                mean_downtime_s=section.mean_downtime_s,
                bursts_per_h=section.bursts_per_h,
                burst_fraction=section.burst_fraction,
                burst_spread_s=section.burst_spread_s,
                zones=section.zones,
                notice_lead_s=section.notice_lead_s,
            )
        )
    path = public_trace(section.name) if isinstance(section, PublicTraceSection) else section.path
    source = str(path)
    trace = limit(read_trace(path, gpus_per_node=spot.gpus_per_node), nodes)
    start_s = section.start_h * 3600 + later * trace.horizon_s
    trace = repeat(trace, start_s + horizon_s)
    if start_s:
        trace = cut(trace, start_s, start_s + horizon_s)
        source += f" from {start_s / 3600:g} h"
    if section.notice_lead_s is not None:
        trace = with_notices(trace, section.notice_lead_s)
        source += f", notices {section.notice_lead_s:g} s ahead"
    return replace(trace, source=source)


@lru_cache(maxsize=128)
def _generated(spec: TraceSpec) -> Trace:
    return generate(spec)
