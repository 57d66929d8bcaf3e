"""How many spot nodes of a trace work and are paid, over time, as arrays. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from spotlight_fleet.traces.trace import Trace, TraceEventKind

Figures: TypeAlias = NDArray[np.float64]
STRETCHES = 2048
"""Told apart in the nodes of a trace: in a day, changes within 42 s are one if there are more."""
JOINT_S = 180.0
"""Nodes lost within so long are lost together: most joint losses are (``trace.burst_spread_s``)."""


@dataclass(frozen=True, eq=False)
class Presence:
    """Stretches in which nothing changes; each begins where the one before ends, the first at 0.

    Attributes:
        until_s: their ends, ascending.
        working: nodes in spot nodes' places that roll out.
        usd_h: dollars an hour of the nodes that are paid.
        lost: each time that some were: nodes that were there, and how many of them were lost.
        notice_s: that losses were announced ahead, in the mean.
    """

    until_s: Figures
    working: Figures
    usd_h: Figures
    lost: tuple[tuple[int, int], ...] = ()
    notice_s: float = 0.0
    _losses_s: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The most nodes that work, the median of the stretches, the fewest but none, and the fewest."""
        working = np.sort(self.working).astype(int).tolist()
        few = next((number for number in working if number), 0)
        return working[-1], working[len(working) // 2], few, working[0]

    def losses_s(self, nodes: int) -> float:
        """How often a second one of so many nodes is lost, others at the same time being one loss."""
        if nodes not in self._losses_s:  # asked for by every way to run a strategy
            times = sum(_hits(nodes, before, gone) for before, gone in self.lost)
            self._losses_s[nodes] = times / float(self.until_s[-1])
        return self._losses_s[nodes]

    @property
    def since_s(self) -> Figures:
        """Their beginnings."""
        return np.append(0.0, self.until_s[:-1])

    @property
    def coarse(self) -> Presence:
        """At most about :data:`STRETCHES`: means over equal times, if there are more."""
        if len(self.until_s) <= STRETCHES:
            return self
        ends_s = np.linspace(0.0, self.until_s[-1], STRETCHES + 1)

        def mean(figure: Figures) -> Figures:
            total = np.append(0.0, np.cumsum(figure * (self.until_s - self.since_s)))
            at_ends: Figures = np.interp(ends_s, np.append(0.0, self.until_s), total)
            means: Figures = np.diff(at_ends) / np.diff(ends_s)
            return means

        working, usd_h = np.rint(mean(self.working)), mean(self.usd_h)
        return replace(self, until_s=ends_s[1:], working=working, usd_h=usd_h)

    @property
    def lasting(self) -> Presence:
        """Without stretches of no length."""
        kept = self.until_s > self.since_s
        until_s, working, usd_h = (each[kept] for each in (self.until_s, self.working, self.usd_h))
        return replace(self, until_s=until_s, working=working, usd_h=usd_h)

    def with_learner(self, nodes: int, joins_s: float, usd_h: float) -> Presence:
        """Where fewer work than the learner is on, others take its place so long after their number fell.

        Args:
            usd_h: of those others.
        """
        since_s, alone = self.since_s, self.working < nodes
        falls = alone & ~np.append(False, alone[:-1])
        fell_s = np.maximum.accumulate(np.where(falls, since_s, 0.0))
        helped_s = np.where(alone, np.clip(fell_s + joins_s, since_s, self.until_s), self.until_s)

        def both(before: Figures, after: Figures) -> Figures:
            return np.stack([before, after], axis=1).ravel()

        return replace(
            self,
            until_s=both(helped_s, self.until_s),
            working=both(self.working, nodes + self.working),
            usd_h=both(self.usd_h, self.usd_h + usd_h),
        ).lasting


def _hits(nodes: int, before: int, gone: int) -> float:
    """Probability that one of so many nodes is among those gone, of all before; of fewer it is one of all."""
    some, others = sorted((min(nodes, before), gone))  # as likely the other way round, with smaller numbers
    return 1 - math.comb(before - others, some) / math.comb(before, some)


def steady(nodes: int, until_s: float) -> Presence:
    """Nodes that stay, and are paid otherwise."""
    return Presence(np.array([until_s]), np.array([float(nodes)]), np.zeros(1))


def presence_of(trace: Trace, usd_h: float | None, joins_s: float, until_s: float) -> Presence:
    """The nodes of a trace.

    Args:
        usd_h: of a node; None: the trace's own price over time.
        joins_s: from the arrival of a node until it works, except at the start.
        until_s: what comes after does not count.
    """
    changes = [(0.0, 0, 0)]  # when, paid, working
    ready_s: dict[str, float] = {}
    joint: list[tuple[float, int, int]] = []  # losses: since when, nodes before, and of them lost
    warned_s: dict[str, float] = {}
    notices_s = 0.0
    for event in trace.events:
        if event.kind is TraceEventKind.NOTICE:
            warned_s[event.node] = event.time_s
        elif event.kind is TraceEventKind.REMOVE and event.time_s < until_s:
            notices_s += event.time_s - warned_s.pop(event.node, event.time_s)
            since_s, before, gone = joint[-1] if joint else (-JOINT_S, 0, 0)
            if event.time_s < since_s + JOINT_S:
                joint[-1] = since_s, before, min(before, gone + 1)
            else:
                joint.append((event.time_s, len(ready_s), 1))
        if event.kind is TraceEventKind.ADD:
            ready_s[event.node] = event.time_s + (joins_s if event.time_s else 0.0)
            changes.append((event.time_s, 1, 0))
        elif event.kind is TraceEventKind.REMOVE:
            changes.append((event.time_s, -1, 0))
            if (since_s := ready_s.pop(event.node)) < event.time_s:
                changes += [(since_s, 0, 1), (event.time_s, 0, -1)]
    changes += [(since_s, 0, 1) for since_s in ready_s.values()]
    points = trace.prices if usd_h is None else ()
    changes += [(point.time_s, 0, 0) for point in points]
    table = np.array(changes)
    table = table[table[:, 0] < until_s]
    times_s, paid, working = table[np.argsort(table[:, 0], kind="stable")].T
    paid, working = np.cumsum(paid), np.cumsum(working)
    if usd_h is None:
        at = np.searchsorted([point.time_s for point in points], times_s, side="right") - 1
        price = np.array([point.usd_h for point in points])[np.maximum(at, 0)]
    else:
        price = np.full_like(times_s, usd_h)
    lost = tuple((before, gone) for _, before, gone in joint)
    notice_s = notices_s / max(1, sum(gone for *_, gone in joint))
    ends_s = np.append(times_s[1:], until_s)
    return Presence(ends_s, working, paid * price, lost, notice_s).lasting.coarse
