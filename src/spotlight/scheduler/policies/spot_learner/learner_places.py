"""Chooses the nodes that hold the learner's ranks: spot nodes, or else those taken on demand.

    a node joins, is noticed or is lost ─► places, once enough slots are free ─► the learner starts there
                                                                                            │
                      the nodes it has left roll out again, unless they have a notice ◄─────┘

Invariants
    1. ``target`` is empty, or has room for all ranks on nodes that are there: ``ranks``, or the largest
       divisor of it, not below ``ranks_min``, that fits and leaves a slot to roll out, if any does.
    2. While the learner lives, a node it runs on is no target of the next: its slots are taken.
    3. Until the ranks have places, every node rolls out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.fleet.rank_places import choose_places
from spotlight.scheduler.types import NodeId


@dataclass(slots=True)
class LearnerPlaces:
    """See the module's docstring.

    Attributes:
        ranks: number of the learner's ranks, if there is room.
        ranks_min: fewest ranks to start with, a divisor of ``ranks``.
        even: whether each node has equally many ranks.
        slots: number of slots of each node that is there.
        on_demand: nodes on demand, used where spot nodes have no room.
        holding: nodes whose workers hold the base weights: the learner starts there at once.
        leaving: nodes with a preemption notice, or that are to be given back.
        advised: nodes that the cloud may take soon: the learner prefers others.
        target: ranks by node where the learner starts next, or runs.
        running: where it runs; empty while it does not.
    """

    ranks: int
    ranks_min: int
    even: bool = False
    slots: dict[NodeId, int] = field(default_factory=dict)
    on_demand: set[NodeId] = field(default_factory=set)
    holding: set[NodeId] = field(default_factory=set)
    leaving: set[NodeId] = field(default_factory=set)
    advised: set[NodeId] = field(default_factory=set)
    target: Mapping[NodeId, int] = field(default_factory=dict)
    running: Mapping[NodeId, int] = field(default_factory=dict)

    def held(self, node: NodeId) -> int:
        """Slots of a node that belong to the learner."""
        return max(self.target.get(node, 0), self.running.get(node, 0))

    @property
    def spot_room(self) -> bool:
        """Whether spot nodes have room for all ranks, or hold them."""
        return bool(self._fitting(self._spot(self._free(self.leaving)), self._sizes[-1:]))

    @property
    def larger(self) -> Mapping[NodeId, int]:
        """Places on spot nodes for a learner of more ranks than the one that runs, beside it."""
        running = self.running
        more = [size for size in self._sizes if size > sum(running.values())] if running else []
        if not more or self.target != running or not self._stays(running) or self.on_demand & running.keys():
            return {}
        return self._fitting(self._spot(self._free(self.leaving | running.keys())), more)

    def grow(self) -> None:
        """Move to :attr:`larger`, if there is."""
        self.target = self.larger or self.target

    def stay(self) -> None:
        """A second learner does not start: the one that runs goes on where it can."""
        if self._stays(self.running):
            self.target = self.running

    def join(self, node: NodeId, slots: int, *, on_demand: bool = False) -> None:
        """A node is there."""
        self.slots[node] = slots
        if on_demand:
            self.on_demand.add(node)
        self._choose()

    def hold(self, node: NodeId) -> None:
        """The node's workers hold the base weights."""
        self.holding.add(node)

    def lose(self, node: NodeId) -> None:
        """A node is gone, and with it a learner that ran there."""
        self.slots.pop(node, None)
        self.on_demand.discard(node)
        self.holding.discard(node)
        self.leaving.discard(node)
        if node in self.running:
            self.running = {}
        if node in self.target:
            self.target = {}
        self._choose()

    def notice(self, node: NodeId) -> None:
        """A node will be gone; the learner gets other places if there are any."""
        if node in self.slots:
            self.leaving.add(node)
            self._choose()

    def cancel(self, node: NodeId) -> None:
        """A node stays after all."""
        self.leaving.discard(node)
        self._choose()

    def lost(self) -> None:
        """The learner's processes have ended; its nodes may live."""
        self.running = {}
        self._choose()

    def started(self, at: Mapping[NodeId, int]) -> None:
        """The learner runs there; what it held elsewhere is free."""
        self.running = at if self.slots.keys() >= at.keys() else {}
        self.holding -= at.keys()  # its workers have ended
        self._choose()

    def _choose(self) -> None:
        if not self._stays(self.target) and self._stays(self.running):
            self.target = self.running
        if self._stays(self.target):
            return
        free = self._free(self.leaving | set(self.running))
        there = sum(self._free(self.leaving).values())
        sizes = [size for size in self._sizes if size < there] or self._sizes[-1:]
        self.target = self._fitting(self._spot(free), sizes) or self._fitting(free, sizes) or self.target

    def _fitting(self, slots: Mapping[NodeId, int], sizes: Sequence[int]) -> Mapping[NodeId, int]:
        """Places for the first of the sizes that fits, where workers hold the base weights if possible."""
        held = {name: count for name, count in slots.items() if name in self.holding}
        chosen = (choose_places(each, size, even=self.even) for size in sizes for each in (held, slots))
        return next((places for places in chosen if places), {})

    @property
    def _sizes(self) -> list[int]:
        """Allowed numbers of ranks, the largest first: divisors, so that all share every batch evenly."""
        return [size for size in range(self.ranks, self.ranks_min - 1, -1) if self.ranks % size == 0]

    def _spot(self, slots: Mapping[NodeId, int]) -> dict[NodeId, int]:
        return {name: count for name, count in slots.items() if name not in self.on_demand}

    def _stays(self, places: Mapping[NodeId, int]) -> bool:
        return bool(places) and self.leaving.isdisjoint(places)

    def _free(self, taken: Collection[NodeId]) -> dict[NodeId, int]:
        """The newest first: its workers have the least to lose. What the cloud may take soon is last."""
        newest = [node for node in reversed(self.slots) if node not in taken]
        return {node: self.slots[node] for node in sorted(newest, key=self.advised.__contains__)}
