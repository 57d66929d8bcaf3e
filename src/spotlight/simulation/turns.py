"""GPUs that train and roll out: which of them are turned to what, and what turning takes.

Invariant: a GPU pays once for each turn. The first lease after training pays, and so does the learner's first
pass after any of its GPUs rolled out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.scheduler.types import NodeId
from spotlight.simulation.gpu_accounts import Gpu


@dataclass(slots=True)
class Turns:
    """See the module's docstring.

    Attributes:
        switch_s: a turn takes.
        count: turns so far, of groups and of the learner.
    """

    switch_s: float
    count: int = 0
    _rolling: set[tuple[NodeId, int]] = field(default_factory=set)

    def to_rollout(self, gpus: Iterable[Gpu]) -> float:
        """A group begins a lease: seconds until it can denoise."""
        turning = {(gpu.node.id, gpu.index) for gpu in gpus if gpu.node.trains} - self._rolling
        if not turning:
            return 0.0
        self._rolling |= turning
        self.count += 1
        return self.switch_s

    def to_training(self) -> float:
        """The learner begins a pass: seconds until all its GPUs can train."""
        if not self._rolling:
            return 0.0
        self._rolling.clear()
        self.count += 1
        return self.switch_s
