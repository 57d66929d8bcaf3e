"""Latents between the layout that a transformer denoises and the one that a VAE decodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpack(latents: Tensor, grid: tuple[int, int]) -> Tensor:
    """Packed latents [batch, rows * columns, 4 * channels] as [batch, channels, 2 * rows, 2 * columns].

    Args:
        grid: rows and columns of tokens.
    """
    rows, columns = grid
    channels = latents.shape[-1] // 4
    split = latents.reshape(-1, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return split.reshape(-1, channels, 2 * rows, 2 * columns)


def pack(latents: Tensor) -> Tensor:
    """The inverse of :func:`unpack`: latents [batch, channels, height, width] as [batch, tokens, values]."""
    batch, channels, height, width = latents.shape
    split = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(batch, height // 2 * (width // 2), 4 * channels)


def latent_statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """``latents_mean`` and ``latents_std`` of a VAE's configuration, shaped for 5-D latents."""
    mean, std = (
        torch.tensor(vae.config[key], device=latents.device).view(1, -1, 1, 1, 1)
        for key in ("latents_mean", "latents_std")
    )
    return mean, std


def decode_normalised(vae: Any, latents: Tensor) -> Tensor:
    """Undo the normalisation of 5-D latents by ``latents_mean`` and ``latents_std``, and decode."""
    mean, std = latent_statistics(vae, latents)
    # Inverted twice, as in the pipelines: dividing by 1/std is not bitwise multiplying by std.
    decoded: Tensor = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    return decoded


def decode_image(vae: Any, latents: Tensor) -> Tensor:
    """Undo an image VAE's scale and shift and decode: [batch, 3, 1, height, width]."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    decoded: Tensor = vae.decode(scaled, return_dict=False)[0]
    return decoded.unsqueeze(2)
