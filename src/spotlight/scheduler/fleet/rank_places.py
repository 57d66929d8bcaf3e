"""Which of several nodes a number of learner ranks go to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def choose_places(slots: Mapping[Name, int], ranks: int, *, even: bool = False) -> Mapping[Name, int]:
    """Ranks by node: fewest nodes, fewest slots left over, first in order; empty if slots are too few.

    Args:
        even: equally many ranks on each node.
    """
    if even:
        return _choose_even(slots, ranks)
    placed: dict[Name, int] = {}
    left = ranks
    while left:
        free = {name: count for name, count in slots.items() if count and name not in placed}
        whole = [name for name, count in free.items() if count >= left]
        if not free:
            return {}
        chosen = min(whole, key=free.__getitem__) if whole else max(free, key=free.__getitem__)
        placed[chosen] = min(left, free[chosen])
        left -= placed[chosen]
    return placed


def _choose_even(slots: Mapping[Name, int], ranks: int) -> Mapping[Name, int]:
    for nodes in (count for count in range(1, ranks + 1) if ranks % count == 0):
        each = ranks // nodes
        able = sorted((name for name, count in slots.items() if count >= each), key=slots.__getitem__)
        if len(able) >= nodes:
            return dict.fromkeys(able[:nodes], each)
    return {}
