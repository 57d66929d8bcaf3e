"""Records: small frozen facts that must outlive the process, numbered 1, 2, 3, ... without gaps.

The in-memory ledger counts them, the durable one (``store/ledger/sqlite_ledger.py``) stores them. They hold
no time, process or tensor: an interrupted and resumed run leaves the same ledger as an uninterrupted one.

Order: prompt seen, rollout issued, finished, scored, trained. :class:`SampleTrained` and the
:class:`StepApplied` it names are written in one transaction, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.scheduler.types import DropReason, PolicyVersion, Rollout, RolloutId, WorkerId
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.reward_config import REWARD as REWARD


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """A prompt enters the run; written once, before its first rollout."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class RolloutIssued:
    """A rollout exists, and must end in exactly one outcome."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """A finished rollout was accepted.

    Attributes:
        version: the one policy version that made all of it.
        epoch: fencing epoch of its lease.
        preview: whose sample it is, if it was made as one and kept.
    """

    rollout: RolloutId
    version: PolicyVersion
    worker: WorkerId
    epoch: int
    preview: RolloutId | None = None


@dataclass(frozen=True, slots=True)
class SampleScored:
    """Rewards of a sample.

    Attributes:
        scores: never empty; :data:`REWARD` is the total, others are parts (``strict``, ...).
    """

    rollout: RolloutId
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SampleTrained:
    """Outcome: the sample entered the optimizer step that made ``optimizer_step``."""

    rollout: RolloutId
    optimizer_step: PolicyVersion


@dataclass(frozen=True, slots=True)
class SampleDropped:
    """Outcome, for any purpose: the sample is not used."""

    rollout: RolloutId
    reason: DropReason
    detail: str


@dataclass(frozen=True, slots=True)
class SampleEvaluated:
    """Outcome: the scores count in the evaluation."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True)
class SampleExplored:
    """Outcome: the preview's scores were used to choose seeds."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The learner applied one optimizer step.

    Attributes:
        version: made by the step: the number of steps applied so far.
        update: index of the step within its iteration.
        samples: number that entered it.
        grad_norm: before clipping. None, like ``loss``, where the learner does not report it.
    """

    version: PolicyVersion
    iteration: int
    update: int
    samples: int
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Workers may pull this policy version."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class CommitRejected:
    """A stale, duplicate or unknown commit was refused."""

    rollout: RolloutId | None
    reason: str


Record: TypeAlias = (
    PromptSeen
    | RolloutIssued
    | SampleFinished
    | SampleScored
    | SampleTrained
    | SampleDropped
    | SampleEvaluated
    | SampleExplored
    | StepApplied
    | VersionPublished
    | CommitRejected
)
