"""How much of the work that waits a group gets. Part of the cluster.

Each gets at most its share of what is outstanding, so that all are done at about the same time: a group on a
slow GPU gets less, and near the end nothing, if faster ones that can work have it all done before it had one
more rollout done. Work is still pulled: a share is a bound, not an assignment.

Invariants
    1. What is granted to groups on GPUs that train is what an optimizer step waits for, and no more of it
       than the trainers' rollout budget.
    2. Of work for which groups compete, each holds its share at most; none competes for the trainers' budget.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.cluster.members import GroupState, WorkerGroup
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.spare_time import Demand, SpareTime
from spotlight.scheduler.effects import GrantLease
from spotlight.scheduler.queue import PullQueue, WorkClass
from spotlight.scheduler.types import Filler, GroupKind, WorkerId

Able: TypeAlias = Callable[[], Mapping[GroupKind, int]]
"""How many groups of each kind can work."""

_FEW = 4


@dataclass(slots=True)
class FairShares:
    """Groups that share the work, those that still form too, by whether they train and by kind."""

    pace: Pace
    sharers: Counter[tuple[bool, GroupKind]] = field(default_factory=Counter)

    def count(self, group: WorkerGroup, change: int) -> None:
        """Add a group to those that share, or remove it (``change`` -1)."""
        self.sharers[group.trains, group.kind] += change

    def of(self, group: WorkerGroup, rollouts: int, *, trainers: bool) -> int:
        """A group's share of ``rollouts``; ``trainers``: GPUs that train share too."""
        speeds = self._speeds()
        all_speeds = sum(
            speeds[kind] * count for (trains, kind), count in self.sharers.items() if trainers or not trains
        )
        speed = speeds[group.kind]
        return math.ceil(rollouts * speed / max(all_speeds, speed))

    def is_sooner_done(self, group: WorkerGroup, share: int, rollouts: int, able: Able) -> bool:
        """Whether faster groups have done all that is left, before ``group`` has done its share.

        Args:
            share: of ``rollouts``; where it is more than a few, one of them more or less does not matter.
            able: groups that work, or wait for work: others may never come. Asked only where it matters.
        """
        if not 0 < share <= _FEW:
            return False
        speeds = self._speeds()
        speed = speeds[group.kind]
        if speed >= max(speeds.values()):
            return False
        done = sum(
            math.floor(share * speeds[kind] / speed) * count
            for kind, count in able().items()
            if speeds.get(kind, 0.0) > speed
        )
        return done > rollouts - share

    def _speeds(self) -> dict[GroupKind, float]:
        """Of all kinds of groups, relative to the first; 1 until a kind's pace is known."""
        kinds = list(dict.fromkeys(kind for _, kind in self.sharers))
        times_s = [self.pace.step_s(kind) for kind in kinds]
        return {
            kind: times_s[0] / each_s if each_s and times_s[0] else 1.0
            for kind, each_s in zip(kinds, times_s, strict=True)
        }

    def check(self, groups: list[WorkerGroup]) -> None:
        """Assert that exactly these groups share."""
        assert +self.sharers == Counter((group.trains, group.kind) for group in groups)


_FILLER = {WorkClass.NEXT: Filler.NEXT, WorkClass.EXPLORE: Filler.EXPLORATION}


