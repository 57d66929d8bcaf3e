"""Workers that become the learner: who holds the base weights need not load them again.

    release() a node is given another role: its workers end, or are kept for the learner that it is for
    take()    the learner starts: kept workers become ranks; where there is none, a new process does

Invariants
    1. No more are kept on a node than it has ranks: each occupies a slot that the learner needs.
    2. The learner starts on a node after the node's workers were released, and none is kept for it later.
    3. What is kept and not taken ends as soon as its node is for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class SpareProcess(Protocol):
    """A worker's process."""

    @property
    def actor(self) -> Any:
        """Its Ray actor."""


Spares = dict[str, list[SpareProcess]]
"""By Ray id of the node."""


@dataclass(slots=True)
class SpareWorkers:
    """See the module's docstring. Head's event loop only.

    Attributes:
        kill: ends a process.
        ranks_at: ranks of the next learner by Ray id of its nodes; empty if it takes over no process.
    """

    kill: Callable[[Any], None]
    ranks_at: Callable[[], Mapping[str, int]]
    _kept: Spares = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _closed: bool = False

    def release(self, ray_id: str, processes: Sequence[SpareProcess], unfit: Sequence[SpareProcess]) -> None:
        """The workers of a node have no work any more.

        Args:
            processes: those that hold the base weights.
            unfit: the others.
        """
        processes = [*self._kept.pop(ray_id, ()), *processes]
        kept = 0 if self._closed or ray_id in self._started else self.ranks_at().get(ray_id, 0)
        self._kept[ray_id] = list(processes[:kept])
        for process in (*processes[kept:], *unfit):
            self.kill(process)

    def prune(self) -> None:
        """The learner's places may have changed."""
        places = {} if self._closed else self.ranks_at()
        self._started &= places.keys()
        for ray_id in self._kept.keys() - places.keys():
            for process in self._kept.pop(ray_id):
                self.kill(process)

    async def take(self, nodes: Collection[str]) -> Spares:
        """The kept processes of nodes on which the learner starts; they are the caller's to end."""
        self._started |= set(nodes)
        return {ray_id: self._kept.pop(ray_id) for ray_id in nodes if ray_id in self._kept}

    def close(self) -> None:
        """End what is kept; nothing is kept any more, and nobody need wait."""
        self._closed = True
        self.prune()
