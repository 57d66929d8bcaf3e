"""Our rollout of Qwen-Image is QwenImagePipeline's, number by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from spotlight.diffusion.samplers import ODE
from spotlight.models.families import qwen_image
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.shared.noise_levels import shift
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.testbed import PIPELINE_DIR
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.prompts import PromptId

TOLERANCE = 1e-5
STEPS = 5
PROMPTS = ("one red circle", "two blue squares left of one yellow triangle")  # lengths differ: a mask
SIZES = (MediaSize(32, 32), MediaSize(32, 64), MediaSize(48, 32))


def load(directory: Path, cache: Path) -> QwenImage:
    return QwenImage.load(directory, device="cpu", dtype=torch.float32, embeddings_cache=cache)


def load_theirs(directory: Path) -> QwenImagePipeline:
    pipe = QwenImagePipeline.from_pretrained(directory)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def family(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> QwenImage:
    return load(random_pipeline, tmp_path_factory.mktemp("embeds"))


@pytest.fixture(scope="module")
def pipeline(random_pipeline: Path) -> QwenImagePipeline:
    return load_theirs(random_pipeline)


def rollout(seed: int) -> Rollout:
    return Rollout(RolloutId(f"r{seed}"), Purpose.EVAL, 0, PromptId("p"), 0, seed, STEPS, PolicyVersion(0))


def ours(family: QwenImage, prompts: tuple[str, ...], size: MediaSize, scale: float) -> list[FinishedRollout]:
    engine = Engine(family, max_batch=8, negative=family.encode([" "])[0])
    recipe = Recipe(size, ODE(), None, scale, "final")
    states = engine.start([rollout(i) for i in range(len(prompts))], family.encode(prompts), recipe)
    results = engine.run(family.transformer, states)
    assert all(isinstance(result, FinishedRollout) for result in results)
    return [result for result in results if isinstance(result, FinishedRollout)]


def theirs(
    family: QwenImage, pipe: QwenImagePipeline, prompts: tuple[str, ...], size: MediaSize, scale: float
) -> np.ndarray:
    engine = Engine(family, max_batch=8, negative=family.encode([" "])[0])
    recipe = Recipe(size, ODE(), None, scale, "final")
    states = engine.start([rollout(i) for i in range(len(prompts))], family.encode(prompts), recipe)
    return pipe(
        list(prompts),
        negative_prompt=[" "] * len(prompts) if scale > 1 else None,
        true_cfg_scale=scale,
        height=size.height,
        width=size.width,
        num_inference_steps=STEPS,
        latents=torch.stack([state.latents for state in states]),
        output_type="np",
    ).images


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.height}x{size.width}")
def test_images_equal_the_pipelines(
    family: QwenImage, pipeline: QwenImagePipeline, size: MediaSize, scale: float
) -> None:
    expected = theirs(family, pipeline, PROMPTS, size, scale)
    results = ours(family, PROMPTS, size, scale)
    found = family.decode_float(torch.stack([result.tensors.final for result in results]), size)[:, 0]
    assert found.shape == (len(PROMPTS), size.height, size.width, 3)
    assert np.abs(found - expected).max() <= TOLERANCE
    assert np.abs(found[0] - found[1]).max() > 0.1
    as_bytes = np.stack([result.image for result in results])
    assert as_bytes.dtype == np.uint8
    assert np.array_equal(as_bytes, (expected * 255).round().astype(np.uint8))


def test_images_of_the_shipped_pipeline_equal_the_pipelines(tmp_path: Path) -> None:
    family = load(PIPELINE_DIR, tmp_path)
    expected = theirs(family, load_theirs(PIPELINE_DIR), PROMPTS, SIZES[0], 4.0)
    finals = torch.stack([result.tensors.final for result in ours(family, PROMPTS, SIZES[0], 4.0)])
    assert np.abs(family.decode_float(finals, SIZES[0])[:, 0] - expected).max() <= TOLERANCE


def test_prompt_and_guidance_matter(family: QwenImage) -> None:
    """Or else the equality above would prove little."""
    size = SIZES[0]
    base = ours(family, PROMPTS[:1], size, 1.0)[0].tensors.final
    assert (ours(family, PROMPTS[1:], size, 1.0)[0].tensors.final - base).abs().max() > 100 * TOLERANCE
    assert (ours(family, PROMPTS[:1], size, 4.0)[0].tensors.final - base).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("steps", [2, 10, 50])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.height}x{size.width}")
def test_sigmas_are_the_schedulers(
    family: QwenImage, pipeline: QwenImagePipeline, size: MediaSize, steps: int
) -> None:
    config = pipeline.scheduler.config
    mu = calculate_shift(
        family.latent_shape(size)[0],
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    pipeline.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    sigmas = family.sigmas(steps, size)
    assert torch.equal(sigmas, pipeline.scheduler.sigmas)
    assert sigmas.dtype == torch.float32
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_one_step_has_no_schedule(family: QwenImage) -> None:
    """diffusers divides 0 by 0 there, on account of shift_terminal."""
    with pytest.raises(ModelError, match=r"1 denoising steps give .*nan.*at least 2 steps"):
        family.sigmas(1, SIZES[0])


def test_sigmas_handed_out_are_not_shared(family: QwenImage) -> None:
    family.sigmas(4, SIZES[0]).zero_()
    assert family.sigmas(4, SIZES[0])[0] == 1


@pytest.mark.parametrize("tokens", [64, 256, 4096, 9000])
def test_shift_is_the_pipelines(tokens: int) -> None:
    config = {"max_image_seq_len": 8192, "max_shift": 0.9}
    assert shift(tokens, config) == calculate_shift(tokens, 256, 8192, 0.5, 0.9)


def test_prompts_are_embedded_as_by_the_pipeline(family: QwenImage, pipeline: QwenImagePipeline) -> None:
    prompts = [*PROMPTS, " ", "", "one red circle " * 40]
    for prompt, condition in zip(prompts, family.encode(prompts), strict=True):
        expected, mask = pipeline.encode_prompt(prompt, max_sequence_length=512)
        assert mask is None
        assert torch.equal(condition["embeds"], expected[0]), prompt
    embeds, mask = pipeline.encode_prompt(list(PROMPTS), max_sequence_length=512)
    batch = family.collate(family.encode(PROMPTS))
    assert torch.allclose(batch["embeds"], embeds, rtol=0, atol=TOLERANCE)
    found = batch.mask("embeds")
    assert found is not None
    assert torch.equal(found, mask.bool())


def test_template_is_the_pipelines(pipeline: QwenImagePipeline) -> None:
    assert pipeline.prompt_template_encode == qwen_image.TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == qwen_image.DROPPED_TOKENS
    assert pipeline.tokenizer_max_length == qwen_image.TOKENIZER_MAX_TOKENS


def test_long_prompts_are_cut_as_by_the_pipeline(
    random_pipeline: Path, pipeline: QwenImagePipeline, tmp_path: Path
) -> None:
    family = QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path, max_text_tokens=7
    )
    prompt = PROMPTS[1]
    expected, _ = pipeline.encode_prompt(prompt, max_sequence_length=7)
    assert expected.shape[1] == 7
    assert torch.equal(family.encode([prompt])[0]["embeds"], expected[0])


def test_bfloat16_transformer_predicts_float32(
    family: QwenImage, random_pipeline: Path, tmp_path: Path
) -> None:
    half = QwenImage.load(random_pipeline, device="cpu", dtype=torch.bfloat16, embeddings_cache=tmp_path)
    assert {p.dtype for p in half.transformer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in half.vae.parameters()} == {torch.float32}
    size, sigma = SIZES[0], torch.tensor([0.5, 0.9])
    latents = torch.randn(2, *family.latent_shape(size), generator=torch.Generator().manual_seed(0))
    exact, rough = (
        f.velocity(f.transformer, latents, sigma, f.collate(f.encode(PROMPTS)), None, size)
        for f in (family, half)
    )
    assert rough.dtype == torch.float32
    error = (rough - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda v: v[:, :1], r"a tensor of shape \[2, 1, \d+\]"), (lambda v: (v,), "a tuple")],
)
def test_a_velocity_in_another_shape_than_the_latents_is_an_error(
    family: QwenImage,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor], object],
    found: str,
) -> None:
    predict, size = family.predict, SIZES[0]
    monkeypatch.setattr(family, "predict", lambda *given: change(predict(*given)))
    latents = torch.randn(2, *family.latent_shape(size))
    with pytest.raises(ModelError, match=rf"QwenImage: its predict returned {found}; expected .*\[2, "):
        family.velocity(
            family.transformer, latents, torch.tensor([0.5, 0.9]), family.collate(family.encode(PROMPTS)),
            None, size,
        )  # fmt: skip
