"""Runs that follow a reward's gradient: they raise it, go on to the bit, and refuse other rewards."""

from __future__ import annotations

import signal
from statistics import fmean

import pytest
from main_job import At, Job, largest_difference, lora, outcome, run_process, run_ranks

from spotlight.config.load import load_config
from spotlight.store.metrics import read_metrics
from spotlight_rewards.base.errors import ConfigError

COUNTER = "rewards=[{name: shape-counter}, {name: jpeg_size, weight: 0}]"
SIZES = ("rollout.prompts_per_iteration=4", "rollout.group_size=4", "learner.micro_batch_size=8")
RISES = 0.1
"""Of the share of red less that of green."""
RATES = {"opsd": "learner.learning_rate=1e-2", "refl": "learner.learning_rate=3e-3"}


def arguments(job: Job, name: str, algorithm: str, *more: str) -> list[str]:
    tags = "data.tags=[counting]"
    return job.arguments(name, f"algorithm.name={algorithm}", RATES[algorithm], COUNTER, tags, *SIZES, *more)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RATES)
def test_a_run_goes_on_to_the_bit(job: Job, algorithm: str) -> None:
    for name, pieces in (("straight", (4,)), ("parts", (2, 4))):
        for iterations in pieces:
            given = arguments(job, f"{algorithm}-{name}", algorithm, f"iterations={iterations}")
            ended = run_process(given, answer=job.root / f"{algorithm}-{name}.json")
            assert ended.finished, ended
    assert outcome(job.root / f"{algorithm}-parts") == outcome(job.root / f"{algorithm}-straight")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RATES)
def test_a_kill_between_scores_and_update_loses_nothing(job: Job, algorithm: str) -> None:
    straight, killed = (arguments(job, f"{algorithm}-{name}", algorithm) for name in ("unkilled", "killed"))
    answer = job.root / f"{algorithm}-killed.json"
    assert run_process(straight, answer=answer).finished
    # The gradients that the rewards' processes have made are gone with the process that holds them.
    ended = run_process(killed, At("work training", 3), answer=answer)
    assert ended.exit_code == -signal.SIGKILL, ended
    again = run_process(killed, answer=answer)
    assert again.finished, again
    assert outcome(job.root / f"{algorithm}-killed") == outcome(job.root / f"{algorithm}-unkilled")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RATES)
def test_two_ranks_do_what_one_does(job: Job, algorithm: str) -> None:
    few = ("iterations=2", "learner.learning_rate=1e-3", "learner.micro_batch_size=4")
    one, two = (arguments(job, f"{algorithm}-{name}", algorithm, *few) for name in ("one", "two"))
    assert run_process(one, answer=job.root / "one.json").finished
    ended = run_ranks(2, two, answer=job.root / "two")
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * 2
    runs = job.root / f"{algorithm}-one", job.root / f"{algorithm}-two"
    assert largest_difference(*runs) <= 1e-5
    assert max(float(tensor.abs().max()) for name, tensor in lora(runs[1]).items() if "lora_B" in name) > 5e-4
    rewards = [[row.values.get("rollout/reward") for row in read_metrics(run)] for run in runs]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RATES)
def test_a_run_raises_a_differentiable_reward(job: Job, algorithm: str) -> None:
    testbed = ("model.path=testbed", "rollout.height=32", "rollout.width=32", "rollout.steps=10")
    sizes = ("rollout.prompts_per_iteration=8", "rollout.group_size=8", "learner.micro_batch_size=32")
    rate = (
        "learner.lora={rank: 32, alpha: 64}",
        "learner.learning_rate=1e-2",
        "iterations=8",
        "evaluation.every=8",
    )
    redder = "rewards=[{name: 'reward_functions:Redder'}]"
    job.train(f"{algorithm}-learns", *arguments(job, "", algorithm)[1:], redder, *testbed, *sizes, *rate)
    rows = [row.values for row in read_metrics(job.root / f"{algorithm}-learns")]
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + RISES, rewards


def test_a_reward_without_a_gradient_is_refused_by_a_list_of_those_that_have_one(job: Job) -> None:
    with pytest.raises(ConfigError) as refused:
        job.train("refused", "algorithm.name=opsd", "rewards=[{name: jpeg_size}]")
    assert "found 'jpeg_size'; expected rewards with a gradient" in str(refused.value)
    assert "shape-counter, pickscore, hps, clip-score, aesthetic" in str(refused.value)


@pytest.mark.parametrize("algorithm", RATES)
def test_what_a_run_with_gradients_excludes(algorithm: str) -> None:
    for more, key in (
        ("fleet.driver=ray", "fleet.driver"),
        ("exploration={}", "exploration"),
        ("rollout.frames=5", "rollout.frames"),
        ("pipeline.axis=prompt", "pipeline.axis"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: .* With a reward's gradient"):
            load_config(None, [f"algorithm.name={algorithm}", more])
