"""What the controller asks of drivers: carried out in order, answered with events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    Node,
    NodeId,
    NodeKind,
    PolicyVersion,
    Rollout,
    RolloutId,
    WeightKind,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Append to the durable ledger before any later checkpoint."""

    position: int
    record: Record


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Lease rollouts to a group; those in ``resume`` continue at a committed step."""

    lease: Lease
    rollouts: tuple[Rollout, ...]
    resume: Mapping[RolloutId, int]


@dataclass(frozen=True, slots=True)
class ScoreSamples:
    """Score finished samples; the answer repeats ``lineage``.

    Attributes:
        size: they are a group that rewards compare, all that was made of so many; None: any samples.
    """

    rollouts: tuple[Rollout, ...]
    lineage: int = 0
    size: int | None = None


@dataclass(frozen=True, slots=True)
class HoldSamples:
    """Finished samples are accepted, but scored later, with the rest of their groups."""

    rollouts: tuple[Rollout, ...]


def accepted(effects: Iterable[Effect], made: Collection[RolloutId]) -> list[Rollout]:
    """Those of the samples ``made`` that the controller accepted, from the effects of their report."""
    samples = (each.rollouts for each in effects if isinstance(each, ScoreSamples | HoldSamples))
    return [rollout for rollouts in samples for rollout in rollouts if rollout.id in made]


@dataclass(frozen=True, slots=True)
class PrepareBatch:
    """Have the learner form advantages and old log-probs of an iteration's groups.

    If ``partial``, more parts follow, each answered by a :class:`~spotlight.scheduler.events.BatchPrepared`,
    all before the first optimizer step.

    Attributes:
        groups: whole groups, or with ``comparisons`` also slices.
        micro_batches: in training order; old log-probs are computed in the same batches.
        comparisons: one per group; empty: each group is compared within itself.
    """

    iteration: int
    groups: tuple[Group, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]
    micro_batches: tuple[MicroBatch, ...]
    partial: bool = False
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainMicroBatch:
    """Accumulate gradients."""

    micro_batch: MicroBatch
    index: int


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    """Apply accumulated gradients of ``samples``, fewer than announced if some were dropped.

    Attributes:
        zeros: samples that the mean counts too, as 0.
    """

    iteration: int
    update: int
    samples: int
    zeros: int = 0


@dataclass(frozen=True, slots=True)
class FinishBatch:
    """Do what follows an iteration's last optimizer step."""

    iteration: int


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Make a policy version available to workers."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Write scores and images of evaluation samples; the answer repeats ``lineage``.

    Attributes:
        issued: all rollouts of the evaluation, in the same order every time.
        scores: of those that were scored.
    """

    iteration: int
    version: PolicyVersion
    issued: tuple[Rollout, ...]
    scores: Mapping[RolloutId, Mapping[str, float]]
    lineage: int = 0

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have scores."""
        return tuple(rollout for rollout in self.issued if rollout.id in self.scores)


