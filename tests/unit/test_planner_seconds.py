"""On the critical path previews have to pay for the time they take."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_exploration import ran

from spotlight.config.sections.exploration import ExplorationConfig, PlannerConfig, PreviewCostsConfig
from spotlight.scheduler.policies.exploration.bandit import Arm, DiscountedUCB, arm_grid
from spotlight.scheduler.policies.exploration.budget import Forecast, IterationSeconds, WindowSeen
from spotlight.scheduler.policies.exploration.contrast import Contrast
from spotlight.scheduler.policies.exploration.planner import Planner

GRID = arm_grid((16, 32, 64), (5, 10))
PROMPTS, GROUP, WORKERS, STEPS = 4, 8, 8, 10


def seconds_of(keeps: bool = True) -> IterationSeconds:
    return IterationSeconds(Forecast(PreviewCostsConfig(step_s=1.0)), STEPS, GROUP, keeps)


def planner(alpha: float = 0.1, keeps: bool = True) -> Planner:
    seconds = seconds_of(keeps)
    bandit = DiscountedUCB(GRID, alpha, discount=0.95)
    return Planner(bandit, seconds.forecast, limited=False, seconds=seconds)


class World:
    """Iterations that take as long as their arm's work, and bring what it is worth."""

    def __init__(self, worth: dict[Arm, float], rest_s: float, keeps: bool = True) -> None:
        self.worth, self.rest_s, self.keeps = worth, rest_s, keeps
        self.source = random.Random(0)

    def window_s(self, arm: Arm) -> float:
        return PROMPTS * arm.seeds_per_prompt * arm.steps / WORKERS

    def seconds(self, arm: Arm | None) -> float:
        rollouts_s = PROMPTS * GROUP * STEPS / WORKERS
        if arm is None:
            return self.rest_s + rollouts_s
        kept = self.keeps and arm.steps == STEPS
        return self.window_s(arm) + self.rest_s + (0.0 if kept else rollouts_s)

    def rate(self, arm: Arm | None) -> float:
        return (1 + (self.worth[arm] if arm else 0.0)) / self.seconds(arm)

    def play(self, plan: Planner, turn: int) -> Arm | None:
        arm = plan.decide(turn, PROMPTS, WORKERS).arm
        if arm is not None:
            opens_s = self.window_s(arm)
            plan.observe(WindowSeen(arm, opens_s, opens_s, WORKERS, PROMPTS * arm.seeds_per_prompt))
        plan.learn_rest(arm, self.seconds(arm) - (self.window_s(arm) if arm else 0.0))
        gain = self.worth[arm] + self.source.gauss(0, 0.05) if arm else 0.0
        found = Contrast(PROMPTS, 1 + gain, 1.0)
        plan.learn(arm, found if arm else None, PROMPTS, PROMPTS)
        return arm


WORTH = {Arm(n, s): {16: 0.5, 32: 1.2, 64: 1.9}[n] * (0.5 if s == 5 else 1.0) for n, s in
         ((arm.seeds_per_prompt, arm.steps) for arm in GRID)}  # fmt: skip


@pytest.mark.parametrize(
    ("rest_s", "best"),
    [(20.0, None), (1500.0, Arm(64, 10))],
    ids=["previews cost most of an iteration", "training does"],
)
def test_more_previews_are_made_the_more_the_rest_takes(rest_s: float, best: Arm | None) -> None:
    world, plan = World(WORTH, rest_s, keeps=False), planner(keeps=False)
    taken = [world.play(plan, turn) for turn in range(60)]
    assert max([None, *GRID], key=world.rate) == best
    assert taken[-30:].count(best) > 24


def test_kept_previews_pay_where_those_made_again_do_not() -> None:
    kept, again = World(WORTH, 60.0, keeps=True), World(WORTH, 60.0, keeps=False)
    best = max([None, *GRID], key=kept.rate)
    assert best is not None
    assert max([None, *GRID], key=again.rate) is None
    for world, keeps, expected in ((kept, True, best), (again, False, None)):
        plan = planner(keeps=keeps)
        taken = [world.play(plan, turn) for turn in range(60)]
        assert taken[-30:].count(expected) > 24


def test_what_did_not_pay_is_tried_again_in_time() -> None:
    world, plan = World(dict.fromkeys(GRID, 0.0), 20.0), planner()
    taken = [world.play(plan, turn) for turn in range(40)]
    assert taken[-10:] == [None] * 10
    world.worth = dict.fromkeys(GRID, 20.0)
    assert any(world.play(plan, turn) is not None for turn in range(40, 160))


