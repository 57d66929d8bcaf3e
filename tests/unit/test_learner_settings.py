"""The learner's schedules and the sums it reports."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight.algorithms.base import LossTerms
from spotlight.config.load import load_config
from spotlight.config.sections.learner_section import EmaConfig, LearnerConfig
from spotlight.training.sharding import Ranks
from spotlight.training.step_metrics import StepReport, UpdateMeter
from spotlight_rewards.base.errors import ConfigError


@given(st.integers(0, 50), st.integers(0, 80) | st.floats(0, 80))
def test_warm_up_is_linear_and_its_first_step_moves(warmup: int, step: float) -> None:
    settings = LearnerConfig(learning_rate=0.5, warmup_steps=warmup)
    rate = settings.learning_rate_at(step)
    assert 0 < rate <= 0.5
    assert rate == pytest.approx(0.5 * min(1, (step + 1) / max(warmup, 1)))


@given(st.integers(0, 20), st.integers(1, 200))
def test_the_learning_rate_falls_along_a_cosine_to_nothing(warmup: int, after: int) -> None:
    settings = LearnerConfig(learning_rate=0.5, warmup_steps=warmup, decay_iterations=warmup + after)
    rates = [settings.learning_rate_at(step) for step in range(warmup, warmup + after + 1)]
    assert rates[0] == 0.5
    assert all(earlier > later for earlier, later in pairwise(rates))
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert rates[after // 2] == pytest.approx(0.25, abs=0.5 / after)
    assert sum(rates) / len(rates) == pytest.approx(0.25, abs=1e-12)


@given(st.integers(1, 1000), st.integers(1, 10), st.floats(0, 0.999))
def test_the_average_decays_as_published(step: int, every: int, cap: float) -> None:
    decay = EmaConfig(cap=cap, every=every).decay(step)
    assert (decay is None) == (step % every != 0)
    if decay is not None:
        assert decay == min((1 + step) / (10 + step), cap)


def test_sums_are_means_over_samples_and_timesteps() -> None:
    meter = UpdateMeter(torch.device("cpu"), steps=5)
    first = torch.tensor([0, 2])
    for timestep in range(2):
        values = torch.tensor([1.0, 2.0]) + timestep
        meter.add(
            LossTerms(
                values,
                {"ratio": values, "kl": 2 * values, "log_prob_rollout_difference": values},
                torch.tensor([timestep, timestep]),
            ),
            first,
        )
    meter.samples = 2
    sums = meter.reduce(Ranks())
    assert (sums.samples, sums.loss, sums.ratio_max) == (2, 2.0, 3.0)
    assert sums.means == {"ratio": 2.0, "kl": 4.0, "log_prob_rollout_difference": 2.0}
    assert sums.replay_difference == {0: 1.0, 1: 2.0, 2: 2.0, 3: 3.0}
    row = StepReport(4, sums, 1.0, 0.5, 3.0, 1e-3, 0.1).flat()
    assert row["replay/step_002"] == 2.0
    assert row["train/ratio_max"] == 3.0


def test_without_labels_or_ratios_nothing_is_made_up() -> None:
    meter = UpdateMeter(torch.device("cpu"), steps=0)
    meter.add(LossTerms(torch.ones(3), {"rho": torch.ones(3)}), torch.zeros(3, dtype=torch.int64))
    sums = meter.reduce(Ranks())
    assert sums.ratio_max is None
    assert sums.replay_difference == {}
    assert "train/ratio_max" not in StepReport(1, sums, 1.0, 1.0, 1.0, 1.0, 1.0).flat()


@given(st.integers(1, 4), st.integers(1, 64), st.integers(1, 40))
def test_by_samples_a_run_that_trains_half_is_as_far_after_twice_as_many_iterations(
    updates: int, half: int, iterations: int
) -> None:
    settings = LearnerConfig(
        schedule_samples=2 * half * updates, updates_per_batch=updates, decay_iterations=40, warmup_steps=3
    )
    whole = LearnerConfig(updates_per_batch=updates, decay_iterations=40, warmup_steps=3)
    trained = iterations * 2 * half * updates
    steps, batches = settings.scheduled(2 * iterations * updates, 2 * iterations, trained)
    assert (steps, batches) == pytest.approx((iterations * updates, iterations))
    assert settings.learning_rate_at(steps) == pytest.approx(whole.learning_rate_at(iterations * updates))
    assert whole.scheduled(7, 5, trained) == (7, 5)


def test_a_decay_by_samples_ends_where_the_samples_do() -> None:
    subset = ["algorithm.train_samples=8", "learner.micro_batch_size=96", "learner.decay_iterations=30"]
    by_samples = [*subset, "learner.schedule_samples=192"]
    assert load_config(None, [*by_samples, "iterations=60"]).iterations == 60
    with pytest.raises(ConfigError, match="after 60 iterations"):
        load_config(None, [*by_samples, "iterations=61"])
    with pytest.raises(ConfigError, match=r"learner\.decay_iterations=30"):
        load_config(None, [*subset, "iterations=31"])
