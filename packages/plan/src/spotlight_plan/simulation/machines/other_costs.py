"""What a run pays beside GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class OtherCosts:
    """What is paid beside GPUs.

    Attributes:
        usd_h: what is paid all the time, by what it is for.
        usd: paid so far, likewise.
    """

    usd_h: Mapping[str, float] = field(default_factory=dict)
    usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since_s: float = 0.0

    def pay(self, name: str, usd: float) -> None:
        """Pay once."""
        self.usd[name] += usd

    def settle(self, now: float) -> None:
        """Pay until now."""
        for name, usd_h in self.usd_h.items():
            self.usd[name] += usd_h * (now - self._since_s) / 3600
        self._since_s = now
