"""How much generation idle trainers should take over: an exact search over the predicted timeline.

Trainers waiting for units (micro-batches, groups) may generate some, at the cost of two context switches and
of not training meanwhile. Dynamic programming over (units taken, units trained, mode) finds the plan that
trains everything earliest.

Exact: generators pull in a fixed order at fixed times, and units taken by trainers only cut off the tail. So
the earlier of two ways to reach a state dominates, since it can wait.

Trainers switch back once there is something to train, not before.

Bounded: a unit that trainers would finish after the generators finished everything is never taken. Left
alone, all training could start by then.

Invariants: a plan never ends later than taking nothing; of equal plans the one that takes less wins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ROUNDING = 1e-9
"""Relative difference of equal plans: rounding depends on summation order."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A group of workers that generates units one after the other.

    Attributes:
        free_s: seconds from now until it can pull a unit.
        unit_s: seconds per unit.
        busy: a unit becomes ready at ``free_s``; otherwise the group is idle, or joins then.
    """

    free_s: float
    unit_s: float
    busy: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.free_s < math.inf and 0 < self.unit_s < math.inf):
            raise ValueError(f"generator is {self}; expected free_s >= 0 and unit_s > 0, in seconds")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Profiled state when trainers have nothing to train; durations in seconds, of all trainers together.

    Attributes:
        ready: generated units not trained.
        waiting: units not being generated yet.
        generators: other than the trainers.
        generate_s, train_s: per unit.
        enter_s: to switch from training to generating.
        leave_s: to switch back, once a unit is trainable.
        generating: trainers are in generating mode now.
        coming: seconds from now until each further unit is trainable.
        whole: nothing is trained before everything is generated.
    """

    ready: int
    waiting: int
    generators: tuple[Generator, ...]
    generate_s: float
    train_s: float
    enter_s: float
    leave_s: float
    generating: bool = False
    coming: tuple[float, ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        if self.ready < 0 or self.waiting < 0:
            raise ValueError(f"{self.ready} units ready and {self.waiting} waiting; expected none below 0")
        for name in ("generate_s", "train_s", "enter_s", "leave_s"):
            seconds: float = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} is {seconds}; expected seconds >= 0")

    @property
    def units(self) -> int:
        """Units still to be trained."""
        busy = sum(generator.busy for generator in self.generators)
        return self.ready + self.waiting + len(self.coming) + busy


@dataclass(frozen=True, slots=True)
class RolloutBudget:
    """How many units the trainers should generate.

    Attributes:
        now: before they train again.
        in_all: in the whole plan, which is recomputed at the next event.
        finish_s: seconds from now until all units are trained.
        finish_without_s: the same if trainers take none; infinite without other generators.
    """

    now: int
    in_all: int
    finish_s: float
    finish_without_s: float


def find_budget(timeline: Timeline, *, gain_min_s: float = 0.0) -> RolloutBudget:
    """The plan that trains all units earliest, in O(units * units trainers could take).

    Args:
        gain_min_s: take nothing for a smaller gain, as predictions are inexact.
    """
    claims, held = _pulls(timeline)
    start = _At(0.0, 0)
    rows: list[_TrainerTimes] = [_TrainerTimes(None, None)] * (timeline.units + 1)
    rows[0] = _TrainerTimes(None, start) if timeline.generating else _TrainerTimes(start, None)
    best = without = _At(math.inf, 0)
    in_all = 0
    for taken in range(timeline.waiting + 1):
        left = timeline.waiting - taken
        finished = sorted([*held, *(claim.ready_s for claim in claims[:left])])
        if timeline.whole:
            end = _end_of_whole(timeline, rows[0], finished, taken)
        else:
            rows = _trained(timeline, rows, finished, taken)
            end = min((at for at in rows[-1] if at is not None), default=_At(math.inf, 0))
        if taken == 0:
            best = without = end
        elif end.at_s < best.at_s * (1 - _ROUNDING):
            best, in_all = end, taken
        if left == 0:
            break
        last = claims[left - 1] if claims else _Claim(math.inf, math.inf)
        all_ready_s = finished[-1] if claims else math.inf
        rows = _taken(timeline, rows, last.at_s, all_ready_s, taken)
        if all(row.generating is None for row in rows):
            break
    if in_all == 0 or without.at_s - best.at_s <= gain_min_s:
        return RolloutBudget(0, 0, without.at_s, without.at_s)
    return RolloutBudget(best.first, in_all, best.at_s, without.at_s)


