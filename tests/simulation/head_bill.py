"""What the head of a cluster writes as costs, checked against the nodes that it knew.

    nodes that join and are lost ──► GPU-seconds and dollars, until the head ends
    :class:`~spotlight.cluster.billing.Billing`, fed with the same events ──► the same, by slot and phase

The simulation's own accounts know more: what a worker that died really did, machines before they join, prices
that change. So the head's can be compared with them by total only where both know the same, and is compared
with its own nodes here.

Invariant: every second of every slot is settled exactly once, at its node's price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.billing import Billing
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Node, NodeId
from spotlight.store.ledger.sqlite_ledger import GpuSpend

TOLERANCE = 1e-6


@dataclass(slots=True)
class HeadBill:
    """The bill of one head, which ends with it.

    Attributes:
        takes_every: events between two bills, as a head bills now and then.
    """

    takes_every: int = 7
    billing: Billing = field(default_factory=Billing)
    _present: dict[NodeId, tuple[Node, float]] = field(default_factory=dict)
    _due_s: float = 0.0
    _due_usd: float = 0.0
    _spent_s: float = 0.0
    _spent_usd: float = 0.0
    _events: int = 0

    def observe(self, event: ev.Event, effects: Sequence[ef.Effect], now: float) -> None:
        """One event of the controller, with its effects."""
        match event:
            case ev.NodeJoined(node):
                self._left(node.id, now)
                self._present[node.id] = node, now
            case ev.NodeLost(name):
                self._left(name, now)
        self.billing.observe(event, effects, now)
        self._events += 1
        if self._events % self.takes_every == 0:
            self._settled(self.billing.take(now))

    def end(self, now: float) -> None:
        """The head ends, or dies: everything is settled. Raises AssertionError."""
        for name in list(self._present):
            self._left(name, now)
        self._settled(self.billing.finish(now))
        for what, found, due in (
            ("GPU-seconds", self._spent_s, self._due_s),
            ("$", self._spent_usd, self._due_usd),
        ):
            assert abs(found - due) <= TOLERANCE * max(1.0, due), (
                f"the head billed {found} {what}, its nodes were there for {due}"
            )

    def _left(self, name: NodeId, now: float) -> None:
        if (was := self._present.pop(name, None)) is not None:
            node, since_s = was
            self._due_s += node.gpus * (now - since_s)
            self._due_usd += node.price_usd_h * (now - since_s) / 3600

    def _settled(self, spends: Iterable[GpuSpend]) -> None:
        for spent in spends:
            assert spent.seconds > 0, f"{spent.worker} is billed {spent.seconds} s as {spent.phase}"
            self._spent_s += spent.seconds
            self._spent_usd += spent.seconds * spent.price_usd_h / 3600
