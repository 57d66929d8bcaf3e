"""Synthetic traces from a seed. Pure: equal specifications give equal traces on every machine.

Each of ``nodes`` slots is a renewal process with exponential up and down times and its own random stream, so
adding slots does not change the others. Slots are dealt to zones in turn. Bursts are a Poisson process in
each zone that takes each node present there with probability ``burst_fraction``, all within
``burst_spread_s``: of joint interruptions of one type in one zone, more than 92 % lie within three minutes
(arXiv 2604.16457).
Replacements have new names: ``node3.2``, of a second zone ``zone1-node3.2``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from spotlight_fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind, require_room
from spotlight_fleet.traces.transforms import with_notices


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Parameters of a synthetic trace.

    Attributes:
        nodes: most nodes at once.
        mean_uptime_s: until a node is preempted on its own.
        mean_downtime_s: until it is replaced; 0: at once.
        zones: that the slots are in.
        bursts_per_h: Poisson rate of bursts in each zone; 0: none.
        burst_fraction: share of a zone's present nodes that a burst takes.
        burst_spread_s: a burst's removals fall within this time.
        notice_lead_s: notice before each removal; 0: none.

    Raises:
        TraceError: a value is out of range.
    """

    seed: int
    horizon_s: float
    nodes: int
    gpus_per_node: int = 1
    mean_uptime_s: float = 2 * 3600.0
    mean_downtime_s: float = 600.0
    zones: int = 1
    bursts_per_h: float = 0.0
    burst_fraction: float = 0.5
    burst_spread_s: float = 180.0
    notice_lead_s: float = 0.0

    def __post_init__(self) -> None:
        positive = ("horizon_s", "nodes", "gpus_per_node", "mean_uptime_s", "zones")
        zero = ("mean_downtime_s", "bursts_per_h", "burst_spread_s", "notice_lead_s")
        for name in (*positive, *zero):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
                expected = "more than 0" if name in positive else "0 or more"
                raise TraceError(f"{name} is {value!r}; expected {expected}")
        if not 0 < self.burst_fraction <= 1:
            raise TraceError(f"burst_fraction is {self.burst_fraction!r}; expected above 0, at most 1")
        ends_h = self.bursts_per_h + 3600 / (self.mean_uptime_s + self.mean_downtime_s)
        require_room("a generated trace", 2 * self.nodes * (1 + self.horizon_s / 3600 * ends_h))


def generate(spec: TraceSpec) -> Trace:
    """Generate a trace."""
    any_number = replace(spec, nodes=1)
    events = [event for place in range(spec.nodes) for event in _place(any_number, place)]
    # At equal times removals come first, so that the fleet never exceeds its size.
    events.sort(key=lambda event: (event.time_s, event.kind is TraceEventKind.ADD, event.node))
    kind = "bursty" if spec.bursts_per_h else "Poisson"
    kind += f", {spec.zones} zones" if spec.zones > 1 else ""
    trace = Trace(tuple(events), spec.horizon_s, f"generated, {kind}, seed {spec.seed}")
    return with_notices(trace, spec.notice_lead_s) if spec.notice_lead_s else trace


@lru_cache(maxsize=128)
def _bursts(spec: TraceSpec, zone: int) -> tuple[float, ...]:
    return tuple(_burst_times_s(spec, zone)) if spec.bursts_per_h else ()


def _burst_times_s(spec: TraceSpec, zone: int) -> Iterator[float]:
    stream = random.Random(f"{spec.seed}/bursts{f'/{zone}' if zone else ''}")
    time_s = _exponential(stream, 3600 / spec.bursts_per_h)
    while time_s < spec.horizon_s:
        yield time_s
        time_s += _exponential(stream, 3600 / spec.bursts_per_h)


@lru_cache(maxsize=4096)
def _place(spec: TraceSpec, place: int) -> tuple[TraceEvent, ...]:
    """One slot, which traces of any number of nodes share; ``spec.nodes`` does not count."""
    return tuple(_nodes_of(spec, place, _bursts(spec, place % spec.zones)))


def _nodes_of(spec: TraceSpec, place: int, bursts: tuple[float, ...]) -> Iterator[TraceEvent]:
    """Successive nodes of one slot, initially occupied with the long-run probability of being up."""
    stream = random.Random(f"{spec.seed}/{place}")
    # Drawn even without a node present, so that a slot's bursts do not depend on its past.
    hits = [
        time_s + stream.random() * spec.burst_spread_s
        for time_s in bursts
        if stream.random() < spec.burst_fraction
    ]
    up = stream.random() < spec.mean_uptime_s / (spec.mean_uptime_s + spec.mean_downtime_s)
    time_s = 0.0 if up else _exponential(stream, spec.mean_downtime_s)
    zone, turn = place % spec.zones, 1
    slot = f"zone{zone}-node{place}" if zone else f"node{place}"
    while time_s < spec.horizon_s:
        name = slot if turn == 1 else f"{slot}.{turn}"
        yield TraceEvent(time_s, TraceEventKind.ADD, name, spec.gpus_per_node)
        alone_s = time_s + _exponential(stream, spec.mean_uptime_s)
        end_s = min([alone_s, *(hit_s for hit_s in hits if hit_s > time_s)])
        if end_s >= spec.horizon_s:
            return
        yield TraceEvent(end_s, TraceEventKind.REMOVE, name, spec.gpus_per_node)
        time_s = end_s + _exponential(stream, spec.mean_downtime_s)
        turn += 1


def _exponential(stream: random.Random, mean: float) -> float:
    """By inversion: only ``random()`` is guaranteed to be equal across Python versions."""
    return -math.log(1 - stream.random()) * mean
