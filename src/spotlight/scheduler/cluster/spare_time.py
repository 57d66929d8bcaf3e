"""Previews made in idle time: who may make them, and when they are preempted. Part of the cluster.

Invariants
    1. A group that holds work which the iteration waits for is given no previews, nor is a GPU that trains:
       denoised beside them, that work would take longer.
    2. While such work waits and nobody can take it, as many groups as it takes lose the previews
       that they hold, as far as there are any. A group that does not pull in time is not counted on.

Where exploration is on the critical path, the iteration waits for previews too, and none of this holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotlight.scheduler.queue import PullQueue, WorkClass
from spotlight.scheduler.types import Lease, Purpose, WorkerId


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to do.

    Attributes:
        needed: rollouts outstanding but previews made in idle time.
        pressing: those of them that nobody holds.
        contended: rollouts outstanding of the sort that is pulled next, needed or ``previews``.
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
        patience_s: how long a group whose previews were preempted is expected to pull.
    """

    queue: PullQueue
    patience_s: float
    explores: bool = False
    _yielding: dict[WorkerId, float] = field(default_factory=dict)

    # -- what there is to do ---------------------------------------------------------------------------

    def demand(self) -> Demand:
        """What waits now, and of how much."""
        queue = self.queue
        previews = queue.outstanding_for(Purpose.EXPLORE) if self.explores else 0
        needed = queue.outstanding - previews
        pressing = queue.waiting - (queue.waiting_for(Purpose.EXPLORE) if self.explores else 0)
        previews_next = previews > 0 and not pressing and (not needed or queue.waiting > 0)
        if previews_next:
            return Demand(needed, pressing, previews, True)
        # Rollouts of the next iteration are shared once nothing of this one waits.
        first = queue.waiting_of(WorkClass.TRAIN, WorkClass.EVAL) > 0
        return Demand(needed, pressing, needed - queue.outstanding_of(WorkClass.NEXT) * first, False)

    # -- who may take it -------------------------------------------------------------------------------

    def room(self, leader: WorkerId, trains: bool, share: int, demand: Demand) -> int:
        """How much of what is pulled next a group may take: it then holds ``share`` at most."""
        if demand.previews and (trains or self.queue.count_held_by(leader, previews=False)):
            return 0
        counts_all = demand.previews or not self.explores
        return share - self.queue.count_held_by(leader, previews=counts_all)

    # -- preemption -----------------------------------------------------------------------------------

    def pulled(self, leader: WorkerId) -> None:
        """A group pulls, or was dissolved: it is not waited for."""
        self._yielding.pop(leader, None)

    def preempt(self, groups: int, able: Callable[[WorkerId], bool], now: float) -> list[Lease]:
        """Requeue previews that some groups hold, for better work that needs so many groups.

        Args:
            able: whether a leader's group can stop and pull.

        Returns:
            The leases that do not count any more.
        """
        groups -= self.awaited(now)
        if groups <= 0:
            return []
        previews = self.queue.previews()
        leaders = list(dict.fromkeys(lease.worker for lease in previews if able(lease.worker)))[:groups]
        given = [
            lease for lease in previews if lease.worker in leaders
        ]  # all that it holds, or it cannot pull
        self._yielding |= dict.fromkeys(leaders, now)
        for lease in given:
            self.queue.renounce(lease.id)
        return given

    def awaited(self, now: float) -> int:
        """Groups whose previews were preempted, and that are expected to pull."""
        return sum(since_s > now - self.patience_s for since_s in self._yielding.values())

    def preempt_beside(self, leader: WorkerId) -> list[Lease]:
        """A group got better work: requeue the previews that it holds besides. Returns their leases."""
        if not self.explores:
            return []
        held = [lease for lease, _ in self.queue.held_by(leader)]
        given = [lease for lease in held if self.queue.purpose_of(lease.id) is Purpose.EXPLORE]
        for lease in given:
            self.queue.renounce(lease.id)
        return given
