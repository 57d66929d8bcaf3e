"""How many rollouts the learner's GPUs should make while it could wait: ``bts``, on what was seen.

All trainers together are one there, since they train together: the last of them to finish decides. So are all
groups beside them, at the sum of their paces: leases are small beside what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.members import ABLE, GroupState
from spotlight.scheduler.overlap.look_ahead import Generator, Timeline, find_budget
from spotlight.scheduler.queue import PullQueue, WorkClass
from spotlight.scheduler.types import GroupKind

_UNITS = 32
"""So many units the work that waits is cut into: the search takes the square of it."""
_GAIN_MIN, _TURNS_MIN = 0.03, 0.1
"""A plan has to gain these shares of the time that is left, and of its turns: predictions are not exact."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is left of an iteration.

    Attributes:
        rollout_steps: of a train rollout.
        evaluation_steps: of one that is only judged, and never trained.
        trainable: samples that could be trained now.
        made: others that are not trained yet: at the rewards, or in groups that lack some.
        train_s: seconds that the learner takes for one.
        whole: it trains nothing before all is there.
        switch_s: that trainers take from training to generating, or back.
        generating: they generated last.
    """

    rollout_steps: int
    evaluation_steps: int
    trainable: int
    made: int
    train_s: float
    whole: bool
    switch_s: float
    generating: bool


def trainer_rollout_budget(cluster: Cluster, backlog: Backlog) -> int | None:
    """Rollouts that trainers' groups should take, together and before they train again.

    None: there are some to take, but no trainer asks for any now. Nothing is taken that would be finished
    later than if it were left, nor what would delay the end of training. As long as nobody's pace is known,
    each group takes one lease, to find out.
    """
    queue, pace = cluster.queue, cluster.pace
    waiting = queue.waiting_of(WorkClass.TRAIN, WorkClass.EVAL)
    willing = [group for group in cluster.trainers() if cluster.willing(group)]
    if not waiting:
        return 0
    if not willing:
        return None
    degree = cluster.degree_for(queue.outstanding_of(WorkClass.TRAIN, WorkClass.EVAL))
    trainers = list(groups_soon(cluster, degree, trains=True))
    times_s = [pace.step_s(kind, trains=True) for kind in trainers]
    step_s = max((seconds for seconds in times_s if seconds is not None), default=None)
    if not step_s:
        return min(waiting, sum(group.capacity for group in willing))
    rate = _rate(cluster, backlog.rollout_steps, degree)
    left = Remaining(queue, backlog)
    unit = min(left.waiting, len(trainers) * max(1, math.ceil(left.waiting / (_UNITS * len(trainers)))))
    timeline = Timeline(
        ready=backlog.trainable // unit,
        waiting=left.waiting // unit,
        generators=(Generator(left.held / rate, unit / rate, busy=left.held > 0),) if rate else (),
        generate_s=math.ceil(unit / len(trainers)) * step_s * backlog.rollout_steps,
        train_s=unit * backlog.train_s * left.trained_share,
        enter_s=backlog.switch_s,
        leave_s=backlog.switch_s,
        generating=backlog.generating,
        # All but the last unit of what is held; what was made waits for some of it, or for scores.
        coming=tuple(
            unit * max(1, number) / rate
            for number in range(-(backlog.made // unit) + 1, left.held // unit if left.held else 1)
            if rate
        ),
        whole=backlog.whole,
    )
    turns_s = timeline.leave_s + (0.0 if timeline.generating else timeline.enter_s)
    found = find_budget(timeline, gain_min_s=_TURNS_MIN * turns_s)
    if found.finish_without_s - found.finish_s < _GAIN_MIN * found.finish_s:
        return 0
    return left.rollouts(found.now * unit)


class Remaining:
    """Rollouts of an iteration counted as train rollouts, by their steps.

    Attributes:
        waiting: that nobody makes yet.
        held: under way.
        trained_share: of all that is left, what will be trained; the rest is only judged.
    """

    def __init__(self, queue: PullQueue, backlog: Backlog) -> None:
        self._weight = backlog.evaluation_steps / backlog.rollout_steps
        self._train, evaluation = (queue.waiting_of(value) for value in (WorkClass.TRAIN, WorkClass.EVAL))
        self._all = self._train + evaluation
        train, judged = (queue.outstanding_of(value) for value in (WorkClass.TRAIN, WorkClass.EVAL))
        self.waiting = self._train + math.ceil(evaluation * self._weight)
        self.held = train - self._train + math.ceil((judged - evaluation) * self._weight)
        trained = backlog.trainable + backlog.made + train
        self.trained_share = trained / (trained + judged * self._weight)

    def rollouts(self, counted: int) -> int:
        """How many rollouts that is of those waiting: train rollouts are taken first."""
        beyond = max(0, counted - self._train)
        return min(self._all, counted - beyond + math.ceil(beyond / self._weight))


def _rate(cluster: Cluster, rollout_steps: int, degree: int) -> float:
    """Rollouts a second of all workers beside the trainers; 0 where there are none, or nothing is known."""
    times_s = [cluster.pace.step_s(kind) for kind in groups_soon(cluster, degree, trains=False)]
    return sum(1 / (step_s * rollout_steps) for step_s in times_s if step_s)


def groups_soon(cluster: Cluster, degree: int, *, trains: bool) -> Iterator[GroupKind]:
    """The groups that workers are in or soon will be: those of the tail part when an iteration begins."""
    for host in cluster.hosts.values():
        if host.node.trains is not trains or host.draining:
            continue
        apart = sum(cluster.workers[name].state in ABLE for name in host.workers)
        for leader in host.leaders:
            group = cluster.groups[leader]
            if group.state is not GroupState.STOPPING and len(group.members) <= degree:
                apart -= len(group.members)
                yield group.kind
        for _ in range(math.ceil(apart / degree)):
            yield GroupKind(host.node.gpu_type, min(apart, degree))
