"""Which explored seeds form a group."""

from __future__ import annotations

from collections.abc import Mapping


def top_and_bottom(rewards: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The seeds with the highest and the lowest rewards, half each (one more of the highest when odd).

    Args:
        rewards: preview reward by seed; equal rewards rank in the mapping's order.

    Raises:
        ValueError: fewer seeds than ``count``.
    """
    if len(rewards) < count:
        raise ValueError(f"{count} seeds cannot be chosen among {len(rewards)} previews")
    ranked = sorted(rewards, key=lambda seed: -rewards[seed])
    low = count // 2
    return (*ranked[: count - low], *ranked[len(ranked) - low :])
