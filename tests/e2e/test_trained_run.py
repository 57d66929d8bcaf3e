"""What a run leaves behind: the same pictures and scores here, in plain diffusers, and in the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from main_job import NFT, Job, Straight, lora
from safetensors.torch import load_file
from typer.testing import CliRunner

import spotlight
from spotlight.cli.main import app
from spotlight.diffusion.noise import INITIAL, noise_batch
from spotlight.models.media import MediaSize
from spotlight.runtime.inference import TrainedRun
from spotlight.runtime.observer import Observer
from spotlight.store.metrics import read_metrics
from spotlight.store.run_summary import read_summary
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.file_errors import StoreError

PROMPT, SEED, STEPS, SIDE = "two green triangles", 11, 3, 16


@pytest.fixture(scope="module")
def run(straight: Straight) -> TrainedRun:
    return TrainedRun.open(straight("diffusion-nft with EMA")[0])


@pytest.fixture(scope="module")
def pipeline(job: Job) -> QwenImagePipeline:
    pipe = QwenImagePipeline.from_pretrained(job.pipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def plain(pipeline: QwenImagePipeline) -> Iterator[QwenImagePipeline]:
    yield pipeline
    pipeline.unload_lora_weights()


def draw(pipe: QwenImagePipeline, run: TrainedRun) -> np.ndarray:
    """The picture of plain diffusers from the seed's initial latents, before rounding: [height, width, 3]."""
    shape = run._family.latent_shape(MediaSize(SIDE, SIDE))
    latents = noise_batch([SEED], [INITIAL], shape, torch.device("cpu"))
    return pipe(
        PROMPT,
        true_cfg_scale=1.0,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        latents=latents,
        output_type="np",
    ).images[0]


def assert_same(plain: np.ndarray, ours: np.ndarray) -> None:
    """Equal but for a value that rounds to the other side: at most one step of 255."""
    assert np.abs(plain * 255 - ours.astype(np.float64)).max() <= 0.5 + 1e-2


def test_plain_diffusers_draws_the_run_s_picture_with_its_lora(
    run: TrainedRun, plain: QwenImagePipeline, tmp_path: Path
) -> None:
    before = draw(plain, run)
    (ours,) = run.generate([PROMPT], [SEED], steps=STEPS)
    assert_same(before, run.with_weights("reference").generate([PROMPT], [SEED], steps=STEPS)[0])
    plain.load_lora_weights(run.directory / "lora")  # as the run exported it
    after = draw(plain, run)
    assert_same(after, ours)
    assert np.abs(after - before).max() > 4 / 255
    exported = load_file(run.export_lora(tmp_path / "again"))
    assert all(torch.equal(tensor, exported[name]) for name, tensor in lora(run.directory).items())


def test_other_weights_of_the_run_are_exported_too(
    run: TrainedRun, plain: QwenImagePipeline, tmp_path: Path
) -> None:
    averaged = run.with_weights("ema")
    averaged.export_lora(tmp_path / "ema")
    plain.load_lora_weights(tmp_path / "ema")
    assert_same(draw(plain, run), averaged.generate([PROMPT], [SEED], steps=STEPS)[0])


def test_plain_diffusers_draws_the_run_s_picture_with_the_merged_weights(
    run: TrainedRun, tmp_path: Path
) -> None:
    run.export_merged(tmp_path / "merged")
    pipe = QwenImagePipeline.from_pretrained(tmp_path / "merged")
    pipe.set_progress_bar_config(disable=True)
    assert_same(draw(pipe, run), run.generate([PROMPT], [SEED], steps=STEPS)[0])


def test_a_full_fine_tune_leaves_a_whole_pipeline_also_when_it_is_continued(job: Job) -> None:
    full = ("learner.mode=full", "learner.learning_rate=0.0003", "evaluation.weights=ema")
    for iterations in (1, 2):
        job.train("full", *NFT, *full, f"iterations={iterations}")
    run = TrainedRun.open(job.root / "full")
    pipe = QwenImagePipeline.from_pretrained(run.directory / "merged")
    pipe.set_progress_bar_config(disable=True)
    ours = run.generate([PROMPT], [SEED], steps=STEPS)[0]
    assert_same(draw(pipe, run), ours)
    assert (ours != run.with_weights("reference").generate([PROMPT], [SEED], steps=STEPS)[0]).any()
    assert read_summary(run.directory / "summary.json").lora is None
    with pytest.raises(ModelError, match="there is no LoRA: export the merged weights"):
        run.export_lora(job.root / "no-lora")


def test_judging_the_run_again_gives_its_last_validation(run: TrainedRun) -> None:
    last = next(row for row in reversed(read_metrics(run.directory)) if "validation/graded" in row.values)
    again = run.evaluate(Observer()).row()
    assert {f"validation/{name}": value for name, value in again.items()} == last.values
    first = next(row for row in read_metrics(run.directory) if "validation/graded" in row.values)
    before = run.with_weights("reference").evaluate(Observer()).row()
    assert {f"validation/{name}": value for name, value in before.items()} == first.values
    assert before != again


def test_pictures_do_not_depend_on_their_company(run: TrainedRun) -> None:
    prompts, seeds = [PROMPT, "one red circle", PROMPT], [SEED, SEED, 5]
    together = run.generate(prompts, seeds, steps=STEPS)
    alone = [run.generate([text], [seed], steps=STEPS)[0] for text, seed in zip(prompts, seeds, strict=True)]
    assert together.shape == (3, SIDE, SIDE, 3)
    assert np.abs(together.astype(int) - np.stack(alone)).max() <= 1
    assert len({picture.tobytes() for picture in together}) == 3


def test_what_cannot_be_opened_says_why(run: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run directory"):
        TrainedRun.open(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((run.directory / "config.yaml").read_bytes())
    with pytest.raises(StoreError, match="no checkpoint yet"):
        TrainedRun.open(tmp_path)
    with pytest.raises(ModelError, match="weights 'nonsense': this run has policy, reference, old, ema"):
        TrainedRun.open(run.directory, weights="nonsense")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_lora_beside_few_bits_is_exported_for_the_model_on_file(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job.train("four-bits", *NFT, "iterations=1", "model.quantize=nf4")
    kept, whole = (TrainedRun.open(job.root / "four-bits", quantize=each) for each in (None, "none"))
    ours, theirs = (each.generate([PROMPT], [SEED], STEPS) for each in (kept, whole))
    assert not np.array_equal(ours, theirs)
    assert np.abs(ours.astype(int) - theirs).max() < 128
    for number, each in enumerate((kept, whole)):
        each.export_lora(tmp_path / f"{number}-lora")
        each.export_merged(tmp_path / f"{number}")
    files = "lora/pytorch_lora_weights.safetensors", "/transformer/diffusion_pytorch_model.safetensors"
    for file in (f"-{files[0]}", files[1]):
        one, two = (load_file(f"{tmp_path}/{number}{file}") for number in range(2))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    said = CliRunner().invoke(app, ["export", str(job.root / "four-bits"), "--out", str(tmp_path / "lora")])
    assert "with the base in NF4" in said.output, said.output
    spotlight.open(job.root / "four-bits").export(tmp_path / "python", device="cpu")
    assert "with the base in NF4" in caplog.text
    job.train("all-weights", *NFT, "iterations=1", "learner.mode=full", "learner.learning_rate=0.001")
    with pytest.raises(ModelError, match="all weights of this run were trained"):
        TrainedRun.open(job.root / "all-weights", quantize="int8")
