"""How much of the waiting work a group gets. Part of the cluster.

Shares let all groups finish at about the same time; near the end a slow group gets nothing if faster ones
would finish everything before its next rollout. A share is a bound, not an assignment.

Invariants
    1. Groups on GPUs that train are granted only what an optimizer step waits for, within the trainers'
       rollout budget.
    2. Each group holds at most its share of the contended work; the trainers' budget is not contended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.cluster.members import GroupState, IdleGroups, WorkerGroup
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.queue import PullQueue, WorkClass
from spotlight.scheduler.cluster.spare_time import Demand, SpareTime
from spotlight.scheduler.effects import GrantLease
from spotlight.scheduler.types import Filler, GroupKind, WorkerId

Able: TypeAlias = Callable[[], Mapping[GroupKind, int]]
"""Number of groups of each kind that can work."""

_FEW = 4


@dataclass(slots=True)
class FairShares:
    """Groups that share the work, forming ones included, counted by (trains, kind).

    Attributes:
        present: all groups by kind, stopping ones too.
    """

    pace: Pace
    sharers: Counter[tuple[bool, GroupKind]] = field(default_factory=Counter)
    present: Counter[GroupKind] = field(default_factory=Counter)

    def add(self, group: WorkerGroup) -> None:
        """A group forms."""
        self.sharers[group.trains, group.kind] += 1
        self.present[group.kind] += 1

    def of(self, group: WorkerGroup, rollouts: int, *, trainers: bool) -> int:
        """A group's share of ``rollouts``; ``trainers``: GPUs that train share too."""
        speeds = self._speeds()
        all_speeds = sum(
            speeds[kind] * count for (trains, kind), count in self.sharers.items() if trainers or not trains
        )
        speed = speeds[group.kind]
        return math.ceil(rollouts * speed / max(all_speeds, speed))

    def is_sooner_done(self, group: WorkerGroup, share: int, rollouts: int, able: Able) -> bool:
        """Whether faster groups would finish everything left before ``group`` finishes its share.

        Args:
            share: of ``rollouts``; False for large shares, where one rollout hardly matters.
            able: groups that work or wait for work; called only if all groups together would.
        """
        if not 0 < share <= _FEW:
            return False
        speeds = self._speeds()
        speed = speeds[group.kind]
        each = {kind: math.floor(share * its / speed) for kind, its in speeds.items() if its > speed}

        def done(groups: Mapping[GroupKind, int]) -> int:
            return sum(number * groups.get(kind, 0) for kind, number in each.items())

        return bool(each) and done(self.present) > rollouts - share and done(able()) > rollouts - share

    def _speeds(self) -> dict[GroupKind, float]:
        """Relative to the first kind; 1 while a pace is unknown."""
        kinds = list(dict.fromkeys(kind for _, kind in self.sharers))
        times_s = [self.pace.step_s(kind) for kind in kinds]
        return {
            kind: times_s[0] / each_s if each_s and times_s[0] else 1.0
            for kind, each_s in zip(kinds, times_s, strict=True)
        }

    def check(self, groups: list[WorkerGroup]) -> None:
        """Assert that exactly these groups are there, and those that do not stop share."""
        sharing = [group for group in groups if group.state is not GroupState.STOPPING]
        assert +self.sharers == Counter((group.trains, group.kind) for group in sharing)
        assert +self.present == Counter(group.kind for group in groups)


_FILLER = {WorkClass.NEXT: Filler.NEXT, WorkClass.EXPLORE: Filler.EXPLORATION}


