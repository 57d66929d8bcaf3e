"""Messages between the controller and the workers: faultless, or lossy, doubling, late and out of order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Network:
    """Decides the fate of each message.

    Attributes:
        lost: share of messages that vanish.
        doubled: share that arrive twice.
        late_s: each message takes up to this long, so later ones overtake it.
    """

    random: random.Random
    lost: float = 0.0
    doubled: float = 0.0
    late_s: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: {"lost": 0, "doubled": 0, "late": 0})

    @property
    def faultless(self) -> bool:
        """Whether every message arrives once, at once."""
        return not (self.lost or self.doubled or self.late_s)

    def heal(self) -> None:
        """No more faults."""
        self.lost = self.doubled = self.late_s = 0.0

    def delays(self) -> list[float]:
        """How long each copy of a message takes; empty when it is lost."""
        if self.random.random() < self.lost:
            self.counts["lost"] += 1
            return []
        copies = 1
        if self.random.random() < self.doubled:
            self.counts["doubled"] += 1
            copies = 2
        self.counts["late"] += self.late_s > 0
        return [self.random.random() * self.late_s for _ in range(copies)]
