"""What drivers tell the controller. Frozen facts: ids, sizes and times, never tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.core.types import DropReason, LeaseId, Phase, PolicyVersion, RolloutId, WorkerId


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The driver is ready: learner and rewards are up, the checkpoint (if any) is loaded."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker can denoise. It gets a fencing epoch; one that joins again gets a higher one."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone; its rollouts go back to the front of the queue."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkPulled:
    """A worker asks for up to ``capacity`` rollouts."""

    worker: WorkerId
    capacity: int


@dataclass(frozen=True, slots=True)
class ProgressCommitted:
    """A rollout's state at ``step`` is safe outside the worker; renews the lease."""

    worker: WorkerId
    lease: LeaseId
    epoch: int
    rollout: RolloutId
    step: int


@dataclass(frozen=True, slots=True)
class RolloutCompleted:
    """A worker finished a rollout, and its sample is safe outside the worker."""

    worker: WorkerId
    lease: LeaseId
    epoch: int
    rollout: RolloutId
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class RolloutFailed:
    """A worker could not finish a rollout (numbers that are not finite, a failed decode)."""

    worker: WorkerId
    lease: LeaseId
    epoch: int
    rollout: RolloutId
    error: str


@dataclass(frozen=True, slots=True)
class SampleRewarded:
    """All rewards of a sample; ``scores`` holds ``reward`` (the weighted sum) and every curve by name."""

    rollout: RolloutId
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """A sample could not be scored after all retries."""

    rollout: RolloutId
    reason: DropReason
    detail: str


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
    """Validation scores and pictures of an iteration are written."""

    iteration: int


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A checkpoint taken before ``iteration`` is durable."""

    iteration: int


@dataclass(frozen=True, slots=True)
class GpuTimeSpent:
    """``seconds`` of a worker's billed time went into a phase."""

    worker: WorkerId
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; leases may have expired."""


Event: TypeAlias = (
    RunStarted
    | WorkerJoined
    | WorkerLeft
    | WorkPulled
    | ProgressCommitted
    | RolloutCompleted
    | RolloutFailed
    | SampleRewarded
    | RewardFailed
    | BatchPrepared
    | MicroBatchTrained
    | OptimizerStepped
    | BatchFinished
    | WeightsPublished
    | EvaluationReported
    | CheckpointCommitted
    | GpuTimeSpent
    | TimePassed
)
