"""Values and events for the next delivery; values go first, so events refer to stored values only."""

from __future__ import annotations

import heapq
import time

from spotlight.rollout.serialization import pack_image, pack_sample, pack_state
from spotlight.rollout.state import FinishedRollout, RolloutState
from spotlight.scheduler.events import Event
from spotlight.scheduler.types import WorkerId
from spotlight.worker.interfaces import HeadClient
from spotlight.worker.reports import Report, ReportedValue


class ReportOutbox:
    """Not thread-safe."""

    def __init__(self, worker: WorkerId, head: HeadClient) -> None:
        self._worker, self._head = worker, head
        self._values: list[ReportedValue] = []
        self._events: list[Event] = []
        self._later: list[tuple[float, int, Event]] = []
        self._count = 0

    def tell(self, event: Event) -> None:
        """Send an event with the next delivery."""
        self._events.append(event)

    def tell_later(self, event: Event, seconds: float) -> None:
        """Send an event after a delay."""
        self._count += 1
        heapq.heappush(self._later, (time.monotonic() + seconds, self._count, event))

    def keep_progress(self, state: RolloutState) -> None:
        """Add a state to resume from."""
        self._values.append(ReportedValue("progress", state.rollout.id, pack_state(state), state.step))

    def keep_finished(self, finished: FinishedRollout) -> None:
        """Add the image for rewards and the sample for the learner."""
        name, step = finished.rollout.id, finished.rollout.steps
        self._values.append(ReportedValue("image", name, pack_image(finished), step))
        self._values.append(ReportedValue("sample", name, pack_sample(finished), step))

    @property
    def due_s(self) -> float | None:
        """``time.monotonic()`` of the next delayed event."""
        return self._later[0][0] if self._later else None

    def deliver(self, digest: str) -> None:
        """Send everything that is due. Raises HeadLostError.

        Args:
            digest: of the weights that made the values.
        """
        while self._later and self._later[0][0] <= time.monotonic():
            self._events.append(heapq.heappop(self._later)[2])
        if self._values or self._events:
            report = Report(self._worker, digest, tuple(self._values), tuple(self._events))
            self._values, self._events = [], []
            self._head.deliver(report)
