"""What a worker sends home: values by content, and the events that speak of them."""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.core.events import Event
from spotlight.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes to keep under (kind, name) and the report's mark; of several the latest step counts."""

    kind: str
    name: str
    data: bytes
    step: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Values first, then events: an event is never heard of before the values are safe."""

    worker: WorkerId
    mark: str
    values: tuple[Value, ...]
    events: tuple[Event, ...]
