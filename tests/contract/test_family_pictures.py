"""Pictures of data as latents: what a family encodes, it decodes to what its VAE makes of the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spotlight.models.family import MediaSize, ModelError, ModelFamily
from spotlight.registry import FAMILIES
from spotlight.testbed import PIPELINE_DIR

OTHERS = ("qwen-image-edit", "z-image", "flux2-klein", "flux2-dev", "flux", "flux-kontext", "krea-2", "sd3")
NONE = ("wan", "wan-i2v", "hunyuan-video", "hunyuan-video-1.5", "qwen-image-2.1")


def load(name: str, pipeline: Path, folder: Path) -> ModelFamily:
    kind = FAMILIES.load(name)
    cache = folder / "embeddings"
    return kind.load(pipeline, device="cpu", dtype=torch.float32, embeddings_cache=cache)


def reconstructed(vae: Any, frames: Tensor) -> Tensor:
    """By the VAE alone: [batch, 3, 1, height, width]."""
    layout = frames if "Qwen" in type(vae).__name__ else frames.squeeze(2)
    decoded = vae.decode(vae.encode(layout).latent_dist.mode(), return_dict=False)[0][:, :3]
    return decoded if decoded.ndim == 5 else decoded.unsqueeze(2)


@pytest.mark.parametrize(
    "name", ["qwen-image", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_a_picture_comes_back_as_the_vae_makes_it(name: str, tmp_path: Path) -> None:
    pipeline = PIPELINE_DIR
    if name != "qwen-image":
        pipeline = tmp_path / "pipeline"
        FAMILIES.load(name).tiny(pipeline, seed=0)
    family = load(name, pipeline, tmp_path)
    side = 2 * (family.dimensions.unit_px or family.dimensions.patch_px)
    size = MediaSize(side, 2 * side)
    frames = torch.rand(2, 3, 1, side, 2 * side, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        latents = family.encode_frames(frames, size)
        assert latents.shape[1:] == family.latent_shape(size)
        found, expected = family.decode_frames(latents, size), reconstructed(family.vae, frames)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NONE)
def test_a_family_that_encodes_none_says_so(name: str, tmp_path: Path) -> None:
    FAMILIES.load(name).tiny(tmp_path / "pipeline", seed=0)
    family = load(name, tmp_path / "pipeline", tmp_path)
    with pytest.raises(ModelError, match="encodes no pictures"):
        family.encode_frames(torch.zeros(1, 3, 1, 32, 32), MediaSize(32, 32))
