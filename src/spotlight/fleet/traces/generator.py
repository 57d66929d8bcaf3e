"""Synthetic traces from a seed. Pure: the same specification gives the same trace on every machine.

Each of ``nodes`` places is a renewal process: a node stays an exponential time and is replaced after another.
Each place draws from its own stream, so more places do not change the first ones. Bursts, a Poisson process
over the whole fleet, take each present node with ``burst_fraction``: spot capacity is lost together, as when
a region runs short. A replacement is a new machine and has a new name, ``node3.2``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind
from spotlight.fleet.traces.transforms import with_notices


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What to generate.

    Attributes:
        nodes: places, and so the most nodes at once.
        mean_uptime_s: until a node is preempted alone.
        mean_downtime_s: until its place has another; 0 at once.
        bursts_per_h: how often the fleet loses nodes together; 0: never (Poisson).
        burst_fraction: share of the present nodes that a burst takes.
        burst_spread_s: a burst's nodes go within this time.
        notice_lead_s: notice before each removal; 0: none.

    Raises:
        TraceError: a value out of range.
    """

    seed: int
    horizon_s: float
    nodes: int
    gpus_per_node: int = 1
    mean_uptime_s: float = 2 * 3600.0
    mean_downtime_s: float = 600.0
    bursts_per_h: float = 0.0
    burst_fraction: float = 0.5
    burst_spread_s: float = 30.0
    notice_lead_s: float = 0.0

    def __post_init__(self) -> None:
        positive = ("horizon_s", "nodes", "gpus_per_node", "mean_uptime_s")
        zero = ("mean_downtime_s", "bursts_per_h", "burst_spread_s", "notice_lead_s")
        for name in (*positive, *zero):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
                expected = "more than 0" if name in positive else "0 or more"
                raise TraceError(f"{name} is {value!r}; expected {expected}")
        if not 0 < self.burst_fraction <= 1:
            raise TraceError(f"burst_fraction is {self.burst_fraction!r}; expected above 0, at most 1")


def generate(spec: TraceSpec) -> Trace:
    """Make a trace. Raises :class:`TraceError` only through the specification."""
    bursts = tuple(_bursts(spec))
    events = [event for place in range(spec.nodes) for event in _place(spec, place, bursts)]
    # At one time, removals first: a fleet never seems larger than it is.
    events.sort(key=lambda event: (event.time_s, event.kind is TraceEventKind.ADD, event.node))
    kind = "bursty" if spec.bursts_per_h else "Poisson"
    trace = Trace(tuple(events), spec.horizon_s, f"generated, {kind}, seed {spec.seed}")
    return with_notices(trace, spec.notice_lead_s) if spec.notice_lead_s else trace


def _bursts(spec: TraceSpec) -> Iterator[float]:
    """When bursts begin."""
    if not spec.bursts_per_h:
        return
    stream = random.Random(f"{spec.seed}/bursts")
    time_s = _exponential(stream, 3600 / spec.bursts_per_h)
    while time_s < spec.horizon_s:
        yield time_s
        time_s += _exponential(stream, 3600 / spec.bursts_per_h)


def _place(spec: TraceSpec, place: int, bursts: tuple[float, ...]) -> Iterator[TraceEvent]:
    """The nodes of one place, one after the other; it begins in the long-run share of time up."""
    stream = random.Random(f"{spec.seed}/{place}")
    # Drawn whether or not a node is there, so that bursts at one place do not depend on its past.
    hits = [
        time_s + stream.random() * spec.burst_spread_s
        for time_s in bursts
        if stream.random() < spec.burst_fraction
    ]
    up = stream.random() < spec.mean_uptime_s / (spec.mean_uptime_s + spec.mean_downtime_s)
    time_s = 0.0 if up else _exponential(stream, spec.mean_downtime_s)
    turn = 1
    while time_s < spec.horizon_s:
        name = f"node{place}" if turn == 1 else f"node{place}.{turn}"
        yield TraceEvent(time_s, TraceEventKind.ADD, name, spec.gpus_per_node)
        alone_s = time_s + _exponential(stream, spec.mean_uptime_s)
        end_s = min([alone_s, *(hit_s for hit_s in hits if hit_s > time_s)])
        if end_s >= spec.horizon_s:
            return
        yield TraceEvent(end_s, TraceEventKind.REMOVE, name, spec.gpus_per_node)
        time_s = end_s + _exponential(stream, spec.mean_downtime_s)
        turn += 1


def _exponential(stream: random.Random, mean: float) -> float:
    """By inversion: only ``random()`` itself is promised to be the same in all versions of Python."""
    return -math.log(1 - stream.random()) * mean
