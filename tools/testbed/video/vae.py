"""Training of the video testbed's VAE.

The latent mean is anchored to a linear code of the pixels: the first principal components of blocks of 4
frames x 4 x 4 pixels, where the first frame of a video counts as four alike. So latents stay as smooth as
videos, which the DiT learns quickly, and the decoder learns what the code leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.nn import functional as F

from spotlight_rewards.reward import Image
from tools.testbed.vae import Log

_BLOCK = 4
"""Frames and pixels per latent."""


@dataclass(frozen=True, slots=True)
class VideoVaeRecipe:
    """Training settings.

    Attributes:
        clips: size of the pool of rendered clips.
        side_px: of these clips, smaller than the testbed's; the network is convolutional except for one
            attention.
        anchor_weight: weight of the latent means' distance to the linear code.
        code_scale: of the code; 1 keeps the pixels' norm (in [-1, 1]). A third makes an object stand out of
            the noise about as much as in the testbed of pictures.
        posterior_std: target of the posterior's standard deviation.
        decoder_steps, decoder_rate: of the decoder alone, which then learns sharp edges (absolute error).
    """

    clips: int = 2048
    side_px: int = 24
    steps: int = 1500
    batch: int = 8
    learning_rate: float = 4e-3
    anchor_weight: float = 0.1
    code_scale: float = 1 / 3
    posterior_std: float = 0.05
    decoder_steps: int = 800
    decoder_rate: float = 2e-3


def to_pixels(videos: Image) -> Tensor:
    """uint8 [batch, frames, height, width, 3] to float32 [batch, 3, frames, height, width] in [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(videos)).permute(0, 4, 1, 2, 3)
    return pixels.float() / 127.5 - 1


def to_videos(pixels: Tensor) -> Image:
    """Inverse of :func:`to_pixels`, rounded like the pipeline's post-processing."""
    unit = (pixels / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    videos: Image = (unit.numpy() * 255).round().astype(np.uint8)
    return videos


def blocks(pixels: Tensor) -> Tensor:
    """The pixels of each latent: [batch, 192, latent frames, height / 4, width / 4]."""
    video = torch.cat([pixels[:, :, :1].expand(-1, -1, _BLOCK - 1, -1, -1), pixels], dim=2)
    batch, channels, *sides = video.shape
    frames, height, width = (side // _BLOCK for side in sides)
    video = video.reshape(batch, channels, frames, _BLOCK, height, _BLOCK, width, _BLOCK)
    return video.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def linear_code(pixels: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """(mean [192], components [channels, 192]) of the blocks of these videos, by falling variance."""
    values = blocks(pixels).movedim(1, -1).flatten(0, -2).double()
    mean = values.mean(dim=0)
    centred = values - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    components = vectors.flip(1)[:, :channels].T
    # The sign of an eigenvector is arbitrary; a definite one keeps the recipe reproducible.
    signs = components.gather(1, components.abs().argmax(dim=1, keepdim=True)).sign()
    return mean.float(), (components * signs).float()


def train_vae(vae: AutoencoderKLWan, videos: Image, recipe: VideoVaeRecipe, seed: int, log: Log) -> float:
    """Train in place; returns the mean loss of the last 100 steps.

    Args:
        videos: uint8 [clips, frames, height, width, 3].
    """
    # Most pixels are white.
    torch.nn.init.ones_(vae.decoder.conv_out.bias)
    pixels = to_pixels(videos)
    mean, components = linear_code(pixels, vae.config.z_dim)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    vae.train()
    losses: list[float] = []
    for step in range(recipe.steps):
        batch = pixels[torch.randint(len(pixels), (recipe.batch,), generator=generator)]
        code = torch.einsum("kc,nc...->nk...", components, blocks(batch) - mean.view(1, -1, 1, 1, 1))
        loss = _loss(vae, batch, code * recipe.code_scale, recipe, generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            log(f"vae step {step + 1}/{recipe.steps} loss {np.mean(losses[-100:]):.5f}")
    vae.eval()
    return float(np.mean(losses[-100:]))


def sharpen(vae: AutoencoderKLWan, videos: Image, recipe: VideoVaeRecipe, seed: int, log: Log) -> float:
    """Train the decoder alone, in place; returns the mean absolute error of the last 100 steps."""
    pixels = to_pixels(videos)
    generator = torch.Generator().manual_seed(seed)
    parameters = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.decoder_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.decoder_rate, total_steps=recipe.decoder_steps, pct_start=0.1
    )
    losses: list[float] = []
    for step in range(recipe.decoder_steps):
        batch = pixels[torch.randint(len(pixels), (recipe.batch,), generator=generator)]
        with torch.no_grad():
            latents = vae.encode(batch).latent_dist.mode()
        noise = torch.randn(latents.shape, generator=generator)
        loss = F.l1_loss(_decode(vae, latents + recipe.posterior_std * noise), batch)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            log(f"decoder step {step + 1}/{recipe.decoder_steps} loss {np.mean(losses[-50:]):.5f}")
    return float(np.mean(losses[-100:]))


def _loss(
    vae: AutoencoderKLWan, pixels: Tensor, code: Tensor, recipe: VideoVaeRecipe, generator: torch.Generator
) -> Tensor:
    mean, log_variance = vae._encode(pixels).chunk(2, dim=1)
    noise = torch.randn(mean.shape, generator=generator)
    decoded = _decode(vae, mean + torch.exp(log_variance / 2) * noise)
    pinned = log_variance - 2 * math.log(recipe.posterior_std)
    loss: Tensor = (
        F.mse_loss(decoded, pixels)
        + recipe.anchor_weight * F.mse_loss(mean, code)
        + 1e-3 * pinned.square().mean()
    )
    return loss


def _decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """As ``vae.decode``, which clamps and so stops gradients on the white background."""
    vae.clear_cache()
    inputs = vae.post_quant_conv(latents)
    frames = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        frames.append(
            vae.decoder(
                inputs[:, :, index : index + 1],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=index == 0,
            )
        )
    vae.clear_cache()
    return torch.cat(frames, dim=2)


@torch.no_grad()
def encode(vae: AutoencoderKLWan, videos: Image, batch: int = 64) -> Tensor:
    """Posterior means, not normalised: [batch, channels, latent frames, height / 4, width / 4]."""
    chunks = [videos[start : start + batch] for start in range(0, len(videos), batch)]
    return torch.cat([vae.encode(to_pixels(chunk)).latent_dist.mode() for chunk in chunks])


def set_latent_mean(vae: AutoencoderKLWan, videos: Image) -> None:
    """Centre the latents and keep their scale, as in the testbed of pictures."""
    mean = encode(vae, videos).mean(dim=(0, 2, 3, 4))
    # Rounded, so that config.json has exactly the numbers used to normalise the latents.
    vae.register_to_config(latents_mean=[round(value, 4) for value in mean.tolist()])


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, videos: Image, batch: int = 64) -> Image:
    """Encode and decode: uint8 of the same shape."""
    latents = encode(vae, videos, batch)
    return np.concatenate([to_videos(vae.decode(chunk).sample) for chunk in torch.split(latents, batch)])
