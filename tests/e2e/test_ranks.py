"""Two ranks (FSDP2 over gloo) do the main job that one rank does, and take up each other's checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kept_pictures import training_pictures
from main_job import (
    ALGORITHMS,
    GRPO,
    NFT,
    ONE_AT_ONCE,
    At,
    Job,
    Outcome,
    clean_audit,
    largest_difference,
    lora,
    newest_checkpoint,
    outcome,
    run_ranks,
)
from test_reward_failures import arguments as moody_arguments

from spotlight.registry import FAMILIES
from spotlight.scheduler.types import DropReason
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.metrics import read_metrics

FOUR = AuditLimits(group_size=4)
RANKS = (
    "rollout.group_size=4",
    "iterations=2",
    "learner.learning_rate=0.001",
    "rewards=[{name: 'reward_functions:moody'}]",
)
WEIGHT_TOLERANCE = 1e-5
"""Largest difference of a LoRA weight after the run; measured: 7e-7, of weights up to 2e-3."""
SCORE_TOLERANCE = 1e-5
"""Of a validation's mean reward; measured: 0. A byte that rounds otherwise would move it by 1e-6."""


def counts(run: Path) -> tuple[object, ...]:
    found = clean_audit(run, FOUR).counts
    return found.issued, found.trained, found.evaluated, found.dropped, found.optimizer_steps, found.versions


def assert_close(first: Outcome, second: Outcome) -> None:
    assert [row[:2] for row in first.validation] == [row[:2] for row in second.validation]
    for one, two in zip(first.validation, second.validation, strict=True):
        assert one[2] == pytest.approx(two[2], abs=SCORE_TOLERANCE)


@pytest.mark.parametrize("algorithm", ONE_AT_ONCE)
def test_two_ranks_do_what_one_does(job: Job, algorithm: str) -> None:
    overrides = [*ALGORITHMS[algorithm], *RANKS]
    one, two = job.root / f"one-{len(overrides)}", job.root / f"two-{len(overrides)}"
    job.train(one.name, *overrides)
    ended = run_ranks(2, job.arguments(two.name, *overrides), answer=job.root / two.name)
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * 2
    assert [each.finished for each in ended] == [True, True]
    assert ended[0].iterations == ended[1].iterations == (0, 1)
    assert training_pictures(two)[0] == training_pictures(one)[0]
    assert counts(one) == counts(two)
    assert_close(outcome(one), outcome(two))
    assert largest_difference(one, two) <= WEIGHT_TOLERANCE
    assert max(float(tensor.abs().max()) for name, tensor in lora(two).items() if "lora_B" in name) > 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("split", ["shuffled", "every_group"])
def test_two_ranks_divide_samples_among_updates_as_one_does(job: Job, split: str) -> None:
    overrides = [*GRPO, *RANKS, f"learner.update_split={split}", "rollout.initial_noise=group"]
    one, two = job.root / f"one-{split}", job.root / f"two-{split}"
    job.train(one.name, *overrides)
    ended = run_ranks(2, job.arguments(two.name, *overrides), answer=two)
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * 2
    assert counts(one) == counts(two)
    assert_close(outcome(one), outcome(two))
    assert largest_difference(one, two) <= WEIGHT_TOLERANCE


@pytest.mark.slow  # the first tier loads such states in tests/invariant/test_learner_ranks.py
@pytest.mark.parametrize("first", [1, 2])
def test_checkpoints_are_taken_up_by_another_number_of_ranks(job: Job, first: int) -> None:
    overrides = [*NFT, *RANKS]
    straight, name = job.root / f"one-{len(overrides)}", f"from-{first}-ranks"
    job.train(straight.name, *overrides)  # at once, where the test above has made it
    for ranks, iterations in ((first, 1), (3 - first, 2)):
        arguments = job.arguments(name, *overrides, f"iterations={iterations}")
        ended = run_ranks(ranks, arguments, answer=job.root / name)
        assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * len(ended)
        assert ended[0].iterations == (iterations - 1,)
    run = job.root / name
    assert (newest_checkpoint(run) / "learner" / "learner.dcp").is_dir() == (first == 1)
    assert counts(run) == counts(straight)
    assert_close(outcome(run), outcome(straight))
    assert largest_difference(run, straight) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("algorithm", ONE_AT_ONCE)
def test_a_rank_left_without_samples_trains_the_others(job: Job, algorithm: str) -> None:
    """All that the second rank made is dropped, and of the single evaluation picture it makes none."""
    overrides = moody_arguments(job, "nan on rank 1", "nan on rank 1")
    alone = ("rollout.group_size=4", "evaluation.prompts=1", "evaluation.images_per_prompt=1")
    name = f"lopsided-{list(ALGORITHMS).index(algorithm)}"
    arguments = job.arguments(name, *ALGORITHMS[algorithm], *overrides, *alone, "evaluation.grid_images=1")
    ended = run_ranks(2, arguments, answer=job.root / name)
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * len(ended)
    report = clean_audit(job.root / name, FOUR)
    assert report.counts.train_dropped == {DropReason.REWARD_NOT_FINITE: 4}
    assert (report.counts.trained, report.counts.evaluated) == (4, 2)


