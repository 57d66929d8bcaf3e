"""What the controller writes down: one small frozen record for every fact that must outlive the process.

The controller numbers its records 1, 2, 3, ... without gaps. The in-memory ledger counts them, the
durable one (``store/ledger/sqlite_ledger.py``) keeps them. A record holds no time, no process and no
tensor: replaying
the same decisions gives the same records, so an interrupted and resumed run leaves the same ledger as an
uninterrupted one.

Order within the sequence: a prompt is seen before its rollouts are issued, a rollout is issued before it
is finished, finished before it is scored, scored before it is trained. :class:`SampleTrained` and the
:class:`StepApplied` it names are written in one transaction, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.scheduler.types import DropReason, PolicyVersion, Prompt, Rollout, RolloutId, WorkerId

REWARD = "reward"
"""The score every trained sample has: the weighted sum that its advantage was made of."""


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """A prompt enters the run; written once, before its first rollout."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class RolloutIssued:
    """A rollout exists from here on, and must end in exactly one outcome."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """A worker committed the finished rollout.

    Attributes:
        version: the one policy version that made all of it.
        epoch: fencing epoch of the lease under which it was committed.
    """

    rollout: RolloutId
    version: PolicyVersion
    worker: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class SampleScored:
    """The rewards of a finished sample.

    Attributes:
        scores: never empty; :data:`REWARD` is the total, other names are parts and details (``strict``, ...).
    """

    rollout: RolloutId
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SampleTrained:
    """Outcome of a train rollout: its sample entered the optimizer step that made ``optimizer_step``."""

    rollout: RolloutId
    optimizer_step: PolicyVersion


@dataclass(frozen=True, slots=True)
class SampleDropped:
    """Outcome of a rollout of any purpose whose sample is not used, and why."""

    rollout: RolloutId
    reason: DropReason
    detail: str


@dataclass(frozen=True, slots=True)
class SampleEvaluated:
    """Outcome of an evaluation rollout: its scores count in the validation."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True)
class SampleExplored:
    """Outcome of an exploration rollout: its scores were used to choose seeds."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The learner applied one optimizer step.

    Attributes:
        version: the policy version the step made: the number of steps applied so far, this one included.
        update: index of the step within its iteration.
        samples: number of samples that entered it.
        loss: the step's loss, where the learner reports it.
        grad_norm: gradient norm before clipping, where the learner reports it.
    """

    version: PolicyVersion
    iteration: int
    update: int
    samples: int
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Workers may pull this policy version from here on."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class CommitRejected:
    """A commit with a stale epoch, or of a rollout already committed, was refused."""

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
