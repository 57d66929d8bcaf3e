"""What a start must leave behind, or must not: open attempts, undone pictures, summaries that resume."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from main_job import NFT, Job

from spotlight.runtime.process import DeviceMemoryError
from spotlight.store.images import drawn_iterations
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary
from spotlight.store.store_errors import DamagedCheckpointError, LedgerError
from spotlight.training.learner import Learner
from spotlight_rewards.base.file_errors import StoreError


def test_wandb_that_is_not_installed_is_found_before_the_run_directory(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(StoreError, match="pip install"):
        job.train("refused", f"runs_dir={tmp_path}/runs", "metrics.wandb.project=p")
    assert not (tmp_path / "runs").exists()


def test_a_device_out_of_memory_is_reported_by_phase_and_the_same_run_goes_on_with_less(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a capacity")

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "accumulate", full)
        with pytest.raises(DeviceMemoryError) as caught:
            job.train("memory", *NFT, "iterations=1")
    for part in ("during training", "9.00 GiB", "learner.micro_batch_size", "several-gpus.md#memory"):
        assert part in str(caught.value)
    with queries.open_readonly(RunPaths(job.root / "memory").ledger) as ledger:
        assert queries.last_ending(ledger) == Ending.FAILED
    less = ("learner.micro_batch_size=3", "rollout.batch_size=2", "learner.recompute=blocks")
    recorded = job.train("memory", *NFT, "iterations=1", *less, "reward_policy.workers=2")
    assert recorded.iterations == [0]


def test_an_extended_run_of_one_picture_forgets_the_undone_evaluation(job: Job) -> None:
    one = ("evaluation.prompts=1", "evaluation.images_per_prompt=1", "evaluation.grid_images=1")
    paths = RunPaths(job.root / "extended-by-one")
    recorded = job.train("extended-by-one", *NFT, *one, "iterations=1")
    assert recorded.result is not None
    assert recorded.result.finished
    assert read_summary(paths.summary).validation_stderr is None
    assert drawn_iterations(paths) == [0, 1]
    assert drawn_iterations(paths, TRAINING) == [0]
    assert recorded.costs_usd == [0]
    with queries.open_readonly(paths.ledger) as ledger:
        before_usd = queries.cost_usd(ledger)
    # What an attempt shows as spent begins with what those before it cost.
    assert job.train("extended-by-one", *NFT, *one, "iterations=2").costs_usd == [before_usd] != [0]
    assert drawn_iterations(paths) == [0, 2]
    assert drawn_iterations(paths, TRAINING) == [0, 1]
    assert not (paths.images / "iteration-000001.png").exists()


def test_another_runs_ledger_and_missing_checkpoints_are_refused_and_nothing_is_lost(job: Job) -> None:
    one = (*NFT, "iterations=1", "evaluation.at_start=false", "evaluation.at_end=false")
    job.train("mine", *one)
    job.train("others", *one, "run_seed=5")
    paths = RunPaths(job.root / "mine")
    kept = shutil.copytree(paths.path, job.root / "mine-copy")
    shutil.copy(RunPaths(job.root / "others").ledger, paths.ledger)
    with pytest.raises(LedgerError, match="not the ledger of"):
        job.train("mine", *one, "iterations=2")
    shutil.copy(kept / "ledger.sqlite", paths.ledger)
    shutil.rmtree(paths.checkpoints)
    with pytest.raises(DamagedCheckpointError, match="no checkpoint is here, but by the ledger one was"):
        job.train("mine", *one, "iterations=2")
    shutil.copytree(kept / "checkpoints", paths.checkpoints, dirs_exist_ok=True)
    assert job.train("mine", *one, "iterations=2").iterations == [1]
