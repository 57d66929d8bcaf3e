"""What drivers report to the controller. Frozen facts: ids, sizes and times, never tensors.

All drivers share one protocol; the inline driver is a cluster of one worker. The controller starts, groups
and fences workers. A group asks for work with :class:`GroupPulled` and is answered once there is some.

Messages between controller and workers may be lost, duplicated, late and out of order. What the driver itself
knows (nodes, learner, rewards) arrives once and in order.
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
    NodeKind,
    Phase,
    PolicyVersion,
    RolloutId,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Learner and rewards are up, and the checkpoint, if any, is loaded.

    ``ranks``: of the learner; None: those of the plan.
    """

    ranks: int | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run is to stop at the next point from which a resume goes on exactly."""


@dataclass(frozen=True, slots=True)
class RolloutFailed:
    """A rollout could not be finished (non-finite numbers, failed decode)."""

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
        lineage: of the ``ScoreSamples`` answered; scores of an older lineage do not count.
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
    """The learner holds advantages and old log-probs."""

    iteration: int


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """The learner accumulated a micro-batch's gradients."""

    iteration: int
    update: int
    index: int


@dataclass(frozen=True, slots=True)
class OptimizerStepped:
    """The learner applied an optimizer step; loss and gradient norm are only recorded."""

    iteration: int
    update: int
    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """The learner finished a batch (EMA, old-policy update)."""

    iteration: int


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """Workers can pull this policy version."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    """Evaluation scores and images are written; ``lineage`` as in ``ReportEvaluation``."""

    iteration: int
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A checkpoint taken before ``iteration`` is durable."""

    iteration: int


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A machine is usable. One that returns is a new machine of the same name.

    ``node``: all of it; :class:`~spotlight.scheduler.effects.AssignRoles` says if it is to be several nodes.
    """

    node: Node


@dataclass(frozen=True, slots=True)
class NodeNoticed:
    """The cloud will preempt a node at ``deadline_s`` (controller time)."""

    node: NodeId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class NodeAdvised:
    """The cloud finds a node likelier than others to be preempted."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NoticeCancelled:
    """The preemption notice was withdrawn."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node and everything on it is gone."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker's process is up, without weights; ``epoch`` as in ``StartWorker``."""

    worker: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerCrashed:
    """A worker's process died or could not start; its node lives."""

    worker: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class WeightsPulled:
    """A worker holds a policy version, verified by checksum and number of bound modules.

    Attributes:
        epoch: of the worker's process.
        lineage: as in ``PullWeights``; an older one does not count.
    """

    worker: WorkerId
    epoch: int
    version: PolicyVersion
    lineage: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A worker could not get its weights (dead peer, checksum mismatch)."""

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
    """A group committed its progress and dissolved; surviving workers are free."""

    leader: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupPulled:
    """A group asks for up to ``capacity`` more rollouts; answered once there is work.

    Attributes:
        seen: its latest lease; a later grant was lost and is resent.
        holds: leases it works on; it will not finish any other.
    """

    leader: WorkerId
    epoch: int
    capacity: int
    seen: LeaseId
    holds: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseProgressed:
    """A lease's open rollouts are durable ``steps`` steps after its start; renews it."""

    leader: WorkerId
    lease: LeaseId
    epoch: int
    steps: int


@dataclass(frozen=True, slots=True)
class LeaseCompleted:
    """Rollouts are finished, their samples durable; renews the lease."""

    leader: WorkerId
    lease: LeaseId
    epoch: int
    rollouts: tuple[RolloutId, ...]
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """A learner rank died: training since the last checkpoint is void, no pending answer follows.

    Before the run has started: the processes are gone, and others are started.
    """

    detail: str


@dataclass(frozen=True, slots=True)
class LearnerRestored:
    """The learner is at the checkpoint named by ``RestoreLearner``. ``ranks``: see :class:`RunStarted`."""

    lineage: int
    ranks: int | None = None


@dataclass(frozen=True, slots=True)
class LearnerPrepared:
    """The answer to ``PrepareLearner``: a second learner needs only the state, or (not ``formed``) failed.

    ``number``: of the effect.
    """

    number: int
    formed: bool = True


@dataclass(frozen=True, slots=True)
class LearnerStarted:
    """The processes of a learner that moves are up; those that it had elsewhere are gone.

    ``ranks``: by machine.
    """

    ranks: Mapping[NodeId, int]


@dataclass(frozen=True, slots=True)
class NodesProvided:
    """So many nodes of a kind are provided, or tried to be.

    ``wanted``: that were asked for then; None: nothing was asked for yet.
    """

    kind: NodeKind
    nodes: int
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class IterationBilled:
    """An iteration is trained; what the run has cost.

    Attributes:
        iteration: counted from 0.
        work_s: worker-seconds of rolling out since the last one.
        spent_usd: of the whole run, all attempts together.
        run_s: since its first attempt began.
    """

    iteration: int
    work_s: float
    spent_usd: float
    run_s: float


@dataclass(frozen=True, slots=True)
class GpuTimeSpent:
    """Billed time of a worker, in seconds, by phase."""

    worker: WorkerId
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened, but timeouts may be due."""


NodeEvent: TypeAlias = NodeJoined | NodeNoticed | NoticeCancelled | NodeLost
MachineEvent: TypeAlias = NodeEvent | NodeAdvised

ClusterEvent: TypeAlias = (
    WorkerStarted | WorkerCrashed | WeightsPulled | PullFailed | GroupFormed | GroupStopped
)

Event: TypeAlias = (
    RunStarted
    | StopRequested
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
    | MachineEvent
    | GroupPulled
    | LeaseProgressed
    | LeaseCompleted
    | LearnerLost
    | LearnerRestored
    | LearnerPrepared
    | LearnerStarted
    | NodesProvided
    | IterationBilled
    | GpuTimeSpent
    | TimePassed
)
