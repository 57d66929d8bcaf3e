"""Bookkeeping of one iteration: what was issued, what became of it, and what outlives a lost learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.types import DropReason, PromptId, Rollout, RolloutId, WorkerId


@dataclass(slots=True)
class Iteration:
    """What was issued and what became of it.

    Attributes:
        unscored: rollouts neither scored nor dropped.
        finished: rollouts whose samples are held somewhere.
        makers: who made them, under which epoch.
        lost: rollouts of an iteration that has not begun, to be dropped then, and why.
    """

    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    groups: dict[tuple[int, PromptId], list[RolloutId]] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)
    makers: dict[RolloutId, tuple[WorkerId, int]] = field(default_factory=dict)
    lost: dict[RolloutId, tuple[DropReason, str]] = field(default_factory=dict)
    evaluation: list[RolloutId] = field(default_factory=list)
    drops: int = 0


@dataclass(slots=True)
class Safe:
    """What outlived a lost learner: samples, their scores and makers, and steps of unfinished rollouts."""

    samples: dict[RolloutId, Rollout] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    makers: dict[RolloutId, tuple[WorkerId, int]] = field(default_factory=dict)
    progress: dict[RolloutId, tuple[Rollout, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, at: Iteration, unfinished: Mapping[RolloutId, tuple[Rollout, int]]) -> Safe:
        """What is safe of an iteration."""
        return cls(
            {name: at.rollouts[name] for name in at.rollouts if name in at.finished},
            dict(at.scores),
            dict(at.makers),
            {name: (rollout, step) for name, (rollout, step) in unfinished.items() if step},
        )

    def merge(self, older: Safe) -> None:
        """Add what an older loss left, and nothing was asked for since."""
        self.samples = older.samples | self.samples
        self.scores = {**older.scores, **self.scores}
        self.makers = older.makers | self.makers
        self.progress = older.progress | self.progress

    def take(self, rollout: Rollout) -> bool:
        """Whether the sample of exactly this rollout is safe; it is then no longer among ``samples``."""
        if self.samples.get(rollout.id) != rollout:
            return False
        del self.samples[rollout.id]
        return True

    def step_of(self, rollout: Rollout) -> int:
        """The step at which exactly this rollout is safe (then no longer in ``progress``), or 0."""
        known, step = self.progress.get(rollout.id, (None, 0))
        if known != rollout:
            return 0
        del self.progress[rollout.id]
        return step
