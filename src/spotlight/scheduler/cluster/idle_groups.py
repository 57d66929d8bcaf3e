"""Groups that wait for work and may have some. Part of the cluster.

Nearly every event looks whether there is work for them. So what is asked then costs the same however many
GPUs that train wait for their turn.
"""

from __future__ import annotations

from collections import Counter
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
    _all: dict[WorkerId, WorkerGroup] = field(default_factory=dict)
    _places: dict[WorkerId, int] = field(default_factory=dict)
    """Ascending in that order."""
    _trainers: Counter[int] = field(default_factory=Counter)
    """Groups on GPUs that train, by degree."""
    _added: int = 0

    def add(self, group: WorkerGroup) -> None:
        """Add one at the end; one that is there keeps its place."""
        if group.leader in self._all:
            return
        self._added += 1
        self._all[group.leader], self._places[group.leader] = group, self._added
        if group.trains:
            self._trainers[group.kind.degree] += 1
        else:
            self.others[group.leader] = group

    def remove(self, leader: WorkerId) -> None:
        """Remove one, if it is there."""
        group = self._all.pop(leader, None)
        if group is None:
            return
        del self._places[leader]
        if group.trains:
            self._trainers[group.kind.degree] -= 1
        else:
            del self.others[leader]

    def clear(self) -> None:
        """Remove all."""
        for each in (self._all, self._places, self._trainers, self.others):
            each.clear()

    def trainers_have(self, degree: int) -> bool:
        """Whether all those on GPUs that train are of this degree."""
        return self._trainers[degree] == len(self._all) - len(self.others)

    def place(self, group: WorkerGroup) -> int:
        """Of one that is there; it keeps it until it is removed, or put behind others."""
        return self._places[group.leader]

    def behind(self, place: int) -> list[WorkerGroup]:
        """All at later places than this."""
        return [group for group in self if self._places[group.leader] > place]

    def turn(self, place: int) -> None:
        """Put those up to this place behind the others."""
        last = next(reversed(self._places.values()), 0)
        if last <= place:
            return  # there are no others
        for group in [group for group in self if self._places[group.leader] <= place]:
            self.remove(group.leader)
            self.add(group)

    def __contains__(self, leader: WorkerId) -> bool:
        return leader in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._all.values())

    def check(self) -> None:
        """Assert that they are in order and counted right, and that each may have work."""
        assert list(self._places) == list(self._all)
        assert list(self._places.values()) == sorted(set(self._places.values()))
        assert +self._trainers == Counter(group.kind.degree for group in self if group.trains)
        assert list(self.others) == [group.leader for group in self if not group.trains]
        for group in self:
            assert group.capacity, f"{group.leader} waits and takes nothing"
            assert len(group.members) == group.kind.degree, f"{group.leader} waits and lost members"
