"""Exploration: previews of many seeds, of which the ones with the highest and lowest rewards form groups.

A preview is a rollout like any other, of the lowest class of the queue. Losing one costs nothing but itself:
what is not scored when the window closes is dropped, and a prompt left with fewer previews than its group
has members keeps its own seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spotlight.core.records import REWARD
from spotlight.core.planner.arms import Arm
from spotlight.core.selection import SelectionPolicy, select
from spotlight.core.types import Rollout, RolloutId


class ArmPolicy(Protocol):
    """Chooses how much to explore for an iteration."""

    def arm(self, iteration: int) -> Arm:
        """The arm for the previews of ``iteration``."""
        ...


@dataclass(frozen=True, slots=True)
class FixedArm:
    """The same arm for every iteration."""

    fixed: Arm

    def arm(self, iteration: int) -> Arm:
        """See :class:`ArmPolicy`."""
        return self.fixed


@dataclass(slots=True)
class Window:
    """The previews for the groups of ``iteration``; ``unscored`` holds those neither scored nor dropped."""

    iteration: int
    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    slots: dict[RolloutId, int] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)

    def choose(self, group_size: int) -> tuple[dict[int, tuple[int, ...]], list[RolloutId]]:
        """Seeds by slot, and the previews that they were chosen among."""
        by_slot: dict[int, dict[RolloutId, int]] = {}
        for name, slot in self.slots.items():
            if name in self.scores:
                by_slot.setdefault(slot, {})[name] = self.rollouts[name].seed
        chosen: dict[int, tuple[int, ...]] = {}
        used: list[RolloutId] = []
        for slot, previews in by_slot.items():
            if len(previews) >= group_size:
                rewards = {seed: self.scores[name][REWARD] for name, seed in previews.items()}
                used += previews
                found = select(rewards, group_size, SelectionPolicy.MAX_VARIANCE)
                if found.seeds:
                    chosen[slot] = found.seeds
        return chosen, used
