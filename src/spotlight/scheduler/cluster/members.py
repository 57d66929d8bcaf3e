"""State of nodes, workers and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.scheduler.effects import PullWeights
from spotlight.scheduler.types import GroupKind, Node, NodeId, PolicyVersion, WorkerId


class WorkerState(StrEnum):
    """STARTING: no process yet. LOADING: no weights yet. FREE: in no group. GROUPED: in one."""

    STARTING = "starting"
    LOADING = "loading"
    FREE = "free"
    GROUPED = "grouped"


ABLE = frozenset({WorkerState.FREE, WorkerState.GROUPED})
"""States of workers with weights, which can be in a group."""


class GroupState(StrEnum):
    """FORMING: not confirmed. READY: may hold a lease. STOPPING: commits what it holds, then dissolves."""

    FORMING = "forming"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(slots=True)
class Worker:
    """One process on one GPU.

    Attributes:
        epoch: of the process; answers under another epoch come from a replaced one.
        based: the base weights are loaded.
        version: None while unknown.
        pull: ordered and not yet confirmed.
        leader: of its group, if it has one.
    """

    id: WorkerId
    node: NodeId
    gpu: int
    epoch: int
    state: WorkerState = WorkerState.STARTING
    based: bool = False
    version: PolicyVersion | None = None
    pull: PullWeights | None = None
    leader: WorkerId | None = None

    @property
    def fetching(self) -> bool:
        """Whether it is downloading full weights from the store."""
        return self.pull is not None and self.pull.peer is None and not self.based


@dataclass(slots=True)
class WorkerGroup:
    """Workers of one node that denoise together. It waits for work while ``capacity`` > 0.

    Attributes:
        kind: as formed, even if members left since.
        trains: its node's GPUs are learner ranks too.
    """

    leader: WorkerId
    epoch: int
    node: NodeId
    members: tuple[WorkerId, ...]
    kind: GroupKind
    trains: bool
    state: GroupState = GroupState.FORMING
    capacity: int = 0


@dataclass(slots=True)
class Host:
    """A node with its workers and group leaders; a preemption notice sets ``deadline_s``."""

    node: Node
    workers: list[WorkerId] = field(default_factory=list)
    leaders: dict[WorkerId, None] = field(default_factory=dict)
    deadline_s: float | None = None
    draining: bool = False


@dataclass(slots=True)
class IdleGroups:
    """Groups that wait for work and may have some, in FIFO order.

    Nearly every event looks whether there is work for them. So what is asked then costs the same however many
    GPUs that train wait for their turn.

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


def check_members(
    hosts: Mapping[NodeId, Host], workers: Mapping[WorkerId, Worker], groups: Mapping[WorkerId, WorkerGroup]
) -> None:
    """Assert: groups are disjoint, each on one node, none active on a draining node."""
    for worker in workers.values():
        assert worker.id in hosts[worker.node].workers
        assert (worker.leader is not None) == (worker.state is WorkerState.GROUPED)
        assert worker.leader is None or worker.id in groups[worker.leader].members
        assert worker.version is None or worker.based
    for group in groups.values():
        assert group.members, "a group without members"
        assert all(workers[name].leader == group.leader for name in group.members)
        assert {workers[name].node for name in group.members} == {group.node}
        assert group.state is GroupState.STOPPING or not hosts[group.node].draining
