"""What a run costs: every second of every slot in a phase, and in the run's ledger.

:class:`Billing` is pure: it attributes them by the controller's events and effects. :class:`ClusterAccounts`
writes what is settled. Invariants of the first:

    1. From a node's joining to its loss, each moment of each slot is in exactly one segment of one phase.
    2. Denoising counts once the controller accepts its result; training counts once a checkpoint that holds
       it is ordered (if that is never committed, the ledger's rollback makes it LOST). All else at risk is
       LOST, so work that dies or is fenced off needs no special handling.
    3. :meth:`Billing.take` returns each second once and withholds those still undecided.

A group working on several leases is in the phase of the oldest. A GPU that both trains and rolls out runs two
processes; :meth:`_Slot.active` decides which one a second belongs to.

A node that comes back under its old name is a new worker in the ledger: ``spot-0/0``, then ``spot-0/0#2``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spotlight.cluster.remote_calls import Clock
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import PHASE_OF, LeaseId, Node, NodeId, Phase, RolloutId, WeightKind, WorkerId
from spotlight.store.ledger.sqlite_ledger import GpuSpend

if TYPE_CHECKING:  # with torch, which the simulator does without
    from spotlight.runtime.observer import Observer
    from spotlight.runtime.recorder import RunRecorder


def slots_of(node: Node) -> tuple[WorkerId, ...]:
    """Slot names of a node: its workers' names, where it has workers."""
    return tuple(WorkerId(f"{node.id}/{gpu}") for gpu in range(node.gpus))


@dataclass(slots=True)
class _Tenant:
    """A process on a slot.

    Attributes:
        at_risk_s: seconds denoised or trained but not accepted yet.
        is_up: of a rank: it belongs to the learner that works, not to the next.
    """

    phase: Phase = Phase.SETUP
    is_up: bool = False
    works: bool = False
    at_risk_s: float = 0.0


@dataclass(slots=True)
class _Slot:
    """A GPU or CPU slot. ``tenants``: a learner rank, a worker, or both in this order."""

    price_usd_h: float
    since_s: float
    tenants: tuple[_Tenant, ...]
    spent: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def active(self) -> _Tenant:
        """The tenant that is working, else one that is not idle; the rank wins a tie."""
        return min(self.tenants, key=lambda tenant: (not tenant.works, tenant.phase is Phase.IDLE))

    def close(self, now: float) -> None:
        seconds, self.since_s = max(0.0, now - self.since_s), max(now, self.since_s)
        tenant = self.active
        if tenant.works:
            tenant.at_risk_s += seconds
        else:
            self.spent[tenant.phase] += seconds

    def settle(self, tenant: _Tenant, phase: Phase) -> None:
        self.spent[phase] += tenant.at_risk_s
        tenant.at_risk_s = 0.0


@dataclass(slots=True)
class _Group:
    epoch: int
    members: tuple[WorkerId, ...]
    leases: dict[LeaseId, tuple[Phase, set[RolloutId]]] = field(default_factory=dict)


def changed_machines(event: ev.Event, effects: Sequence[ef.Effect]) -> dict[NodeId, tuple[Node, ...]]:
    """The nodes on each machine that comes, goes or is something else from now on."""
    changed: dict[NodeId, tuple[Node, ...]] = {}
    match event:
        case ev.NodeJoined(node):
            changed[node.id] = (node,)
        case ev.NodeLost(name):
            changed[name] = ()
    return changed | {each.machine: each.parts for each in effects if isinstance(each, ef.AssignRoles)}