def test_a_model_with_a_forward_for_each_row_makes_unequal_leases_on_shards(job: Job) -> None:
    """Three pictures on two ranks: every rank takes part in each forward of a sharded model."""
    pipeline = job.root / "a-forward-for-each-row"
    FAMILIES.load("qwen-image-2.1").tiny(pipeline, seed=0)
    prompts = job.root / "three.txt"
    prompts.write_text("a red circle\ntwo blue squares\nthree green triangles above a square\n")
    own = (
        "model.family=qwen-image-2.1",
        f"model.path={pipeline}",
        "model.max_text_tokens=128",
        "rollout.height=32",
        "rollout.width=32",
    )
    scored = (f"data.train={prompts}", f"data.test={prompts}", "data.tags=[]", "rewards=[{name: jpeg_size}]")
    evaluated = ("evaluation.prompts=null", "evaluation.images_per_prompt=1", "evaluation.grid_images=1")
    arguments = job.arguments("rows", *NFT, *RANKS[:-1], "iterations=1", *own, *scored, *evaluated)
    ended = run_ranks(2, arguments, answer=job.root / "rows")
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * len(ended)
    assert clean_audit(job.root / "rows", FOUR).counts.evaluated == 6


def test_a_batch_that_does_not_divide_by_the_ranks_is_refused_by_all(job: Job) -> None:
    arguments = job.arguments("indivisible", *GRPO)
    ended = run_ranks(2, arguments, answer=job.root / "indivisible")
    for each in ended:
        assert each.error is not None
        assert (
            "rollout.group_size: found 3; expected samples of an update (3) divisible by the 2 ranks"
            in each.error
        )
    assert not (job.root / "indivisible").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["work rollout", "work training"])
def test_ranks_stop_together_and_go_on_exactly(job: Job, moment: str) -> None:
    overrides = [*NFT, *RANKS, "checkpoint.every=9"]
    run, straight = job.root / f"two-stopped-{moment[5:]}", job.root / f"two-straight-{moment[5:]}"
    run_ranks(2, job.arguments(straight.name, *overrides), answer=job.root / straight.name)
    count = sum(moment in each for each in moments_of(straight))
    second = At(moment, count // 2 + 1, signal.SIGTERM)  # of iteration 1
    ended = run_ranks(2, job.arguments(run.name, *overrides), second, answer=job.root / run.name)
    assert [(each.exit_code, each.stopped, each.iterations) for each in ended] == [(0, True, (0,))] * 2
    assert newest_checkpoint(run).name.endswith("iteration-000001")
    ended = run_ranks(2, job.arguments(run.name, *overrides), answer=job.root / run.name)
    assert [each.iterations for each in ended] == [(1,)] * 2
    assert (outcome(run).ledger, outcome(run).metrics) == (
        outcome(straight).ledger,
        outcome(straight).metrics,
    )
    assert largest_difference(run, straight) == 0


def moments_of(run: Path) -> list[str]:
    moments: list[str] = json.loads(run.with_suffix(".0").read_text(encoding="utf-8"))["moments"]
    return moments


@pytest.mark.slow
def test_one_command_starts_ranks_and_stops_them(job: Job) -> None:
    arguments = job.arguments("one-command", *NFT, *RANKS, "iterations=40", "checkpoint.every=99")
    run = job.root / "one-command"
    command = [sys.executable, "-m", "spotlight.cli", "train", "--plain", "--ranks", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line.decode()
            if "SIGTERM" not in printed and len(read_metrics(run)) >= 3:
                process.send_signal(signal.SIGTERM)
                printed += "(SIGTERM)"
    assert process.returncode == 130, printed
    assert "Stopped; the same command resumes." in printed
    assert printed.count("SIGTERM: stopping") == 1, "of rank 0 alone"
    assert newest_checkpoint(run)
    subprocess.run(
        [*command, "iterations=4"], check=True, timeout=600, cwd=Path(__file__).parent, env=environment
    )
    clean_audit(run, FOUR)


@pytest.mark.slow
def test_torchrun_runs_the_main_job(job: Job) -> None:
    overrides = [*NFT, *RANKS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    places = os.pathsep.join(sys.path)
    subprocess.run(
        [*command, "-m", "spotlight.cli", "train", *job.arguments("torchrun", *overrides)],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": places},
        cwd=Path(__file__).parent,
    )
    summary = json.loads((job.root / "torchrun" / "summary.json").read_text())
    assert summary["samples"] == {"issued": 16, "trained": 16, "dropped": {}}
    clean_audit(job.root / "torchrun", FOUR)
