"""Values and events for the next delivery; values go first, so events refer to stored values only.

Values are packed as they are delivered: behind the next step, where the head's client does that.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from spotlight.rollout.commits import Committer
from spotlight.rollout.serialization import pack_image, pack_sample
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
        self._committer = Committer()
        self._values: list[Iterable[ReportedValue]] = []
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

    def keep_progress(self, states: Sequence[RolloutState]) -> None:
        """Add states to resume from."""
        if states:
            packed = self._committer.begin(states)
            self._values.append(
                ReportedValue(
                    "latent" if one.latent else "progress", one.rollout, one.data, one.step, one.latent
                )
                for one in packed
            )

    def keep_finished(self, finished: FinishedRollout) -> None:
        """Add the image for rewards and the sample for the learner."""
        name, step = finished.rollout.id, finished.rollout.steps
        packers = ("image", pack_image), ("sample", pack_sample)
        self._values.append(ReportedValue(kind, name, pack(finished), step) for kind, pack in packers)

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
            values, events = chain(*self._values), tuple(self._events)
            self._values, self._events = [], []
            self._head.deliver(self._reports(values, events, weights_digest))

    def _reports(
        self, values: Iterable[ReportedValue], events: tuple[Event | RolloutSpeed, ...], weights_digest: str
    ) -> Iterator[Report]:
        """Values in order, each report with at most ``report_bytes`` or one; the last has the events."""
        together: list[ReportedValue] = []
        size = 0
        for value in values:
            if together and size + len(value.data) > self._report_bytes:
                yield Report(self._worker, weights_digest, tuple(together), ())
                together, size = [], 0
            together.append(value)
            size += len(value.data)
        yield Report(self._worker, weights_digest, tuple(together), events)
