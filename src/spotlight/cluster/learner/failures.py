"""When a learner that keeps failing is given up. Pure.

A life is *stuck* if a rank failed and no more calls were answered than in another life since the last
checkpoint: what kills at the same point every time, such as the kernel for want of memory, gets no further.
Lives whose nodes left are not stuck; that is known some time after the failure, hence :meth:`Failures.judge`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

RAISED_MAX = 3
"""After this many lives in a row that unexpected errors ended, stop retrying."""
STUCK_MAX = 10
"""After this many stuck lives in a row whose nodes stayed, and another failure, stop retrying."""


@dataclass(slots=True)
class Failures:
    """Lives since the last checkpoint, in a row.

    Attributes:
        lost: lives that were up.
        raised: lives ended by unexpected errors, up to now.
    """

    lost: int = 0
    raised: int = 0
    _stuck: list[int] = field(default_factory=list)
    _furthest: int = 0

    def ended(self, life: int, *, answered: int, raised: bool, failed: bool) -> None:
        """Count an ended life.

        Args:
            answered: calls, once it was up.
            raised: an unexpected error ended it.
            failed: a rank ended it, by an error, its death or its silence.
        """
        self.raised = self.raised + 1 if raised else 0
        if answered > self._furthest:
            self._furthest, self._stuck = answered, []
        elif failed:
            self._stuck.append(life)

    @property
    def suspects(self) -> Sequence[int]:
        """The lives to :meth:`judge`; empty: too few. Not the newest of all: its node may be leaving."""
        return self._stuck[:-1] if len(self._stuck) > STUCK_MAX else ()

    def judge(self, stayed: Collection[int]) -> bool:
        """Whether to give up: of the suspects, those whose nodes all ``stayed`` are too many."""
        self._stuck = [*(life for life in self._stuck[:-1] if life in stayed), self._stuck[-1]]
        return bool(self.suspects)
