"""The nouns that flow between the parts of Spotlight.

Everything here is small, frozen and made of ids, sizes and floats: never a tensor, never an object
of another process. Tensors travel beside these nouns, keyed by :data:`RolloutId`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

PromptId = NewType("PromptId", str)
RolloutId = NewType("RolloutId", str)
WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
LeaseId = NewType("LeaseId", int)
PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps applied to the policy."""


class Purpose(StrEnum):
    """Why a rollout is made. Only ``TRAIN`` samples may enter an optimizer step."""

    TRAIN = "train"
    EXPLORE = "explore"
    EVAL = "eval"


class Phase(StrEnum):
    """Where a GPU-second went. Every billed second has exactly one phase."""

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


class Filler(StrEnum):
    """What fills time in which a GPU would otherwise wait."""

    TRAINING = "training"
    """The learner trains what is there, while other samples of the iteration are made."""
    TRAINERS = "trainers"
    """GPUs of the learner roll out."""
    NEXT = "next"
    """Rollouts of the next iteration, before this one is trained."""
    EXPLORATION = "exploration"
    """Previews."""

    @property
    def words(self) -> str:
        """What the GPUs did."""
        return _FILLER_WORDS[self]


_FILLER_WORDS = {
    Filler.TRAINING: "training beside rollouts",
    Filler.TRAINERS: "rollouts by trainers",
    Filler.NEXT: "next iteration's rollouts",
    Filler.EXPLORATION: "previews",
}


class DropReason(StrEnum):
    """Why the sample of a rollout is not used."""

    ROLLOUT_FAILED = "rollout_failed"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_NOT_FINITE = "reward_not_finite"
    GROUP_TOO_SMALL = "group_too_small"
    UNEVEN_BATCH = "uneven_batch"
    STALE = "stale"
    EXPLORATION_OVER = "exploration_over"


class NodeKind(StrEnum):
    """Whether the cloud may take a node back."""

    RESERVED = "reserved"
    SPOT = "spot"


class WeightKind(StrEnum):
    """What a weight pull moves: everything, or only the adapter on top of a base that is there."""

    ADAPTER = "adapter"
    FULL = "full"


class Baseline(StrEnum):
    """What a sample's reward is compared with: its whole group, what is there of it, or explored seeds."""

    GROUP = "group"
    SLICE = "slice"
    EXPLORATION = "exploration"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to draw, with what the reward must know of it."""

    id: PromptId
    text: str
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One (prompt, seed) to denoise.

    Attributes:
        seed: 63-bit integer that fixes ALL randomness: initial noise, every SDE kick, the SDE window.
        member: index of the rollout within its group (or within its prompt's evaluation images).
        version: the policy version that must make all of it.
    """

    id: RolloutId
    purpose: Purpose
    iteration: int
    prompt_id: PromptId
    member: int
    seed: int
    steps: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that joined the cluster.

    Attributes:
        price_usd_h: price of the whole node when it joined.
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


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Sequence-parallel groups that are expected to be equally fast."""

    gpu_type: str
    degree: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Rollouts held by one worker until ``deadline_s`` (controller time), fenced by ``epoch``.

    A sequence-parallel group holds leases in the name of its leader: ``worker`` is the leader, and ``epoch``
    tells this group from every other one that the worker ever led.
    """

    id: LeaseId
    worker: WorkerId
    epoch: int
    rollouts: tuple[RolloutId, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """The surviving samples of one prompt in one iteration; their rewards become advantages."""

    prompt_id: PromptId
    rollouts: tuple[RolloutId, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How samples of one group that are trained before the rest of it is there become advantages.

    Attributes:
        baseline: GROUP: they are the whole group.
        others: scores besides: SLICE: of the group's earlier slices; EXPLORATION: of other seeds' previews.
    """

    baseline: Baseline = Baseline.GROUP
    others: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the learner takes in one forward/backward.

    Attributes:
        iteration: the iteration whose samples these are.
        update: index of the optimizer step within the iteration.
        rollouts: whole or partial groups, in group order.
        update_samples: number of samples of the whole optimizer step (the loss's normaliser); as planned,
            where they are trained before all are there.
    """

    iteration: int
    update: int
    rollouts: tuple[RolloutId, ...]
    update_samples: int
