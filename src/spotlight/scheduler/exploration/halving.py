"""Successive halving of previews: those in the middle of their prompt's rewards are stopped at rungs.

A preview pauses at a rung, a number of denoising steps, and the sample that the model predicts there is
scored. Once all of a prompt's previews have been looked at, the most different go on from their committed
states and the others are stopped. What counts in a group is its spread, so that a preview in the middle would
not be chosen however it ended.

Invariants
    1. A decision needs the looks of all previews of the prompt that are left, and depends on nothing else.
    2. As many go on as the rung says, or all of them, where they are no more or look alike.
    3. No reward at a rung chooses a seed: groups are chosen among previews that ran to their end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.exploration.evidence import GroupEvidence, fit_lines
from spotlight.scheduler.exploration.selection import (
    SelectionPolicy,
    SelectionVerdict,
    sample_variance,
    select,
)


@dataclass(frozen=True, slots=True)
class Rung:
    """How many of a prompt's previews go on after ``step`` denoising steps."""

    step: int
    goes_on: int


def rungs_of(explores: ExplorationConfig, group_size: int, steps: int) -> tuple[Rung, ...]:
    """The rungs in order, each leaving the same share; empty where no preview is stopped.

    Args:
        steps: denoising steps of a rollout.
    """
    if explores.rungs is None:
        return ()
    (seeds,), _ = explores.arms(group_size, steps)
    share = explores.finishers_of(group_size) / seeds
    count = len(explores.rungs)
    # Rounded up, but not for a binary rounding: 32 * 0.5 ** (2 / 2) is 16.
    return tuple(
        Rung(step, math.ceil(seeds * share ** (at / count) - 1e-9))
        for at, step in enumerate(explores.rungs, start=1)
    )


def next_pause(rungs: Collection[Rung], step: int) -> int | None:
    """The first rung after ``step``; None: from there to the end."""
    return min((rung.step for rung in rungs if rung.step > step), default=None)


def stopped(looks: Mapping[int, float], goes_on: int, policy: SelectionPolicy) -> frozenset[int]:
    """The seeds that end here.

    Args:
        looks: reward at this rung by seed, of all that are left.
        goes_on: number that may go on.
    """
    if len(looks) <= goes_on:
        return frozenset()
    selection = select(looks, goes_on, policy)
    if selection.verdict is not SelectionVerdict.CHOSEN:
        return frozenset()  # they look alike: their steps so far do not say enough
    return frozenset(looks.keys() - set(selection.seeds))


def pool_variance(looks: Sequence[Mapping[int, float]], finished: Mapping[int, float]) -> float:
    """Variance that the whole pool's rewards would have, from those of the seeds that ran to their end.

    Rung by rung: what goes on was chosen by its look, so that the line of the next rewards over these looks
    is not biased by that (:mod:`.evidence`). Right if earlier looks tell nothing that the latest does not.

    Args:
        looks: rewards by seed at each rung; the first has all of the pool.
        finished: final rewards.
    """
    stages = [*looks, finished]
    variance = sample_variance([looks[0][seed] for seed in sorted(looks[0])])
    for before, after in pairwise(stages):
        seeds = sorted(before.keys() & after.keys())
        left = GroupEvidence(
            len(before),
            variance,
            tuple(before[seed] for seed in seeds),
            tuple(after[seed] for seed in seeds),
        )
        (line,) = fit_lines([left])
        variance = variance if line is None else max(0.0, line.pool_variance(left))
    return variance
