"""Idle-time previews: which groups may make them, and when they are preempted. Part of the cluster.

Invariants
    1. Neither a group that holds work the iteration waits for nor a GPU that trains gets previews: batched
       with them, that work would be slower.
    2. While such work waits and no group can take it, enough groups lose their previews to take it. A group
       that does not pull in time is not counted on.

Neither holds with exploration on the critical path: there the iteration waits for previews too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.queue import PullQueue, WorkClass
from spotlight.scheduler.types import Lease, Purpose, WorkerId


@dataclass(frozen=True, slots=True)
class Demand:
    """Outstanding work.

    Attributes:
        needed: rollouts outstanding, without idle-time previews.
        pressing: those of ``needed`` not leased.
        contended: rollouts outstanding of the kind pulled next.
        previews: that kind is previews.
    """

    needed: int
    pressing: int
    contended: int
    previews: bool


@dataclass(slots=True)
class SpareTime:
    """See the module's docstring.

    Attributes:
        explores: previews are made in idle time.
        patience_s: how long a group is expected to pull after its previews were preempted.
    """

    queue: PullQueue
    patience_s: float
    explores: bool = False
    _yielding: dict[WorkerId, float] = field(default_factory=dict)

    # -- what there is to do ---------------------------------------------------------------------------

    def demand(self) -> Demand:
        """Outstanding work now."""
        queue = self.queue
        previews = queue.outstanding_for(Purpose.EXPLORE) if self.explores else 0
        needed = queue.outstanding - previews
        pressing = queue.waiting - (queue.waiting_of(WorkClass.EXPLORE) if self.explores else 0)
        previews_next = previews > 0 and not pressing and (not needed or queue.waiting > 0)
        if previews_next:
            return Demand(needed, pressing, previews, True)
        # Rollouts of the next iteration are contended only once nothing of this one waits.
        first = queue.waiting_of(WorkClass.TRAIN, WorkClass.EVAL) > 0
        return Demand(needed, pressing, needed - queue.outstanding_of(WorkClass.NEXT) * first, False)

    # -- who may take it -------------------------------------------------------------------------------

    def room(self, leader: WorkerId, trains: bool, share: int, demand: Demand) -> int:
        """How many of the next rollouts a group may take to hold at most ``share``."""
        if demand.previews and (trains or self.queue.count_held_by(leader, previews=False)):
            return 0
        counts_all = demand.previews or not self.explores
        return share - self.queue.count_held_by(leader, previews=counts_all)

    # -- preemption -----------------------------------------------------------------------------------

    def pulled(self, leader: WorkerId) -> None:
        """A group pulled or was dissolved: stop waiting for its pull."""
        self._yielding.pop(leader, None)

    def preempt(self, groups: int, able: Callable[[WorkerId], bool], now: float) -> list[Lease]:
        """Requeue the previews of some groups, so that ``groups`` of them can take better work.

        Args:
            able: whether a leader's group can stop and pull.

        Returns:
            The revoked leases.
        """
        groups -= self.awaited(now)
        if groups <= 0:
            return []
        previews = self.queue.previews()
        leaders = list(dict.fromkeys(lease.worker for lease in previews if able(lease.worker)))[:groups]
        # All of a group's previews: it pulls only when it holds none.
        given = [lease for lease in previews if lease.worker in leaders]
        self._yielding |= dict.fromkeys(leaders, now)
        for lease in given:
            self.queue.renounce(lease.id)
        return given

    def awaited(self, now: float) -> int:
        """Groups expected to pull soon because their previews were preempted."""
        return sum(since_s > now - self.patience_s for since_s in self._yielding.values())

    def preempt_beside(self, leader: WorkerId) -> list[Lease]:
        """A group got better work: requeue its previews. Returns their leases."""
        if not self.explores:
            return []
        held = [lease for lease, _ in self.queue.held_by(leader)]
        given = [lease for lease in held if self.queue.purpose_of(lease.id) is Purpose.EXPLORE]
        for lease in given:
            self.queue.renounce(lease.id)
        return given
