"""Which waiting group gets which work. Part of the controller.

A group pulls and is granted at most its share (:mod:`spotlight.scheduler.cluster.sharing`). At the tail of a
batch, groups that wait merge with their neighbours. Idle-time previews are preempted for other work.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from functools import cache

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.members import GroupState, Host, WorkerGroup
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.cluster.sharing import Able
from spotlight.scheduler.cluster.spare_time import Demand
from spotlight.scheduler.effects import AbandonLease, GrantLease
from spotlight.scheduler.types import GroupKind, Lease, LeaseId, Purpose, WorkerId


class Dispatcher:
    """See the module's docstring."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.queue, self.serving = cluster, cluster.queue, cluster.serving
        self.spare, self.pace = cluster.spare, cluster.pace

    def pulled(self, event: ev.GroupPulled) -> None:
        """A group asks for work; :meth:`serve` grants it."""
        cluster = self.cluster
        group = cluster.groups.get(event.leader)
        if group is None or group.epoch != event.epoch or group.state is GroupState.STOPPING:
            cluster.count(Recovery.ANSWER_STALE)
            return
        if group.state is GroupState.FORMING:
            cluster.count(Recovery.FORMED_BY_PULL)
            cluster.formed(group)
        for lease, _ in self.queue.held_by(group.leader):
            if lease.id in event.holds:
                continue
            if event.seen < lease.id:
                cluster.count(Recovery.GRANT_RESENT)
                cluster.effects.append(GrantLease(*self.queue.granted(lease.id)))
                return
            cluster.count(Recovery.LEASE_RENOUNCED)
            self.queue.renounce(lease.id)
            self.pace.cut(lease.id, cluster.now)
        if not event.holds:
            self.queue.limits.works_on(group.leader, 0)
        group.capacity = event.capacity
        self.spare.pulled(group.leader)
        cluster.load(group.members)
        cluster.consider(group)
        demand = self.spare.demand()
        if not demand.pressing and (demand.needed or not self.queue.waiting):
            # Tail of the batch: a busy neighbour finishes sooner together with this group's workers.
            degree = cluster.degree_for(demand.needed or demand.contended)
            host, steps = cluster.hosts[group.node], cluster.plan.tail_steps
            self._grow(host, degree, steps, over_previews=demand.needed > 0)

    def finished(self, leader: WorkerId, lease: LeaseId) -> None:
        """A group finished rollouts of a lease."""
        self.queue.limits.works_on(leader, self.queue.count_held_by(leader))
        if not self.queue.is_open(lease):
            self.pace.end(lease, self.cluster.now)
            if (group := self.cluster.groups.get(leader)) is not None:
                self.cluster.load(group.members)

    def failed(self, lease: LeaseId) -> None:
        """A rollout failed. If it was the lease's last, no pace is measured."""
        if not self.queue.is_open(lease):
            self.pace.cut(lease, self.cluster.now)

    def serve(self) -> None:
        """Grant waiting work to waiting groups, each up to its share."""
        if not self.queue.waiting:
            return
        if self.serving.idle:
            self._grant()
        self._preempt_previews()

    def _grant(self) -> None:
        """Groups that hold their full share leave the rest to others and stay idle until shares change."""
        idle, suits, able = self.serving.idle, self.serving.suits_trainers(), cache(self._able)
        demand = self.spare.demand()
        wanted = self.cluster.degree_for(demand.contended)
        # Hundreds of trainers may wait, at most events: without work for them they are passed over unseen.
        unseen = not suits and idle.trainers_have(wanted)
        turns, place = deque(idle.others.values() if unseen else idle), 0
        while turns:
            group = turns.popleft()
            if group.leader not in idle:
                continue  # it was stopped to form a larger one
            place = idle.place(group)
            if not self._offer(group, demand, wanted, able):
                continue
            then, demand = demand, self.spare.demand()
            if demand.previews != then.previews:
                wanted = self.cluster.degree_for(demand.contended)
                if unseen and not idle.trainers_have(wanted):
                    unseen, turns = False, deque(idle.behind(place))
            if not self.queue.waiting:
                idle.turn(place)
                break

    def _offer(self, group: WorkerGroup, demand: Demand, wanted: int, able: Able) -> bool:
        """Grant a waiting group work, or stop it for another degree; returns whether it waits no more."""
        cluster, serving = self.cluster, self.serving
        room = serving.room(group, demand, able)
        if len(group.members) > wanted and not self.queue.count_held_by(group.leader):
            cluster.count(Recovery.TAIL_ENDED)
            cluster.stop(group)
            return True
        if len(group.members) < wanted and self._grow(
            cluster.hosts[group.node], wanted, 0, over_previews=not demand.previews
        ):
            return True
        if room <= 0:
            return False
        serving.idle.remove(group.leader)
        grant = serving.grant(group, room, cluster.now)
        if grant.resume:
            cluster.count(Recovery.RESUMED)
        cluster.effects.append(grant)
        self._abandon_previews([] if demand.previews else self.spare.preempt_beside(group.leader))
        return True

    def _able(self) -> Counter[GroupKind]:
        groups = (group for group in self.cluster.groups.values() if self.serving.competes(group))
        return Counter(
            group.kind for group in groups if self.queue.holds(group.leader) or self.cluster.willing(group)
        )

    def _preempt_previews(self) -> None:
        previews = self.spare.explores and self.queue.previews_held
        if not (previews and (demand := self.spare.demand()).pressing):
            return
        groups, share, ready = self.cluster.groups, 1, GroupState.READY
        for kind in +self.serving.shares.present:  # groups of a kind have equal shares
            first = next((one for one in groups.values() if one.kind == kind and one.state is ready), None)
            share = max(share, self.serving.share(first, demand) if first else 1)

        def able(leader: WorkerId) -> bool:
            return leader in groups and groups[leader].state is ready

        given = self.spare.preempt(math.ceil(demand.pressing / share), able, self.cluster.now)
        self._abandon_previews(given)

    @property
    def preview_capacity(self) -> int:
        """Previews that waiting groups would take at once."""
        able = self.serving.idle.others.values()
        return sum(g.capacity for g in able if not self.queue.count_held_by(g.leader, previews=False))

    def preview_workers(self, *, trainers: bool) -> int:
        """Workers that can make previews; ``trainers``: also those on GPUs that train."""
        able = (each for each in self.cluster.groups.values() if each.state is not GroupState.STOPPING)
        return sum(len(each.members) for each in able if trainers or not each.trains)

    def _abandon_previews(self, leases: list[Lease]) -> None:
        """Have the holders of requeued previews stop at the next step boundary and pull."""
        for lease in leases:
            self.cluster.count(Recovery.PREVIEWS_YIELDED)
            self.pace.cut(lease.id, self.cluster.now)
            self.abandon(lease.worker, lease.epoch, lease.id)

    # -- leases that end -----------------------------------------------------------------------------

    def suspect(self, lease: Lease) -> None:
        """A lease expired: stop its group; if it does not answer, its workers are restarted."""
        group = self.cluster.groups.get(lease.worker)
        if group is not None and group.epoch == lease.epoch:
            self.cluster.count(Recovery.LEASE_EXPIRED)
            self.cluster.stop(group, silent=True)

    def revoked(self, lease: Lease) -> None:
        """Tell the holder of a revoked lease, if it is in this cluster."""
        self.pace.cut(lease.id, self.cluster.now)
        if lease.worker in self.cluster.workers:
            self.abandon(lease.worker, lease.epoch, lease.id)

    def abandon(self, leader: WorkerId, epoch: int, lease: LeaseId) -> None:
        """Tell a lease's holder that the lease no longer counts."""
        self.cluster.count(Recovery.LEASE_ABANDONED)
        self.cluster.effects.append(AbandonLease(leader, epoch, lease))

    # -- GPUs that train -------------------------------------------------------------------------------

    def set_trainer_budget(self, rollouts: float, *, explore: bool) -> None:
        """Set how many rollouts GPUs that train may pull now, and whether previews too."""
        trainers = self.cluster.trainers()
        if self.serving.set_trainer_budget(rollouts, trainers, explore=explore):
            for group in trainers:
                self.cluster.consider(group)

    @property
    def trainers_work(self) -> bool:
        """Whether GPUs that train are rolling out and so cannot train."""
        served = self.serving.trainers_served
        while served:  # one that holds no work any more is looked at once
            leader, group = next(iter(served.items()))
            if self.queue.holds(leader) and self.cluster.groups.get(leader) is group:
                return True
            del served[leader]
        return False

    # -- larger groups ---------------------------------------------------------------------------------

    def _grow(self, host: Host, degree: int, steps_held: int, *, over_previews: bool) -> bool:
        """Stop a node's groups to form larger ones; returns whether it did.

        Args:
            steps_held: 0: only if no group works; else only if some lease has more steps than this to go.
            over_previews: idle-time previews do not count as work.
        """
        cluster = self.cluster
        groups = [cluster.groups[leader] for leader in host.leaders]
        if any(self.queue.holds_other_than(other.leader, cluster.target) for other in groups):
            return False  # rollouts of an older version can only be finished by their holder
        held = (one for other in groups for one in self.queue.held_by(other.leader))
        if over_previews and self.spare.explores:
            held = (one for one in held if self.queue.purpose_of(one[0].id) is not Purpose.EXPLORE)
        steps = max((steps for _, steps in held), default=0)
        if (
            cluster.able(host) < degree
            or any(len(other.members) >= degree or other.state is not GroupState.READY for other in groups)
            or (steps > 0 if steps_held == 0 else steps <= steps_held)
        ):
            return False
        cluster.count(Recovery.TAIL_REFORMED)
        for other in groups:
            cluster.stop(other)
        return True
