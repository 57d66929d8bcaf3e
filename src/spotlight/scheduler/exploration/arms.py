"""Arms: how much to explore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """How much to explore: previews of each prompt, and denoising steps of each."""

    seeds_per_prompt: int
    steps: int

    @property
    def name(self) -> str:
        """In metrics and checkpoints: 32x6 is 32 seeds of 6 steps."""
        return f"{self.seeds_per_prompt}x{self.steps}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name. Raises ValueError for anything else."""
        seeds, _, steps = name.partition("x")
        if not (seeds.isdecimal() and steps.isdecimal()):
            raise ValueError(f"{name!r} names no exploration arm; expected one like 32x6 (seeds x steps)")
        return cls(int(seeds), int(steps))


def arm_grid(seed_counts: Sequence[int], step_counts: Sequence[int]) -> tuple[Arm, ...]:
    """Every combination, ascending."""
    return tuple(sorted({Arm(seeds, steps) for seeds in seed_counts for steps in step_counts}))
