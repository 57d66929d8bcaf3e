"""Judging a run afterwards works as within the run: batch by batch, and what fails is said plainly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from main_job import NFT, Job, Straight

from spotlight.models.family import ModelError
from spotlight.runtime import inference as trained
from spotlight.runtime.inference import TrainedRun
from spotlight.runtime.observer import Observer
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.reward import RewardInputError


def test_pictures_are_scored_a_batch_at_a_time(straight: Straight, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(trained, "prepare_process", lambda device, *precision: prepared.append(precision))
    run = TrainedRun.open(straight("diffusion-nft with EMA")[0])
    assert prepared == [(run.config.deterministic, run.config.model.tf32)]
    sizes: list[int] = []
    submit = RewardPool.submit

    def counted(self, images, *rest):  # type: ignore[no-untyped-def]
        sizes.append(len(images))
        return submit(self, images, *rest)

    monkeypatch.setattr(RewardPool, "submit", counted)
    whole = run.evaluate(Observer()).row()
    assert sizes == [4]
    rollout = run.config.rollout.model_copy(update={"batch_size": 3})
    there = tuple(each.model_copy(update={"device": "spot", "replicas": 3}) for each in run.config.rewards)
    changed = run.config.model_copy(update={"rollout": rollout, "rewards": there})  # as on a cluster
    in_parts = dataclasses.replace(run, config=changed)
    assert in_parts.evaluate(Observer()).row() == pytest.approx(whole, abs=0.02)
    assert sizes == [4, 3, 1]


def test_rewards_that_score_nothing_are_a_plain_error(straight: Straight, tmp_path: Path) -> None:
    run = TrainedRun.open(straight("diffusion-nft with EMA")[0])
    reward = run.config.rewards[0].model_copy(
        update={"name": "reward_functions:moody", "retries": 0, "isolation_s": 0.0}
    )
    broken = dataclasses.replace(run, config=run.config.model_copy(update={"rewards": (reward,)}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one red circle", "mood": "raise"}\n')
    with pytest.raises(RewardInputError, match=r"none of 2 pictures could be scored; the first: moody: "):
        broken.evaluate(Observer(), prompts_file=prompts)


def test_a_finished_full_fine_tune_goes_on_and_replaces_its_export(job: Job) -> None:
    full = (*NFT, "learner.mode=full", "learner.learning_rate=1e-4", "algorithm.reference_weight=0.0")
    first = job.train("judged-full", *full, "iterations=1")
    index = job.root / "judged-full" / "merged" / "transformer" / "diffusion_pytorch_model.safetensors"
    before = index.read_bytes()
    second = job.train("judged-full", *full, "iterations=2")
    assert [each.result is not None and each.result.error for each in (first, second)] == [None, None]
    assert second.iterations == [1]
    assert index.read_bytes() != before
    run = TrainedRun.open(job.root / "judged-full")
    with pytest.raises(ModelError, match="weights 'reference': this run has policy, old, ema"):
        run.with_weights("reference")


def test_what_rewards_print_is_kept_beside_the_attempts(job: Job) -> None:
    job.train("printing", *NFT, "iterations=1", "rewards=[{name: 'reward_functions:chatty'}]")
    log = job.root / "printing" / "attempts" / "rank-0-reward-chatty-0.log"
    assert "scoring 6 pictures" in log.read_text()


def test_prompts_that_are_trained_on_and_held_out_are_noted(job: Job) -> None:
    prompts = job.root / "shared.txt"
    prompts.write_text("one red circle\ntwo blue squares\n")
    recorded = job.train("shared", *NFT, f"data.train={prompts}", f"data.test={prompts}", "iterations=1")
    assert any(note.startswith("2 of 2 held-out prompts are in data.train too") for note in recorded.notes)
