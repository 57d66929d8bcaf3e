"""What only rank 0 does may take longer than a collective may: the ledger, while another program locks it.

The other ranks wait for it in short collectives, which rank 0 joins whenever it looks at the lock. So a rank
that is lost or hangs is still noticed after ``fleet.learner_collective_s``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spotlight.training.sharding import Ranks


class MainTurn:
    """The turns of rank 0; every rank takes part in each, and has one object."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_on = False

    @contextmanager
    def take(self) -> Iterator[None]:
        """A block with rank 0's work, without collectives; the others wait at its end. Collective."""
        self._is_on = self._ranks.is_main
        try:
            yield
        finally:
            self._is_on = False
        if self._ranks.is_main:
            self._ranks.share(True)
        while not self._ranks.is_main and not self._ranks.share(False)[0]:
            pass

    def keep_alive(self) -> None:
        """Rank 0 still waits; it calls this more often than ``fleet.learner_collective_s``."""
        if self._is_on:
            self._ranks.share(False)
