"""Simulated previews rank as well as the model says, and depend on nothing but names."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from scipy import stats

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_plan.simulation.virtual_rewards import RewardModel
from spotlight_rewards.base.prompts import PromptId

PLAN = Plan(
    run_seed=0, iterations=1, prompts_per_iteration=1, group_size=2, rollout_steps=10,
    evaluation=EvaluationConfig(steps=10, images_per_prompt=1, every=1),
    updates_per_batch=1, micro_batch_size=2, checkpoint_every=1,
    lease_s=60.0, max_drop_share=None,
    exploration=ExplorationConfig(where="idle", seeds_per_prompt=2, steps=5),
)  # fmt: skip


def sample(seed: int, purpose: Purpose, steps: int = 10, prompt: str = "p") -> Rollout:
    return Rollout(RolloutId("r"), purpose, 0, PromptId(prompt), 0, seed, steps, PolicyVersion(0))


@pytest.mark.parametrize(("steps", "exponent"), [(5, 1.66), (8, 0.82), (10, 1.0)])
def test_previews_correlate_as_the_model_says(steps: int, exponent: float) -> None:
    model = RewardModel(exponent=exponent)
    seeds = range(4000)
    made = [model.reward(sample(seed, Purpose.TRAIN), PLAN) for seed in seeds]
    previews = [model.reward(sample(seed, Purpose.EXPLORE, steps), PLAN) for seed in seeds]
    expected = model.correlation(steps, 10, stale=True)
    assert stats.pearsonr(made, previews).statistic == pytest.approx(expected, abs=0.03)
    assert statistics.stdev(previews) == pytest.approx(statistics.stdev(made), rel=0.05)
    assert expected == pytest.approx(model.correlation(steps, 10, stale=False) * 0.97)


def test_the_formula_fits_what_was_measured() -> None:
    for exponent, measured in (
        (1.66, {3: 0.420, 4: 0.580, 5: 0.684, 6: 0.761, 8: 0.895}),
        (0.82, {4: 0.380, 5: 0.432, 6: 0.520, 8: 0.718}),
    ):
        model = RewardModel(exponent=exponent)
        for steps, spearman in measured.items():
            assert model.correlation(steps, 10, stale=False) == pytest.approx(spearman, abs=0.04)


def test_some_prompts_have_no_contrast() -> None:
    model = RewardModel(flat_share=0.4)
    flat = 0
    for prompt in range(300):
        rewards = {model.reward(sample(seed, Purpose.TRAIN, prompt=f"p{prompt}"), PLAN) for seed in range(3)}
        flat += len(rewards) == 1
    assert flat / 300 == pytest.approx(0.4, abs=0.1)
    one = sample(7, Purpose.TRAIN)
    again = dataclasses.replace(one, id=RolloutId("other"), member=3, version=PolicyVersion(9))
    assert model.reward(one, PLAN) == model.reward(again, PLAN)


def test_impossible_models_are_refused() -> None:
    for settings in ({"exponent": 0.0}, {"staleness": 1.5}, {"flat_share": -0.1}, {"spread": -1.0}):
        with pytest.raises(ValueError, match="expected an exponent"):
            RewardModel(**settings)
