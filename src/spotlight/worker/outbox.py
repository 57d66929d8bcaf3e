"""Values and events for the next delivery; values go first, so events refer to stored values only."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from spotlight.rollout.serialization import pack_image, pack_sample, pack_state
from spotlight.rollout.state import FinishedRollout, RolloutState
from spotlight.scheduler.events import Event
from spotlight.scheduler.types import WorkerId
from spotlight.worker.interfaces import HeadClient
from spotlight.worker.reports import Report, ReportedValue, RolloutSpeed

REPORT_BYTES = 64 * 2**20
"""Most bytes of values in a report that has several: Ray's smallest object store holds 75 MiB, and a batch of
states of 129 frames at 720p takes hundreds (``benchmarks/state_bytes.py``)."""


class ReportOutbox:
    """Not thread-safe.

    Args:
        report_bytes: values beyond it are delivered before, in reports of their own without events.
    """

    def __init__(self, worker: WorkerId, head: HeadClient, report_bytes: int = REPORT_BYTES) -> None:
        self._worker, self._head, self._report_bytes = worker, head, report_bytes
        self._values: list[ReportedValue] = []
        self._events: list[Event | RolloutSpeed] = []
        self._later: list[tuple[float, int, Event]] = []
        self._count = 0

    def send(self, event: Event | RolloutSpeed) -> None:
        """Send an event with the next delivery."""
        self._events.append(event)

    def send_later(self, event: Event, seconds: float) -> None:
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

    def deliver(self, weights_digest: str) -> None:
        """Send everything that is due. Raises HeadLostError.

        Args:
            weights_digest: of the weights that made the values.
        """
        while self._later and self._later[0][0] <= time.monotonic():
            self._events.append(heapq.heappop(self._later)[2])
        if self._values or self._events:
            *before, last = _parts(self._values, self._report_bytes)
            events, self._values, self._events = tuple(self._events), [], []
            for values in before:  # each has arrived before the next is sent
                self._head.deliver(Report(self._worker, weights_digest, values, ()))
            self._head.deliver(Report(self._worker, weights_digest, last, events))


def _parts(values: Sequence[ReportedValue], most_bytes: int) -> list[tuple[ReportedValue, ...]]:
    """In order, each of at most ``most_bytes`` or one value; at least one part."""
    parts: list[list[ReportedValue]] = [[]]
    size = 0
    for value in values:
        if parts[-1] and size + len(value.data) > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(value)
        size += len(value.data)
    return [tuple(part) for part in parts]
