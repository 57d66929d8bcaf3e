"""Previews made in idle time: what they may take, and when they give way. Part of the cluster.

Invariants
    1. A group that holds work which the iteration waits for is given no previews, nor is a GPU that trains:
       denoised beside them, that work would take longer.
    2. While such work waits and nobody can take it, as many groups as it takes were told to give back the
       previews that they hold, as far as there are any. A group that does not pull in time is not counted on.

Where exploration is on the critical path, the iteration waits for previews too, and none of this holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotlight.core.queue import PullQueue
from spotlight.core.types import Lease, Purpose, WorkerId


@dataclass(slots=True)
class SpareTime:
    """See the module's docstring.

    Attributes:
        explores: previews are made in idle time.
        patience_s: how long a group that was told to give way is counted on.
    """

    queue: PullQueue
    patience_s: float
    explores: bool = False
    _yielding: dict[WorkerId, float] = field(default_factory=dict)

    # -- what there is to do ---------------------------------------------------------------------------

    @property
    def needed(self) -> int:
        """Rollouts outstanding that the iteration waits for."""
        previews = self.queue.outstanding_for(Purpose.EXPLORE) if self.explores else 0
        return self.queue.outstanding - previews

    @property
    def pressing(self) -> int:
        """Those of them that nobody holds."""
        previews = self.queue.waiting_for(Purpose.EXPLORE) if self.explores else 0
        return self.queue.waiting - previews

    @property
    def contended(self) -> int:
        """Rollouts outstanding of the sort that is pulled next, needed or previews; or of what there is."""
        needed = self.needed
        previews_next = self.queue.waiting and not self.pressing
        return self.queue.outstanding - needed if previews_next or not needed else needed

    # -- who may take it -------------------------------------------------------------------------------

    def trainers_share(self) -> bool:
        """Whether GPUs that train may take what is pulled next, while the learner idles."""
        return not self.explores or self.pressing > 0

    def room(self, leader: WorkerId, trains: bool, share: int) -> int:
        """How much of what is pulled next a group may take; of everything it holds at most ``share``."""
        needed = self.queue.count_held_by(leader, previews=not self.explores)
        if self.pressing:
            return share - needed
        if trains or needed:
            return 0
        return share - self.queue.count_held_by(leader)

    # -- giving way ------------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether better work waits while groups hold previews."""
        return self.explores and self.pressing > 0 and self.queue.previews_held > 0

    def pulled(self, leader: WorkerId) -> None:
        """A group asks for work, or is no more."""
        self._yielding.pop(leader, None)

    def give_way(self, groups: int, able: set[WorkerId], now: float) -> list[Lease]:
        """Requeue previews that some groups hold, for better work that needs so many groups.

        Args:
            able: leaders of groups that can stop and pull.

        Returns:
            The leases that do not count any more.
        """
        groups -= sum(told_s > now - self.patience_s for told_s in self._yielding.values())
        given: list[Lease] = []
        for lease in self.queue.previews() if groups > 0 else ():
            if lease.worker not in able:
                continue
            groups -= lease.worker not in self._yielding
            if groups < 0:
                break
            self._yielding[lease.worker] = now
            given.append(lease)
        for lease in given:
            self.queue.renounce(lease.id)
        return given

    def crowded_out(self, leader: WorkerId) -> list[Lease]:
        """A group got better work: requeue the previews that it holds besides. Returns their leases."""
        given = [lease for lease in self.queue.previews() if lease.worker == leader] if self.explores else []
        for lease in given:
            self.queue.renounce(lease.id)
        return given
