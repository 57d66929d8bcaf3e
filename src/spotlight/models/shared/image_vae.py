"""Latents of a VAE for single pictures, whose configuration names a scale and a shift."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def decode_image(vae: Any, latents: Tensor) -> Tensor:
    """Undo an image VAE's scale and shift and decode: [batch, 3, 1, height, width]."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    decoded: Tensor = vae.decode(scaled, return_dict=False)[0]
    return decoded.unsqueeze(2)


def encode_image(vae: Any, frames: Tensor) -> Tensor:
    """The inverse of :func:`decode_image`: [batch, channels, height, width]."""
    latents: Tensor = vae.encode(frames.squeeze(2)).latent_dist.mode()
    scaled: Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return scaled
