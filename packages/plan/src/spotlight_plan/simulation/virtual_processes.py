"""Simulated worker processes, groups and leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotlight.scheduler.types import (
    Lease,
    LeaseId,
    NodeId,
    Phase,
    PolicyVersion,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight_plan.simulation.gpu_accounts import BilledSegment, VirtualGpu


@dataclass(frozen=True, slots=True)
class VirtualWeights:
    """A policy version's actual weights: learners may differ in ``content`` for the same version number."""

    version: PolicyVersion
    content: int


INITIAL_WEIGHTS = VirtualWeights(PolicyVersion(0), 0)
"""Weights at the start of every run."""

NO_LEASE = LeaseId(0)


@dataclass(slots=True, eq=False)
class VirtualProcess:
    """A worker's process.

    Attributes:
        fence: the highest group epoch received; lower ones are ignored.
        ordered: newest (lineage, version) it was ordered to load; older ones are ignored.
        frozen_until_s: stopped by a signal until then.
    """

    worker: WorkerId
    node: NodeId
    gpu: VirtualGpu
    epoch: int
    up: bool = False
    alive: bool = True
    based: bool = False
    weights: VirtualWeights | None = None
    ordered: tuple[int, int] = (-1, -1)
    pulling: bool = False
    fence: int = 0
    group: VirtualGroup | None = None
    frozen_until_s: float = 0.0

    @property
    def gpu_type(self) -> str:
        return self.gpu.node.gpu_type


@dataclass(slots=True, eq=False)
class LeaseWork:
    """A lease in progress.

    Attributes:
        left: unfinished rollouts, with their first step.
        done: steps since the lease began.
        committed: of these, reported steps.
        turn: invalidates calls scheduled earlier.
    """

    lease: Lease
    weights: VirtualWeights
    phase: Phase
    left: dict[RolloutId, tuple[Rollout, int]]
    done: int = 0
    committed: int = 0
    chunk: int = 0
    chunk_start_s: float = 0.0
    step_s: float = 0.0
    decoding: bool = False
    halting: bool = False
    turn: int = 0
    unconfirmed: list[BilledSegment] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class VirtualGroup:
    """Connected processes; ``seen`` is the last lease granted to them."""

    leader: WorkerId
    epoch: int
    members: list[VirtualProcess]
    formed: bool = False
    broken: bool = False
    stopping: bool = False
    run: LeaseWork | None = None
    seen: LeaseId = NO_LEASE
    polls: int = 0
