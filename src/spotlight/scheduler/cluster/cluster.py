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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.commands import Alarms, CommandEffect, Commands, Key, OpenCommand
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
from spotlight.scheduler.cluster.queue import PullQueue, first_epoch
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.cluster.sharing import Serving
from spotlight.scheduler.cluster.spare_time import SpareTime
from spotlight.scheduler.cluster.weight_sources import choose_source
from spotlight.scheduler.effects import (
    Effect,
    FormGroup,
    PullWeights,
    StartWorker,
    StopGroup,
)
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.types import GroupKind, Node, NodeId, PolicyVersion, WeightKind, WorkerId


@dataclass(slots=True)
class Cluster:
    """See the module's docstring. ``queue`` is shared with the controller.

    Attributes:
        target: the published policy version.
        lineage: increases with each restart of the learner.
        effects: taken by the controller after each event.
        now: of the event being processed.
        noticed: nodes with a preemption notice.
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
    now: float = 0.0
    noticed: set[NodeId] = field(default_factory=set)
    serving: Serving = field(init=False)
    _capable: int = 0
    _trainers: list[WorkerGroup] | None = None
    _commands: Commands = field(default_factory=Commands)
    _drains: Alarms[NodeId] = field(default_factory=Alarms)
    _epochs: dict[WorkerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serving = Serving(self.queue, SpareTime(self.queue, self.plan.answer_s))
        self.queue.limits.first_s = self.plan.start_s

    @property
    def spare(self) -> SpareTime:
        """Scheduling of idle-time previews."""
        return self.serving.spare

    @property
    def pace(self) -> Pace:
        """Measured speed of groups."""
        return self.serving.pace

    # -- events ----------------------------------------------------------------------------------------

    def handle(self, event: ev.ClusterEvent) -> None:
        """Process an event of a worker or a group; append to ``effects``."""
        match event:
            case ev.GroupFormed() | ev.GroupStopped():
                self._group_answered(event)
            case _:
                self._worker_answered(event)

    def ring(self, now: float) -> None:
        """Act on all timeouts due by ``now``."""
        self.now = now
        while (node := self._drains.pop(now)) is not None:
            self._drain(node)
        for effect, given_up in self._commands.overdue(now):
            if given_up:
                self._give_up(effect)
            else:
                self.count(Recovery.COMMAND_RESENT)
                self.effects.append(effect)

    @property
    def next_s(self) -> float | None:
        """When :meth:`ring` is next due; None if never."""
        times = (self._commands.next_s, self._drains.next_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    # -- weights ---------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> None:
        """Publish a version: groups finish their leases, then need it for new work."""
        self.target = version
        self.serving.idle.clear()
        for worker in self.workers.values():
            adapter = worker.pull is not None and worker.pull.kind is WeightKind.ADAPTER
            self._load(worker, self._forget_pull(worker) if adapter else None)

    def roll_back(self, version: PolicyVersion) -> None:
        """The learner returned to ``version``: later versions and pulls under way are void."""
        self.target = version
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
            self.consider(group)

    def _load(self, worker: Worker, earlier: OpenCommand | None = None) -> None:
        if worker.state is WorkerState.STARTING or worker.version == self.target or worker.pull is not None:
            return
        if worker.leader is not None and self.queue.holds(worker.leader):
            return  # one version makes a whole rollout; `finished` or `pulled` loads it later
        neighbours = (self.workers[name] for name in self.hosts[worker.node].workers)
        source = choose_source(worker, neighbours, self.target, self.plan.publishes)
        if source is None:
            return  # a neighbour is fetching it, and all of the node are loaded after it
        pull = PullWeights(worker.id, worker.epoch, self.target, self.lineage, source.kind, source.peer)
        worker.pull = pull
        patience_s = self.plan.start_s if source.kind is WeightKind.FULL else self.plan.answer_s
        self._send(("pull", worker.id), pull, patience_s, worker.leader)
        if earlier is not None and earlier.patience_s == patience_s:
            self._commands.inherit(("pull", worker.id), earlier)

    def load(self, workers: Iterable[WorkerId]) -> None:
        """Have workers pull the published version, unless their group holds work of another."""
        for name in workers:
            self._load(self.workers[name])

    def _forget_pull(self, worker: Worker) -> OpenCommand | None:
        worker.pull = None
        return self._commands.done(("pull", worker.id))

    def _pulled(self, worker: Worker, event: ev.WeightsPulled | ev.PullFailed) -> None:
        pull = worker.pull
        if event.lineage != self.lineage:
            self.count(Recovery.PULL_STALE_LINEAGE)
            return
        if pull is None or pull.version != event.version:
            self.count(Recovery.ANSWER_STALE)
            self._commands.answered_earlier(("pull", worker.id))
            return
        self._forget_pull(worker)
        if isinstance(event, ev.PullFailed):
            self.count(Recovery.PULL_FAILED)
            self._load(worker)
            return
        worker.based, worker.version = True, event.version
        if worker.state is WorkerState.LOADING:
            self._set_state(worker, WorkerState.FREE)
            self._regroup(worker.node)
        elif worker.leader is not None:
            self.consider(self.groups[worker.leader])
        if pull.kind is WeightKind.FULL:
            self.load(self.hosts[worker.node].workers)
        self._load(worker)

    # -- nodes -----------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        """A node is there: its workers start, if it rolls out."""
        host = self.hosts[node.id] = Host(node)
        if node.rolls_out:
            for gpu in range(node.gpus):
                worker = Worker(WorkerId(f"{node.id}/{gpu}"), node.id, gpu, 0)
                self.workers[worker.id] = worker
                host.workers.append(worker.id)
                self._start(worker)

    def lose(self, node: NodeId) -> None:
        """A node is gone, and with it its workers."""
        self.count(Recovery.NODE_LOST)
        self._remove(node)

    def reassign(self, nodes: Sequence[NodeId], parts: Sequence[Node]) -> None:
        """Nodes of a machine are others from now on, without notices; their workers end."""
        self.count(Recovery.NODE_REASSIGNED)
        for node in nodes:
            self._remove(node)
        for part in parts:
            self.join(part)

    def _remove(self, node: NodeId) -> None:
        host = self.hosts.pop(node)
        self._drains.cancel(node)
        self.noticed.discard(node)
        for leader in list(host.leaders):
            self._dissolve(self.groups[leader], host)
        for name in host.workers:
            self._set_state(self.workers[name], WorkerState.STARTING)
            del self.workers[name]
            self._commands.done(("start", name))
            self._commands.done(("pull", name))

    def notice(self, node: NodeId, deadline_s: float) -> None:
        """A node ends then: it is drained before."""
        self.hosts[node].deadline_s = deadline_s
        self.noticed.add(node)
        drain_s = deadline_s - self.plan.drain_margin_s
        if drain_s <= self.now:
            self._drain(node)
        else:
            self._drains.set(node, drain_s)

    def _drain(self, node: NodeId) -> None:
        host = self.hosts[node]
        self.count(Recovery.NODE_DRAINED)
        host.draining = True
        for leader in list(host.leaders):
            self.stop(self.groups[leader])

    def cancel_notice(self, node: NodeId) -> None:
        """A node stays after all."""
        self.count(Recovery.NOTICE_CANCELLED)
        self._drains.cancel(node)
        self.hosts[node].deadline_s, self.hosts[node].draining = None, False
        self.noticed.discard(node)
        self._regroup(node)

    # -- workers ---------------------------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        worker.epoch = self._epochs[worker.id] = self._epochs.get(worker.id, first_epoch(self.queue.term)) + 1
        worker.based, worker.version, worker.pull, worker.leader = False, None, None, None
        self.queue.limits.started(worker.id)
        self._set_state(worker, WorkerState.STARTING)
        start = StartWorker(worker.id, worker.node, worker.gpu, worker.epoch)
        self._send(("start", worker.id), start, self.plan.start_s)

    def _restart(self, worker: Worker) -> None:
        self.count(Recovery.WORKER_RESTARTED)
        self._commands.done(("start", worker.id))
        self._forget_pull(worker)
        self._leave(worker)
        self._start(worker)
        for name in self.hosts[worker.node].workers:
            neighbour = self.workers[name]
            if neighbour.pull is not None and neighbour.pull.peer == worker.id:
                self.count(Recovery.PULL_LOST_PEER)
                self._forget_pull(neighbour)
        self.load(self.hosts[worker.node].workers)

    def _worker_answered(
        self, event: ev.WorkerStarted | ev.WorkerCrashed | ev.WeightsPulled | ev.PullFailed
    ) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.epoch != event.epoch:
            self.count(Recovery.ANSWER_STALE)
        elif isinstance(event, ev.WorkerCrashed):
            self.count(Recovery.WORKER_CRASHED)
            self._restart(worker)
        elif isinstance(event, ev.WeightsPulled | ev.PullFailed):
            self._pulled(worker, event)
        elif worker.state is WorkerState.STARTING:
            self._commands.done(("start", worker.id))
            self._set_state(worker, WorkerState.LOADING)
            self._load(worker)

    def able(self, host: Host) -> int:
        """Workers of a node that can be in a group."""
        return sum(self.workers[name].state in ABLE for name in host.workers)

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
            self.queue.limits.formed(members, kind, trains=trains)
            host.leaders[group.leader] = None
            self.serving.shares.add(group)
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
            self.count(Recovery.ANSWER_STALE)
        elif isinstance(event, ev.GroupStopped):
            self._dissolve(group, self.hosts[group.node])
            self._regroup(group.node)
            self.load(self.hosts[group.node].workers)
        elif group.state is GroupState.FORMING:
            self.formed(group)

    def formed(self, group: WorkerGroup) -> None:
        """A group is ready for work."""
        self._commands.done(("form", group.leader))
        group.state = GroupState.READY

    def stop(self, group: WorkerGroup, *, silent: bool = False) -> None:
        """Have a group commit what it holds and dissolve; ``silent``: it had its time to finish a step."""
        if group.state is GroupState.STOPPING:
            if silent:
                self._commands.hurry(("stop", group.leader))
            return
        self._commands.done(("form", group.leader))
        self.serving.parts(group)
        group.state, group.capacity = GroupState.STOPPING, 0
        stop = StopGroup(group.leader, group.epoch, group.members)
        self._send(("stop", group.leader), stop, self.plan.answer_s, None if silent else group.leader)

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
        self.count(Recovery.GROUP_LOST_MEMBER)
        if group.state is GroupState.STOPPING:
            stop = StopGroup(group.leader, group.epoch, group.members)
            self._commands.amend(("stop", group.leader), stop)
        else:
            self.stop(group)

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

    # -- GPUs that train -------------------------------------------------------------------------------

    def trainers(self) -> list[WorkerGroup]:
        """Groups on GPUs that train; cached, since every event reads it."""
        if self._trainers is None:
            training = (host for host in self.hosts.values() if host.node.trains)
            self._trainers = [self.groups[name] for host in training for name in host.leaders]
        return self._trainers

    def willing(self, group: WorkerGroup) -> bool:
        """Whether a group waits for work with the target version; none is ready on a node that drains."""
        return (
            group.capacity > 0
            and group.state is GroupState.READY
            and all(self.workers[name].version == self.target for name in group.members)
        )

    def consider(self, group: WorkerGroup) -> None:
        """Put a group on the list of those that may be granted work, or take it off."""
        if self.willing(group) and not (group.trains and self.serving.trainer_budget <= 0):
            self.serving.idle.add(group)
        else:
            self.serving.idle.remove(group.leader)

    # -- commands --------------------------------------------------------------------------------------

    def _send(
        self, key: Key, effect: CommandEffect, patience_s: float, leader: WorkerId | None = None
    ) -> None:
        """``leader``: of the group that may have to finish a step first."""
        self._commands.send(key, effect, patience_s, self.now, self.queue.limits.limit_s(leader))
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

    def count(self, recovery: Recovery) -> None:
        """Count a recovery."""
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
        self.serving.shares.check([*self.groups.values()])
        self.serving.idle.check()
        assert all(self.groups[group.leader] is group for group in self.serving.idle)
        trainers = [group.leader for group in self.groups.values() if group.trains]
        assert sorted(group.leader for group in self.trainers()) == sorted(trainers)
        assert {name for name in trainers if self.queue.holds(name)} <= self.serving.trainers_served.keys()
        self._commands.check()
