"""What the controller asks drivers to do. A driver carries effects out in order, and answers with events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.core.records import Record
from spotlight.core.types import Group, Lease, MicroBatch, PolicyVersion, Rollout, RolloutId, WorkerId


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Append to the durable ledger; durable before any later checkpoint is committed."""

    position: int
    record: Record


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Hand rollouts to the worker that pulled; those in ``resume`` continue at a committed step."""

    lease: Lease
    rollouts: tuple[Rollout, ...]
    resume: Mapping[RolloutId, int]


@dataclass(frozen=True, slots=True)
class NoWork:
    """Nothing to pull now; ask again after any other event, which may have issued or requeued rollouts."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ScoreSamples:
    """Have the reward pool score finished samples."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class PrepareBatch:
    """Give the learner an iteration's groups with their scores: it forms advantages and old log-probs.

    Attributes:
        micro_batches: what will be trained, in order: old log-probs are computed in the same batches.
    """

    iteration: int
    groups: tuple[Group, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class TrainMicroBatch:
    """Accumulate gradients."""

    micro_batch: MicroBatch
    index: int


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    """Apply the accumulated gradients."""

    iteration: int
    update: int


@dataclass(frozen=True, slots=True)
class FinishBatch:
    """Do what follows the last optimizer step of an iteration."""

    iteration: int


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Make a policy version available to workers."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Write validation scores and pictures of finished evaluation samples."""

    iteration: int
    version: PolicyVersion
    rollouts: tuple[Rollout, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class DiscardSamples:
    """Free the tensors of samples that nothing will ask for again."""

    rollouts: tuple[RolloutId, ...]


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Save learner, controller snapshot and ledger position together.

    Attributes:
        iteration: the iteration that a resumed run starts with.
        position: the ledger position the checkpoint stands for.
        snapshot: the controller's state, JSON-able; ``Controller.restore`` takes it.
    """

    iteration: int
    position: int
    snapshot: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The run is over; ``error`` says why it had to stop early, with the remedy."""

    error: str | None


Effect: TypeAlias = (
    WriteRecord
    | GrantLease
    | NoWork
    | ScoreSamples
    | PrepareBatch
    | TrainMicroBatch
    | StepOptimizer
    | FinishBatch
    | PublishWeights
    | ReportEvaluation
    | DiscardSamples
    | CommitCheckpoint
    | FinishRun
)
