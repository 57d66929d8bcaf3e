"""Groups that wait for work and may have some. Part of the cluster.

Every event may look for work for them, so what it asks costs the same however many they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.members import WorkerGroup
from spotlight.scheduler.types import WorkerId


@dataclass(slots=True)
class IdleGroups:
    """In FIFO order.

    Attributes:
        others: those on GPUs that do not train.
    """

    others: dict[WorkerId, WorkerGroup] = field(default_factory=dict)
    _all: OrderedDict[WorkerId, WorkerGroup] = field(default_factory=OrderedDict)
    _trainers: Counter[int] = field(default_factory=Counter)
    """Groups on GPUs that train, by degree."""

    def add(self, group: WorkerGroup) -> None:
        """Add one at the end; one that is there keeps its place."""
        if group.leader in self._all:
            return
        self._all[group.leader] = group
        if group.trains:
            self._trainers[group.kind.degree] += 1
        else:
            self.others[group.leader] = group

    def remove(self, leader: WorkerId) -> None:
        """Remove one, if it is there."""
        if (group := self._all.pop(leader, None)) is not None:
            self._forget(group)

    def pop(self) -> WorkerGroup:
        """Remove and return the first."""
        _, group = self._all.popitem(last=False)
        self._forget(group)
        return group

    def clear(self) -> None:
        """Remove all."""
        self._all.clear()
        self._trainers.clear()
        self.others.clear()

    def are_trainers(self, degree: int) -> bool:
        """Whether all are groups of this degree on GPUs that train."""
        return not self.others and self._trainers[degree] == len(self._all)

    def _forget(self, group: WorkerGroup) -> None:
        if group.trains:
            self._trainers[group.kind.degree] -= 1
        else:
            del self.others[group.leader]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._all.values())

    def check(self) -> None:
        """Assert that they are counted right, and that each may have work."""
        assert +self._trainers == Counter(group.kind.degree for group in self if group.trains)
        assert list(self.others) == [group.leader for group in self if not group.trains]
        for group in self:
            assert group.capacity, f"{group.leader} waits and takes nothing"
            assert len(group.members) == group.kind.degree, f"{group.leader} waits and lost members"
