"""The planner takes what fits, learns from what was realised, says why, and goes on from its snapshot."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.sections.exploration import PreviewCostsConfig
from spotlight.scheduler.policies.exploration.bandit import Arm, DiscountedUCB, arm_grid
from spotlight.scheduler.policies.exploration.budget import Forecast, WindowSeen
from spotlight.scheduler.policies.exploration.contrast import Contrast
from spotlight.scheduler.policies.exploration.planner import Decision, Planner

GRID = arm_grid((16, 32), (4, 8))
COSTS = PreviewCostsConfig(step_s=1.0, fixed_s=1.0, reward_s=2.0)
PROMPTS, WORKERS = 4, 8


def planner(*, limited: bool = True, caution: float = 1.0) -> Planner:
    return Planner(DiscountedUCB(GRID, alpha=0.5), Forecast(COSTS, caution), limited)


def decide(plan: Planner, iteration: int = 1, workers: int = WORKERS) -> Decision:
    return plan.decide(iteration, PROMPTS, workers)


def window(arm: Arm, open_s: float, share: float = 1.0) -> WindowSeen:
    """A window at full yield, of which a share was delivered."""
    scored = round(share * PROMPTS * arm.seeds_per_prompt)
    return WindowSeen(arm, open_s, open_s, WORKERS, scored)


def brought(gain: float, random_contrast: float = 1.0) -> Contrast:
    return Contrast(4, random_contrast + gain, random_contrast)


def learn(plan: Planner, arm: Arm | None, contrast: Contrast | None) -> None:
    """Of previews that chose every group."""
    plan.learn(arm, contrast, PROMPTS, PROMPTS)


def test_only_arms_that_fit_are_taken() -> None:
    plan = planner(caution=0.0)
    first = decide(plan)
    assert (first.arm, first.metrics["capacity"]["cautious_s"]) == (Arm(16, 4), None)  # type: ignore[index]
    # 16x8 takes 4 * 16 * 9 = 576 worker-seconds, 32x4 takes 640; 8 workers deliver 600 in 2 + 75 s.
    plan.forecast.observe(WindowSeen(Arm(16, 4), 77.0, 77.0, WORKERS, 120))
    fits = {name for name, one in arms_of(plan).items() if one["fits"]}
    assert fits == {"16x4", "16x8"}
    assert all(one["fits"] for one in arms_of(plan, 2 * WORKERS).values())
    lost = decide(plan, workers=0)
    assert (lost.arm, "no arm fits" in str(lost.metrics["why"])) == (Arm(16, 4), True)


def arms_of(plan: Planner, workers: int = WORKERS) -> dict[str, dict[str, Any]]:
    found = decide(plan, workers=workers).metrics["arms"]
    assert isinstance(found, dict)
    return found


def test_an_unsteady_market_is_trusted_less() -> None:
    steady, unsteady = planner(), planner()
    for turn in range(6):
        steady.observe(window(Arm(16, 8), 74.0))
        unsteady.observe(window(Arm(16, 8), 74.0, 1.4 if turn % 2 else 0.6))
    of = [plan.forecast.capacity(WORKERS) for plan in (steady, unsteady)]
    assert of[0].expected_s == pytest.approx(576)
    assert of[1].expected_s == pytest.approx(576, rel=0.05)
    assert of[0].cautious_s == pytest.approx(576)
    assert of[1].cautious_s is not None
    assert of[1].cautious_s < 0.7 * 576
    assert arms_of(steady)["16x8"]["fits"]
    assert not arms_of(unsteady)["16x8"]["fits"]


def test_what_ended_early_tells_the_yield_all_the_same() -> None:
    plan = planner()
    plan.observe(WindowSeen(Arm(16, 4), 200.0, 42.0, WORKERS, 64))
    found = plan.forecast.capacity(WORKERS)
    assert found.yields == pytest.approx(1.0)  # 64 * 5 in 40 s of 8 workers
    assert found.expected_s == pytest.approx(8 * 198)


def test_realised_gain_decides_and_prompts_do_not() -> None:
    """Arm 32x8 brings most, but is played in iterations whose prompts differ least by themselves."""
    plan, source = planner(limited=False), random.Random(0)
    worth = {Arm(16, 4): 0.1, Arm(16, 8): 0.3, Arm(32, 4): 0.2, Arm(32, 8): 0.9}
    taken = []
    for turn in range(60):
        arm = decide(plan, turn).arm
        assert arm is not None
        noise = source.gauss(0, 0.1)
        prompts = 0.5 if arm == Arm(32, 8) else source.uniform(2, 5)
        learn(plan, arm, brought(worth[arm] + noise, prompts))
        taken.append(arm)
    assert taken[-30:].count(Arm(32, 8)) > 20


def test_an_arm_is_judged_by_all_prompts_it_was_to_explore() -> None:
    """Neither tried again and again because nothing was learnt, nor judged by the prompts it served alone."""
    plan = planner(limited=False)
    first = decide(plan).arm
    assert first is not None
    plan.learn(first, None, chosen=0, prompts=PROMPTS)
    assert decide(plan).arm != first
    for arm, chosen in ((Arm(16, 8), 4), (Arm(32, 8), 1)):
        plan.learn(arm, brought(0.5), chosen, PROMPTS)
    found = arms_of(plan)
    assert found["16x8"]["mean"] == pytest.approx(4 * found["32x8"]["mean"])


@given(seed=st.integers(0, 200), cut=st.integers(0, 25))
def test_a_restored_planner_decides_as_the_old_one(seed: int, cut: int) -> None:
    source = random.Random(seed)
    straight, resumed = planner(), planner()
    for turn in range(25):
        if turn == cut:
            state = json.loads(json.dumps(resumed.snapshot()))
            resumed = planner()
            resumed.load(state)
        one, other = (decide(plan, turn) for plan in (straight, resumed))
        assert one == other
        json.dumps(one.metrics, allow_nan=False)
        seen = WindowSeen(
            one.arm or GRID[0], source.uniform(40, 300), 40.0, source.randrange(9), source.randrange(64)
        )
        result = brought(source.gauss(0.3, 0.3), source.random())
        for plan in (straight, resumed):
            plan.observe(seen)
            learn(plan, one.arm, result)


def test_a_planner_resumes_with_another_grid() -> None:
    old = planner(limited=False)
    awaited = decide(old).arm
    assert awaited is not None
    left = [arm for arm in GRID if arm != awaited]
    new = Planner(DiscountedUCB(left, alpha=0.5), Forecast(COSTS, 1.0), limited=False)
    new.load(json.loads(json.dumps(old.snapshot())))
    assert decide(new, 2).arm in left


def test_a_broken_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="bandit"):
        planner().load({})
