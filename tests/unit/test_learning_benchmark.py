"""The learning benchmark's arithmetic: what a score costs, gains with intervals, and which runs are made."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from benchmarks import _learning_figures as figures
from benchmarks import learning
from benchmarks._exploration_lab import laboratory
from benchmarks._learning_cases import BASELINE, CASES, TASKS, LearningSizes

from spotlight_plan.scenarios.profile import load_profile
from spotlight_plan.scenarios.profile_costs import forward_s, train_point_s

SIZES = LearningSizes(10, 2, 4, 4, evaluate_every=5, evaluation_images=1, reserved=1, spot=2, overrides=())


def run(speed: float, cost: float, noise: float = 0.0) -> figures.LearningRun:
    """Its score rises by ``speed`` per iteration, each of which costs so much."""
    strict = {at: min(1.0, at * speed) + noise for at in range(0, 31, 5)}
    return figures.LearningRun(strict, {"usd": [cost * number for number in range(1, 31)]})


def test_a_gain_is_the_ratio_of_what_the_target_costs() -> None:
    slow, fast = {0: run(0.02, 3.0), 1: run(0.02, 3.0)}, {0: run(0.04, 2.0), 1: run(0.04, 2.0)}
    found = figures.gains(0.4, slow, fast, 1, 50)["usd"]
    assert found["cost"] == pytest.approx(20)
    assert found["ratio"] == found["low"] == found["high"] == pytest.approx(3)
    same = figures.gains(0.4, slow, slow, 1, 50)["usd"]
    assert (same["ratio"], same["low_all"], same["undecided"]) == (1, 1, 0)


def test_a_baseline_that_still_rises_reaches_its_own_end_when_it_ends() -> None:
    slow = {0: run(0.02, 3.0, 0.01), 1: run(0.02, 3.0)}
    found = figures.gains(None, slow, slow, 1, 50)["usd"]
    assert (found["cost"], found["ratio"], found["undecided"]) == (pytest.approx(90), 1, 0)
    fast = {seed: run(0.04, 3.0) for seed in slow}
    assert figures.gains(None, slow, fast, 1, 50)["usd"]["low"] > 1.5


def test_what_is_not_reached_is_said_and_never_a_number() -> None:
    slow, fast = {0: run(0.01, 1.0)}, {0: run(0.04, 1.0)}
    assert figures.gains(0.9, slow, slow, 1, 50)["usd"]["undecided"] == 1
    assert figures.gains(0.9, fast, slow, 1, 50)["usd"] | {"low_all": 0, "high_all": 0} == {
        "cost": None, "ratio": 0, "low": 0, "high": 0, "low_all": 0, "high_all": 0, "undecided": 0
    }  # fmt: skip
    unreached = figures.gains(0.9, slow, fast, 1, 50)["usd"]
    assert unreached["cost"] is not None
    assert (unreached["ratio"], unreached["high"]) == (None, None)
    assert figures.ratio(0.0, 0.0) is None


def test_intervals_cover_and_widen_with_the_cases_compared() -> None:
    covered, draw = 0, random.Random(0)
    for _ in range(6):
        noisy = [{seed: run(speed, 1.0, draw.gauss(0, 0.03)) for seed in range(6)} for speed in (0.02, 0.03)]
        one, many = (figures.gains(0.3, *noisy, compared, 200)["usd"] for compared in (1, 10))
        covered += one["low"] <= 1.5 <= one["high"]
        assert many["low_all"] <= one["low"] <= one["high"] <= many["high_all"]
    assert covered >= 4
    assert all(map(math.isnan, figures.quantiles([], 0.9)))
    assert figures.quantiles([3.0, 1.0, 2.0], 1.0) == (1.0, 3.0)


def test_each_case_takes_its_best_rate_of_a_seed_that_is_not_compared() -> None:
    assert figures.best_rate({1e-3: 0.5, 2e-3: 0.7, 4e-3: 0.7}) == 2e-3
    wanted = [*learning.wanted_tuning(["counting"], [BASELINE, "awm"])]
    assert {seed for *_, seed in wanted} == {learning.TUNING_SEED}
    assert len(set(wanted)) == 2 * 3
    assert [learning.in_turn("abc", at)[0] for at in range(4)] == ["a", "b", "c", "a"]


def test_the_choice_of_rates_is_shown_with_what_it_was_made_by(tmp_path: Path) -> None:
    record = learning.Record(tmp_path / "learning.json", SIZES, ("tuned", "runs", "simulated"))
    for rate, end in zip(CASES["awm"].rates, (0.7, 0.9, 0.5), strict=True):
        name = learning.name_of("counting", "awm", rate, learning.TUNING_SEED)
        record.tree["tuned"][name] = {"strict": {"0": 0.5, "10": end}, "cpu_s": 100 * end}
    assert learning.chosen_rates(record, ["counting"], ["awm"], tuned=True) == {("counting", "awm"): 2e-3}
    (row,) = learning.rates_table(record, "counting", ["awm"])
    assert (row["rate"], row["at 10"], row["CPU s"]) == ("0.002", "0.900", "90")
    heights = [row[f"height {number}"] for number in (1, 2, 3)]
    assert heights == ["0.600 at 0.001", "0.700 at 0.002", "0.500 at 0.004"]


@pytest.mark.parametrize("task", TASKS)
def test_every_case_is_a_configuration_that_trains_what_it_says(task: str) -> None:
    for name, case in CASES.items():
        if not case.suits(TASKS[task]):
            continue
        config = SIZES.config(task, case, case.rates[1], 3)
        assert config.learner.learning_rate == case.rates[1]
        assert config.rollout.group_size == SIZES.generated(case)
        assert (config.algorithm.train_samples or config.rollout.group_size) == SIZES.trained(case), name
        assert (config.exploration is not None) == (case.explores is not None)
        assert config.exploration is None or config.exploration.seeds_per_prompt == SIZES.previews(case)


def test_chosen_previews_of_current_weights_are_rollouts_and_count_once() -> None:
    made = {name: SIZES.made(CASES[name]) for name in (BASELINE, "wide-subset", "explored", "explored-idle")}
    assert made == {BASELINE: 4, "wide-subset": 8, "explored": 8, "explored-idle": 12}
    config = SIZES.config("counting", CASES["explored"], 1e-3, 0)
    assert config.exploration is not None
    assert config.exploration.makes_rollouts(config.rollout.true_cfg_scale)


def test_simulated_training_has_the_forwards_that_each_algorithm_takes() -> None:
    profile = load_profile("testbed-cpu")
    plain = train_point_s(profile, "cpu", 32 * 32)
    for name, others in {
        BASELINE: 2,
        "awm": 2,
        "dgpo": 2,
        "diffusion-dpo": 1,
        "v-grpo": 0,
        "grpo-guard": 0,
    }.items():
        config = SIZES.config("counting", CASES[name], CASES[name].rates[1], 0)
        size = config.learner.micro_batch_size
        one_s = forward_s(profile, "cpu", 32 * 32, size, 1) / size
        found = train_point_s(learning.with_all_forwards(profile, config), "cpu", 32 * 32)
        assert found == pytest.approx(plain + others * one_s), name


@pytest.mark.parametrize("name", ["wide-subset", "wide-subset+overlap", "explored-idle"])
def test_cases_are_simulated_with_the_work_that_they_do(name: str) -> None:
    found = learning.simulate_case(SIZES, "counting", name)
    ends_s = found["iteration_ends_s"]
    assert len(ends_s) == SIZES.iterations
    assert all(before < after for before, after in pairwise(ends_s))
    assert found["usd_s"] > 0
    assert math.isfinite(found["usd_s"])


@pytest.mark.parametrize(
    ("task", "case"),
    [(task, case) for task in TASKS for case in CASES if CASES[case].suits(TASKS[task])],
)
def test_every_case_can_be_measured_at_the_sizes_that_the_command_has(task: str, case: str) -> None:
    options = signature(learning.main).parameters
    numbers = [field.name for field in fields(LearningSizes) if field.name != "overrides"]
    sizes = LearningSizes(**{name: options[name].default for name in numbers}, overrides=())
    for rate in CASES[case].rates:
        config = sizes.config(task, CASES[case], rate, 0)
        assert sizes.prompts * sizes.trained(CASES[case]) % config.learner.micro_batch_size == 0


def test_what_is_made_for_shapes_is_refused_for_words(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"opsd; with --task text expected cases without"):
        learning.main(json_file=tmp_path / "no.json", task=["text"], case=["awm", "opsd"])
    assert not (tmp_path / "no.json").exists()


@pytest.mark.slow
def test_overlap_trains_early_groups_that_are_all_one_version_stale() -> None:
    case = CASES["wide-subset+overlap"]
    sizes = replace(SIZES, iterations=3, group_size=8, rollout_steps=2)
    with laboratory(sizes.config("counting", case, 1e-3, 0)) as lab:
        rows = lab.train(case.explores).rows
    assert [row["pipeline/early_samples"] for row in rows] == [0, 16, 16]
