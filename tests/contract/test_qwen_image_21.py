"""What only Qwen-Image-2.1 has: fixed noise levels, prompts that are never cut, forwards by text length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.family_cases import CASES, PROMPTS

from spotlight.models.families.qwen_image_21 import QwenImage21
from spotlight.models.media import MediaSize
from spotlight.models.shared import rows
from spotlight_files.model_errors import ModelError

SIZE = MediaSize(32, 64)
LEVELS = [1.0, 0.8, 0.5, 0.2]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen-image-2.1")
    QwenImage21.tiny(directory, seed=0)
    return directory


def load(directory: Path, cache: Path, max_text_tokens: int = 64) -> QwenImage21:
    return QwenImage21.load(
        directory,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=cache,
        max_text_tokens=max_text_tokens,
    )


def test_a_pipeline_may_fix_its_noise_levels(pipeline: Path, tmp_path: Path) -> None:
    index = json.loads((pipeline / "model_index.json").read_text())
    turbo = tmp_path / "turbo"
    turbo.mkdir()
    for part in pipeline.iterdir():
        (turbo / part.name).symlink_to(part)
    (turbo / "model_index.json").unlink()
    (turbo / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": LEVELS}))
    family, theirs = load(turbo, tmp_path), CASES["qwen-image-2.1"].load(turbo)
    theirs(PROMPTS[0], height=SIZE.height, width=SIZE.width, output_type="latent")
    assert torch.equal(family.sigmas(len(LEVELS), SIZE), theirs.scheduler.sigmas)
    with pytest.raises(ModelError, match=r"steps is 5; expected as many as .*sample_sigmas, \[1\.0.*Set it"):
        family.sigmas(5, SIZE)


def test_a_prompt_that_is_too_long_is_refused(pipeline: Path, tmp_path: Path) -> None:
    family = load(pipeline, tmp_path, max_text_tokens=12)
    with pytest.raises(ModelError, match=r"red red.*expected at most 12: .*raise model\.max_text_tokens"):
        family.encode(["red " * 20])


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_do_not_depend_on_the_texts_beside_them(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    family = load(pipeline, tmp_path)
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1], " "]
    conditions = family.encode(prompts)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(len(prompts), *family.latent_shape(SIZE), generator=generator)
    sigma = torch.linspace(0.2, 0.9, len(prompts))
    alone = [
        family.velocity(
            family.transformer, latents[i : i + 1], sigma[i : i + 1], family.collate([one]), None, SIZE
        )
        for i, one in enumerate(conditions)
    ]
    forwards: list[int] = []
    family.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    if sharded:  # every rank must run equally many forwards, whatever its texts
        monkeypatch.setattr(rows, "gathers", lambda model: isinstance(model, type(family.transformer)))
    together = family.velocity(family.transformer, latents, sigma, family.collate(conditions), None, SIZE)
    assert forwards == ([1, 1, 1, 1] if sharded else [2, 1, 1])
    assert np.abs((together - torch.cat(alone)).detach().numpy()).max() <= 1e-6
