"""Virtual time: calls at points in it, the earliest first, and those of one point in the order they came."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """See the module's docstring. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()

    def at(self, at_s: float, then: Callable[..., None], *args: object) -> None:
        """Call ``then`` at this time."""
        heapq.heappush(self._heap, (at_s, next(self._numbers), then, args))

    def after(self, seconds: float, then: Callable[..., None], *args: object) -> None:
        """Call ``then`` in ``seconds``."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), then, args))

    def advance(self, until_s: float | None) -> bool:
        """Make the next call. Returns False when there is none until then."""
        if not self._heap:
            return False
        at_s, _, call, args = heapq.heappop(self._heap)
        if until_s is not None and at_s > until_s:
            self.now = until_s
            return False
        self.now = at_s
        call(*args)
        return True
