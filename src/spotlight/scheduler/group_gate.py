"""Samples whose reward compares a whole group wait here until no more of their group is to come. Pure.

Invariant: a sample enters once and leaves once, with its group or by :meth:`GroupGate.forget`. A member whose
rollout failed is not waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.types import Purpose, Rollout, RolloutId


def group_of(rollout: Rollout) -> str:
    """What the ids of a group's rollouts begin with; a prompt drawn twice in an iteration has two groups."""
    return rollout.id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """What became of the rollouts of the iterations under way.

    Attributes:
        awaited: groups with a member still to be made.
        sizes: rollouts issued by group, failed ones included.
    """

    awaited: frozenset[str]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, issued: Iterable[Rollout], unmade: Iterable[Rollout], full: int) -> GroupProgress:
        """From all rollouts issued, and those of them not made yet.

        Args:
            full: size of a group for training; of a smaller one, more rollouts will be issued.
        """
        for_training: dict[bool, list[str]] = {True: [], False: []}
        for rollout in issued:
            for_training[rollout.purpose is Purpose.TRAIN].append(group_of(rollout))
        sizes = Counter(for_training[True])
        partly = [name for name, size in sizes.items() if size < full]
        sizes.update(for_training[False])
        return cls(frozenset({*map(group_of, unmade), *partly}), sizes)


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """All that was made of a group, by member.

    Attributes:
        name: see :func:`group_of`.
        lineage: under which its scores count.
        size: how many were to be made.
    """

    name: str
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
        complete: dict[str, list[tuple[Rollout, int]]] = {}
        for rollout, lineage in self._held.values():
            if (name := group_of(rollout)) not in progress.awaited:
                complete.setdefault(name, []).append((rollout, lineage))
        released = []
        for name, members in complete.items():
            self.forget(rollout.id for rollout, _ in members)
            rollouts = tuple(sorted((rollout for rollout, _ in members), key=lambda each: each.member))
            lineage = max(lineage for _, lineage in members)
            size = max(progress.sizes.get(name, 0), len(rollouts))
            released.append(CompleteGroup(name, rollouts, lineage, size))
        return released
