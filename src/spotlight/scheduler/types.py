"""The data types that flow between the parts of Spotlight.

Small, frozen, made of ids, sizes and floats. Tensors travel separately, keyed by :data:`RolloutId`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, TypeAlias

from spotlight_rewards.base.prompts import PromptId

RolloutId = NewType("RolloutId", str)
WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
LeaseId = NewType("LeaseId", int)
Scores: TypeAlias = Mapping[str, float]
"""Rewards of a sample, by name."""
PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps applied to the policy."""


class Purpose(StrEnum):
    """Why a rollout is made. Only ``TRAIN`` samples may enter an optimizer step."""

    TRAIN = "train"
    EXPLORE = "explore"
    EVAL = "eval"


class Phase(StrEnum):
    """Where a GPU-second went; each billed second has exactly one phase."""

    SETUP = "setup"
    ROLLOUT = "rollout"
    EXPLORATION = "exploration"
    EVALUATION = "evaluation"
    REWARD = "reward"
    TRAINING = "training"
    WEIGHT_SYNC = "weight_sync"
    CHECKPOINT = "checkpoint"
    RECONFIGURATION = "reconfiguration"
    IDLE = "idle"
    LOST = "lost"


PHASE_OF = {Purpose.TRAIN: Phase.ROLLOUT, Purpose.EVAL: Phase.EVALUATION, Purpose.EXPLORE: Phase.EXPLORATION}
"""Phase of the seconds in which a rollout is made."""


class Filler(StrEnum):
    """What fills otherwise idle GPU time."""

    TRAINING = "training"
    """Training while other samples of the iteration are generated."""
    TRAINERS = "trainers"
    """Rollouts on the learner's GPUs."""
    NEXT = "next"
    """Rollouts of the next iteration, before this one is trained."""
    EXPLORATION = "exploration"
    """Previews."""

    @property
    def words(self) -> str:
        """For users."""
        return _FILLER_WORDS[self]


_FILLER_WORDS = {
    Filler.TRAINING: "training beside rollouts",
    Filler.TRAINERS: "rollouts by trainers",
    Filler.NEXT: "next iteration's rollouts",
    Filler.EXPLORATION: "previews",
}


class DropReason(StrEnum):
    """Why a rollout's sample is not used."""

    ROLLOUT_FAILED = "rollout_failed"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_NOT_FINITE = "reward_not_finite"
    GROUP_TOO_SMALL = "group_too_small"
    NOT_CHOSEN = "not_chosen"
    """Scored; others of its group are trained."""
    SILENT_GROUP = "silent_group"
    """Scored; all chosen rewards of its group are equal."""
    UNEVEN_BATCH = "uneven_batch"
    STALE = "stale"
    EXPLORATION_OVER = "exploration_over"
    STOPPED_EARLY = "stopped_early"
    """Only in ledgers of older versions: a preview whose first steps looked like those of others."""

    @property
    def by_choice(self) -> bool:
        """Whether the sample was complete and scored, and the run chose not to train it."""
        return self in (DropReason.NOT_CHOSEN, DropReason.SILENT_GROUP)

    @property
    def words(self) -> str:
        """For users."""
        return f"{'left out' if self.by_choice else 'dropped'} ({self.value})"


class NodeKind(StrEnum):
    """Whether the cloud may preempt a node; one on demand is there as long as the learner needs it."""

    RESERVED = "reserved"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class WeightKind(StrEnum):
    """What a weight pull moves: everything, or the adapter only."""

    ADAPTER = "adapter"
    FULL = "full"


class Baseline(StrEnum):
    """What rewards are compared with: the whole group, its slices so far, or previews of other seeds."""

    GROUP = "group"
    SLICE = "slice"
    EXPLORATION = "exploration"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One (prompt, seed) to denoise.

    Attributes:
        seed: 63-bit; fixes all randomness: initial noise, SDE noise, SDE window.
        member: index within its group, or among its prompt's evaluation images.
        version: the one policy version that must make all of it.
    """

    id: RolloutId
    purpose: Purpose
    iteration: int
    prompt_id: PromptId
    member: int
    seed: int
    steps: int
    version: PolicyVersion


def group_of(rollout: Rollout) -> str:
    """What the ids of a group's rollouts begin with; a prompt drawn twice in an iteration has two groups."""
    return rollout.id.rpartition("-")[0]


class Maker(NamedTuple):
    """Who made a sample: a worker, under a lease of ``epoch``; as ``preview`` if it was kept from one."""

    worker: WorkerId
    epoch: int
    preview: RolloutId | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster.

    Attributes:
        price_usd_h: of the whole node, when it joined.
        trains: its GPUs are learner ranks.
        rolls_out: its GPUs are workers; with ``trains`` too, they pull only while the learner waits.
    """

    id: NodeId
    kind: NodeKind
    gpus: int
    gpu_type: str
    price_usd_h: float
    trains: bool
    rolls_out: bool


class GroupKind(NamedTuple):
    """Sequence-parallel groups expected to be equally fast."""

    gpu_type: str
    degree: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Rollouts held by one worker until ``deadline_s`` (controller time), fenced by ``epoch``.

    For a sequence-parallel group ``worker`` is the leader, and ``epoch`` is unique among all groups it ever
    led.
    """

    id: LeaseId
    worker: WorkerId
    epoch: int
    rollouts: tuple[RolloutId, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt's surviving samples in one iteration."""

    prompt_id: PromptId
    rollouts: tuple[RolloutId, ...]


COMPARED_MIN = 2
"""Minimum of others to compare a sample of an incomplete group with: fewer are noise."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What samples of a group are compared with, if trained before the group is complete.

    Attributes:
        baseline: GROUP: the samples are the whole group, or all that is trained of it.
        others: additional scores; GROUP: of members not trained, which count in spreads only; SLICE: of the
            group's earlier slices; EXPLORATION: of previews of other seeds.
    """

    baseline: Baseline = Baseline.GROUP
    others: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward/backward.

    Attributes:
        update: index of the optimizer step within the iteration.
        rollouts: in group order.
        update_samples: samples of the whole optimizer step (the loss normaliser), as planned if the batch is
            incomplete.
    """

    iteration: int
    update: int
    rollouts: tuple[RolloutId, ...]
    update_samples: int
