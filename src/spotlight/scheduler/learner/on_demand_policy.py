"""When a learner on spot nodes takes a node on demand, and when it gives it back. Pure; used by drivers.

    it waits for after_s ─► TAKE ─► the node joins, the learner starts there
    spot nodes have had room for back_after_s ─► LEAVE ─► the learner moves ─► EMPTY ─► the node is given back

Invariants
    1. There is at most one such node, coming or there.
    2. EMPTY is decided once for a node, LEAVE once until STAY.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_PAUSE_MIN_S, _PAUSE_MAX_S = 60.0, 3600.0
"""After one that did not come, before the next is taken."""


class OnDemandStep(StrEnum):
    """What to do about a node on demand."""

    TAKE = "take"
    CANCEL = "cancel"
    """It was not started, or did not come in time; the next is taken after a pause, longer each time."""
    LEAVE = "leave"
    """The learner is to move to spot nodes."""
    STAY = "stay"
    """They are gone again before it has moved."""
    EMPTY = "empty"
    """Nothing is to work on it any more: the learner is elsewhere."""


@dataclass(slots=True)
class OnDemandPolicy:
    """See the module's docstring.

    Attributes:
        after_s: how long a learner waits first.
        back_after_s: how long spot nodes must have had room for it.
        start_s: how long a node may take to join.
    """

    after_s: float
    back_after_s: float
    start_s: float
    _waits_since_s: float | None = None
    _room_since_s: float | None = None
    _taken_s: float | None = None
    _pause_s: float = 0.0
    _not_before_s: float = 0.0
    _leaves: bool = False
    _empties: bool = False

    def decide(
        self,
        now_s: float,
        *,
        waits: bool,
        spot_room: bool,
        is_there: bool,
        holds: bool,
        failed: bool = False,
    ) -> OnDemandStep | None:
        """Call it often; times are those of one clock.

        Args:
            waits: the learner has no room anywhere.
            spot_room: spot nodes without a notice have room for the learner.
            is_there: the node on demand has joined and is not lost.
            holds: the learner is there, or will start there.
            failed: the one that was taken will not come.
        """
        self._waits_since_s = _since(self._waits_since_s, waits, now_s)
        self._room_since_s = _since(self._room_since_s, spot_room, now_s)
        if is_there:
            self._taken_s, self._pause_s = None, 0.0
            return self._give_back(now_s, holds)
        self._leaves = self._empties = False
        if self._taken_s is not None:
            if now_s - self._taken_s < self.start_s and not failed:
                return None
            self._taken_s = None
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, 2 * self._pause_s))
            self._not_before_s = now_s + self._pause_s
            return OnDemandStep.CANCEL
        if self._waits_since_s is None or now_s - self._waits_since_s < self.after_s:
            return None
        if now_s < self._not_before_s:
            return None
        self._taken_s = now_s
        return OnDemandStep.TAKE

    def _give_back(self, now_s: float, holds: bool) -> OnDemandStep | None:
        if not holds:
            emptied, self._empties = self._empties, True
            return None if emptied else OnDemandStep.EMPTY
        lasts = self._room_since_s is not None and now_s - self._room_since_s >= self.back_after_s
        if self._leaves and self._room_since_s is None:
            self._leaves = False
            return OnDemandStep.STAY
        if self._leaves or not lasts:
            return None
        self._leaves = True
        return OnDemandStep.LEAVE


def _since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
