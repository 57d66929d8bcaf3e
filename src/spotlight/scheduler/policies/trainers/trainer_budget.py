"""How many rollouts the learner's GPUs should make while waiting, by look-ahead on measured pace.

All trainers act as one unit, as fast as their slowest, since they train together. All other groups act as one
generator with their summed rate: leases are small compared with what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.members import GroupState
from spotlight.scheduler.cluster.queue import PullQueue, WorkClass
from spotlight.scheduler.policies.trainers.look_ahead import Others, Timeline, find_budget
from spotlight.scheduler.types import GroupKind

_UNITS = 32
"""Waiting work is divided into this many units; the search is quadratic in it."""
_GAIN_MIN, _TURNS_MIN = 0.03, 0.1
"""Minimum gain, as fractions of the time left and of the switching time: predictions are inexact."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is left of an iteration.

    Attributes:
        trainable: samples trainable now.
        made: samples not trainable yet: at the rewards, or in incomplete groups.
        train_s: seconds the learner takes per sample generated, trained or not.
        whole: nothing is trained before everything is there.
        switch_s: seconds trainers take to switch between training and generating.
        generating: trainers are in generating mode.
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
    """Rollouts that all trainer groups together should take before they train again.

    None: some, but no trainer group asks for work. Nothing is taken that others would finish sooner, or that
    delays the end of training. While no pace is known, each group takes one lease, to measure it.
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
        others=Others(left.held / rate, unit / rate, busy=left.held > 0) if rate else None,
        generate_s=math.ceil(unit / len(trainers)) * step_s * backlog.rollout_steps,
        train_s=unit * backlog.train_s * left.trained_share,
        enter_s=backlog.switch_s,
        leave_s=backlog.switch_s,
        generating=backlog.generating,
        # All but the last unit of what is leased. Samples already made precede them: they wait for
        # scores or for the rest of their group.
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
    return left.rollouts(found.units * unit)


class Remaining:
    """An iteration's rollouts, in units of train rollouts by denoising steps.

    Attributes:
        waiting: not leased.
        held: leased.
        trained_share: fraction of all that is left that will be trained; the rest is evaluation.
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
        """Convert ``counted`` units to waiting rollouts; train rollouts are taken first."""
        beyond = max(0, counted - self._train)
        return min(self._all, counted - beyond + math.ceil(beyond / self._weight))


def _rate(cluster: Cluster, rollout_steps: int, degree: int) -> float:
    """Rollouts per second of all groups without trainers; 0 if none or unknown."""
    times_s = [cluster.pace.step_s(kind) for kind in groups_soon(cluster, degree, trains=False)]
    return sum(1 / (step_s * rollout_steps) for step_s in times_s if step_s)


def groups_soon(cluster: Cluster, degree: int, *, trains: bool) -> Iterator[GroupKind]:
    """Kinds of the groups that exist or are about to form, once tail groups above ``degree`` are split."""
    for host in cluster.hosts.values():
        if host.node.trains is not trains or host.draining:
            continue
        apart = cluster.able(host)
        for leader in host.leaders:
            group = cluster.groups[leader]
            if group.state is not GroupState.STOPPING and len(group.members) <= degree:
                apart -= len(group.members)
                yield group.kind
        for _ in range(math.ceil(apart / degree)):
            yield GroupKind(host.node.gpu_type, min(apart, degree))
