"""State of nodes, workers and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.scheduler.cluster.weight_sources import Holding
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

    def holding(self) -> Holding:
        """Its weights, as seen by neighbours choosing a source."""
        fetching = self.pull is not None and self.pull.peer is None and not self.based
        return Holding(self.id, self.based, self.version, fetching)


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
