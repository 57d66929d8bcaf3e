"""GPU-seconds and cost by phase.

Invariants:

- Each billed moment of a GPU is in exactly one segment of one phase.
- Work counts as LOST until the controller accepts its result (:meth:`GpuAccounts.confirm`).
- A GPU that trains and rolls out pays once per switch: at its first lease after training, and at the
  learner's first pass after any of its GPUs rolled out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight_plan.simulation.machines.other_costs import OtherCosts
from spotlight_plan.simulation.scenario import GpuTimeline, Segment


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
    """A billed GPU. Its learner's activity takes precedence over its worker's.

    Attributes:
        unconfirmed: collects closed segments of work in progress; None without such work.
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
        """Current phase; work in progress is LOST until confirmed."""
        if self.learner is not Phase.IDLE:
            return self.learner
        return Phase.LOST if self.unconfirmed is not None else self.worker


@dataclass(slots=True)
class GpuAccounts:
    """All GPUs of a run, present and past, and what is paid beside them."""

    timelines: bool
    other: OtherCosts = field(default_factory=OtherCosts)
    seconds: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    usd: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    billed_s: float = 0.0
    gpus: dict[NodeId, list[VirtualGpu]] = field(default_factory=dict)
    _past: list[VirtualGpu] = field(default_factory=list)

    def add(self, node: Node, now: float) -> None:
        """Start billing a node."""
        learner = Phase.SETUP if node.trains else Phase.IDLE
        worker = Phase.SETUP if node.rolls_out else Phase.IDLE
        usd_s = node.price_usd_h / node.gpus / 3600
        self.gpus[node.id] = [
            VirtualGpu(node, index, usd_s, now, now, worker, learner) for index in range(node.gpus)
        ]

    def remove(self, node: NodeId, now: float) -> None:
        """Stop billing a node."""
        for gpu in self.gpus.pop(node):
            self._close(gpu, now)
            self.billed_s += now - gpu.joined_s
            if self.timelines:
                self._past.append(gpu)

    def reassign(self, before: Sequence[Node], after: Sequence[Node], now: float) -> None:
        """A machine's nodes train or roll out, unlike before, at the price that its GPUs have."""
        usd_s = self.gpus[before[0].id][0].usd_s
        for node in before:
            self.remove(node.id, now)
        for node in after:
            self.add(node, now)
            for gpu in self.gpus[node.id]:
                gpu.usd_s = usd_s

    def price(self, node: NodeId, price_usd_h: float, now: float) -> None:
        """Change a node's price."""
        for gpu in self.gpus.get(node, ()):
            self._close(gpu, now)
            gpu.usd_s = price_usd_h / gpu.node.gpus / 3600

    def worker(self, gpu: VirtualGpu, phase: Phase, now: float) -> None:
        """Set the phase of a GPU's worker, outside of work in progress."""
        self._close(gpu, now)
        gpu.worker, gpu.unconfirmed = phase, None

    def work(self, gpu: VirtualGpu, unconfirmed: list[BilledSegment], now: float) -> None:
        """Start or continue work in progress, which is confirmed or lost later."""
        self._close(gpu, now)
        gpu.unconfirmed = unconfirmed

    def learner(self, phase: Phase, training: list[BilledSegment], now: float) -> None:
        """Set the phase of all learner ranks; ``training`` collects segments that may yet be lost."""
        for gpus in self.gpus.values():
            for gpu in gpus:
                if gpu.node.trains:
                    self._close(gpu, now)
                    gpu.learner, gpu.training = phase, training

    def confirm(self, segments: Iterable[BilledSegment], phase: Phase) -> None:
        """Assign closed segments to their final phase."""
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
        self.other.settle(now)

    @property
    def total_usd(self) -> float:
        """Cost of closed segments, and of all else."""
        return sum(self.usd.values()) + sum(self.other.usd.values())

    def by_phase(self) -> dict[Phase, float]:
        """GPU-seconds of closed segments by phase."""
        total: dict[Phase, float] = defaultdict(float)
        for (_, phase), seconds in self.seconds.items():
            total[phase] += seconds
        return total

    def drawn(self) -> tuple[GpuTimeline, ...]:
        """Timelines of all GPUs, ordered by when billing began."""
        gpus = sorted(
            [*self._past, *(gpu for gpus in self.gpus.values() for gpu in gpus)],
            key=lambda gpu: (gpu.joined_s, gpu.node.id, gpu.index),
        )
        return tuple(GpuTimeline(gpu.node.id, gpu.index, gpu.node.kind, _merged(gpu.history)) for gpu in gpus)

    def check(self, now: float) -> None:
        """Assert that phases add up to the billed time."""
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
    """Switches between training and rollout; see the module docstring.

    Attributes:
        switch_s: time per switch.
        count: switches so far, of groups and of the learner.
    """

    switch_s: float
    count: int = 0
    _rolling: set[tuple[NodeId, int]] = field(default_factory=set)

    def to_rollout(self, gpus: Iterable[VirtualGpu]) -> float:
        """Seconds until a group that begins a lease can denoise."""
        turning = {(gpu.node.id, gpu.index) for gpu in gpus if gpu.node.trains} - self._rolling
        if not turning:
            return 0.0
        self._rolling |= turning
        self.count += 1
        return self.switch_s

    def to_training(self) -> float:
        """Seconds until all GPUs of a learner that begins a pass can train."""
        if not self._rolling:
            return 0.0
        self._rolling.clear()
        self.count += 1
        return self.switch_s
