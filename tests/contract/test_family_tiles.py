"""Large frames are decoded in diffusers' tiles, Wan's a few frames at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLWan

from spotlight.models.families import wan
from spotlight.models.families.hunyuan_video import HunyuanVideo
from spotlight.models.family import decode_normalised
from spotlight.models.media import MediaSize

pytestmark = pytest.mark.slow  # 10 s: the smallest frame that is tiled has 512 x 512 pixels


def test_frames_above_the_limit_are_diffusers_tiles_and_near_to_whole_ones(tmp_path: Path) -> None:
    """Tiles normalise and attend within themselves, so they equal the whole frame only about."""
    HunyuanVideo.tiny(tmp_path / "pipeline", seed=0)
    family = HunyuanVideo.load(
        tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "embeddings"
    )
    vae = AutoencoderKLHunyuanVideo.from_pretrained(tmp_path / "pipeline" / "vae")
    size = MediaSize(520, 528)
    shape = family.latent_shape(size)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = family.decode_frames(latents, size)
        whole = vae.decode(latents / vae.config.scaling_factor).sample
        vae.enable_tiling()
        tiled = vae.decode(latents / vae.config.scaling_factor).sample
    assert ours.shape == (1, 3, 1, 520, 528)
    assert (ours - tiled).abs().max() <= 1e-5
    difference = (ours - whole).abs()
    assert difference.max() > 1e-3  # it was tiled
    assert difference.mean() < 0.05 * whole.std()  # measured: 0.032


def test_wans_frames_above_the_limit_are_diffusers_tiles_frame_by_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit lowered: the real one, 720p, takes minutes."""
    wan.Wan.tiny(tmp_path / "pipeline", seed=0)
    family = wan.Wan.load(
        tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "embeddings"
    )
    size, first = MediaSize(272, 264, frames=5), MediaSize(272, 264)
    latents = torch.randn(1, *family.latent_shape(size), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = family.decode_frames(latents, size)
    monkeypatch.setattr(wan, "_UNTILED_PX", 256 * 256)
    with torch.no_grad():
        ours = family.decode_frames(latents, size)
        alone = family.decode_frames(latents[:, :, :1], first)
        vae = AutoencoderKLWan.from_pretrained(tmp_path / "pipeline" / "vae")
        vae.enable_tiling()
        theirs = decode_normalised(vae, latents)
    assert ours.shape == whole.shape == (1, 3, 5, 272, 264)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours[:, :, :1] - alone).abs().max() <= 1e-5  # a frame waits for no later one
    difference = (ours - whole).abs()
    assert difference.max() > 1e-4  # it was tiled
    assert difference.mean() < 0.05 * whole.std()
    finished = size.pixels // 90
    assert family.decoded_pixels(size) == 4 * 256 * 256 + finished  # of a tile's latent frame