class Billing:
    """Tracks the phase of every slot. Times are seconds of the controller's clock."""

    def __init__(self) -> None:
        self._slots: dict[WorkerId, _Slot] = {}
        self._nodes: dict[NodeId, Node] = {}
        self._machines: dict[NodeId, tuple[NodeId, ...]] = {}
        self._groups: dict[WorkerId, _Group] = {}
        self._gone: list[GpuSpend] = []

    def observe(self, event: ev.Event, effects: Sequence[ef.Effect], now: float) -> None:
        """Process one controller event and its effects."""
        for machine, parts in changed_machines(event, effects).items():
            for node in self.nodes_on(machine):
                self._lose(node, now)
            self._machines[machine] = tuple(part.id for part in parts)
            for part in parts:
                self._join(part, now)
        match event:
            case ev.WorkerStarted(worker):
                self._turn([worker], Phase.SETUP, now)
            case ev.WorkerCrashed(worker):
                self._crash(worker, now)
            case ev.WeightsPulled(worker) | ev.PullFailed(worker):
                self._rest([worker], now)
            case ev.GroupFormed(leader) if leader in self._groups:
                self._rest(self._groups[leader].members, now)
            case ev.GroupStopped(leader, epoch):
                self._part(leader, epoch, now)
            case ev.LeaseProgressed() | ev.LeaseCompleted() | ev.RolloutFailed():
                self._made(event, effects, now)
            case ev.LearnerRestored() | ev.RunStarted():
                self._came_up()
                self._train(Phase.IDLE, now)
            case ev.BatchPrepared() | ev.MicroBatchTrained() | ev.OptimizerStepped() | ev.BatchFinished():
                self._train(Phase.IDLE, now)
            case ev.WeightsPublished() | ev.CheckpointCommitted():
                self._train(Phase.IDLE, now)
            case ev.LearnerLost():
                self._train(Phase.SETUP, now, at_risk=Phase.LOST)
        for effect in effects:
            self._ordered(effect, now)

    def _ordered(self, effect: ef.Effect, now: float) -> None:
        match effect:
            case ef.StartWorker(worker):
                self._turn([worker], Phase.SETUP, now)
            case ef.PullWeights(worker, kind=kind):
                if not self._busy(worker):
                    phase = Phase.SETUP if kind is WeightKind.FULL else Phase.WEIGHT_SYNC
                    self._turn([worker], phase, now)
            case ef.FormGroup(leader, epoch, members):
                self._groups[leader] = _Group(epoch, members)
                self._turn(members, Phase.RECONFIGURATION, now)
            case ef.GrantLease(lease, rollouts):
                group = self._groups.get(lease.worker)
                if group is not None and group.epoch == lease.epoch:
                    names = {rollout.id for rollout in rollouts}
                    group.leases[lease.id] = PHASE_OF[rollouts[0].purpose], names
                    self._work(group, now)
            case ef.AbandonLease(leader, epoch, lease):
                group = self._groups.get(leader)
                if group is not None and group.epoch == epoch and lease in group.leases:
                    self._end(group, lease, now)
            case ef.PrepareBatch() | ef.TrainMicroBatch() | ef.StepOptimizer() | ef.FinishBatch():
                self._train(Phase.TRAINING, now)
            case ef.PublishWeights():
                self._train(Phase.WEIGHT_SYNC, now)
            case ef.CommitCheckpoint():
                self._train(Phase.CHECKPOINT, now, at_risk=Phase.TRAINING)
            case ef.FinishRun():
                self._train(Phase.IDLE, now, at_risk=Phase.TRAINING)

    def nodes_on(self, machine: NodeId) -> tuple[NodeId, ...]:
        """What a machine is to the controller; empty: it is not there."""
        return self._machines.get(machine, ())

    def price_of(self, node: NodeId) -> dict[WorkerId, float]:
        """Price of each slot of a node, in USD per hour."""
        return {name: self._slots[name].price_usd_h for name in slots_of(self._nodes[node])}

    def take(self, now: float) -> list[GpuSpend]:
        """Return the seconds settled since the last call."""
        taken = self.take_gone()
        for name, slot in self._slots.items():
            slot.close(now)
            taken += _spent(name, slot)
        return taken

    def take_gone(self) -> list[GpuSpend]:
        """Return the seconds of slots that are no longer there, which all are settled."""
        taken, self._gone = self._gone, []
        return taken

    def finish(self, now: float) -> list[GpuSpend]:
        """Return all remaining seconds; those still undecided are LOST."""
        for node in list(self._nodes):
            self._lose(node, now)
        return self.take(now)

    # -- nodes -----------------------------------------------------------------------------------------

    def _join(self, node: Node, now: float) -> None:
        if node.id in self._nodes:
            self._lose(node.id, now)
        self._nodes[node.id] = node
        for name in slots_of(node):
            tenants = tuple(_Tenant() for there in (node.trains, node.rolls_out) if there)
            tenants = tenants or (_Tenant(Phase.IDLE),)  # nothing runs on a node that is left
            self._slots[name] = _Slot(node.price_usd_h / node.gpus, now, tenants)

    def _lose(self, node_id: NodeId, now: float) -> None:
        node = self._nodes.pop(node_id, None)
        for name in slots_of(node) if node is not None else ():
            slot = self._slots.pop(name)
            slot.close(now)
            for tenant in slot.tenants:
                slot.settle(tenant, Phase.LOST)
            self._gone += _spent(name, slot)

    # -- workers ---------------------------------------------------------------------------------------

    def _known(self, workers: Iterable[WorkerId]) -> Iterator[tuple[_Slot, _Tenant]]:
        for name in workers:
            if name in self._slots:
                yield self._slots[name], self._slots[name].tenants[-1]

    def _turn(self, workers: Iterable[WorkerId], phase: Phase, now: float) -> None:
        """Enter a phase that is not work at risk; what was at risk is LOST."""
        for slot, worker in self._known(workers):
            slot.close(now)
            slot.settle(worker, Phase.LOST)
            worker.phase, worker.works = phase, False

    def _rest(self, workers: Iterable[WorkerId], now: float) -> None:
        self._turn([name for name in workers if not self._busy(name)], Phase.IDLE, now)

    def _busy(self, worker: WorkerId) -> bool:
        return any(known.works for _, known in self._known([worker]))

    def _crash(self, worker: WorkerId, now: float) -> None:
        self._turn([worker], Phase.SETUP, now)
        for group in self._groups.values():
            if worker in group.members:
                # The rest of the group still holds the denoised state: only this worker's seconds are lost.
                group.members = tuple(name for name in group.members if name != worker)

    # -- groups ----------------------------------------------------------------------------------------

    def _part(self, leader: WorkerId, epoch: int, now: float) -> None:
        group = self._groups.get(leader)
        if group is not None and group.epoch == epoch:
            del self._groups[leader]
            self._turn(group.members, Phase.IDLE, now)

    def _work(self, group: _Group, now: float) -> None:
        phase, _ = next(iter(group.leases.values()))
        for slot, worker in self._known(group.members):
            slot.close(now)
            worker.phase, worker.works = phase, True

    def _made(
        self,
        event: ev.LeaseProgressed | ev.LeaseCompleted | ev.RolloutFailed,
        effects: Sequence[ef.Effect],
        now: float,
    ) -> None:
        leader = event.worker if isinstance(event, ev.RolloutFailed) else event.leader
        group = self._groups.get(leader)
        if group is None or group.epoch != event.epoch or event.lease not in group.leases:
            return
        if any(isinstance(effect, ef.AbandonLease) and effect.lease == event.lease for effect in effects):
            return
        for slot, worker in self._known(group.members):
            slot.close(now)
            slot.settle(worker, worker.phase)
        _, left = group.leases[event.lease]
        match event:
            case ev.LeaseCompleted(rollouts=rollouts):
                left.difference_update(rollouts)
            case ev.RolloutFailed(rollout=rollout):
                left.discard(rollout)
        if not left:
            self._end(group, event.lease, now)

    def _end(self, group: _Group, lease: LeaseId, now: float) -> None:
        del group.leases[lease]
        if group.leases:
            self._work(group, now)
        else:
            self._turn(group.members, Phase.IDLE, now)

    # -- the learner -----------------------------------------------------------------------------------

    def _ranks(self) -> Iterator[tuple[_Slot, _Tenant]]:
        for node in self._nodes.values():
            for name in slots_of(node) if node.trains else ():
                if self._slots[name].tenants[0].is_up:
                    yield self._slots[name], self._slots[name].tenants[0]

    def _came_up(self) -> None:
        for node in self._nodes.values():
            for name in slots_of(node) if node.trains else ():
                self._slots[name].tenants[0].is_up = True

    def _train(self, phase: Phase, now: float, at_risk: Phase | None = None) -> None:
        """Have all ranks enter a phase; training at risk stays so, or counts as ``at_risk`` from now on."""
        for slot, rank in self._ranks():
            slot.close(now)
            if at_risk is not None:
                slot.settle(rank, at_risk)
            rank.phase, rank.works = phase, phase is Phase.TRAINING


