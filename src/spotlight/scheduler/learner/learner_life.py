"""What is kept of the learner, and when it is formed where. Part of the controller.

    lost     ─► rolled back ─► RestoreLearner, once there are GPUs for all ranks
    noticed  ─► PrepareLearner, once there are GPUs elsewhere ─► RestoreLearner, when it holds nothing that
                is not durable; if the notice leaves no time for that, or nothing rolls out meanwhile what it
                waits for, EndLearner ─► lost

With ``ClusterPlan.learner_moves`` the state after an iteration is made durable behind the rollouts of the
next, and nothing is trained until it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.members import Host
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import Effect, EndLearner, PrepareLearner, RestoreLearner
from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.iteration import Snapshot


@dataclass(slots=True)
class LearnerLife:
    """See the module's docstring.

    Attributes:
        ranks: that it has.
        ranks_min: it can be formed with so many.
        committed: what a lost learner starts from.
        saving: becomes ``committed`` once it is durable.
        up: it can be given work.
        restore_due: it waits for GPUs.
        preparing: a second one was asked for elsewhere; ``prepared``: it waits for the state.
        preparations: so many were asked for.
        ending: it was ended, and its loss is not reported yet.
    """

    ranks: int
    fleet: Fleet
    committed: Snapshot
    ranks_min: int
    saving: Snapshot | None = None
    up: bool = True
    restore_due: bool = False
    preparing: bool = False
    prepared: bool = False
    preparations: int = 0
    ending: bool = False
    _given_up: bool = False

    @property
    def works(self) -> bool:
        """Whether it can be given samples: it is up, and what it made before is durable."""
        return self.up and self.saving is None and not self.ending

    def lost(self) -> None:
        """It has to be restored from :attr:`committed`."""
        self._ends()
        self.saving, self.restore_due = None, True

    def saved(self) -> None:
        """What was being saved is durable."""
        if self.saving is not None:
            self.committed, self.saving = self.saving, None

    def observe(self, event: ev.Event) -> None:
        """Call before the fleet handles an event."""
        match event:
            case ev.RunStarted(ranks):
                self.ranks = ranks or self.ranks
            case ev.LearnerRestored(lineage, ranks) if lineage == self.fleet.cluster.lineage:
                self.up = True
                if ranks not in (None, self.ranks):
                    self.ranks = ranks
                    self.fleet.cluster.count(Recovery.LEARNER_RESIZED)
            case ev.LearnerPrepared(number, formed) if self.preparing and number == self.preparations:
                self.prepared, self.preparing = formed, formed
                self._given_up = not formed
            case ev.NodeJoined() | ev.NodeNoticed():
                self.nodes_changed()
            case ev.NodeLost(node):
                self.nodes_changed()
                if (machine := self.fleet.machines.get(node)) is not None and machine.ranks:
                    self.preparing = self.prepared = False  # it may have been there

    def nodes_changed(self) -> None:
        """A second one may start now, or elsewhere."""
        self._given_up = False

    def _reason_to_end(self, *, waits: bool) -> str:
        """Why it ends although it holds samples: a second one is ready elsewhere. Empty: it goes on."""
        if not (self.works and self.prepared):
            return ""
        if any(host.draining for host in self._leaving):
            return "its node is about to be preempted"
        hosts = self.fleet.cluster.hosts.values()
        stuck = waits and not any(host.node.rolls_out for host in hosts)
        return "no node is left to roll out what it waits for" if stuck else ""

    def placed(self, iteration: int, *, idle: bool, waits: bool = False) -> Iterator[Effect]:
        """Bring it where it can work.

        Args:
            iteration: the current one.
            idle: it does nothing, and holds nothing that is not durable.
            waits: it does nothing, and rollouts of the iteration are left to be made.
        """
        awaited = self.restore_due or self.preparing or (self.up and (self._leaving or self._has_second))
        if self.ending or not awaited:
            return
        if self._room < self.ranks_min:
            self.preparing = self.prepared = False
        elif self.restore_due:
            self.restore_due = False
            yield RestoreLearner(iteration, self.fleet.cluster.lineage)
        elif not self.preparing:
            if not self._given_up:
                self.preparing = True
                self.preparations += 1
                yield PrepareLearner(self.preparations)
        elif not idle and (why := self._reason_to_end(waits=waits)):
            # What it is asked may be answered before its end: it is undone when the loss is reported.
            self.fleet.cluster.count(Recovery.LEARNER_EVICTED)
            self.ending = True
            yield EndLearner(why)
        elif self.prepared and idle and self.works:
            self.fleet.cluster.count(Recovery.LEARNER_MOVED)
            self._ends()
            yield RestoreLearner(iteration, self.fleet.cluster.lineage)

    def _ends(self) -> None:
        self.up = self.preparing = self.prepared = self.ending = False

    @property
    def _leaving(self) -> list[Host]:
        """Nodes that train and have a notice, where the learner moves."""
        cluster = self.fleet.cluster
        hosts = [cluster.hosts[name] for name in cluster.noticed] if cluster.plan.learner_moves else []
        return [host for host in hosts if host.node.trains]

    @property
    def _has_second(self) -> bool:
        """Whether it has places elsewhere: for more ranks, or after a notice that is cancelled since."""
        return self.fleet.cluster.plan.learner_moves and self._all_gpus > self.ranks

    @property
    def _room(self) -> int:
        """GPUs to form it on: on nodes that train, and stay as far as is known, and that it does not hold."""
        stay = self._all_gpus - sum(host.node.gpus for host in self._leaving)
        if self.up and self.fleet.cluster.plan.learner_moves:
            stay = min(stay, self._all_gpus - self.ranks)
        return stay

    @property
    def _all_gpus(self) -> int:
        return sum(host.node.gpus for host in self.fleet.cluster.hosts.values() if host.node.trains)
