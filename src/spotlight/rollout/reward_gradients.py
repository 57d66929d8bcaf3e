"""Gradients of rewards by latents, through the VAE, for algorithms that follow them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.rollout.state import FinishedRollout


def with_gradient(
    family: ModelFamily, sample: FinishedRollout, gradient: NDArray[np.float32] | None, size: MediaSize
) -> FinishedRollout:
    """A sample with a reward's gradient by its final latents, in their shape on the CPU; in float32.

    Args:
        gradient: of the reward by the picture's pixels in [0, 1], [height, width, 3].
    """
    assert gradient is not None, "rewards without one are refused when they are loaded"
    if getattr(family.vae, "_supports_gradient_checkpointing", False):
        family.vae.enable_gradient_checkpointing()  # a decoder's activations take gigabytes
    leaf = sample.tensors.final[None].to(family.device, torch.float32).requires_grad_()
    with torch.enable_grad():
        pixels = (family.decode_frames(leaf, size) * 0.5 + 0.5).clamp(0, 1)
    by_pixels = torch.from_numpy(gradient.copy()).to(family.device).permute(2, 0, 1)[None, :, None]
    (found,) = torch.autograd.grad(pixels, leaf, by_pixels)
    return replace(sample, tensors=replace(sample.tensors, gradient=found[0].cpu()))
