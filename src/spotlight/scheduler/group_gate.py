"""Samples whose reward compares a whole group wait here until no more of their group is to come. Pure.

Invariant: a sample enters once and leaves once, with its group or by :meth:`GroupGate.forget`. A member whose
rollout failed is not waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.types import PromptId, Purpose, Rollout, RolloutId


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The rollouts of one prompt in one iteration; a prompt drawn twice has two groups.

    Attributes:
        name: what the ids of its rollouts begin with.
    """

    purpose: Purpose
    iteration: int
    prompt_id: PromptId
    name: str


def group_of(rollout: Rollout) -> GroupKey:
    """The group a rollout belongs to."""
    name, _, _ = rollout.id.rpartition("-")
    return GroupKey(rollout.purpose, rollout.iteration, rollout.prompt_id, name)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """What became of the rollouts of the iterations under way.

    Attributes:
        awaited: groups with a member still to be made.
        sizes: rollouts issued by group, failed ones included.
    """

    awaited: frozenset[GroupKey]
    sizes: Mapping[GroupKey, int]

    @classmethod
    def of(cls, issued: Iterable[Rollout], unmade: Iterable[Rollout], full: int) -> GroupProgress:
        """From all rollouts issued, and those of them not made yet.

        Args:
            full: size of a group for training; of a smaller one, more rollouts will be issued.
        """
        sizes = Counter(map(group_of, issued))
        partly = (key for key, size in sizes.items() if key.purpose is Purpose.TRAIN and size < full)
        return cls(frozenset({*map(group_of, unmade), *partly}), sizes)


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """All that was made of a group, by member.

    Attributes:
        lineage: under which its scores count.
        size: how many were to be made.
    """

    key: GroupKey
    rollouts: tuple[Rollout, ...]
    lineage: int
    size: int


@dataclass(slots=True)
class GroupGate:
    """See the module's docstring."""

    _held: dict[RolloutId, tuple[Rollout, int]] = field(default_factory=dict)

    def hold(self, rollouts: Iterable[Rollout], lineage: int) -> None:
        """Let samples wait for the rest of their groups."""
        self._held |= {rollout.id: (rollout, lineage) for rollout in rollouts}

    def forget(self, rollouts: Iterable[RolloutId]) -> None:
        """Discard samples that are no longer wanted."""
        for rollout in rollouts:
            self._held.pop(rollout, None)

    @property
    def holds_any(self) -> bool:
        """Whether any sample waits."""
        return bool(self._held)

    def release(self, progress: GroupProgress) -> list[CompleteGroup]:
        """Remove the complete groups, in order of their first arrival.

        Members that were reported under different lineages leave under the newest: the older ones survived
        the loss of a learner.
        """
        complete: dict[GroupKey, list[tuple[Rollout, int]]] = {}
        for rollout, lineage in self._held.values():
            if (key := group_of(rollout)) not in progress.awaited:
                complete.setdefault(key, []).append((rollout, lineage))
        released = []
        for key, members in complete.items():
            self.forget(rollout.id for rollout, _ in members)
            rollouts = tuple(sorted((rollout for rollout, _ in members), key=lambda each: each.member))
            lineage = max(lineage for _, lineage in members)
            size = max(progress.sizes.get(key, 0), len(rollouts))
            released.append(CompleteGroup(key, rollouts, lineage, size))
        return released
