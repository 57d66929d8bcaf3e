"""What a worker sends home: values by content, and the events that speak of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from pickle import PickleBuffer
from typing import SupportsIndex

from spotlight.scheduler.events import Event
from spotlight.scheduler.types import WorkerId


@dataclass(frozen=True, slots=True)
class ReportedValue:
    """Bytes to keep under (kind, name) and the report's mark; of several the latest step counts.

    Attributes:
        kind: ``progress``, ``sample``, ``image``, ``condition`` or ``weights``; see :mod:`~.parcels`.
        name: of the rollout, prompt or weights.
    """

    kind: str
    name: str
    data: bytes
    step: int = 0

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., ReportedValue], tuple[object, ...]]:
        # The bytes out of band: a cluster's transport then moves them as they are, in half the time.
        data = PickleBuffer(self.data) if index(protocol) >= 5 else self.data
        return _value, (self.kind, self.name, data, self.step)


def _value(kind: str, name: str, data: bytes | memoryview, step: int) -> ReportedValue:
    return ReportedValue(kind, name, bytes(data), step)  # a view's memory is the transport's: not to be kept


@dataclass(frozen=True, slots=True)
class Report:
    """Values first, then events: an event is never heard of before the values are safe.

    Attributes:
        mark: digest of the weights that made the values.
    """

    worker: WorkerId
    mark: str
    values: tuple[ReportedValue, ...]
    events: tuple[Event, ...]
