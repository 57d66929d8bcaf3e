"""Faults, injected into a simulation at any event.

Each fault is a small frozen value drawn from a seed, so a failing run can be repeated with fewer of them. All
faults heal: killed nodes come back, stopped processes are continued, the network recovers. After the last
one the run must come to its end.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_plan.simulation.virtual_processes import VirtualProcess
from tests.simulation.faulty_simulation import FaultySimulation


class FaultKind(StrEnum):
    """What can go wrong."""

    KILL_NODE = "kill_node"
    REBOOT_NODE = "reboot_node"
    NOTICE = "notice"
    CANCELLED_NOTICE = "cancelled_notice"
    SLOW_NODE = "slow_node"
    FREEZE_WORKER = "freeze_worker"
    CRASH_WORKER = "crash_worker"
    CRASH_LEARNER = "crash_learner"
    NOTICE_LEARNER = "notice_learner"
    """For the node of a learner that moves, while it works; not drawn for others."""
    RESTART_HEAD = "restart_head"
    BAD_NETWORK = "bad_network"
    SILENT_REWARDS = "silent_rewards"


WEIGHTS = {
    FaultKind.KILL_NODE: 4,
    FaultKind.REBOOT_NODE: 1,
    FaultKind.NOTICE: 3,
    FaultKind.CANCELLED_NOTICE: 2,
    FaultKind.SLOW_NODE: 1,
    FaultKind.FREEZE_WORKER: 3,
    FaultKind.CRASH_WORKER: 3,
    FaultKind.CRASH_LEARNER: 4,
    FaultKind.RESTART_HEAD: 3,
    FaultKind.BAD_NETWORK: 3,
    FaultKind.SILENT_REWARDS: 1,
}
"""How often each is drawn."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        after_events: injected when the controller has handled this many events.
        which: selects the node or process it hits among those present, in [0, 1).
        seconds: duration; of a notice, its lead.
        share: of messages or rewards, in [0, 1).
    """

    kind: FaultKind
    after_events: int
    which: float
    seconds: float
    share: float


def draw_faults(source: random.Random, count: int, within_events: int) -> tuple[Fault, ...]:
    """Faults in order of time. Only some kinds per trial: their combinations are then explored deeper."""
    enabled = source.sample(list(WEIGHTS), k=source.choice([2, 3, 4, len(WEIGHTS)]))
    kinds = source.choices(enabled, [WEIGHTS[kind] for kind in enabled], k=count)
    faults = [
        Fault(
            kind,
            source.randrange(1, within_events),
            source.random(),
            source.choice([0.0, 1.0, 5.0, 30.0, 120.0]) * source.random(),
            source.random() * 0.4,
        )
        for kind in kinds
    ]
    return tuple(sorted(faults, key=lambda fault: fault.after_events))


@dataclass(slots=True)
class FaultInjector:
    """Injects faults when they are due; ``injected`` counts them by kind."""

    simulation: FaultySimulation
    faults: tuple[Fault, ...]
    injected: Counter[FaultKind] = field(default_factory=Counter)
    last_s: float = 0.0
    _next: int = 0

    def advance(self) -> None:
        """Schedule the faults that are due."""
        while (
            self._next < len(self.faults) and self.faults[self._next].after_events <= self.simulation.events
        ):
            self.simulation.after(0.0, self.inject, self.faults[self._next])
            self._next += 1

    @property
    def pending(self) -> bool:
        """Whether faults are left to inject."""
        return self._next < len(self.faults)

    def inject(self, fault: Fault) -> None:
        """Inject one fault now, and schedule its end."""
        simulation = self.simulation
        self.last_s = max(self.last_s, simulation.now + fault.seconds)
        self.injected[fault.kind] += 1
        match fault.kind:
            case FaultKind.BAD_NETWORK:
                network = simulation.network
                # Where many messages are lost, some are very late too.
                late_s = fault.which * (60.0 if fault.share > 0.25 else 8.0)
                network.lost, network.doubled, network.late_s = fault.share / 2, fault.share, late_s
                simulation.after(fault.seconds, self._network_heals)
            case FaultKind.SILENT_REWARDS:
                simulation.reward_failing = fault.share
                simulation.after(fault.seconds, self._rewards_heal)
            case FaultKind.CRASH_LEARNER:
                simulation.lose_learner("killed")
            case FaultKind.NOTICE_LEARNER:
                self._notice_learner(fault)
            case FaultKind.RESTART_HEAD:
                simulation.restart_head(fault.seconds)
            case FaultKind.FREEZE_WORKER | FaultKind.CRASH_WORKER:
                self._hit_worker(fault)
            case _:
                self._hit_node(fault)

    def _notice_learner(self, fault: Fault) -> None:
        simulation = self.simulation
        at = [*simulation.places.running]
        if simulation.learner.task is None or not at:
            simulation.after(1.0, self._notice_learner, fault)
        else:
            self._notice(simulation.places.machines[at[int(fault.which * len(at))]], fault.seconds)

    def _notice(self, node: Node, seconds: float) -> None:
        self.simulation.happen(ev.NodeNoticed(node.id, self.simulation.now + seconds))
        self.simulation.after(seconds, self._kill, node)

    def _network_heals(self) -> None:
        network = self.simulation.network
        network.lost = network.doubled = network.late_s = 0.0

    def _rewards_heal(self) -> None:
        self.simulation.reward_failing = 0.0

    def _hit_worker(self, fault: Fault) -> None:
        processes = [p for p in self.simulation.workers.processes.values() if p.up]
        if not processes:
            return
        process: VirtualProcess = processes[int(fault.which * len(processes))]
        if fault.kind is FaultKind.FREEZE_WORKER:
            process.frozen_until_s = max(process.frozen_until_s, self.simulation.now + fault.seconds)
        else:
            self.simulation.crash(process)

    def _hit_node(self, fault: Fault) -> None:
        simulation = self.simulation
        spot = fault.kind in {FaultKind.NOTICE, FaultKind.CANCELLED_NOTICE}
        nodes = [
            node for node in simulation.places.machines.values() if not spot or node.kind is NodeKind.SPOT
        ]
        if not nodes:
            return
        node = nodes[int(fault.which * len(nodes))]
        match fault.kind:
            case FaultKind.KILL_NODE:
                self._kill(node)
            case FaultKind.REBOOT_NODE:
                simulation.reboot(node)
            case FaultKind.NOTICE:
                self._notice(node, fault.seconds)
            case FaultKind.CANCELLED_NOTICE:
                simulation.happen(ev.NodeNoticed(node.id, simulation.now + 2 * fault.seconds))
                simulation.after(fault.seconds, simulation.happen, ev.NoticeCancelled(node.id))
            case _:
                simulation.slow[node.id] = 1 + 10 * fault.share
                simulation.after(fault.seconds, self._speed_up, node.id)

    def _speed_up(self, node: NodeId) -> None:
        self.simulation.slow.pop(node, None)

    def _kill(self, node: Node) -> None:
        away_s = self.simulation.random.uniform(1.0, 60.0)
        self.last_s = max(self.last_s, self.simulation.now + away_s)
        self.simulation.happen(ev.NodeLost(node.id))
        self.simulation.after(away_s, self.simulation.happen, ev.NodeJoined(node))
