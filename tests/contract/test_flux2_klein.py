"""What only FLUX.2-klein has: a shift that depends on the steps, and distilled models without guidance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux2 import pipeline_flux2

from spotlight.config.load import build_config
from spotlight.models.families.flux2_klein import Flux2Klein
from spotlight.models.media import MediaSize
from spotlight.report.loading import loading_snippet
from spotlight_files.model_errors import ModelError


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Flux2Klein:
    directory = tmp_path_factory.mktemp("flux2-klein")
    Flux2Klein.tiny(directory / "pipeline", seed=0)
    return Flux2Klein.load(
        directory / "pipeline",
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=directory,
        max_text_tokens=24,
    )


@pytest.mark.parametrize("side", [16, 64, 256, 260, 264, 512])
@pytest.mark.parametrize("steps", [1, 4, 50, 200])
def test_shift_is_the_pipelines(family: Flux2Klein, side: int, steps: int) -> None:
    size = MediaSize(side, side)
    tokens = family.dimensions.tokens(size)
    # FLUX.2-dev's, of which the other pipeline has a copy.
    assert family.dynamic_shift(steps, size) == {"mu": pipeline_flux2.compute_empirical_mu(tokens, steps)}


@pytest.mark.parametrize(
    ("side", "steps", "mu"),
    [(128, 4, 2.0306897), (128, 50, 1.7019562), (256, 28, 2.1514432), (512, 4, 3.2299863)],
)
def test_above_4300_tokens_the_shift_is_linear_in_them(
    family: Flux2Klein, side: int, steps: int, mu: float
) -> None:
    assert family.dynamic_shift(steps, MediaSize(side, side))["mu"] == pytest.approx(mu, abs=1e-6)


def test_a_distilled_pipeline_refuses_guidance(family: Flux2Klein) -> None:
    family.check_guidance(family.files, 4.0)
    index = family.files.root / "model_index.json"
    index.write_text(index.read_text().replace('"is_distilled": false', '"is_distilled": true'))
    family.check_guidance(family.files, 1.0)
    with pytest.raises(ModelError, match=r"guidance is 4; expected 1: .*distilled.*use a base model"):
        family.check_guidance(family.files, 4.0, "guidance")


def test_the_loading_snippet_passes_what_the_call_takes() -> None:
    model = {"family": "flux2-klein", "path": "/models/klein"}
    config = build_config({"model": model, "rollout": {"true_cfg_scale": 4.0}}, "the test")
    snippet = loading_snippet(config, Path("/run/lora"), prompt="a cat")
    assert "prompt='a cat'" in snippet
    assert "guidance_scale=4.0" in snippet
    assert "negative_prompt_embeds=pipe.encode_prompt(' ')[0]" in snippet