def _spent(name: WorkerId, slot: _Slot) -> Iterator[GpuSpend]:
    for phase, seconds in slot.spent.items():
        if seconds > 0:
            yield GpuSpend(name, phase, seconds, slot.price_usd_h)
    slot.spent.clear()


# -- cost accounting: writes the GPU-seconds of every slot to the run's ledger -----------------------------


FLUSH_S = 5.0
"""Most time until records are in the ledger; bills of a small cluster are written as often."""
BILL_S_MAX = 60.0
"""Most time between two bills: what a killed head can leave unaccounted."""
SLOTS_BILLED_A_SECOND = 10.0
"""Larger clusters are billed more rarely than every :data:`FLUSH_S`: a bill is a row or two of every slot."""


@dataclass(slots=True)
class ClusterAccounts:
    """Writes what :class:`Billing` settles. Head's event loop only.

    Attributes:
        written_s: time on ``clock`` up to which all settled seconds are in the ledger.
    """

    clock: Clock
    observer: Observer
    billing: Billing = field(default_factory=Billing)
    written_s: float = 0.0
    _flushed_s: float = 0.0
    _epoch_s: float = 0.0
    _billed_as: dict[WorkerId, WorkerId] = field(default_factory=dict)
    _joined: dict[NodeId, int] = field(default_factory=dict)
    _seconds: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.written_s = self._flushed_s = self.clock()
        # One clock for all billing: totals of two clocks would not add up.
        self._epoch_s = time.time() - self.written_s

    def observe(
        self, event: ev.Event, effects: Sequence[ef.Effect], now: float, recorder: RunRecorder
    ) -> None:
        """Account for one controller event and its effects."""
        changed = changed_machines(event, effects)
        ended = [node for machine in changed for node in self.billing.nodes_on(machine)]
        self.billing.observe(event, effects, now)
        for node in ended:
            self._stop_billing(node, now, recorder)
        for part in (part for parts in changed.values() for part in parts):
            self._start_billing(part.id, now, recorder)

    def write_due(self, recorder: RunRecorder) -> float:
        """Write records, and seconds, if it is time to; returns when to call again, on ``clock``."""
        bill_s = min(max(FLUSH_S, len(self._billed_as) / SLOTS_BILLED_A_SECOND), BILL_S_MAX)
        if (now := self.clock()) >= self.written_s + bill_s:
            self.write(recorder)
        elif now >= self._flushed_s + FLUSH_S:
            recorder.flush()
            self._flushed_s = now
        return min(self.written_s + bill_s, self._flushed_s + FLUSH_S)

    def write(self, recorder: RunRecorder) -> None:
        """Write all seconds settled since the last call."""
        now = self.clock()
        self._spend(recorder, self.billing.take(now), now)
        self.observer.billed(recorder.ledger.cost_usd())

    def finish(self, recorder: RunRecorder) -> None:
        """Close the attempt's accounts: seconds still at risk are lost."""
        now = self.clock()
        self._spend(recorder, self.billing.finish(now), now)

    def take_seconds(self) -> dict[Phase, float]:
        """GPU-seconds by phase written since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _spend(self, recorder: RunRecorder, spends: Iterable[GpuSpend], now: float) -> None:
        elapsed_s, self.written_s, self._flushed_s = now - self.written_s, now, now
        self._bill(recorder, spends, elapsed_s)

    def _bill(self, recorder: RunRecorder, spends: Iterable[GpuSpend], elapsed_s: float) -> None:
        rows = [replace(spent, worker=self._billed_as[spent.worker]) for spent in spends]
        for row in rows:
            self._seconds[row.phase] += row.seconds
        recorder.bill(rows, elapsed_s, self._epoch_s + self.written_s)

    def _start_billing(self, node: NodeId, now: float, recorder: RunRecorder) -> None:
        times = self._joined[node] = self._joined.get(node, 0) + 1
        prices = self.billing.price_of(node)
        names = {slot: WorkerId(f"{slot}#{times}") if times > 1 else slot for slot in prices}
        self._billed_as |= names
        recorder.ledger.start_billing(
            {names[slot]: price for slot, price in prices.items()}, self._epoch_s + now
        )

    def _stop_billing(self, node: NodeId, now: float, recorder: RunRecorder) -> None:
        slots = [slot for slot in self._billed_as if slot.rpartition("/")[0] == node]
        if slots:
            # Not those of all slots: on a large cluster nodes are lost more often than bills are due.
            self._bill(recorder, self.billing.take_gone(), 0.0)
            recorder.ledger.stop_billing([self._billed_as.pop(slot) for slot in slots], self._epoch_s + now)
