"""What a simulated run tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.scheduler.effects import ReportPipeline
from spotlight.scheduler.types import NodeId, NodeKind, Phase


@dataclass(frozen=True, slots=True)
class Segment:
    """What one GPU did for a while."""

    start_s: float
    end_s: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """Everything one GPU did, without gaps, from when its node joined until it left (once for each stay)."""

    node: NodeId
    gpu: int
    kind: NodeKind
    gpu_type: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class IterationTime:
    """One iteration: from the publication before it to its own. An iteration done twice is here twice.

    Attributes:
        cost_usd: what all nodes cost meanwhile.
        trained: samples that entered an optimizer step.
    """

    iteration: int
    start_s: float
    end_s: float
    cost_usd: float
    trained: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A whole run.

    Attributes:
        finished: the run came to its planned end.
        error: why the controller stopped it, if it did.
        phase_s: GPU-seconds by kind of node and phase; LOST is work that had to be done again.
        cost_usd: the same, priced.
        gpus: empty unless the scenario asked for timelines.
        preemptions: nodes lost; notices: notices given.
        events: what the controller was told.
        explorations: reports of :class:`~spotlight.scheduler.effects.ReportExploration`, in order; one
        undone is
            here, too.
        overlaps: reports of :class:`~spotlight.scheduler.effects.ReportPipeline`, likewise.
        log_hash: of all these events with their times; equal runs have equal hashes.
    """

    finished: bool
    error: str | None
    end_s: float
    iterations: tuple[IterationTime, ...]
    phase_s: Mapping[tuple[NodeKind, Phase], float]
    cost_usd: Mapping[tuple[NodeKind, Phase], float]
    gpus: tuple[GpuTimeline, ...]
    preemptions: int
    notices: int
    trained: int
    evaluated: int
    explored: int
    dropped: int
    events: int
    gpu_hours: float
    log_hash: str
    explorations: tuple[Mapping[str, object], ...] = ()
    overlaps: tuple[ReportPipeline, ...] = ()