@dataclass(slots=True)
class Serving:
    """See the module's docstring.

    Attributes:
        spare: previews beside other work.
        pace: how long groups take.
        idle: leaders of groups that wait for work and may have some.
        trainer_budget: pull so many rollouts, the groups on GPUs that train.
        trainers_explore: these may be previews.
        switch_s: that they take to turn from training to rollouts, or back.
        turned: workers of those that were given rollouts since they trained.
    """

    queue: PullQueue
    spare: SpareTime
    pace: Pace = field(default_factory=Pace)
    idle: OrderedDict[WorkerId, None] = field(default_factory=OrderedDict)
    trainer_budget: float = math.inf
    trainers_explore: bool = False
    switch_s: float = 0.0
    turned: set[WorkerId] = field(default_factory=set)
    shares: FairShares = field(init=False)
    _each_trainer: float = math.inf

    def __post_init__(self) -> None:
        self.shares = FairShares(self.pace)

    # -- groups ----------------------------------------------------------------------------------------

    def parts(self, group: WorkerGroup) -> None:
        """A group takes no more work."""
        self.shares.count(group, -1)
        self.idle.pop(group.leader, None)
        self.spare.pulled(group.leader)

    def dissolved(self, group: WorkerGroup) -> None:
        """A group was dissolved."""
        if group.state is not GroupState.STOPPING:
            self.parts(group)
        self.pace.forget(group.leader)

    # -- work ------------------------------------------------------------------------------------------

    def room(self, group: WorkerGroup, demand: Demand, able: Able) -> int:
        """How much of what is pulled next a group may take; ``able``: groups that work, or wait for work."""
        if group.trains and not self._suits_trainers():
            return 0
        if group.trains and math.isfinite(self.trainer_budget):
            share = demand.contended  # of which they take what was planned for them
        else:
            share = self.share(group, demand)
            if self.shares.is_sooner_done(group, share, demand.contended, able):
                share -= 1
        trains = group.trains and self.spare.explores
        return self.spare.room(group.leader, trains, share, demand)

    def competes(self, group: WorkerGroup) -> bool:
        """Whether a group may take of what is pulled next: not where trainers have work planned for them."""
        return not group.trains or (math.isinf(self.trainer_budget) and self._suits_trainers())

    def share(self, group: WorkerGroup, demand: Demand) -> int:
        """A group's share of what is pulled next."""
        # A few rollouts for the trainers are taken from what is left, not from anybody's share.
        trainers = not demand.previews and math.isinf(self.trainer_budget)
        return self.shares.of(group, demand.contended, trainers=trainers)

    def grant(self, group: WorkerGroup, rollouts: int, now: float) -> GrantLease:
        """Lease up to so many rollouts to a group that waits for them."""
        limit, value = min(group.capacity, rollouts), self.queue.best
        if group.trains:
            limit = int(min(limit, self._each_trainer, self.trainer_budget))
        granted = self.queue.pull(group.leader, limit, now)
        assert granted is not None, "rollouts wait, and the leader was admitted"
        assert value is not None, "rollouts wait"
        lease, taken, resume = granted
        group.capacity = 0
        if group.trains:
            self.trainer_budget -= len(taken)
        steps = sum(rollout.steps - resume.get(rollout.id, 0) for rollout in taken)
        filler = Filler.TRAINERS if group.trains else _FILLER.get(value)
        fills = filler is not Filler.EXPLORATION or self.spare.explores
        begins_s = now + self._turn(group)
        self.pace.begin(lease.id, group.leader, group.kind, steps, filler, begins_s, fills=fills)
        return GrantLease(*granted)

    # -- GPUs that train -------------------------------------------------------------------------------

    def set_trainer_budget(self, rollouts: float, trainers: Sequence[WorkerGroup], *, explore: bool) -> bool:
        """How many rollouts GPUs that train may pull now; returns whether that lets some, or stops all."""
        changed = (rollouts > 0) != (self.trainer_budget > 0)
        self.trainer_budget, self.trainers_explore = rollouts, explore
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

    def _turn(self, group: WorkerGroup) -> float:
        """A group is given work: seconds until it begins."""
        if not group.trains or self.turned.issuperset(group.members):
            return 0.0
        self.turned.update(group.members)
        return self.switch_s

    def _suits_trainers(self) -> bool:
        """Whether what would be pulled now is worth a learner's time."""
        best = self.queue.best
        if self.trainer_budget <= 0 or best is None:
            return False
        return best in (WorkClass.TRAIN, WorkClass.EVAL) or (
            best is WorkClass.EXPLORE and self.trainers_explore
        )
