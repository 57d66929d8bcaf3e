"""What the controller asks drivers to do. A driver carries effects out in order, and answers with events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.records import Record
from spotlight.scheduler.types import (
    Comparison,
    Filler,
    Group,
    Lease,
    LeaseId,
    MicroBatch,
    NodeId,
    PolicyVersion,
    Rollout,
    RolloutId,
    WeightKind,
    WorkerId,
)


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
class ScoreSamples:
    """Have the reward pool score finished samples; ``lineage`` is to be sent back."""

    rollouts: tuple[Rollout, ...]
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class PrepareBatch:
    """Give the learner an iteration's groups with their scores: it forms advantages and old log-probs.

    With ``partial`` these are some of the iteration's samples, and the rest follows in further effects, each
    answered by a :class:`~spotlight.scheduler.events.BatchPrepared`; all come before the first optimizer
    step.

    Attributes:
        groups: whole groups, or with ``comparisons`` also slices of groups.
        micro_batches: what will be trained, in order: old log-probs are computed in the same batches.
        weights: factors of samples' losses that undo the choice of their seeds; 1 where absent.
        comparisons: one for each group; empty: each is compared within itself.
    """

    iteration: int
    groups: tuple[Group, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]
    micro_batches: tuple[MicroBatch, ...]
    weights: Mapping[RolloutId, float] = field(default_factory=dict)
    partial: bool = False
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainMicroBatch:
    """Accumulate gradients."""

    micro_batch: MicroBatch
    index: int


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    """Apply the accumulated gradients of ``samples``: fewer than were announced if some got lost."""

    iteration: int
    update: int
    samples: int


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
    """Write validation scores and pictures of finished evaluation samples; ``lineage`` is to be sent back."""

    iteration: int
    version: PolicyVersion
    rollouts: tuple[Rollout, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class ReportExploration:
    """Write what exploration did for an iteration's groups and what came of it; ``report`` is JSON-able."""

    iteration: int
    report: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReportPipeline:
    """Write what overlapped in an iteration.

    Attributes:
        filled_s: GPU seconds by what filled them; what filled none is absent.
        overlapped_samples: trained before all were there; None where the learner waits for all.
        early_samples: made before their iteration began; None where none may be.
    """

    iteration: int
    filled_s: Mapping[Filler, float]
    overlapped_samples: int | None = None
    early_samples: int | None = None

    def row(self) -> dict[str, float]:
        """As metrics."""
        found: dict[str, float | None] = {f"{filler}_s": seconds for filler, seconds in self.filled_s.items()}
        found |= {"overlapped_samples": self.overlapped_samples, "early_samples": self.early_samples}
        return {f"pipeline/{name}": value for name, value in found.items() if value is not None}


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
class StartWorker:
    """Start a worker's process on a GPU; first kill whatever process of that worker is left there."""

    worker: WorkerId
    node: NodeId
    gpu: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Have a worker load a policy version.

    Attributes:
        epoch: of the worker's process.
        lineage: counts the learner's restarts; to be sent back.
        kind: everything, or the adapter only.
        peer: a worker on the same node to copy from; None is the store.
    """

    worker: WorkerId
    epoch: int
    version: PolicyVersion
    lineage: int
    kind: WeightKind
    peer: WorkerId | None


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Join workers of one node into a sequence-parallel group; the first of them leads."""

    leader: WorkerId
    epoch: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Have a group (what lives of it) commit at the next step boundary what it holds, and part."""

    leader: WorkerId
    epoch: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class AbandonLease:
    """A lease does not count any more: its holder stops at the next step boundary and pulls again."""

    leader: WorkerId
    epoch: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class RollBack:
    """Undo the durable ledger's records after ``position``; those that follow are numbered from there."""

    position: int


@dataclass(frozen=True, slots=True)
class RestoreLearner:
    """Start the learner anew from the checkpoint taken before ``iteration`` (0: the start of the run)."""

    iteration: int
    lineage: int


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The run is over; ``error`` says why it had to stop early, with the remedy."""

    error: str | None


ClusterEffect: TypeAlias = StartWorker | PullWeights | FormGroup | StopGroup | AbandonLease

Effect: TypeAlias = (
    WriteRecord
    | GrantLease
    | ScoreSamples
    | PrepareBatch
    | TrainMicroBatch
    | StepOptimizer
    | FinishBatch
    | PublishWeights
    | ReportEvaluation
    | ReportExploration
    | ReportPipeline
    | DiscardSamples
    | CommitCheckpoint
    | ClusterEffect
    | RollBack
    | RestoreLearner
    | FinishRun
)
