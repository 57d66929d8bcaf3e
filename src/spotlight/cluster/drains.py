"""Tells the cloud once no work is left on a machine that has a preemption notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.types import NodeId


@dataclass(slots=True)
class Drains:
    """Watches machines that end until they are empty. ``acknowledge`` is called once for each."""

    acknowledge: Callable[[NodeId], None]
    _began_s: dict[NodeId, float] = field(default_factory=dict)
    """When the work on a machine was first to stop."""
    _empty: set[NodeId] = field(default_factory=set)

    def finished(self, fleet: Fleet, now: float) -> list[tuple[NodeId, float]]:
        """Machines that have no work left, with the seconds it took to stop it. Call after every event."""
        hosts = fleet.cluster.hosts
        if not fleet.cluster.noticed and not self._began_s:
            return []
        ending = {name: each for name, each in fleet.machines.items() if each.ends_s is not None}
        self._began_s = {name: at_s for name, at_s in self._began_s.items() if name in ending}
        self._empty &= ending.keys()
        done: list[tuple[NodeId, float]] = []
        for name, machine in ending.items():
            if name in self._empty or not any(hosts[part.id].draining for part in machine.parts):
                continue
            began_s = self._began_s.setdefault(name, now)
            if fleet.is_empty(machine):
                self._empty.add(name)
                self.acknowledge(name)
                done.append((name, now - began_s))
        return done