class _Claim(NamedTuple):
    """When generators pull a waiting unit and have it ready."""

    at_s: float
    ready_s: float


class _At(NamedTuple):
    """The earliest time to reach a state, and the units taken first on the way."""

    at_s: float
    first: int


class _TrainerTimes(NamedTuple):
    """Earliest arrival in each mode, for some (taken, trained); None: unreachable."""

    training: _At | None
    generating: _At | None


def _pulls(timeline: Timeline) -> tuple[list[_Claim], list[float]]:
    """Pulls in order if trainers take nothing, and when units under way are ready."""
    heap = [(generator.free_s, i) for i, generator in enumerate(timeline.generators)]
    heapq.heapify(heap)
    claims: list[_Claim] = []
    while heap and len(claims) < timeline.waiting:
        at_s, i = heap[0]
        ready_s = at_s + timeline.generators[i].unit_s
        claims.append(_Claim(at_s, ready_s))
        heapq.heapreplace(heap, (ready_s, i))
    return claims, [
        *timeline.coming,
        *(generator.free_s for generator in timeline.generators if generator.busy),
    ]


def _trained(
    timeline: Timeline, rows: Sequence[_TrainerTimes], finished: Sequence[float], taken: int
) -> list[_TrainerTimes]:
    """Extend each state by training as early as possible. ``finished``: ascending ready times, in seconds."""
    found = list(rows)
    for trained in range(timeline.units):
        of_generators = trained + 1 - timeline.ready - taken
        if of_generators > len(finished):
            break
        ready_s = finished[of_generators - 1] if of_generators > 0 else 0.0
        at = _earliest(timeline, found[trained], ready_s, timeline.train_s)
        if at is not None:
            found[trained + 1] = _TrainerTimes(at, found[trained + 1].generating)
    return found


def _end_of_whole(timeline: Timeline, row: _TrainerTimes, finished: Sequence[float], taken: int) -> _At:
    """``row``: states with nothing trained."""
    if timeline.ready + taken + len(finished) < timeline.units:
        return _At(math.inf, 0)  # the rest is never generated
    if not timeline.units:
        return _At(0.0, 0)
    at = _earliest(timeline, row, max(finished, default=0.0), timeline.units * timeline.train_s)
    return at or _At(math.inf, 0)


def _earliest(timeline: Timeline, row: _TrainerTimes, ready_s: float, train_s: float) -> _At | None:
    """When ``train_s`` of training on units ready at ``ready_s`` ends, from the better mode."""
    ways = [(way, turn_s) for way, turn_s in zip(row, (0.0, timeline.leave_s), strict=True) if way]
    return min(
        (_At(max(way.at_s, ready_s) + turn_s + train_s, way.first) for way, turn_s in ways), default=None
    )


def _taken(
    timeline: Timeline, rows: Sequence[_TrainerTimes], claimed_s: float, all_ready_s: float, taken: int
) -> list[_TrainerTimes]:
    """Extend each state by one unit, begun before a generator claims it and ready before the others."""
    found = []
    for trained, (training, generating) in enumerate(rows):
        ways = []
        if training:
            ways.append((training, timeline.enter_s))
        if generating:
            ways.append((generating, 0.0))
        ends = [
            _At(way.at_s + switch_s + timeline.generate_s, way.first if trained else taken + 1)
            for way, switch_s in ways
            if way.at_s < claimed_s
        ]
        found.append(_TrainerTimes(None, min((end for end in ends if end.at_s <= all_ready_s), default=None)))
    return found
