"""A market of spot nodes that a run takes some of, where there is no cloud: emulated or simulated. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpotOffers:
    """Which nodes of a market are taken.

    Attributes:
        wanted: how many to take.
        offered: slots of the nodes that there are, those given back last.
        taken: those of them that the run has.
    """

    wanted: int
    offered: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def take(self) -> tuple[str, int] | None:
        """Take the next node, if one more is wanted and there is one."""
        free = next((name for name in self.offered if name not in self.taken), None)
        if free is None or len(self.taken) >= self.wanted:
            return None
        self.taken.add(free)
        return free, self.offered[free]

    def withdraw(self, name: str) -> bool:
        """The market takes a node away; returns whether the run had it."""
        self.offered.pop(name, None)
        had = name in self.taken
        self.taken.discard(name)
        return had

    def want(self, nodes: int, present: Collection[str], leaving: Collection[str]) -> list[str]:
        """Another number is wanted; returns the nodes to give back: those of ``leaving``, and those that have
        not come."""
        able = [name for name in self.taken if name in leaving or name not in present]
        able.sort(key=lambda name: (name in leaving, name), reverse=True)
        back = able[: max(0, len(self.taken) - nodes)]
        for name in back:
            self.taken.discard(name)
            self.offered[name] = self.offered.pop(name)
        self.wanted = max(nodes, len(self.taken))
        return back
