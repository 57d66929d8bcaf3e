"""The program that makes a video testbed: what it writes is a complete Wan pipeline, and small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.testbed.video import architecture
from tools.testbed.video.clips import FRAMES, SIDE_PX, render_all
from tools.testbed.video.flow import VideoFlowRecipe
from tools.testbed.video.make import VideoRecipe, make
from tools.testbed.video.prompts import split
from tools.testbed.video.vae import VideoVaeRecipe, blocks, linear_code, to_pixels, to_videos

from spotlight.models.families.wan import Wan
from spotlight.models.media import MediaSize


def test_the_linear_code_keeps_most_of_a_clip():
    """What latents are anchored to: blocks of pixels, and their principal components."""
    videos = render_all(split()[0], seed=0)
    pixels = to_pixels(videos)
    assert (to_videos(pixels) == videos).all()
    values = blocks(pixels)
    assert values.shape == (36, 192, 2, 8, 8)
    first, later = values[0, :, 0].reshape(3, 4, -1), values[0, :, 1].reshape(3, 4, -1)
    assert (first == first[:, :1]).all()  # the first frame counts as four
    assert (later != later[:, :1]).any()
    mean, components = linear_code(pixels, 24)
    assert torch.allclose(components @ components.T, torch.eye(24), atol=1e-5)
    centred = values.movedim(1, -1) - mean
    left_out = centred - centred @ components.T @ components
    assert left_out.square().mean() < 0.15 * centred.square().mean()


@pytest.mark.slow
def test_a_short_making_gives_a_whole_pipeline(tmp_path: Path):
    few = replace(
        VideoRecipe(reconstructed=12, scored=12),
        vae=VideoVaeRecipe(clips=36, steps=4, decoder_steps=4),
        flow=VideoFlowRecipe(clips=36, steps=10),
    )
    make(tmp_path / "made", few)
    record = json.loads((tmp_path / "made/TRAINING.json").read_text())
    assert record["recipe"]["flow"]["steps"] == 10
    assert len(record["flow_losses"]) == 10
    assert set(json.loads((tmp_path / "made/scores.json").read_text())["scores"]) == {
        "strict", "graded", "appearance", "movement",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in (tmp_path / "made").rglob("*") if path.is_file()) < 3.8e6
    make(tmp_path / "again", few, tmp_path / "made")
    for part in ("vae", "transformer"):
        made, again = (
            load_file(next((tmp_path / name / part).glob("*.safetensors"))) for name in ("made", "again")
        )
        assert made.keys() == again.keys()
        assert all(torch.equal(made[name], again[name]) for name in made)
    with pytest.raises(ValueError, match=r"made with seed 0 and .*expected seed 1 .*Leave --vae out"):
        make(tmp_path / "other", replace(few, seed=1), tmp_path / "made")
    family = Wan.load(
        tmp_path / "made",
        device=torch.device("cpu"),
        dtype=torch.float32,
        embeddings_cache=tmp_path / "cache",
        max_text_tokens=architecture.TEXT_TOKENS,
    )
    size = MediaSize(SIDE_PX, SIDE_PX, FRAMES, 5.0)
    assert family.latent_shape(size) == (architecture.LATENT_CHANNELS, 2, 8, 8)
    (condition,) = family.encode(["a red circle moving left"])
    assert condition["embeds"].shape == (6, architecture.TEXT_WIDTH)
