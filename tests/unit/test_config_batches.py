"""Batches that do not divide among steps and ranks are refused with numbers that do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.config.sections.learner_section import LearnerConfig, batch_problems
from spotlight.config.sections.rollout import RolloutConfig
from spotlight_rewards.base.errors import ConfigError, Problem

BASE = (
    "algorithm.name=diffusion-nft",
    "rollout={sampler: ode, steps: 10, prompts_per_iteration: 12, group_size: 16}",
    "learner={updates_per_batch: 1, micro_batch_size: 64}",
    "evaluation.images_per_prompt=16",
)
"""What these tests count on, whatever the embedded default becomes."""


def test_whole_groups_are_demanded_of_the_ranks_that_torchrun_starts() -> None:
    config = load_config(None, [*BASE, "algorithm.name=dgpo", "learner.micro_batch_size=8"])
    assert not list(config.rank_problems(2, ()))
    (problem,) = config.rank_problems(1, ())
    assert (problem.key, "set 16" in problem.remedy) == ("learner.micro_batch_size", True)


def test_samples_that_are_not_whole_groups_need_not_divide_by_prompts() -> None:
    divides = "learner={updates_per_batch: 8, update_split: every_group, micro_batch_size: 24}"
    assert load_config(None, [*BASE, divides]).learner.updates_per_batch == 8  # of 12 prompts


def batch_config(prompts: int, group: int, updates: int, micro: int) -> RunConfig:
    return RunConfig(
        rollout=RolloutConfig(prompts_per_iteration=prompts, group_size=group),
        learner=LearnerConfig(updates_per_batch=updates, micro_batch_size=micro),
    )


def fixes(problem: Problem, config: RunConfig, ranks: int) -> list[tuple[RunConfig, int]]:
    """The configurations that the remedy's numbers stand for."""
    rollout, learner = config.rollout, config.learner
    prompts, group = rollout.prompts_per_iteration, rollout.group_size
    updates, micro = learner.updates_per_batch, learner.micro_batch_size
    suggested = [int(number) for number in re.findall(r"\d+", problem.remedy)]
    match problem.key:
        case "learner.updates_per_batch":
            *counts, more = suggested
            return [(batch_config(prompts, group, count, micro), ranks) for count in counts] + [
                (batch_config(more, group, updates, micro), ranks)
            ]
        case "rollout.group_size":
            *counts, size = suggested
            return [(config, count) for count in counts] + [
                (batch_config(prompts, size, updates, micro), ranks)
            ]
        case "learner.micro_batch_size":
            return [(batch_config(prompts, group, updates, size), ranks) for size in suggested]
    raise AssertionError(problem)


@given(st.integers(1, 24), st.integers(2, 24), st.integers(1, 8), st.integers(1, 64), st.integers(1, 8))
def test_batches_divide_or_the_error_says_what_does(
    prompts: int, group: int, updates: int, micro: int, ranks: int
) -> None:
    config = batch_config(prompts, group, updates, micro)
    problems = list(batch_problems(config, ranks))
    share = prompts * group / updates / ranks
    divides = prompts % updates == 0 and share % 1 == 0 and (share % micro == 0 or micro > share)
    assert bool(problems) != divides
    for problem in problems:
        for fixed, fixed_ranks in fixes(problem, config, ranks):
            # One problem at a time: the same key is not wrong again.
            assert problem.key not in {p.key for p in batch_problems(fixed, fixed_ranks)}


def test_on_a_cluster_the_batch_must_divide_by_its_learner_ranks() -> None:
    batch = ("rollout={prompts_per_iteration: 12, group_size: 16}", "learner.micro_batch_size=64")
    load_config(None, [*batch, "fleet.driver=ray"])
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*batch, "fleet.driver=ray", "fleet.learner_ranks=2"])
    (problem,) = caught.value.problems
    assert problem.key == "learner.micro_batch_size"
    assert "96 samples that a rank trains" in problem.expected


@pytest.mark.parametrize(
    ("per_node", "fits"), [((), True), ((2, 2), True), ((3, 1), False), ((1, 2, 1), False)]
)
def test_ranks_share_the_model_per_node_only_where_nodes_are_equal(
    per_node: tuple[int, ...], fits: bool
) -> None:
    config = load_config(None, BASE)
    problems = list(config.rank_problems(4, per_node))
    assert [problem.key for problem in problems] == ([] if fits else ["learner.shard"])
    alone = load_config(None, [*BASE, "learner.shard=none"])
    assert not list(alone.rank_problems(4, per_node))


def test_ranks_keep_a_quantised_model_whole() -> None:
    config = load_config(None, [*BASE, "model.quantize=int8", "learner.micro_batch_size=48"])
    assert not list(config.rank_problems(1, ()))
    (problem,) = config.rank_problems(2, ())
    assert problem.key == "learner.shard"
    assert "set learner.shard=none" in problem.remedy
    whole = load_config(None, [*BASE, "model.quantize=int8", "learner={micro_batch_size: 48, shard: none}"])
    assert not list(whole.rank_problems(2, ()))
