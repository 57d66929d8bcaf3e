"""From surviving groups to optimizer steps and micro-batches. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from spotlight.core.types import Group, MicroBatch, RolloutId


def split_updates(groups: Sequence[Group], updates: int) -> list[list[Group]]:
    """Divide whole groups among at most ``updates`` optimizer steps, as evenly as counts allow."""
    updates = min(updates, len(groups))
    bounds = [len(groups) * index // updates for index in range(updates + 1)]
    return [list(groups[low:high]) for low, high in zip(bounds, bounds[1:], strict=False)]


def uneven_remainder(groups: Sequence[Group], ranks: int) -> list[RolloutId]:
    """Samples to leave out so that every rank trains equally many (the last ones; none with one rank)."""
    samples = [rollout for group in groups for rollout in group.rollouts]
    surplus = len(samples) % ranks
    return samples[len(samples) - surplus :]


def micro_batches(
    groups: Sequence[Group],
    iteration: int,
    update: int,
    size: int,
    excluded: frozenset[RolloutId] = frozenset(),
) -> list[MicroBatch]:
    """Cut an optimizer step's samples, in group order, into micro-batches of at most ``size``."""
    samples = [rollout for group in groups for rollout in group.rollouts if rollout not in excluded]
    return [
        MicroBatch(iteration, update, tuple(samples[start : start + size]), len(samples))
        for start in range(0, len(samples), size)
    ]