@dataclass(slots=True)
class Serving:
    """See the module's docstring.

    Attributes:
        idle: groups that wait for work and may have some.
        trainer_budget: rollouts that groups on GPUs that train may still pull.
        trainers_explore: these may be previews.
        switch_s: seconds a trainer takes to switch between training and rollouts.
        turned: trainers' workers that received rollouts since they last trained.
        trainers_served: groups on GPUs that train, by leader, that were granted work: all that hold any, and
            perhaps others.
    """

    queue: PullQueue
    spare: SpareTime
    pace: Pace = field(default_factory=Pace)
    idle: IdleGroups = field(default_factory=IdleGroups)
    trainer_budget: float = math.inf
    trainers_explore: bool = False
    switch_s: float = 0.0
    turned: set[WorkerId] = field(default_factory=set)
    trainers_served: dict[WorkerId, WorkerGroup] = field(default_factory=dict)
    shares: FairShares = field(init=False)
    _each_trainer: float = math.inf

    def __post_init__(self) -> None:
        self.shares = FairShares(self.pace)

    # -- groups ----------------------------------------------------------------------------------------

    def parts(self, group: WorkerGroup) -> None:
        """Remove a group from sharing: it takes no more work."""
        self.shares.sharers[group.trains, group.kind] -= 1
        self.idle.remove(group.leader)
        self.spare.pulled(group.leader)

    def dissolved(self, group: WorkerGroup) -> None:
        """Forget a dissolved group."""
        if group.state is not GroupState.STOPPING:
            self.parts(group)
        self.shares.present[group.kind] -= 1
        self.pace.forget(group.leader)

    # -- work ------------------------------------------------------------------------------------------

    def room(self, group: WorkerGroup, demand: Demand, able: Able) -> int:
        """How many of the next rollouts a group may take."""
        if group.trains and not self.suits_trainers():
            return 0
        if group.trains and math.isfinite(self.trainer_budget):
            share = demand.contended  # bounded by their budget instead of a share
        else:
            share = self.share(group, demand)
            if self.shares.is_sooner_done(group, share, demand.contended, able):
                share -= 1
        return self.spare.room(group.leader, group.trains, share, demand)

    def competes(self, group: WorkerGroup) -> bool:
        """Whether a group competes for the next work: not a trainer whose budget is planned."""
        return not group.trains or (math.isinf(self.trainer_budget) and self.suits_trainers())

    def share(self, group: WorkerGroup, demand: Demand) -> int:
        """A group's share of the next work."""
        # A finite trainer budget comes out of the total, not out of other groups' shares.
        trainers = not demand.previews and math.isinf(self.trainer_budget)
        return self.shares.of(group, demand.contended, trainers=trainers)

    def grant(self, group: WorkerGroup, rollouts: int, now: float) -> GrantLease:
        """Lease up to ``rollouts`` to a group in :attr:`idle`."""
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
            self.trainers_served[group.leader] = group
        steps = sum(rollout.steps - resume.get(rollout.id, 0) for rollout in taken)
        filler = Filler.TRAINERS if group.trains else _FILLER.get(value)
        fills = filler is not Filler.EXPLORATION or self.spare.explores
        begins_s = now + self._turn(group)
        self.pace.begin(lease.id, group.leader, group.kind, steps, filler, begins_s, fills=fills)
        return GrantLease(*granted)

    # -- GPUs that train -------------------------------------------------------------------------------

    def set_trainer_budget(self, rollouts: float, trainers: Sequence[WorkerGroup], *, explore: bool) -> bool:
        """Set the trainers' budget. Returns whether this starts or stops them."""
        changed = (rollouts > 0) != (self.trainer_budget > 0)
        self.trainer_budget, self.trainers_explore = rollouts, explore
        self._each_trainer = rollouts
        if rollouts and math.isfinite(rollouts):
            ready = sum(group.state is GroupState.READY for group in trainers)
            self._each_trainer = math.ceil(rollouts / max(1, ready))
        return changed

    def learner_turns(self) -> float:
        """Seconds until a learner that gets work has switched to training."""
        turn_s = self.switch_s if self.turned else 0.0
        self.turned.clear()
        return turn_s

    def _turn(self, group: WorkerGroup) -> float:
        """Seconds until a group that gets work has switched to rollouts."""
        if not group.trains or self.turned.issuperset(group.members):
            return 0.0
        self.turned.update(group.members)
        return self.switch_s

    def suits_trainers(self) -> bool:
        """Whether the next work is for GPUs that train, and in their budget."""
        best = self.queue.best
        if self.trainer_budget <= 0 or best is None:
            return False
        return best in (WorkClass.TRAIN, WorkClass.EVAL) or (
            best is WorkClass.EXPLORE and self.trainers_explore
        )
