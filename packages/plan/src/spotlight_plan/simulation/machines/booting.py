"""Machines that are billed and boot: the cluster does not know them yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Node, NodeId, Phase
from spotlight_plan.simulation.gpu_accounts import GpuAccounts
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged


@dataclass(slots=True)
class _Boot:
    machine: Node
    since_s: float
    deadline_s: float | None = None


@dataclass(slots=True)
class BootingMachines:
    """Billed as setting up from their arrival until they can be used, or are lost.

    Attributes:
        lost: so many were lost before they could be used.
    """

    accounts: GpuAccounts
    lost: int = 0
    _boots: dict[NodeId, _Boot] = field(default_factory=dict)

    def join(self, machine: Node, now: float) -> None:
        """One arrives."""
        self._boots[machine.id] = _Boot(machine, now)
        self.accounts.add(machine, now)
        for gpu in self.accounts.gpus[machine.id]:
            gpu.learner = Phase.SETUP

    def happen(self, event: NodeEvent, now: float) -> bool:
        """Apply an event of one that boots; returns whether it is of one."""
        name = event.node.id if isinstance(event, ev.NodeJoined) else event.node
        boot = self._boots.get(name)
        if boot is None:
            return False
        match event:
            case ev.NodeLost():
                del self._boots[name]
                self.accounts.remove(name, now)
                self.lost += 1
            case ev.NodeNoticed(_, deadline_s):
                boot.deadline_s = deadline_s
            case ev.NoticeCancelled():
                boot.deadline_s = None
            case PriceChanged(_, price_usd_h):
                boot.machine = replace(boot.machine, price_usd_h=price_usd_h)
                self.accounts.price(name, price_usd_h, now)
        return True

    def booted(self, name: NodeId, since_s: float, now: float) -> tuple[Node, float | None] | None:
        """The machine that has booted, with its notice's deadline; None if it is gone again.

        Args:
            since_s: when it arrived.
        """
        boot = self._boots.get(name)
        if boot is None or boot.since_s != since_s:
            return None
        del self._boots[name]
        self.accounts.remove(name, now)
        return boot.machine, boot.deadline_s
