"""What drivers report to the controller. Frozen facts: ids, sizes and times, never tensors.

One protocol for all drivers; the inline driver is a cluster of one worker. The controller starts, groups and
fences workers, a group asks for work with :class:`GroupPulled` and gets it once there is some.

Messages between the controller and workers may be lost, duplicated, late and out of order. What the driver
itself knows (nodes, the learner, rewards) arrives once and in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.scheduler.types import (
    DropReason,
    LeaseId,
    Node,
    NodeId,
    Phase,
    PolicyVersion,
    RolloutId,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The driver is ready: learner and rewards are up, the checkpoint (if any) is loaded."""


@dataclass(frozen=True, slots=True)
class RolloutFailed:
    """A worker could not finish a rollout (numbers that are not finite, a failed decode)."""

    worker: WorkerId
    lease: LeaseId
    epoch: int
    rollout: RolloutId
    error: str


@dataclass(frozen=True, slots=True)
class SamplesRewarded:
    """All rewards of some samples.

    Attributes:
        scores: by rollout: ``reward`` (the weighted sum) and every curve by name.
        lineage: of the ``ScoreSamples`` it answers: scores of an abandoned lineage do not count.
    """

    scores: Mapping[RolloutId, Mapping[str, float]]
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """A sample could not be scored after all retries; ``lineage`` as in :class:`SamplesRewarded`."""

    rollout: RolloutId
    reason: DropReason
    detail: str
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class BatchPrepared:
    """The learner holds the iteration's advantages and old log-probs."""

    iteration: int


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """The learner accumulated the gradients of a micro-batch."""

    iteration: int
    update: int
    index: int


@dataclass(frozen=True, slots=True)
class OptimizerStepped:
    """The learner applied an optimizer step; loss and gradient norm are for the record only."""

    iteration: int
    update: int
    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """The learner did what follows the last step of a batch (the old policy follows, EMA)."""

    iteration: int


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """Workers can pull this policy version."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    """Validation scores and pictures of an iteration are written; ``lineage`` as in ``ReportEvaluation``."""

    iteration: int
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A checkpoint taken before ``iteration`` is durable."""

    iteration: int


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is there and may be used; one that comes back is a new node of the same name."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeNoticed:
    """The cloud will take a node at ``deadline_s`` (controller time)."""

    node: NodeId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class NoticeCancelled:
    """The cloud will not take the node after all."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and everything on it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker's process is up, without weights; ``epoch`` is that of the ``StartWorker`` it obeys."""

    worker: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerCrashed:
    """A worker's process died, or could not be started; its node lives."""

    worker: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class WeightsPulled:
    """A worker holds a policy version, checked against its checksum and the number of bound modules.

    Attributes:
        epoch: of the worker's process.
        lineage: of the ``PullWeights`` it obeys: versions of an abandoned lineage do not count.
    """

    worker: WorkerId
    epoch: int
    version: PolicyVersion
    lineage: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A worker could not get its weights (the peer died, a checksum differed)."""

    worker: WorkerId
    epoch: int
    version: PolicyVersion
    lineage: int


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """The workers of a sequence-parallel group can reach each other."""

    leader: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupStopped:
    """A group committed what it held and is no more; its living workers stand free."""

    leader: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupPulled:
    """A group can hold ``capacity`` rollouts more than it does; answered once there is work.

    Attributes:
        seen: the last lease the group was granted. If the controller granted a later one, that grant was lost
            and is sent again.
        holds: the leases it works on. Any other that is still open the group will not finish.
    """

    leader: WorkerId
    epoch: int
    capacity: int
    seen: LeaseId
    holds: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseProgressed:
    """All open rollouts of a lease are safe at ``steps`` steps after the lease began; renews the lease."""

    leader: WorkerId
    lease: LeaseId
    epoch: int
    steps: int


@dataclass(frozen=True, slots=True)
class LeaseCompleted:
    """Rollouts of a lease are finished, their samples safe outside the group; renews the lease."""

    leader: WorkerId
    lease: LeaseId
    epoch: int
    rollouts: tuple[RolloutId, ...]
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """A learner rank died: what was trained since the last checkpoint is void. No answer of it follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class LearnerRestored:
    """The learner stands at the checkpoint that ``RestoreLearner`` named."""

    lineage: int


@dataclass(frozen=True, slots=True)
class GpuTimeSpent:
    """``seconds`` of a worker's billed time went into a phase."""

    worker: WorkerId
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; leases may have expired."""


ClusterEvent: TypeAlias = (
    NodeJoined
    | NodeNoticed
    | NoticeCancelled
    | NodeLost
    | WorkerStarted
    | WorkerCrashed
    | WeightsPulled
    | PullFailed
    | GroupFormed
    | GroupStopped
)

Event: TypeAlias = (
    RunStarted
    | RolloutFailed
    | SamplesRewarded
    | RewardFailed
    | BatchPrepared
    | MicroBatchTrained
    | OptimizerStepped
    | BatchFinished
    | WeightsPublished
    | EvaluationReported
    | CheckpointCommitted
    | ClusterEvent
    | GroupPulled
    | LeaseProgressed
    | LeaseCompleted
    | LearnerLost
    | LearnerRestored
    | GpuTimeSpent
    | TimePassed
)
