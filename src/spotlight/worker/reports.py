"""Values that a worker stores, and the events that refer to them."""

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
    """Bytes to store under (kind, name) and :func:`address`; the latest step wins.

    Attributes:
        kind: ``progress``, ``latent``, ``sample``, ``image``, ``condition`` or ``weights``.
        name: of the rollout, prompt or weights.
        suffix: names one of several values of a name.
    """

    kind: str
    name: str
    data: bytes
    step: int = 0
    suffix: str = ""

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., ReportedValue], tuple[object, ...]]:
        # Out-of-band pickling lets the transport move the bytes without a copy, in half the time.
        data = PickleBuffer(self.data) if index(protocol) >= 5 else self.data
        return _value, (self.kind, self.name, data, self.step, self.suffix)


def address(weights_digest: str, suffix: str) -> str:
    """The third part of a value's key."""
    return f"{weights_digest}/{suffix}" if suffix else weights_digest


def _value(kind: str, name: str, data: bytes | memoryview, step: int, suffix: str) -> ReportedValue:
    # Copied: the view's memory belongs to the transport.
    return ReportedValue(kind, name, bytes(data), step, suffix)


@dataclass(frozen=True, slots=True)
class RolloutSpeed:
    """What one device did for training rollouts since it last reported.

    Attributes:
        tokens: of pictures and text, once per forward.
        flops: None: not counted.
        peak_flop_s: of the device; None: unknown.
    """

    tokens: float
    flops: float | None
    seconds: float
    peak_flop_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Values, which the receiver makes durable before it handles the events.

    Attributes:
        weights_digest: of the weights that made the values.
    """

    worker: WorkerId
    weights_digest: str
    values: tuple[ReportedValue, ...]
    events: tuple[Event | RolloutSpeed, ...]
