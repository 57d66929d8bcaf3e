"""What a worker sends home: values by content, and the events that speak of them."""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.core.events import Event
from spotlight.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes to keep under (kind, name) and the report's mark; of several the latest step counts.

    Attributes:
        kind: ``progress``, ``sample``, ``image``, ``condition`` or ``weights``; see :mod:`~.parcels`.
        name: of the rollout, prompt or weights.
    """

    kind: str
    name: str
    data: bytes
    step: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Values first, then events: an event is never heard of before the values are safe.

    Attributes:
        mark: digest of the weights that made the values.
    """

    worker: WorkerId
    mark: str
    values: tuple[Value, ...]
    events: tuple[Event, ...]
