"""What a simulation's GPUs cost, computed a second time and in another way than the accounts do.

    nodes that come, go and change their price ──► GPU-seconds and dollars, by kind of node
    segments of work that the controller accepted ──► GPU-seconds and dollars, by kind and phase

Invariant: the accounts, closed and open segments together, agree with both after every event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.scheduler.events import NodeJoined, NodeLost
from spotlight.scheduler.types import PHASE_OF, Node, NodeId, NodeKind, Phase
from spotlight_plan.simulation.gpu_accounts import BilledSegment, GpuAccounts
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged

TOLERANCE = 1e-9
"""Relative to all that was billed: rounding only."""


@dataclass(slots=True)
class Amount:
    """GPU-seconds, and what they cost."""

    seconds: float = 0.0
    usd: float = 0.0

    def add(self, seconds: float, usd: float) -> None:
        """Add to both."""
        self.seconds += seconds
        self.usd += usd


@dataclass(slots=True)
class Bill:
    """See the module's docstring.

    Attributes:
        total: billed to nodes of each kind until ``since_s``.
        work: the accepted part of it, by phase in which results are made.
    """

    since_s: float = 0.0
    total: dict[NodeKind, Amount] = field(default_factory=lambda: defaultdict(Amount))
    work: dict[tuple[NodeKind, Phase], Amount] = field(default_factory=lambda: defaultdict(Amount))
    _present: dict[NodeId, tuple[Node, float]] = field(default_factory=dict)
    _accepted: dict[int, BilledSegment] = field(default_factory=dict)

    def apply(self, event: NodeEvent, now: float) -> None:
        """Start, stop or re-price a node's billing; repeated joins and unknown nodes change nothing."""
        self.advance(now)
        match event:
            case NodeJoined(node):
                self._present.setdefault(node.id, (node, node.price_usd_h))
            case NodeLost(name):
                self._present.pop(name, None)
            case PriceChanged(name, price_usd_h) if name in self._present:
                self._present[name] = self._present[name][0], price_usd_h

    def advance(self, now: float) -> None:
        """Bill the time until ``now``."""
        seconds = now - self.since_s
        for node, price_usd_h in self._present.values():
            self.total[node.kind].add(seconds * node.gpus, seconds * price_usd_h / 3600)
        self.since_s = now

    def accept(self, segments: Iterable[BilledSegment], phase: Phase) -> None:
        """Count accepted work once, however often its message arrived."""
        for spent in segments:
            if id(spent) not in self._accepted:
                self._accepted[id(spent)] = spent  # kept alive, so that its id is not reused
                self.work[spent.kind, phase].add(spent.end_s - spent.start_s, spent.usd)

    def compare(self, accounts: GpuAccounts, now: float) -> None:
        """Assert that the accounts agree."""
        self.advance(now)
        spent: dict[NodeKind, Amount] = defaultdict(Amount)
        for key, seconds in accounts.seconds.items():
            spent[key[0]].add(seconds, accounts.usd[key])
        for gpus in accounts.gpus.values():
            for gpu in gpus:
                open_s = now - gpu.since_s
                spent[gpu.node.kind].add(open_s, open_s * gpu.usd_s)
        for kind in NodeKind:
            due = self.total[kind]
            _require_equal(spent[kind], due, due, kind, None)
            for phase in PHASE_OF.values():
                key = kind, phase
                booked = Amount(accounts.seconds.get(key, 0.0), accounts.usd.get(key, 0.0))
                _require_equal(booked, self.work[key], due, kind, phase)


def _require_equal(
    found: Amount, expected: Amount, scale: Amount, kind: NodeKind, phase: Phase | None
) -> None:
    seconds, usd = abs(found.seconds - expected.seconds), abs(found.usd - expected.usd)
    what = phase or "all phases"
    assert seconds <= TOLERANCE * max(1.0, scale.seconds), (
        f"the accounts have {found.seconds} GPU-seconds of {kind} nodes ({what}), {expected.seconds} are due"
    )
    assert usd <= TOLERANCE * max(1.0, scale.usd), (
        f"the accounts have {found.usd} $ of {kind} nodes ({what}), {expected.usd} $ are due"
    )
