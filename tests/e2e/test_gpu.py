"""The main job on a GPU: a few iterations, a resume, and pictures, under bfloat16 autocast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from main_job import ALGORITHMS, Job, clean_audit

from spotlight.models.slots import CopySlots
from spotlight.runtime.inference import TrainedRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_resume_and_generate_on_a_gpu(job: Job, algorithm: str, dtype: str) -> None:
    name = f"gpu-{dtype}-{algorithm.partition(' ')[0].rstrip(',')}"
    overrides = (
        *ALGORITHMS[algorithm],
        "device=cuda",
        f"model.dtype={dtype}",
        "learner.autocast=bfloat16",
        "learner.recompute=blocks",
    )
    first = job.train(name, *overrides, "iterations=2")
    assert first.iterations == [0, 1]
    resumed = job.train(name, *overrides, "iterations=3")
    assert resumed.iterations == [2]
    clean_audit(job.root / name)
    run = TrainedRun.open(job.root / name)
    assert run._family.device.type == "cuda"
    assert all(parameter.is_cuda for parameter in run._family.transformer.parameters())
    pictures = run.generate(["one red circle"] * 2, [1, 2], steps=3)
    assert pictures.shape == (2, 16, 16, 3)
    before = run.with_weights("reference").generate(["one red circle"] * 2, [1, 2], steps=3)
    assert np.abs(pictures.astype(int) - before).max() > 0


def test_a_full_fine_tune_runs_on_a_gpu(job: Job) -> None:
    recorded = job.train(
        "gpu-full",
        *ALGORITHMS["diffusion-nft with EMA"],
        "device=cuda",
        "learner.mode=full",
        "learner.learning_rate=1e-4",
        "learner.autocast=bfloat16",
        "iterations=2",
    )
    assert recorded.iterations == [0, 1]
    run = TrainedRun.open(job.root / "gpu-full")
    assert isinstance(run._slots, CopySlots)
    assert run.generate(["one red circle"], [1], steps=3).shape == (1, 16, 16, 3)
