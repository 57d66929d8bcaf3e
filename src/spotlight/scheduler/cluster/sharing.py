"""How much of the work that waits a group gets. Part of the cluster.

Invariants
    1. What is granted to groups on GPUs that train is what an optimizer step waits for, and no more of it
       than the controller lets them take.
    2. Of work for which groups compete, each holds its share at most; what was planned for GPUs that train is
       not competed for.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.members import Group, GroupState
from spotlight.scheduler.cluster.shares import Able, Shares
from spotlight.scheduler.cluster.spare_time import Demand, SpareTime
from spotlight.scheduler.effects import GrantLease
from spotlight.scheduler.overlap.pace import Pace
from spotlight.scheduler.queue import PullQueue, Value
from spotlight.scheduler.types import Filler, WorkerId

_FILLER = {Value.NEXT: Filler.NEXT, Value.EXPLORE: Filler.EXPLORATION}


@dataclass(slots=True)
class Serving:
    """See the module's docstring.

    Attributes:
        spare: previews beside other work.
        pace: how long groups take.
        idle: leaders of groups that wait for work and may have some.
        trainers_may: pull so many rollouts, the groups on GPUs that train.
        trainers_explore: these may be previews.
        switch_s: that they take to turn from training to rollouts, or back.
        turned: workers of those that were given rollouts since they trained.
    """

    queue: PullQueue
    spare: SpareTime
    pace: Pace = field(default_factory=Pace)
    idle: OrderedDict[WorkerId, None] = field(default_factory=OrderedDict)
    trainers_may: float = math.inf
    trainers_explore: bool = False
    switch_s: float = 0.0
    turned: set[WorkerId] = field(default_factory=set)
    shares: Shares = field(init=False)
    _each_trainer: float = math.inf

    def __post_init__(self) -> None:
        self.shares = Shares(self.pace)

    # -- groups ----------------------------------------------------------------------------------------

    def parts(self, group: Group) -> None:
        """A group takes no more work."""
        self.shares.count(group, -1)
        self.idle.pop(group.leader, None)
        self.spare.pulled(group.leader)

    def dissolved(self, group: Group) -> None:
        """A group is no more."""
        if group.state is not GroupState.STOPPING:
            self.parts(group)
        self.pace.forget(group.leader)

    # -- work ------------------------------------------------------------------------------------------

    def room(self, group: Group, demand: Demand, able: Able) -> int:
        """How much of what is pulled next a group may take; ``able``: groups that work, or wait for work."""
        if group.trains and not self._suits_trainers():
            return 0
        if group.trains and math.isfinite(self.trainers_may):
            share = demand.contended  # of which they take what was planned for them
        else:
            share = self.share(group, demand)
            if self.shares.is_sooner_done(group, share, demand.contended, able):
                share -= 1
        trains = group.trains and self.spare.explores
        return self.spare.room(group.leader, trains, share, demand)

    def competes(self, group: Group) -> bool:
        """Whether a group may take of what is pulled next: not where trainers have work planned for them."""
        return not group.trains or (math.isinf(self.trainers_may) and self._suits_trainers())

    def share(self, group: Group, demand: Demand) -> int:
        """A group's share of what is pulled next."""
        # A few rollouts for the trainers are taken from what is left, not from anybody's share.
        trainers = not demand.previews and math.isinf(self.trainers_may)
        return self.shares.of(group, demand.contended, trainers=trainers)

    def grant(self, group: Group, rollouts: int, now: float) -> GrantLease:
        """Lease up to so many rollouts to a group that waits for them."""
        limit, value = min(group.capacity, rollouts), self.queue.best
        if group.trains:
            limit = int(min(limit, self._each_trainer, self.trainers_may))
        granted = self.queue.pull(group.leader, limit, now)
        assert granted is not None, "rollouts wait, and the leader was admitted"
        assert value is not None, "rollouts wait"
        lease, taken, resume = granted
        group.capacity = 0
        if group.trains:
            self.trainers_may -= len(taken)
        steps = sum(rollout.steps - resume.get(rollout.id, 0) for rollout in taken)
        filler = Filler.TRAINERS if group.trains else _FILLER.get(value)
        self.pace.begin(lease.id, group.leader, group.kind, steps, filler, now + self._turn(group))
        return GrantLease(*granted)

    # -- GPUs that train -------------------------------------------------------------------------------

    def let_trainers(self, rollouts: float, trainers: Sequence[Group], *, explore: bool) -> bool:
        """How many rollouts GPUs that train may pull now; returns whether that lets some, or stops all."""
        changed = (rollouts > 0) != (self.trainers_may > 0)
        self.trainers_may, self.trainers_explore = rollouts, explore
        self._each_trainer = rollouts
        if rollouts and math.isfinite(rollouts):
            ready = sum(group.state is GroupState.READY for group in trainers)
            self._each_trainer = math.ceil(rollouts / max(1, ready))
        return changed

    def learner_turns(self) -> float:
        """The learner is given work: seconds until its GPUs can train."""
        turn_s = self.switch_s if self.turned else 0.0
        self.turned.clear()
        return turn_s

    def _turn(self, group: Group) -> float:
        """A group is given work: seconds until it begins."""
        if not group.trains or self.turned.issuperset(group.members):
            return 0.0
        self.turned.update(group.members)
        return self.switch_s

    def _suits_trainers(self) -> bool:
        """Whether what would be pulled now is worth a learner's time."""
        best = self.queue.best
        if self.trainers_may <= 0 or best is None:
            return False
        return best in (Value.TRAIN, Value.EVAL) or (best is Value.EXPLORE and self.trainers_explore)