@dataclass(frozen=True, slots=True)
class ReportExploration:
    """Write what exploration chose for an iteration and its effect; ``report`` is JSON-able."""

    iteration: int
    report: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReportPipeline:
    """Write what overlapped in an iteration.

    Attributes:
        filled_s: GPU-seconds by filler, without zeros.
        samples: counted by policies, by name: ``overlapped_samples`` were trained before the batch was
            complete, ``early_samples`` made before their iteration began.
    """

    iteration: int
    filled_s: Mapping[Filler, float]
    samples: Mapping[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """As metrics."""
        filled = {f"{filler}_s": seconds for filler, seconds in self.filled_s.items()}
        return {f"pipeline/{name}": value for name, value in (filled | dict(self.samples)).items()}


@dataclass(frozen=True, slots=True)
class ReportChoice:
    """Write how many of an iteration's scored samples were trained.

    Attributes:
        not_chosen: left out by ``algorithm.train_samples``.
        silent: left out because all chosen rewards of their group are equal.
    """

    iteration: int
    trained: int
    not_chosen: int
    silent: int

    def row(self) -> dict[str, float]:
        """As metrics."""
        counts = {"trained": self.trained, "not_chosen": self.not_chosen, "silent": self.silent}
        return {f"choice/{name}": float(number) for name, number in counts.items()}


@dataclass(frozen=True, slots=True)
class KeepPreview:
    """A preview's stored sample is from now on that of ``rollout``, which is not made; so are its scores."""

    preview: RolloutId
    rollout: Rollout
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DiscardSamples:
    """Free the tensors of samples no longer needed."""

    rollouts: tuple[RolloutId, ...]


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Save learner, controller snapshot and ledger position together.

    Attributes:
        iteration: the one a resumed run starts with.
        position: of the ledger.
        snapshot: JSON-able, for ``Controller.restore``.
    """

    iteration: int
    position: int
    snapshot: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker's process on a GPU; kill any leftover of it first."""

    worker: WorkerId
    node: NodeId
    gpu: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Have a worker load a policy version.

    Attributes:
        epoch: of the worker's process.
        lineage: number of learner restarts; repeated in the answer.
        peer: worker on the same node to copy from; None: the store.
    """

    worker: WorkerId
    epoch: int
    version: PolicyVersion
    lineage: int
    kind: WeightKind
    peer: WorkerId | None


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Join workers of one node into a sequence-parallel group."""

    leader: WorkerId
    epoch: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Have a group's surviving members commit at the next step boundary and dissolve."""

    leader: WorkerId
    epoch: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class AbandonLease:
    """A lease was revoked: stop at the next step boundary and pull again."""

    leader: WorkerId
    epoch: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class RollBack:
    """Truncate the durable ledger after ``position``; numbering continues from there."""

    position: int


@dataclass(frozen=True, slots=True)
class RestoreLearner:
    """Restart the learner from the checkpoint taken before ``iteration`` (0: the start of the run)."""

    iteration: int
    lineage: int


@dataclass(frozen=True, slots=True)
class PrepareLearner:
    """Start a second learner at the new places, up to loading its state; ``RestoreLearner`` takes it.

    ``number`` counts these effects; ``LearnerPrepared`` repeats it.
    """

    number: int


@dataclass(frozen=True, slots=True)
class EndLearner:
    """End the learner's processes, whatever they do; ``LearnerLost`` follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class AssignRoles:
    """A machine is these nodes from now on: each trains, rolls out or rests. Workers of what it was end.

    Where none is ordered, it is the one node as which it joined. ``parts``: in the order of its GPUs.
    """

    machine: NodeId
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PlaceLearner:
    """Where a learner that moves is formed next, or is: ranks by machine. Empty: it waits for room."""

    ranks: Mapping[NodeId, int]


@dataclass(frozen=True, slots=True)
class NodesWanted:
    """Provide so many nodes of a kind. A level, not a change: it holds until the next.

    ``ending``: machines that may be ended if they are too many, since nothing works on them any more.
    """

    kind: NodeKind
    nodes: int
    ending: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportFleet:
    """Tell the user how many nodes of a kind are wanted and why, or what they will do.

    Attributes:
        text: may be empty.
        row: as metrics.
    """

    kind: NodeKind
    text: str
    row: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishRun:
    """End the run.

    Attributes:
        error: why it stopped early, with the remedy.
        stopped: it was asked to, and is to be resumed.
    """

    error: str | None
    stopped: bool = False


TrainEffect: TypeAlias = PrepareBatch | TrainMicroBatch | StepOptimizer | FinishBatch
ClusterEffect: TypeAlias = StartWorker | PullWeights | FormGroup | StopGroup | AbandonLease

FleetEffect: TypeAlias = AssignRoles | PlaceLearner | NodesWanted | ReportFleet

Effect: TypeAlias = (
    WriteRecord
    | GrantLease
    | ScoreSamples
    | HoldSamples
    | TrainEffect
    | PublishWeights
    | ReportEvaluation
    | ReportExploration
    | ReportPipeline
    | ReportChoice
    | KeepPreview
    | DiscardSamples
    | CommitCheckpoint
    | ClusterEffect
    | RollBack
    | RestoreLearner
    | PrepareLearner
    | EndLearner
    | FleetEffect
    | FinishRun
)
