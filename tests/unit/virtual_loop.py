"""The head's loop with a clock that the test turns."""

from __future__ import annotations

from spotlight.cluster.loop import Loop


class VirtualLoop(Loop):
    """A :class:`Loop` whose time passes only in :meth:`pass_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(clock=lambda: self.now_s)

    def settle(self) -> None:
        """Make all calls that are due now."""
        while self._due:
            self.turn(self.now_s)

    def pass_s(self, seconds: float) -> None:
        """Make the calls of the next ``seconds``, each at its time."""
        end_s = self.now_s + seconds
        self.settle()
        while self._timers and self._timers[0][0] <= end_s:
            self.now_s = max(self.now_s, self._timers[0][0])
            self.settle()
        self.now_s = end_s

    @property
    def _due(self) -> bool:
        return not self._items.empty() or (bool(self._timers) and self._timers[0][0] <= self.now_s)
