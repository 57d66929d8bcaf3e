"""How many rollouts the learner's GPUs should make while it could wait: ``bts`` on what was seen.

All trainers together are one there: they train together, so the last of them to finish its rollouts decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spotlight.core.cluster import Cluster
from spotlight.core.members import Group, GroupState
from spotlight.core.pipeline.bts import Generator, Timeline, plan_takes
from spotlight.core.queue import Value

_UNITS = 32
"""So many units the work that waits is cut into: the search takes the square of it."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is left of an iteration.

    Attributes:
        trainable: samples that could be trained now.
        train_s: seconds that the learner takes for one; 0 where it trains nothing before all is there.
        switch_s: that trainers take from training to generating, or back.
    """

    trainable: int
    train_s: float
    switch_s: float


def rollouts_to_take(cluster: Cluster, backlog: Backlog, now: float) -> int:
    """Rollouts that trainers' groups should take, one after the other, before they train.

    Nothing is taken that would be finished later than if it were left, nor what would delay the end of
    training. As long as nobody's pace is known, each group takes one lease, to find out.
    """
    queue, pace = cluster.queue, cluster.pace
    waiting = queue.waiting_of(Value.TRAIN, Value.EVAL)
    trainers = [group for group in cluster.trainers() if cluster.willing(group)]
    if not waiting or not trainers:
        return 0
    paces = [pace.rollout_s(group.kind) for group in trainers]
    each_s = max((seconds for seconds in paces if seconds is not None), default=None)
    if not each_s:
        return min(waiting, sum(group.capacity for group in trainers))
    unit = min(waiting, len(trainers) * max(1, math.ceil(waiting / (_UNITS * len(trainers)))))
    found = plan_takes(
        Timeline(
            ready=backlog.trainable // unit,
            waiting=waiting // unit,
            generators=_generators(cluster, unit, now),
            generate_s=math.ceil(unit / len(trainers)) * each_s,
            train_s=unit * backlog.train_s,
            enter_s=backlog.switch_s,
            leave_s=backlog.switch_s,
        )
    )
    return min(waiting, found.now * unit)


def _generators(cluster: Cluster, unit: int, now: float) -> tuple[Generator, ...]:
    """Groups beside the trainers, as far as their pace is known."""
    found = []
    for group in _others(list(cluster.groups.values()), cluster):
        each_s = cluster.pace.rollout_s(group.kind)
        if each_s:
            leases = [lease.id for lease, _ in cluster.queue.held_by(group.leader)]
            found.append(Generator(cluster.pace.left_s(leases, now), unit * each_s, busy=bool(leases)))
    return tuple(found)


def _others(groups: Sequence[Group], cluster: Cluster) -> list[Group]:
    return [
        group
        for group in groups
        if not group.trains
        and group.state is GroupState.READY
        and not cluster.hosts[group.node].draining
        and (group.capacity or cluster.queue.holds(group.leader))
    ]
