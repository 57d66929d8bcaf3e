"""Nodes, their workers, and the groups that pull work. Part of the controller.

    NodeJoined ─► StartWorker ─► WorkerStarted ─► PullWeights ─► WeightsPulled ─► FormGroup ─► GroupFormed
                                                                                                   │
           GrantLease, once there is work and the group has the published version ◄── GroupPulled ◄──┘

A loss, a preemption notice or a change of degree stops the affected groups (StopGroup ─► GroupStopped);
surviving workers form new groups under new epochs.

Invariants
    1. A worker is in at most one group; a group's members are on one living node.
    2. Only a READY group holds leases, or a STOPPING one that may still commit.
    3. Every command (start, pull, form, stop) is answered, resent on timeout, or ends in a restart of its
       workers: no wait is unbounded.
    4. A group is granted work only while all members hold the published version, and keeps it until the work
       is finished.
    5. Answers under an old epoch, or to a closed command, change nothing.
    6. Idle-time previews are preempted by other work (see
       :class:`~spotlight.scheduler.cluster.spare_time.SpareTime`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.commands import Alarms, CommandEffect, Commands, Key
from spotlight.scheduler.cluster.members import (
    ABLE,
    GroupState,
    Host,
    Worker,
    WorkerGroup,
    WorkerState,
    check_members,
)
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.placement import choose_degree, form_groups
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.cluster.sharing import Serving
from spotlight.scheduler.cluster.spare_time import SpareTime
from spotlight.scheduler.cluster.weight_sources import choose_source
from spotlight.scheduler.effects import (
    AbandonLease,
    Effect,
    FormGroup,
    GrantLease,
    PullWeights,
    StartWorker,
    StopGroup,
)
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.queue import PullQueue, first_epoch
from spotlight.scheduler.types import (
    GroupKind,
    Lease,
    LeaseId,
    Node,
    NodeId,
    PolicyVersion,
    Purpose,
    WeightKind,
    WorkerId,
)


@dataclass(slots=True)
class Cluster:
    """See the module's docstring. ``queue`` is shared with the controller.

    Attributes:
        target: the published policy version.
        lineage: increases with each restart of the learner.
        effects: taken by the controller after each event.
        noticed: nodes with a preemption notice.
        helpers: nodes whose GPUs both train and roll out.
        serving: divides work among groups.
    """

    plan: ClusterPlan
    queue: PullQueue
    lineage: int
    target: PolicyVersion
    recoveries: Counter[Recovery] = field(default_factory=Counter)
    effects: list[Effect] = field(default_factory=list)
    hosts: dict[NodeId, Host] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    groups: dict[WorkerId, WorkerGroup] = field(default_factory=dict)
    noticed: set[NodeId] = field(default_factory=set)
    helpers: dict[NodeId, Host] = field(default_factory=dict)
    serving: Serving = field(init=False)
    _now: float = 0.0
    _capable: int = 0
    _trainers: list[WorkerGroup] | None = None
    _commands: Commands = field(default_factory=Commands)
    _drains: Alarms[NodeId] = field(default_factory=Alarms)
    _epochs: dict[WorkerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serving = Serving(self.queue, SpareTime(self.queue, self.plan.answer_s))

    @property
    def spare(self) -> SpareTime:
        """Scheduling of idle-time previews."""
        return self.serving.spare

    @property
    def pace(self) -> Pace:
        """Measured speed of groups."""
        return self.serving.pace

    # -- what happens ----------------------------------------------------------------------------------

    def handle(self, event: ev.ClusterEvent, now: float) -> None:
        """Process one cluster event; append to ``effects``."""
        self._now = now
        match event:
            case ev.NodeJoined(node):
                self._join(node)
            case ev.NodeLost(node_id):
                self._lose(node_id)
            case ev.NodeNoticed(node_id, deadline_s):
                self._notice(node_id, deadline_s)
            case ev.NoticeCancelled(node_id):
                self._cancel_notice(node_id)
            case ev.GroupFormed() | ev.GroupStopped():
                self._group_answered(event)
            case _:
                self._worker_answered(event)

    def ring(self, now: float) -> None:
        """Act on all timeouts due by ``now``."""
        self._now = now
        while (node := self._drains.pop(now)) is not None:
            self._drain(node)
        for effect, given_up in self._commands.overdue(now):
            if given_up:
                self._give_up(effect)
            else:
                self._count(Recovery.COMMAND_RESENT)
                self.effects.append(effect)

    def suspect(self, lease: Lease) -> None:
        """A lease expired: stop its group; if it does not answer, its workers are restarted."""
        group = self.groups.get(lease.worker)
        if group is not None and group.epoch == lease.epoch:
            self._count(Recovery.LEASE_EXPIRED)
            self._stop(group)

    def revoked(self, lease: Lease) -> None:
        """Tell the holder of a revoked lease, if it is in this cluster."""
        self.pace.cut(lease.id, self._now)
        if lease.worker in self.workers:
            self.abandon(lease.worker, lease.epoch, lease.id)

    def abandon(self, leader: WorkerId, epoch: int, lease: LeaseId) -> None:
        """Tell a lease's holder that the lease no longer counts."""
        self._count(Recovery.LEASE_ABANDONED)
        self.effects.append(AbandonLease(leader, epoch, lease))

    @property
    def next_s(self) -> float | None:
        """When :meth:`ring` is next due; None if never."""
        times = (self._commands.next_s, self._drains.next_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def learner_gpus(self) -> int:
        """GPUs on nodes that train."""
        return sum(host.node.gpus for host in self.hosts.values() if host.node.trains)

    # -- weights ---------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion, now: float) -> None:
        """Publish a version: groups finish their leases, then need it for new work."""
        self._now, self.target = now, version
        self.serving.idle.clear()
        for worker in self.workers.values():
            if worker.pull is not None and worker.pull.kind is WeightKind.ADAPTER:
                self._forget_pull(worker)
            self._load(worker)

    def roll_back(self, version: PolicyVersion, now: float) -> None:
        """The learner returned to ``version``: later versions and pulls under way are void."""
        self._now, self.target = now, version
        self.lineage += 1
        self.serving.idle.clear()
        for worker in self.workers.values():
            # A pull under way may land after this, so what the worker holds is unknown until a newer one.
            if worker.pull is not None or (worker.version is not None and worker.version > version):
                worker.version = None
            self._forget_pull(worker)
        for worker in self.workers.values():
            self._load(worker)
        for group in self.groups.values():
            self._consider(group)

    def _load(self, worker: Worker) -> None:
        if worker.state is WorkerState.STARTING or worker.version == self.target or worker.pull is not None:
            return
        if worker.leader is not None and self.queue.holds(worker.leader):
            return  # one version makes a whole rollout; `finished` or `pulled` loads it later
        neighbours = (self.workers[name].holding() for name in self.hosts[worker.node].workers)
        source = choose_source(worker.holding(), neighbours, self.target, self.plan.publishes)
        if source is None:
            return  # a neighbour is fetching it; _load_node follows
        pull = PullWeights(worker.id, worker.epoch, self.target, self.lineage, source.kind, source.peer)
        worker.pull = pull
        patience_s = self.plan.start_s if source.kind is WeightKind.FULL else self.plan.answer_s
        self._send(("pull", worker.id), pull, patience_s)

    def _load_node(self, node: NodeId) -> None:
        for name in self.hosts[node].workers:
            self._load(self.workers[name])

    def _forget_pull(self, worker: Worker) -> None:
        worker.pull = None
        self._commands.done(("pull", worker.id))

    def _pulled(self, worker: Worker, event: ev.WeightsPulled | ev.PullFailed) -> None:
        pull = worker.pull
        if event.lineage != self.lineage:
            self._count(Recovery.PULL_STALE_LINEAGE)
            return
        if pull is None or pull.version != event.version:
            self._count(Recovery.ANSWER_STALE)
            return
        self._forget_pull(worker)
        if isinstance(event, ev.PullFailed):
            self._count(Recovery.PULL_FAILED)
            self._load(worker)
            return
        worker.based, worker.version = True, event.version
        if worker.state is WorkerState.LOADING:
            self._set_state(worker, WorkerState.FREE)
            self._regroup(worker.node)
        elif worker.leader is not None:
            self._consider(self.groups[worker.leader])
        if pull.kind is WeightKind.FULL:
            self._load_node(worker.node)
        self._load(worker)

    # -- nodes -----------------------------------------------------------------------------------------

    def _join(self, node: Node) -> None:
        if node.id in self.hosts:
            self._count(Recovery.NODE_RETURNED)
            self._lose(node.id)
        host = self.hosts[node.id] = Host(node)
        if node.trains and node.rolls_out:
            self.helpers[node.id] = host
        if node.rolls_out:
            for gpu in range(node.gpus):
                worker = Worker(WorkerId(f"{node.id}/{gpu}"), node.id, gpu, 0)
                self.workers[worker.id] = worker
                host.workers.append(worker.id)
                self._start(worker)

    def _lose(self, node: NodeId) -> None:
        host = self.hosts.pop(node, None)
        if host is None:
            return
        self._count(Recovery.NODE_LOST)
        self._drains.cancel(node)
        self.noticed.discard(node)
        self.helpers.pop(node, None)
        for leader in list(host.leaders):
            self._dissolve(self.groups[leader], host)
        for name in host.workers:
            self._set_state(self.workers[name], WorkerState.STARTING)
            del self.workers[name]
            self._commands.done(("start", name))
            self._commands.done(("pull", name))

    def _notice(self, node: NodeId, deadline_s: float) -> None:
        if (host := self.hosts.get(node)) is None:
            return
        host.deadline_s = deadline_s
        self.noticed.add(node)
        drain_s = deadline_s - self.plan.drain_margin_s
        if drain_s <= self._now:
            self._drain(node)
        else:
            self._drains.set(node, drain_s)

    def _drain(self, node: NodeId) -> None:
        host = self.hosts[node]
        self._count(Recovery.NODE_DRAINED)
        host.draining = True
        for leader in list(host.leaders):
            self._stop(self.groups[leader])

    def _cancel_notice(self, node: NodeId) -> None:
        if (host := self.hosts.get(node)) is None or host.deadline_s is None:
            return
        self._count(Recovery.NOTICE_CANCELLED)
        self._drains.cancel(node)
        host.deadline_s, host.draining = None, False
        self.noticed.discard(node)
        self._regroup(node)

    # -- workers ---------------------------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        worker.epoch = self._epochs[worker.id] = self._epochs.get(worker.id, first_epoch(self.queue.term)) + 1
        worker.based, worker.version, worker.pull, worker.leader = False, None, None, None
        self._set_state(worker, WorkerState.STARTING)
        start = StartWorker(worker.id, worker.node, worker.gpu, worker.epoch)
        self._send(("start", worker.id), start, self.plan.start_s)

    def _restart(self, worker: Worker) -> None:
        self._count(Recovery.WORKER_RESTARTED)
        self._commands.done(("start", worker.id))
        self._forget_pull(worker)
        self._leave(worker)
        self._start(worker)
        for name in self.hosts[worker.node].workers:
            neighbour = self.workers[name]
            if neighbour.pull is not None and neighbour.pull.peer == worker.id:
                self._count(Recovery.PULL_LOST_PEER)
                self._forget_pull(neighbour)
        self._load_node(worker.node)

    def _worker_answered(
        self, event: ev.WorkerStarted | ev.WorkerCrashed | ev.WeightsPulled | ev.PullFailed
    ) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.epoch != event.epoch:
            self._count(Recovery.ANSWER_STALE)
        elif isinstance(event, ev.WorkerCrashed):
            self._count(Recovery.WORKER_CRASHED)
            self._restart(worker)
        elif isinstance(event, ev.WeightsPulled | ev.PullFailed):
            self._pulled(worker, event)
        elif worker.state is WorkerState.STARTING:
            self._commands.done(("start", worker.id))
            self._set_state(worker, WorkerState.LOADING)
            self._load(worker)

    def _set_state(self, worker: Worker, state: WorkerState) -> None:
        self._capable += (state in ABLE) - (worker.state in ABLE)
        worker.state = state

    # -- groups ----------------------------------------------------------------------------------------

    def _regroup(self, node: NodeId) -> None:
        """Group a node's free workers, unless a stopping group is about to free more."""
        host = self.hosts[node]
        if host.draining or any(self.groups[leader].state is GroupState.STOPPING for leader in host.leaders):
            return
        free = [name for name in host.workers if self.workers[name].state is WorkerState.FREE]
        for members in self._divided(free):
            kind, trains = GroupKind(host.node.gpu_type, len(members)), host.node.trains
            group = WorkerGroup(members[0], self.queue.admit(members[0]), node, members, kind, trains)
            self.groups[group.leader] = group
            self._trainers = None
            host.leaders[group.leader] = None
            self.serving.shares.count(group, 1)
            for name in members:
                self._set_state(self.workers[name], WorkerState.GROUPED)
                self.workers[name].leader = group.leader
            form = FormGroup(group.leader, group.epoch, members)
            self._send(("form", group.leader), form, self.plan.answer_s)

    def _divided(self, free: list[WorkerId]) -> list[tuple[WorkerId, ...]]:
        """Split free workers into groups for other waiting work, then for previews."""
        demand, degrees = self.spare.demand(), self.plan.degrees
        degree, previews = self.degree_for(demand.contended), self.queue.outstanding - demand.needed
        first = len(free) if demand.previews or not previews else demand.pressing * degree
        rest = form_groups(free[first:], self.degree_for(previews), degrees)
        return [*form_groups(free[:first], degree, degrees), *rest]

    def degree_for(self, rollouts: int) -> int:
        """GPUs per group when ``rollouts`` are outstanding."""
        return choose_degree(self.plan, self._capable, rollouts)

    def _group_answered(self, event: ev.GroupFormed | ev.GroupStopped) -> None:
        group = self.groups.get(event.leader)
        if group is None or group.epoch != event.epoch:
            self._count(Recovery.ANSWER_STALE)
        elif isinstance(event, ev.GroupStopped):
            self._dissolve(group, self.hosts[group.node])
            self._regroup(group.node)
            self._load_node(group.node)
        elif group.state is GroupState.FORMING:
            self._formed(group)

    def _formed(self, group: WorkerGroup) -> None:
        self._commands.done(("form", group.leader))
        group.state = GroupState.READY

    def _stop(self, group: WorkerGroup) -> None:
        if group.state is GroupState.STOPPING:
            return
        self._commands.done(("form", group.leader))
        self.serving.parts(group)
        group.state, group.capacity = GroupState.STOPPING, 0
        stop = StopGroup(group.leader, group.epoch, group.members)
        self._send(("stop", group.leader), stop, self.plan.answer_s)

    def _leave(self, worker: Worker) -> None:
        """Remove a dead worker from its group and stop the rest."""
        if worker.leader is None:
            return
        group = self.groups[worker.leader]
        worker.leader = None
        group.members = tuple(name for name in group.members if name != worker.id)
        if not group.members:
            self._dissolve(group, self.hosts[group.node])
            return
        self._count(Recovery.GROUP_LOST_MEMBER)
        if group.state is GroupState.STOPPING:
            stop = StopGroup(group.leader, group.epoch, group.members)
            self._commands.amend(("stop", group.leader), stop)
        else:
            self._stop(group)

    def _dissolve(self, group: WorkerGroup, host: Host) -> None:
        del self.groups[group.leader], host.leaders[group.leader]
        self._trainers = None
        self.serving.dissolved(group)
        self._commands.done(("form", group.leader))
        self._commands.done(("stop", group.leader))
        self.queue.release(group.leader)
        for name in group.members:
            self._set_state(self.workers[name], WorkerState.FREE)
            self.workers[name].leader = None

    # -- work ------------------------------------------------------------------------------------------

    def pulled(self, event: ev.GroupPulled, now: float) -> None:
        """A group asks for work; :meth:`serve` grants it."""
        self._now = now
        group = self.groups.get(event.leader)
        if group is None or group.epoch != event.epoch or group.state is GroupState.STOPPING:
            self._count(Recovery.ANSWER_STALE)
            return
        if group.state is GroupState.FORMING:
            self._count(Recovery.FORMED_BY_PULL)
            self._formed(group)
        for lease, _ in self.queue.held_by(group.leader):
            if lease.id in event.holds:
                continue
            if event.seen < lease.id:
                self._count(Recovery.GRANT_RESENT)
                self.effects.append(GrantLease(*self.queue.granted(lease.id)))
                return
            self._count(Recovery.LEASE_RENOUNCED)
            self.queue.renounce(lease.id)
            self.pace.cut(lease.id, self._now)
        group.capacity = event.capacity
        self.spare.pulled(group.leader)
        self._load_group(group)
        self._consider(group)
        demand = self.spare.demand()
        if not demand.pressing and (demand.needed or not self.queue.waiting):
            # Tail of the batch: a busy neighbour finishes sooner together with this group's workers.
            degree = self.degree_for(demand.needed or demand.contended)
            self._grow(self.hosts[group.node], degree, self.plan.tail_steps, over_previews=demand.needed > 0)

    def finished(self, leader: WorkerId, lease: LeaseId, now: float) -> None:
        """A group finished rollouts of a lease."""
        self._now = now
        if not self.queue.is_open(lease):
            self.pace.end(lease, now)
            if (group := self.groups.get(leader)) is not None:
                self._load_group(group)

    def failed(self, lease: LeaseId, now: float) -> None:
        """A rollout failed. If it was the lease's last, no pace is measured."""
        if not self.queue.is_open(lease):
            self.pace.cut(lease, now)

    def serve(self, now: float) -> None:
        """Grant waiting work to waiting groups, each up to its share."""
        if not self.queue.waiting:
            return
        self._now = now
        if self.serving.idle:
            self._grant()
        self._preempt_previews()

    def _grant(self) -> None:
        serving, satisfied, now = self.serving, list[WorkerId](), self._now
        demand = self.spare.demand()
        wanted = self.degree_for(demand.contended)
        able = cache(self._able)
        while serving.idle and self.queue.waiting:
            leader, _ = serving.idle.popitem(last=False)
            group = self.groups[leader]
            host, room = self.hosts[group.node], serving.room(group, demand, able)
            if len(group.members) > wanted and not self.queue.count_held_by(leader):
                self._count(Recovery.TAIL_ENDED)
                self._stop(group)
                continue
            if len(group.members) < wanted and self._grow(host, wanted, 0, over_previews=not demand.previews):
                continue
            if room <= 0:
                satisfied.append(leader)
                continue
            grant = serving.grant(group, room, now)
            if grant.resume:
                self._count(Recovery.RESUMED)
            self.effects.append(grant)
            self._abandon_previews([] if demand.previews else self.spare.preempt_beside(leader))
            then, demand = demand, self.spare.demand()
            if demand.previews != then.previews:
                wanted = self.degree_for(demand.contended)
        # Groups that hold their full share leave the rest to others and stay idle until the shares change.
        serving.idle.update(dict.fromkeys(leader for leader in satisfied if self.groups[leader].capacity))

    def _able(self) -> Counter[GroupKind]:
        groups = (group for group in self.groups.values() if self.serving.competes(group))
        return Counter(
            group.kind for group in groups if self.queue.holds(group.leader) or self.willing(group)
        )

    def _preempt_previews(self) -> None:
        if not (self.spare.explores and self.queue.previews_held):
            return
        demand = self.spare.demand()
        if not demand.pressing:
            return
        ready = [group for group in self.groups.values() if group.state is GroupState.READY]
        share = max((self.serving.share(group, demand) for group in ready), default=1)
        able = {group.leader for group in ready}
        given = self.spare.preempt(math.ceil(demand.pressing / share), able.__contains__, self._now)
        self._abandon_previews(given)

    @property
    def preview_capacity(self) -> int:
        """Previews that waiting groups would take at once."""
        waiting = (self.groups[leader] for leader in self.serving.idle)
        able = (group for group in waiting if not group.trains)
        return sum(g.capacity for g in able if not self.queue.count_held_by(g.leader, previews=False))

    def _abandon_previews(self, leases: list[Lease]) -> None:
        """Have the holders of requeued previews stop at the next step boundary and pull."""
        for lease in leases:
            self._count(Recovery.PREVIEWS_YIELDED)
            self.pace.cut(lease.id, self._now)
            self.abandon(lease.worker, lease.epoch, lease.id)

    # -- GPUs that train -------------------------------------------------------------------------------

    def set_trainer_budget(self, rollouts: float, *, explore: bool) -> None:
        """Set how many rollouts GPUs that train may pull now, and whether previews too."""
        trainers = self.trainers()
        if self.serving.set_trainer_budget(rollouts, trainers, explore=explore):
            for group in trainers:
                self._consider(group)

    def trainers(self) -> list[WorkerGroup]:
        """Groups on GPUs that train; cached, since every event reads it."""
        if self._trainers is None:
            self._trainers = [self.groups[name] for host in self.helpers.values() for name in host.leaders]
        return self._trainers

    @property
    def trainers_work(self) -> bool:
        """Whether GPUs that train are rolling out and so cannot train."""
        holders = self.queue.holders
        return bool(holders) and any(group.leader in holders for group in self.trainers())

    def willing(self, group: WorkerGroup) -> bool:
        """Whether a group waits for work, holds the target version and is not draining."""
        return (
            group.capacity > 0
            and group.state is GroupState.READY
            and not self.hosts[group.node].draining
            and all(self.workers[name].version == self.target for name in group.members)
        )

    def _load_group(self, group: WorkerGroup) -> None:
        for name in group.members:
            self._load(self.workers[name])

    def _consider(self, group: WorkerGroup) -> None:
        if self.willing(group) and not (group.trains and self.serving.trainer_budget <= 0):
            self.serving.idle[group.leader] = None
        else:
            self.serving.idle.pop(group.leader, None)

    def _grow(self, host: Host, degree: int, steps_held: int, *, over_previews: bool) -> bool:
        """Stop a node's groups to form larger ones; returns whether it did.

        Args:
            steps_held: 0: only if no group works; else only if some lease has more steps than this to go.
            over_previews: idle-time previews do not count as work.
        """
        groups = [self.groups[leader] for leader in host.leaders]
        if any(self.queue.holds_other_than(other.leader, self.target) for other in groups):
            return False  # rollouts of an older version can only be finished by their holder
        held = (one for other in groups for one in self.queue.held_by(other.leader))
        if over_previews and self.spare.explores:
            held = (one for one in held if self.queue.purpose_of(one[0].id) is not Purpose.EXPLORE)
        steps = max((steps for _, steps in held), default=0)
        able = sum(self.workers[name].state in ABLE for name in host.workers)
        if (
            able < degree
            or any(len(other.members) >= degree or other.state is not GroupState.READY for other in groups)
            or (steps > 0 if steps_held == 0 else steps <= steps_held)
        ):
            return False
        self._count(Recovery.TAIL_REFORMED)
        for other in groups:
            self._stop(other)
        return True

    # -- commands --------------------------------------------------------------------------------------

    def _send(self, key: Key, effect: CommandEffect, patience_s: float) -> None:
        self._commands.send(key, effect, patience_s, self._now)
        self.effects.append(effect)

    def _give_up(self, command: CommandEffect) -> None:
        match command:
            case StartWorker(worker) | PullWeights(worker):
                self._restart(self.workers[worker])
            case FormGroup(leader) | StopGroup(leader):
                group = self.groups[leader]
                self._dissolve(group, self.hosts[group.node])
                for name in group.members:
                    self._restart(self.workers[name])
                self._regroup(group.node)

    def _count(self, recovery: Recovery) -> None:
        self.recoveries[recovery] += 1

    def check(self) -> None:
        """Assert the invariants above, in O(workers)."""
        check_members(self.hosts, self.workers, self.groups)
        for worker in self.workers.values():
            assert (worker.state is WorkerState.STARTING) == (("start", worker.id) in self._commands)
            assert (worker.pull is not None) == (("pull", worker.id) in self._commands)
        for group in self.groups.values():
            assert (group.state is GroupState.FORMING) == (("form", group.leader) in self._commands)
            assert (group.state is GroupState.STOPPING) == (("stop", group.leader) in self._commands)
        assert self._capable == sum(worker.state in ABLE for worker in self.workers.values())
        sharers = [group for group in self.groups.values() if group.state is not GroupState.STOPPING]
        self.serving.shares.check(sharers)
        assert set(self.serving.idle) <= {group.leader for group in self.groups.values() if group.capacity}
        helping = {name for name, host in self.hosts.items() if host.node.trains and host.node.rolls_out}
        assert self.helpers.keys() == helping
        trainers = [group.leader for group in self.groups.values() if group.trains]
        assert sorted(group.leader for group in self.trainers()) == sorted(trainers)
        self._commands.check()
