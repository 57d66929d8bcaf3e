"""Training of the testbed's VAE.

Twelve channels per 2 x 2 x 3 pixels can be lossless, so training only chooses a latent space that the DiT
learns quickly. The latent mean is anchored to the pixels (each channel to one of the twelve values of its 2 x
2 block) and the posterior's width is fixed, so latents stay as smooth as images, and the decoder learns to
remove errors of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn
from torch.nn import functional as F

from spotlight_rewards.reward import Image

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VaeRecipe:
    """Training settings.

    Attributes:
        pictures: size of the pool of rendered scenes.
        crop_px: side of the random training crops, at most the picture's; the network is convolutional
            except for one attention.
        anchor_weight: weight of the latent means' distance to the pixels.
        posterior_std: target of the posterior's standard deviation; pixels lie in [-1, 1].
    """

    pictures: int = 4096
    steps: int = 1000
    batch: int = 64
    crop_px: int = 16
    learning_rate: float = 4e-3
    anchor_weight: float = 0.1
    posterior_std: float = 0.05


def to_pixels(images: Image) -> Tensor:
    """uint8 [batch, height, width, 3] to float32 [batch, 3, 1, height, width] in [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).unsqueeze(2)
    return pixels.float() / 127.5 - 1


def to_images(pixels: Tensor) -> Image:
    """Inverse of :func:`to_pixels`, rounded like the pipeline's post-processing."""
    unit = (pixels.squeeze(2) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    images: Image = (unit.numpy() * 255).round().astype(np.uint8)
    return images


Code = Callable[[Tensor], Tensor]
"""What latent means are anchored to, of pixels [batch, 3, 1, height, width]."""


def pixels_of_blocks(pixels: Tensor) -> Tensor:
    """The values of each 2 x 2 block: [batch, 12, 1, height / 2, width / 2]."""
    return F.pixel_unshuffle(pixels.squeeze(2), 2).unsqueeze(2)


def train_vae(
    vae: AutoencoderKLQwenImage,
    images: Image,
    recipe: VaeRecipe,
    seed: int,
    log: Log,
    code: Code = pixels_of_blocks,
) -> float:
    """Train in place and set ``latents_mean`` from the data; returns the last loss.

    Args:
        images: uint8 [pictures, height, width, 3].
    """
    with _still_pictures(vae):
        loss = _fit(vae, to_pixels(images), recipe, seed, log, code)
    _set_latent_mean(vae, images)
    return loss


def _fit(
    vae: AutoencoderKLQwenImage, pixels: Tensor, recipe: VaeRecipe, seed: int, log: Log, code: Code
) -> float:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    vae.train()
    loss = torch.tensor(math.nan)
    for step in range(recipe.steps):
        batch = _crops(pixels, recipe, generator)
        loss = _loss(vae, batch, code(batch), recipe, generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            log(f"vae step {step + 1}/{recipe.steps} loss {loss.item():.5f}")
    vae.eval()
    return loss.item()


@contextmanager
def _still_pictures(vae: AutoencoderKLQwenImage) -> Iterator[None]:
    """Reduce every causal 3-D convolution to its last temporal tap, a 2-D convolution.

    The other taps see only the zero padding before the first frame: the same result at a third of the work,
    and 2-D convolutions are faster on CPUs.
    """
    convolutions = [module for module in vae.modules() if isinstance(module, nn.Conv3d)]
    for module in convolutions:
        module.forward = partial(_convolve_frame, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in convolutions:
            del module.forward


def _convolve_frame(module: nn.Conv3d, frames: Tensor, cache: None = None) -> Tensor:
    weight = module.weight[:, :, -1]
    return F.conv2d(frames.squeeze(2), weight, module.bias, padding=weight.shape[-1] // 2).unsqueeze(2)


def _crops(pixels: Tensor, recipe: VaeRecipe, generator: torch.Generator) -> Tensor:
    chosen = pixels[torch.randint(len(pixels), (recipe.batch,), generator=generator)]
    sides = [min(recipe.crop_px, side) for side in pixels.shape[-2:]]
    top, left = (
        int(torch.randint(whole - side + 1, (), generator=generator))
        for whole, side in zip(pixels.shape[-2:], sides, strict=True)
    )
    return chosen[..., top : top + sides[0], left : left + sides[1]]


def _loss(
    vae: AutoencoderKLQwenImage, pixels: Tensor, anchor: Tensor, recipe: VaeRecipe, generator: torch.Generator
) -> Tensor:
    mean, log_variance = vae.quant_conv(vae.encoder(pixels)).chunk(2, dim=1)
    noise = torch.randn(mean.shape, generator=generator)
    # Not vae.decode, which clamps and so stops gradients on the white background.
    decoded = vae.decoder(vae.post_quant_conv(mean + torch.exp(log_variance / 2) * noise))
    pinned = log_variance - 2 * math.log(recipe.posterior_std)
    loss: Tensor = (
        F.mse_loss(decoded, pixels)
        + recipe.anchor_weight * F.mse_loss(mean, anchor)
        + 1e-3 * pinned.square().mean()
    )
    return loss


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, images: Image, batch: int = 256) -> Tensor:
    """Posterior means, not normalised: [batch, channels, 1, height / 2, width / 2]."""
    chunks = [images[start : start + batch] for start in range(0, len(images), batch)]
    return torch.cat([vae.encode(to_pixels(chunk)).latent_dist.mode() for chunk in chunks])


def _set_latent_mean(vae: AutoencoderKLQwenImage, images: Image) -> None:
    """Centre the latents and keep the pixels' scale: ``latents_std`` stays 1.

    Mostly white images are sparse: at unit variance objects would lie about five units from the background,
    so the image would be determined at noise levels above 0.9, which pre-training and reinforcement learning
    visit too rarely to learn from.
    """
    mean = encode(vae, images).mean(dim=(0, 2, 3, 4))
    # Rounded, so that config.json has exactly the numbers used to normalise the latents.
    vae.register_to_config(latents_mean=[round(value, 4) for value in mean.tolist()])


@torch.no_grad()
def reconstruct(vae: AutoencoderKLQwenImage, images: Image, batch: int = 256) -> Image:
    """Encode and decode: uint8 of the same shape."""
    latents = encode(vae, images, batch)
    return np.concatenate([to_images(vae.decode(chunk).sample) for chunk in torch.split(latents, batch)])


def mean_psnr_db(images: Image, others: Image) -> float:
    """Mean peak signal-to-noise ratio over images, in dB; an exact copy counts as 60."""
    squared = (images.astype(np.float64) - others.astype(np.float64)) ** 2
    error = np.maximum(squared.mean(axis=(1, 2, 3)), 255**2 / 1e6)
    return float((10 * np.log10(255**2 / error)).mean())
