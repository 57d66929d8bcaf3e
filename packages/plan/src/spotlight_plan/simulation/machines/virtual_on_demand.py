"""The node on demand of a learner that no spot node has room for, in virtual time.

:class:`spotlight.scheduler.learner.on_demand_policy.OnDemandPolicy` decides, as in real runs. A node that is
given back is treated as one with a preemption notice, and ends once nothing works on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from spotlight.scheduler import events as ev
from spotlight.scheduler.learner.on_demand_policy import OnDemandPolicy, OnDemandStep
from spotlight.scheduler.types import Node, NodeId
from spotlight_plan.simulation.machines.virtual_places import VirtualPlaces
from spotlight_plan.simulation.scenario import NodeEvent, OnDemandOffer

LOOK_S = 1.0
"""Between two looks while it is wanted, coming or there, as in real runs."""
LEARNER_S = 3600.0
"""Beside the time of a start, what the learner has to leave the node (``fleet.learner_s``)."""


class OnDemandHost(Protocol):
    """What the node on demand uses of the simulation."""

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        ...

    @property
    def head_up(self) -> bool:
        """Whether anybody decides."""
        ...

    @property
    def places(self) -> VirtualPlaces:
        """Where the learner may be."""
        ...

    def after(self, seconds: float, then: Callable[..., None], *args: object) -> None:
        """Call ``then`` in ``seconds`` of virtual time."""
        ...

    def happen(self, event: NodeEvent) -> None:
        """Apply a node event."""
        ...

    def works(self, machine: NodeId) -> bool:
        """Whether a group or the learner still works on a machine."""
        ...


@dataclass(slots=True)
class VirtualOnDemand:
    """Looks after it; one at a time.

    Attributes:
        ranks: of the learner, at least.
        start_s: how long a node may take to join.
        taken: nodes so far.
        decisions: how often each was made.
    """

    host: OnDemandHost
    offer: OnDemandOffer
    ranks: int
    start_s: float
    taken: int = 0
    decisions: Counter[OnDemandStep] = field(default_factory=Counter)
    _policy: OnDemandPolicy = field(init=False)
    _coming: NodeId | None = None
    _ends: bool = False
    _look: int = 0

    def __post_init__(self) -> None:
        self._policy = OnDemandPolicy(self.offer.after_s, self.offer.back_after_s, self.start_s)

    def changed(self) -> None:
        """Nodes or the learner's places have changed: look now."""
        self._after(0.0)

    def _after(self, seconds: float) -> None:
        self._look += 1
        self.host.after(seconds, self._decide, self._look)

    def _decide(self, look: int) -> None:
        if look != self._look or not self.host.head_up:
            return
        places, there = self.host.places, self._find()
        assert places.moving is not None, "only a learner that moves takes a node on demand"
        waits = not places.has_room(self.ranks)
        step = self._policy.decide(
            self.host.now,
            waits=waits,
            spot_room=places.moving.spot_room,
            is_there=there is not None,
            holds=there is not None and places.moving.held(there) > 0,
        )
        if step is not None:
            self.decisions[step] += 1
            self._do(step, there)
        there = self._find()
        if there is not None and self._ends and not self.host.works(there):
            self._ends = False
            self.host.happen(ev.NodeLost(there))
        elif waits or self._coming is not None or there is not None:
            self._after(LOOK_S)

    def _do(self, step: OnDemandStep, there: NodeId | None) -> None:
        host = self.host
        match step:
            case OnDemandStep.TAKE:
                self.taken += 1
                node = replace(self.offer.node, id=NodeId(f"{self.offer.node.id}:{self.taken}"))
                self._coming = node.id
                host.after(0.0, self._comes, node)
            case OnDemandStep.CANCEL:
                if self._coming is not None:
                    host.happen(ev.NodeLost(self._coming))
                self._coming = None
            case OnDemandStep.LEAVE if there is not None:
                host.happen(ev.NodeNoticed(there, host.now + self.start_s + LEARNER_S))
            case OnDemandStep.STAY if there is not None:
                host.happen(ev.NoticeCancelled(there))
            case OnDemandStep.EMPTY if there is not None:
                self._ends = True
                host.happen(ev.NodeNoticed(there, host.now))

    def _comes(self, node: Node) -> None:
        if node.id == self._coming:
            self.host.happen(ev.NodeJoined(node))

    def _find(self) -> NodeId | None:
        """The node, once it has joined; it may have been lost since."""
        places = self.host.places
        assert places.moving is not None, "only a learner that moves takes a node on demand"
        there = next(map(NodeId, places.moving.on_demand), None)
        if there is not None:
            self._coming = None
        else:
            self._ends = False
        return there
