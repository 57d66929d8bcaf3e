"""The search for how much trainers generate, against every schedule there is on small instances."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executed_lines import executed_lines

from spotlight.scheduler.policies.trainers.look_ahead import Generator, RolloutBudget, Timeline, find_budget


@dataclass(frozen=True)
class World:
    """A live simulation: seconds are counted on, generators pull when free, trainers do as told."""

    timeline: Timeline
    now_s: float
    free_s: tuple[float, ...]
    holds: tuple[bool, ...]
    waiting: int
    ready: int
    trained: int
    generating: bool
    coming: tuple[float, ...]

    @staticmethod
    def of(timeline: Timeline) -> World:
        generators = timeline.generators
        world = World(
            timeline, 0.0, tuple(g.free_s for g in generators), tuple(g.busy for g in generators),
            timeline.waiting, timeline.ready, 0, timeline.generating, timeline.coming,
        )  # fmt: skip
        return world.until(0.0)

    def until(self, at_s: float) -> World:
        """Generators work on until then; who is free then pulls before the trainers do."""
        free, holds, waiting, ready = list(self.free_s), list(self.holds), self.waiting, self.ready
        while True:
            able = [i for i in range(len(free)) if free[i] <= at_s and (holds[i] or waiting)]
            if not able:
                break
            i = min(able, key=lambda i: (free[i], i))
            ready += holds[i]
            holds[i] = waiting > 0
            if holds[i]:
                waiting -= 1
                free[i] += self.timeline.generators[i].unit_s
        later = tuple(ready_s for ready_s in self.coming if ready_s > at_s)
        ready += len(self.coming) - len(later)
        return replace(
            self,
            now_s=at_s,
            free_s=tuple(free),
            holds=tuple(holds),
            waiting=waiting,
            ready=ready,
            coming=later,
        )

    def choices(self) -> list[tuple[World, bool]]:
        """Train a unit, take one (True), or wait for the next that becomes ready."""
        t, found = self.timeline, list[tuple[World, bool]]()
        if self.ready and (not t.whole or self.ready + self.trained == t.units):
            switch_s = t.leave_s if self.generating else 0.0
            later = replace(self, ready=self.ready - 1).until(self.now_s + switch_s + t.train_s)
            found.append((replace(later, trained=self.trained + 1, generating=False), False))
        if self.waiting:
            switch_s = 0.0 if self.generating else t.enter_s
            later = replace(self, waiting=self.waiting - 1).until(self.now_s + switch_s + t.generate_s)
            found.append((replace(later, ready=later.ready + 1, generating=True), True))
        busy = zip(self.free_s, self.holds, strict=True)
        events = [free for free, holds in busy if free > self.now_s and (holds or self.waiting)]
        events += self.coming
        if events:
            found.append((self.until(min(events)), False))
        return found


def best_of_all(world: World, takes: int | None = None) -> float:
    """The earliest end of every schedule; ``takes``: of those that take at most so many units."""
    if world.trained == world.timeline.units:
        return world.now_s
    ends = [math.inf]
    for choice, took in world.choices():
        if took and takes == 0:
            continue
        ends.append(best_of_all(choice, None if takes is None else takes - took))
    return min(ends)


SECONDS = st.integers(0, 12).map(float)
UNITS = st.integers(1, 12).map(float)
GENERATORS = st.lists(st.builds(Generator, free_s=SECONDS, unit_s=UNITS, busy=st.booleans()), max_size=2)


@st.composite
def timelines(draw: st.DrawFn, waiting_max: int = 3) -> Timeline:
    return Timeline(
        ready=draw(st.integers(0, 2)),
        waiting=draw(st.integers(0, waiting_max)),
        generators=tuple(draw(GENERATORS)),
        generate_s=draw(UNITS),
        train_s=draw(UNITS),
        enter_s=draw(SECONDS),
        leave_s=draw(SECONDS),
        generating=draw(st.booleans()),
        coming=tuple(draw(st.lists(SECONDS, max_size=2))),
        whole=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=150)
@given(timelines())
def test_the_plan_is_the_best_of_all_schedules(timeline: Timeline) -> None:
    plan = find_budget(timeline)
    assert plan.finish_s == pytest.approx(best_of_all(World.of(timeline)))
    assert plan.finish_without_s == pytest.approx(best_of_all(World.of(timeline), takes=0))
    if plan.in_all:
        fewer = best_of_all(World.of(timeline), takes=plan.in_all - 1)
        assert plan.finish_s < fewer
        assert best_of_all(World.of(timeline), takes=plan.in_all) == pytest.approx(plan.finish_s)


@given(timelines(waiting_max=30), st.floats(0, 20))
def test_a_plan_never_ends_later_than_taking_nothing_and_gains_what_it_must(
    timeline: Timeline, gain_min_s: float
) -> None:
    plan = find_budget(timeline, gain_min_s=gain_min_s)
    assert plan.finish_s <= plan.finish_without_s
    assert 0 <= plan.now <= plan.in_all <= timeline.waiting
    if plan.in_all:
        assert plan.finish_without_s - plan.finish_s > gain_min_s
    else:
        assert plan.finish_s == plan.finish_without_s


@given(timelines(waiting_max=30))
def test_no_unit_is_taken_that_would_be_ready_after_generators_had_made_everything(
    timeline: Timeline,
) -> None:
    plan = find_budget(timeline)
    if not plan.now or not timeline.generators:
        return
    world = World.of(timeline)
    everything_s = _generated_s(world)
    switch_s = 0.0 if timeline.generating else timeline.enter_s
    assert switch_s + plan.now * timeline.generate_s <= everything_s


def _generated_s(world: World) -> float:
    """When generators, left alone, have made everything."""
    while world.waiting:
        world = world.until(min(world.free_s))
    return max((free for free, holds in zip(world.free_s, world.holds, strict=True) if holds), default=0.0)


def test_idle_trainers_help_slow_generators() -> None:
    timeline = Timeline(
        ready=0, waiting=6, generators=(Generator(10.0, 10.0),), generate_s=4.0, train_s=1.0, enter_s=1.0,
        leave_s=1.0,
    )  # fmt: skip
    plan = find_budget(timeline)
    assert plan.finish_without_s == 71.0
    assert plan.finish_s < 0.5 * plan.finish_without_s
    assert plan.now >= 3


def test_bounded_stealing_beats_taking_everything_one_can() -> None:
    """Trainers that always take end later than those that never do."""
    timeline = Timeline(
        ready=0, waiting=4, generators=(Generator(1.0, 1.0), Generator(1.0, 1.0)), generate_s=6.0,
        train_s=2.0, enter_s=2.0, leave_s=2.0,
    )  # fmt: skip
    plan = find_budget(timeline)
    assert plan == RolloutBudget(0, 0, plan.finish_without_s, plan.finish_without_s)
    world = World.of(timeline)
    while world.trained < timeline.units:
        choices = world.choices()
        took = [choice for choice, taken in choices if taken]
        world = took[0] if took else choices[0][0]
    assert world.now_s > 1.2 * plan.finish_s


def test_without_generators_trainers_make_everything() -> None:
    timeline = Timeline(0, 3, (), generate_s=2.0, train_s=1.0, enter_s=1.0, leave_s=1.0)
    assert find_budget(timeline) == RolloutBudget(3, 3, 11.0, math.inf)


def test_nothing_to_do_takes_nothing() -> None:
    idle = Timeline(0, 0, (Generator(0.0, 1.0, busy=False),), 1.0, 1.0, 0.0, 0.0)
    assert find_budget(idle) == RolloutBudget(0, 0, 0.0, 0.0)


def test_a_large_timeline_is_searched_fast() -> None:
    timeline = Timeline(0, 192, tuple(Generator(5.0 + i, 9.0) for i in range(8)), 4.0, 0.2, 1.0, 1.0)
    assert find_budget(timeline).in_all > 20
    assert executed_lines(lambda: find_budget(timeline)) < 600_000  # executes 414,000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ready": -1}, "-1 units ready and 1 waiting; expected none below 0"),
        ({"train_s": -1.0}, "train_s is -1.0; expected seconds >= 0"),
        ({"generate_s": math.inf}, "generate_s is inf"),
    ],
)
def test_impossible_timelines_are_errors(change: dict[str, float], message: str) -> None:
    timeline = Timeline(0, 1, (), 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=message):
        replace(timeline, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit_s > 0, in seconds"):
        Generator(0.0, 0.0)
