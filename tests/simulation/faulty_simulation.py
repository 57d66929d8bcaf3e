"""A simulation whose processes fail: what no scenario asks for."""

from __future__ import annotations

from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import Node
from spotlight_plan.simulation.virtual_driver import Simulation
from spotlight_plan.simulation.virtual_processes import VirtualProcess


class FaultySimulation(Simulation):
    """See the module's docstring."""

    def reboot(self, node: Node) -> None:
        """A node is lost and returns before anyone notices, unless a learner that moves may be on it."""
        if node.id not in self.places.machines:
            return
        holds_learner = self._take(node.id)
        if self._moves:
            self.feed(ev.NodeLost(node.id))
        self.apply(ev.NodeJoined(node))
        if holds_learner:
            self.lose_learner(f"node {node.id} was restarted")

    def crash(self, process: VirtualProcess) -> None:
        """A worker process dies, and the driver notices."""
        self.workers.kill(process)
        self.after(1.0, self.feed, ev.WorkerCrashed(process.worker, process.epoch))

    def restart_head(self, down_s: float) -> None:
        """Kill the head with controller and learner; it restarts from the last checkpoint."""
        self.learner.lose()
        self.head_up, self.head_life = False, self.head_life + 1
        self._closing = None
        self.places.running = {}
        self.after(down_s, self._head_back, self.head_life)

    def _head_back(self, life: int) -> None:
        if life != self.head_life:
            return
        self.head_up = True
        plan, durable = self.scenario.plan, self.learner.checkpoint
        if durable is None:
            self.controller = Controller(plan, self.train, self.test, life)
        else:
            snapshot = durable.effect.snapshot
            self.controller = Controller.restore(plan, self.train, self.test, snapshot, life)
        self.store.samples.clear()
        self.store.progress.clear()
        self.places.placed = {}
        for name, machine in self.places.machines.items():
            if self.places.parts[name] != (machine,):
                self._assign(name, (machine,))
        for name, machine in self.places.machines.items():
            self.feed(ev.NodeJoined(machine))
            if name in self.noticed:
                self.feed(ev.NodeNoticed(name, self.noticed[name]))
        self._report_supply()
        self._start_learner()
