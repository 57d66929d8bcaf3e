"""How many spot nodes a deadline or a budget needs: on what was measured, within bounds, without going back
and forth.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.scheduler.policies.target.choose_nodes import NodesChooser, Rest, TargetDecision
from spotlight.scheduler.policies.target.iteration_model import (
    MEASURED_MIN,
    IterationModel,
    MeasuredIteration,
)
from spotlight.scheduler.policies.target.pace_meter import PaceMeter

NODES_MAX = 16


@dataclass
class Course:
    """A run whose iterations take ``fixed_s + work_s / workers``, with noise, in virtual time."""

    fixed_s: float
    work_s: float
    iterations: int
    deadline_s: float | None = None
    budget_usd: float | None = None
    asked: int = 2
    delay_s: float = 60.0
    other_usd_h: float = 10.0
    node_usd_h: float = 5.0
    noise: float = 0.05
    market: int = 1000
    seed: int = 0
    now_s: float = 0.0
    usd: float = 0.0
    decisions: list[TargetDecision] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    def run(self) -> Course:
        chance = random.Random(self.seed)
        policy, meter = NodesChooser(1, NODES_MAX), PaceMeter(300.0, 600.0)
        meter.begin(0.0, self.asked)
        there = min(self.asked, self.market)
        coming: tuple[float, int] | None = None
        meter.observe(0.0, there, there)
        for iteration in range(self.iterations):
            work_s = self.work_s * chance.lognormvariate(0.0, self.noise)
            left_s, left_work = self.fixed_s, work_s
            while left_s > 0 or left_work > 0:
                until_s = left_s if left_s > 0 else left_work / there
                step_s = min(until_s, coming[0] - self.now_s) if coming else until_s
                self.now_s += step_s
                self.usd += step_s * (self.other_usd_h + there * self.node_usd_h) / 3600
                if left_s > 0:
                    left_s = left_s - step_s if step_s < left_s else 0.0
                else:
                    left_work = left_work - step_s * there if step_s < until_s else 0.0
                if coming and self.now_s >= coming[0]:
                    there, coming = coming[1], None
                    meter.observe(self.now_s, there, there)
            meter.end_iteration(self.now_s, work_s)
            wanted = self.decide(policy, meter, iteration)
            if wanted != self.asked:
                self.changes.append((iteration, self.asked, wanted))
                meter.ask(self.now_s, wanted)
                self.asked = wanted
                if min(wanted, self.market) > there:
                    coming = self.now_s + self.delay_s, min(wanted, self.market)
                else:
                    there, coming = min(wanted, self.market), None
                    meter.observe(self.now_s, there, there)
        return self

    def decide(self, policy: NodesChooser, meter: PaceMeter, iteration: int) -> int:
        rest = Rest(
            self.iterations - iteration - 1,
            None if self.deadline_s is None else self.deadline_s - self.now_s,
            None if self.budget_usd is None else self.budget_usd - self.usd,
            self.asked, 0.0, 1.0, self.other_usd_h, self.node_usd_h,
        )  # fmt: skip
        decision = policy.decide(rest, meter)
        if decision is None:
            return self.asked
        self.decisions.append(decision)
        return decision.nodes

    # -- what a number of nodes that stays would have taken -----------------------------------------------

    def takes_s(self, nodes: int) -> float:
        return self.iterations * (self.fixed_s + self.work_s / nodes)

    def costs_usd(self, nodes: int) -> float:
        return self.takes_s(nodes) * (self.other_usd_h + nodes * self.node_usd_h) / 3600


COURSES = {
    "fixed_s": st.floats(5.0, 100.0),
    "work_s": st.floats(100.0, 2000.0),
    "asked": st.integers(1, NODES_MAX),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=150, deadline=None)
@given(**COURSES, slack=st.floats(1.3, 4.0))
def test_a_deadline_that_can_be_held_is_held_and_cheaply(
    fixed_s: float, work_s: float, asked: int, seed: int, slack: float
) -> None:
    probe = Course(fixed_s, work_s, 60)
    deadline_s = slack * probe.takes_s(NODES_MAX) + 6 * (fixed_s + work_s / asked)
    course = Course(fixed_s, work_s, 60, deadline_s=deadline_s, asked=asked, seed=seed).run()
    assert course.now_s <= deadline_s, course.changes
    holding = [nodes for nodes in range(1, NODES_MAX + 1) if probe.takes_s(nodes) <= 0.9 * deadline_s]
    least = min(map(probe.costs_usd, holding))
    # Before enough is measured, and while it doubles or halves, it has what it began with.
    begun = 8 / 60 * max(probe.costs_usd(asked), least)
    assert course.usd <= 1.2 * least + begun, course.changes


@settings(max_examples=150, deadline=None)
@given(**COURSES, slack=st.floats(1.25, 4.0))
def test_a_budget_that_can_be_held_is_held_and_fast(
    fixed_s: float, work_s: float, asked: int, seed: int, slack: float
) -> None:
    probe = Course(fixed_s, work_s, 60)
    cheapest = min(map(probe.costs_usd, range(1, NODES_MAX + 1)))
    budget = slack * cheapest + 8 / 60 * probe.costs_usd(asked)
    course = Course(fixed_s, work_s, 60, budget_usd=budget, asked=asked, seed=seed).run()
    assert course.usd <= budget, course.changes
    holding = [nodes for nodes in range(1, NODES_MAX + 1) if probe.costs_usd(nodes) <= 0.85 * budget]
    fastest_s = min(map(probe.takes_s, holding), default=math.inf)
    assert course.now_s <= 1.25 * fastest_s + 10 * (fixed_s + work_s / asked), course.changes


@settings(max_examples=150, deadline=None)
@given(
    **COURSES,
    hours=st.one_of(st.none(), st.floats(0.05, 20.0)),
    budget=st.one_of(st.none(), st.floats(1.0, 400.0)),
    market=st.integers(1, 20),
    noise=st.floats(0.0, 0.2),
)
def test_it_is_bounded_patient_and_does_not_go_back_and_forth(
    fixed_s: float, work_s: float, asked: int, seed: int, hours: float | None, budget: float | None,
    market: int, noise: float,
) -> None:  # fmt: skip
    if hours is None and budget is None:
        return
    deadline_s = None if hours is None else 3600 * hours
    course = Course(
        fixed_s, work_s, 60, deadline_s, budget, asked, seed=seed, market=market, noise=noise
    ).run()
    for iteration, before, after in course.changes:
        assert iteration >= MEASURED_MIN
        assert 1 <= after <= NODES_MAX
        assert before // 2 <= after <= max(2 * before, 1)
    iterations = [iteration for iteration, _, _ in course.changes]
    assert all(later - sooner > 2 for sooner, later in pairwise(iterations))
    ups = [after > before for _, before, after in course.changes]
    turns = sum(one != other for one, other in pairwise(ups))
    assert turns <= 4, course.changes
    for decision in course.decisions:
        for each in (decision.now, decision.then, decision.best):
            low, high = each.range_s
            assert low <= each.seconds <= high
            assert low <= high or math.isinf(high)


def test_out_of_reach_is_said_and_the_nearest_is_done() -> None:
    late = Course(20.0, 800.0, 60, deadline_s=1200.0).run()
    assert late.asked == NODES_MAX, "the fastest"
    assert not any(decision.reachable for decision in late.decisions)
    dear = Course(20.0, 800.0, 60, budget_usd=1.0).run()
    costs = [dear.costs_usd(nodes) for nodes in range(1, NODES_MAX + 1)]
    assert costs[dear.asked - 1] == pytest.approx(min(costs), rel=0.05), "the cheapest"
    assert not any(decision.reachable for decision in dear.decisions)
    both = Course(20.0, 800.0, 60, deadline_s=3000.0, budget_usd=25.0).run()
    assert 1 < both.asked < NODES_MAX, "between the two: neither is exceeded more than the other"
    last = both.decisions[-8]
    assert not last.reachable
    # The budget is spent: the deadline is still held, by the cheapest that holds it.
    spent = Course(20.0, 800.0, 60, deadline_s=9000.0, budget_usd=2.0).run()
    assert spent.now_s <= 9000.0
    assert spent.asked < NODES_MAX


def test_a_market_without_more_nodes_is_not_asked_for_ever_more() -> None:
    course = Course(20.0, 800.0, 60, deadline_s=1200.0, market=3).run()
    assert course.asked <= 8
    assert course.decisions[-1].best.seconds == pytest.approx(course.decisions[-1].now.seconds)


def test_equal_sizes_are_told_apart_by_the_work_that_was_measured() -> None:
    equal = [MeasuredIteration(100.0 + each % 3, 4.0, 240.0, 4.0, 4) for each in range(6)]
    model = IterationModel.fitted(equal)
    assert model is not None
    assert model.work_s == pytest.approx(240.0)
    assert model.fixed_s == pytest.approx(41.0)
    # Other sizes say more: where rollouts overlap with what is fixed, more workers save less.
    other = [MeasuredIteration(50.0 + 100.0 / 8, 8.0, 240.0, 8.0, 8) for _ in range(4)]
    mixed = IterationModel.fitted([MeasuredIteration(75.0, 4.0, 240.0, 4.0, 4)] * 4 + other)
    assert mixed is not None
    assert mixed.work_s == pytest.approx(100.0)
    assert mixed.fixed_s == pytest.approx(50.0)
    assert IterationModel.fitted(equal[: MEASURED_MIN - 1]) is None


def test_one_outlier_does_not_move_the_slope() -> None:
    def taken(workers: float) -> MeasuredIteration:
        return MeasuredIteration(30.0 + 200.0 / workers, workers, 200.0, workers, int(workers))

    calm = [taken(2.0)] * 5 + [taken(4.0)] * 5
    stalled = [*calm[:7], MeasuredIteration(900.0, 4.0, 200.0, 4.0, 4), *calm[8:]]
    model = IterationModel.fitted(stalled)
    assert model is not None
    assert model.work_s == pytest.approx(200.0, rel=0.1)
    assert model.spread > 0.5, "but the range of what is to come is wide"


def test_how_long_a_node_takes_is_measured() -> None:
    meter = PaceMeter(node_s=300.0, patience_s=600.0)
    meter.begin(0.0, 2)
    meter.observe(40.0, 2, 2)
    assert meter.delay_s == 300.0, "those of the beginning waited for the run itself"
    for begun_s, took_s in ((100.0, 90.0), (400.0, 110.0)):
        meter.ask(begun_s, 4)
        meter.observe(begun_s + took_s, 4, 4)
        meter.ask(begun_s + 200.0, 2)
        meter.observe(begun_s + 201.0, 2, 2)
    assert meter.delay_s == 100.0
    meter.ask(1000.0, 4)
    meter.observe(1700.0, 3, 3)
    meter.observe(1800.0, 4, 4)
    assert meter.delay_s == 100.0, "one that came after all patience says nothing"


def test_an_attempt_goes_on_with_what_was_measured() -> None:
    meter = PaceMeter(300.0, 600.0)
    meter.recall([MeasuredIteration(60.0, 2.0, 80.0, 2.0, 2)] * 5)
    meter.begin(0.0, 2)
    meter.observe(10.0, 2, 2)
    assert meter.end_iteration(200.0, 80.0) is None, "it began before there was anything to measure from"
    assert meter.model is not None
    decision = NodesChooser(1, NODES_MAX).decide(Rest(10, 300.0, None, 2, 0.0, 1.0, 1.0, 1.0), meter)
    assert decision is not None
    assert decision.best.nodes > 2


def test_what_a_lost_learner_costs_is_part_of_what_iterations_take() -> None:
    meter = PaceMeter(300.0, 600.0)
    meter.recall([MeasuredIteration(10.0, 2.0, 5.0, 2.0, 2)])
    meter.begin(0.0, 2)
    meter.observe(0.0, 2, 2)
    for end_s in (100.0, 160.0, 220.0, 280.0):
        meter.end_iteration(end_s, 80.0)
    meter.interrupt(0)  # it is lost in the next iteration, which goes on
    assert meter.end_iteration(370.0, 80.0) == MeasuredIteration(90.0, 2.0, 80.0, 2.0, 2)
    meter.interrupt(2)  # it is lost, and the last two iterations were not saved
    assert [each.seconds for each in meter.iterations] == [10.0, 60.0, 60.0]
    assert meter.end_iteration(460.0, 70.0) == MeasuredIteration(240.0, 2.0, 230.0, 2.0, 2)
    assert meter.end_iteration(520.0, 80.0) == MeasuredIteration(60.0, 2.0, 80.0, 2.0, 2)
    assert sum(each.seconds for each in meter.iterations[1:]) == 520.0 - 100.0
    # Those of an earlier attempt stay, and what began before the first publication is no iteration.
    meter.interrupt(6)
    assert [each.seconds for each in meter.iterations] == [10.0]
    assert meter.end_iteration(600.0, 80.0) is None
    assert meter.end_iteration(670.0, 80.0) == MeasuredIteration(70.0, 2.0, 80.0, 2.0, 2)


def test_iterations_of_two_sizes_that_are_made_again_tell_of_neither() -> None:
    meter = PaceMeter(300.0, 600.0)
    meter.begin(0.0, 2)
    meter.observe(0.0, 2, 2)
    for end_s in (60.0, 120.0, 180.0):
        meter.end_iteration(end_s, 80.0)
    meter.ask(180.0, 1)
    meter.observe(180.0, 1, 1)
    meter.end_iteration(240.0, 80.0)
    assert [each.asked for each in meter.iterations] == [2, 2, None]
    meter.end_iteration(300.0, 80.0)
    meter.interrupt(3)
    assert meter.end_iteration(400.0, 80.0) == MeasuredIteration(
        280.0, 340.0 / 280.0, 320.0, 340.0 / 280.0, None
    )


def test_a_change_is_judged_by_what_it_brought() -> None:
    policy, meter = NodesChooser(1, NODES_MAX), PaceMeter(300.0, 600.0)
    meter.recall([MeasuredIteration(60.0, 2.0, 80.0, 2.0, 2)] * 5)
    meter.begin(0.0, 2)
    meter.observe(0.0, 2, 2)
    meter.end_iteration(1.0, 80.0)
    meter.ask(1.0, 4)
    late = Rest(50, 100.0, None, 4, 0.0, 1.0, 1.0, 1.0)
    for now_s in (61.0, 110.0, 150.0):
        if now_s == 110.0:
            meter.observe(90.0, 4, 4)
        meter.end_iteration(now_s, 80.0)
        decision = policy.decide(late, meter)
        assert decision is not None
        assert decision.best.nodes > 4
        assert decision.nodes == 4, "two iterations that began with four nodes are not over yet"
    meter.end_iteration(190.0, 80.0)
    decision = policy.decide(late, meter)
    assert decision is not None
    assert decision.nodes == 8


def test_steps_are_bounded_in_both_directions() -> None:
    for asked, left_s, expected in ((3, 100.0, 6), (12, 1e6, 6)):
        policy, meter = NodesChooser(1, NODES_MAX), PaceMeter(300.0, 600.0)
        taken = MeasuredIteration(20.0 + 240.0 / asked, asked, 240.0, asked, asked)
        meter.recall([taken] * 6)
        meter.begin(0.0, asked)
        rest = Rest(50, left_s, None, asked, 0.0, 1.0, 0.0, 1.0)
        decisions = [policy.decide(rest, meter) for _ in range(2)]
        assert [each.nodes for each in decisions if each][-1] == expected