@given(st.floats(1, 1e4), st.booleans())
def test_seconds_of_what_was_not_played_follow_from_what_was(rest_s: float, keeps: bool) -> None:
    world, seconds = World(WORTH, rest_s, keeps), seconds_of(keeps)
    assert seconds.of(Arm(16, 10), PROMPTS, WORKERS) is None
    played = Arm(32, 10)
    opens_s = world.window_s(played)
    seen = WindowSeen(played, opens_s, opens_s, WORKERS, PROMPTS * 32)
    seconds.forecast.observe(seen)
    seconds.learn_window(seen)
    seconds.learn_rest(played, world.seconds(played) - opens_s)
    for arm in (None, *GRID):
        assert seconds.of(arm, PROMPTS, WORKERS) == pytest.approx(world.seconds(arm))
    again = seconds_of(keeps)
    again.load(json.loads(json.dumps(seconds.snapshot())))
    again.forecast.load(seconds.forecast.snapshot())
    assert again.of(None, PROMPTS, WORKERS) == seconds.of(None, PROMPTS, WORKERS)


def test_a_window_that_opens_before_there_are_workers_tells_no_seconds() -> None:
    """As a run's first: neither what workers deliver nor how long previews take is known by it."""
    world, seconds, first, second = World(WORTH, 60.0), seconds_of(), Arm(64, 10), Arm(16, 10)
    for arm, opens_s, workers in ((first, 900.0, 0), (second, world.window_s(second), WORKERS)):
        seen = WindowSeen(arm, opens_s, opens_s, workers, PROMPTS * arm.seeds_per_prompt)
        assert seconds.of(None, PROMPTS, WORKERS) is None
        seconds.forecast.observe(seen)
        seconds.learn_window(seen)
        seconds.learn_rest(arm, world.seconds(arm) - world.window_s(arm))
    for each in (None, first, second):
        assert seconds.of(each, PROMPTS, WORKERS) == pytest.approx(world.seconds(each))


def test_decisions_and_seconds_survive_a_restart() -> None:
    world, plan = World(WORTH, 300.0), planner()
    for turn in range(12):
        world.play(plan, turn)
    again = planner()
    again.load(json.loads(json.dumps(plan.snapshot())))
    assert again.decide(12, PROMPTS, WORKERS) == plan.decide(12, PROMPTS, WORKERS)
    older = {name: value for name, value in plan.snapshot().items() if name != "seconds"}
    planner().load(json.loads(json.dumps(older)))


def explored(maximises: str, learns_s: float) -> Any:
    costs = PreviewCostsConfig(step_s=0.1)
    section = ExplorationConfig(
        planner=PlannerConfig(
            seed_counts=(8, 16, 48),
            step_counts=(10,),
            alpha=0.1,
            costs=costs,
            maximises=maximises,  # type: ignore[arg-type]
        ),
    )
    return ran(section, learns_s=learns_s, iterations=40, keeps_previews=True)


def test_in_a_run_previews_are_as_many_as_training_is_slow() -> None:
    """Simulated: fewer where training takes little, and that gives more contrast per second."""
    quick, slow = (explored("contrast_per_second", learns_s) for learns_s in (0.2, 60.0))

    def previews(run: Any) -> float:
        made = [report["window"]["issued"] for report in run.reports[-20:]]
        return statistics.fmean(made)

    assert previews(quick) < 0.7 * previews(slow)
    greedy = explored("contrast", 0.2)

    def per_s(run: Any) -> float:
        found = [report["contrast"] for report in run.reports]
        random_groups = statistics.fmean(each["random"] for each in found if each)
        return sum(each.get("realised", random_groups) for each in found) / run.now

    assert per_s(quick) > per_s(greedy)
    assert "per_s" in quick.reports[-1]["decision"]["arms"]["8x10"]


def test_in_a_run_costs_that_are_far_off_are_not_compared() -> None:
    """The profiled step takes 50 times as long as a real one: that is known when two windows have ended."""
    section = ExplorationConfig(
        planner=PlannerConfig(seed_counts=(8, 16), step_counts=(10,), costs=PreviewCostsConfig(step_s=20.0))
    )
    run = ran(section, iterations=6, keeps_previews=True)
    rates = [report["decision"].get("random_per_s") for report in run.reports]
    assert run.reports[0]["window"]["workers"] == 0
    assert rates[:2] == [None, None]
    random_s = ran(None, iterations=6).now / 6
    assert [1 / per_s for per_s in rates[2:]] == pytest.approx([random_s] * 4, rel=0.5)
