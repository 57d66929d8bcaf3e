"""Where every GPU-second went, and what it cost.

Invariants:

- From when a GPU is billed until it is not, each moment is in exactly one segment of one phase.
- Work counts as LOST until the controller has accepted its result (:meth:`GpuAccounts.confirm`), so whatever
  dies, is fenced off or never arrives is lost without further bookkeeping.
- A GPU that trains and rolls out pays once per switch: with its first lease after training, and with the
  learner's first pass after any of its GPUs rolled out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight.simulation.scenario import GpuTimeline, Segment


@dataclass(slots=True)
class BilledSegment:
    """A closed segment; ``phase`` may still change."""

    kind: NodeKind
    start_s: float
    end_s: float
    usd: float
    phase: Phase


@dataclass(slots=True)
class VirtualGpu:
    """One billed GPU. What its learner rank does hides what its worker does.

    Attributes:
        unconfirmed: where closed segments of work in progress are kept, while there is any.
    """

    node: Node
    index: int
    usd_s: float
    joined_s: float
    since_s: float
    worker: Phase
    learner: Phase
    unconfirmed: list[BilledSegment] | None = None
    training: list[BilledSegment] | None = None
    history: list[BilledSegment] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        """What it does now; work in progress is lost until confirmed."""
        if self.learner is not Phase.IDLE:
            return self.learner
        return Phase.LOST if self.unconfirmed is not None else self.worker


@dataclass(slots=True)
class GpuAccounts:
    """All GPUs of a run, present and past."""

    timelines: bool
    seconds: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    usd: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    billed_s: float = 0.0
    gpus: dict[NodeId, list[VirtualGpu]] = field(default_factory=dict)
    _past: list[VirtualGpu] = field(default_factory=list)

    def add(self, node: Node, now: float) -> None:
        """A node is billed from now on."""
        learner = Phase.SETUP if node.trains else Phase.IDLE
        worker = Phase.SETUP if node.rolls_out else Phase.IDLE
        usd_s = node.price_usd_h / node.gpus / 3600
        self.gpus[node.id] = [
            VirtualGpu(node, index, usd_s, now, now, worker, learner) for index in range(node.gpus)
        ]

    def remove(self, node: NodeId, now: float) -> None:
        """A node is billed no more."""
        for gpu in self.gpus.pop(node):
            self._close(gpu, now)
            self.billed_s += now - gpu.joined_s
            if self.timelines:
                self._past.append(gpu)

    def price(self, node: NodeId, price_usd_h: float, now: float) -> None:
        """A node's price changes."""
        for gpu in self.gpus.get(node, ()):
            self._close(gpu, now)
            gpu.usd_s = price_usd_h / gpu.node.gpus / 3600

    def worker(self, gpu: VirtualGpu, phase: Phase, now: float) -> None:
        """A GPU's worker turns to something that is not work in progress."""
        self._close(gpu, now)
        gpu.worker, gpu.unconfirmed = phase, None

    def work(self, gpu: VirtualGpu, unconfirmed: list[BilledSegment], now: float) -> None:
        """A GPU's worker begins, or goes on with, work that will be confirmed or lost."""
        self._close(gpu, now)
        gpu.unconfirmed = unconfirmed

    def learner(self, phase: Phase, training: list[BilledSegment], now: float) -> None:
        """All learner ranks turn to a phase; training is kept in ``training``, to be lost if it must be."""
        for gpus in self.gpus.values():
            for gpu in gpus:
                if gpu.node.trains:
                    self._close(gpu, now)
                    gpu.learner, gpu.training = phase, training

    def confirm(self, segments: Iterable[BilledSegment], phase: Phase) -> None:
        """Closed segments were this phase (or were lost after all)."""
        for spent in segments:
            seconds = spent.end_s - spent.start_s
            self.seconds[spent.kind, spent.phase] -= seconds
            self.usd[spent.kind, spent.phase] -= spent.usd
            self.seconds[spent.kind, phase] += seconds
            self.usd[spent.kind, phase] += spent.usd
            spent.phase = phase

    def settle(self, now: float) -> None:
        """Close all open segments."""
        for gpus in self.gpus.values():
            for gpu in gpus:
                self._close(gpu, now)

    @property
    def total_usd(self) -> float:
        """Cost of everything closed so far."""
        return sum(self.usd.values())

    def by_phase(self) -> dict[Phase, float]:
        """GPU-seconds by phase, as far as they are closed."""
        total: dict[Phase, float] = defaultdict(float)
        for (_, phase), seconds in self.seconds.items():
            total[phase] += seconds
        return total

    def drawn(self) -> tuple[GpuTimeline, ...]:
        """The timelines of all GPUs, in the order in which they were billed."""
        gpus = sorted(
            [*self._past, *(gpu for gpus in self.gpus.values() for gpu in gpus)],
            key=lambda gpu: (gpu.joined_s, gpu.node.id, gpu.index),
        )
        return tuple(
            GpuTimeline(gpu.node.id, gpu.index, gpu.node.kind, gpu.node.gpu_type, _merged(gpu.history))
            for gpu in gpus
        )

    def check(self, now: float) -> None:
        """Assert that phases add up to what was billed."""
        self.settle(now)
        present = sum(now - gpu.joined_s for gpus in self.gpus.values() for gpu in gpus)
        billed, spent = self.billed_s + present, sum(self.seconds.values())
        assert abs(billed - spent) <= 1e-6 * max(1.0, billed), f"billed {billed} s, spent {spent} s"

    def _close(self, gpu: VirtualGpu, now: float) -> None:
        if now <= gpu.since_s:
            return
        phase = gpu.phase
        seconds, usd = now - gpu.since_s, (now - gpu.since_s) * gpu.usd_s
        kind = gpu.node.kind
        self.seconds[kind, phase] += seconds
        self.usd[kind, phase] += usd
        keep = None
        if gpu.learner is not Phase.IDLE:
            keep = gpu.training if phase is Phase.TRAINING else None
        else:
            keep = gpu.unconfirmed
        if keep is not None or self.timelines:
            spent = BilledSegment(kind, gpu.since_s, now, usd, phase)
            if keep is not None:
                keep.append(spent)
            if self.timelines:
                gpu.history.append(spent)
        gpu.since_s = now


def _merged(history: list[BilledSegment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for spent in history:
        if merged and merged[-1].phase is spent.phase:
            merged[-1] = Segment(merged[-1].start_s, spent.end_s, spent.phase)
        else:
            merged.append(Segment(spent.start_s, spent.end_s, spent.phase))
    return tuple(merged)


@dataclass(slots=True)
class GpuSwitches:
    """See the module's docstring.

    Attributes:
        switch_s: a turn takes.
        count: turns so far, of groups and of the learner.
    """

    switch_s: float
    count: int = 0
    _rolling: set[tuple[NodeId, int]] = field(default_factory=set)

    def to_rollout(self, gpus: Iterable[VirtualGpu]) -> float:
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
