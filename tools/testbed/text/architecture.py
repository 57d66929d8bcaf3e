"""The components of the tiny Qwen-Image pipeline that writes, untrained: the real classes, small.

Guarantees about the pipeline directory: 16 x 56 pictures become 4 x 14 x 8 VAE latents, that is 2 x 7 tokens
of 32 channels, one column of them for each letter; every letter of a quoted word is a token of text, the
first at a fixed place. So the rotary embedding sees a letter's column at one distance from its token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage
from torch import nn

from spotlight_rewards.reward import Image
from tools.testbed import architecture
from tools.testbed.architecture import Parts, store_halves
from tools.testbed.text.prompts import INKS
from tools.testbed.vae import Code, to_pixels
from tools.testbed.video.vae import blocks, linear_code

LATENT_CHANNELS = 8
TEXT_WIDTH = 32
_LAYERS, _HEADS = 2, 2
_CODE_SCALE = 0.25
"""Of the linear code, which has four times the norm of a pixel: blocks count a picture as four frames."""


def build(seed: int) -> Parts:
    """All components with random weights from ``seed``."""
    torch.manual_seed(seed)
    tokenizer = architecture.build_tokenizer({"the", "word", '"', "in", *INKS})
    text_encoder = architecture.build_text_encoder(
        tokenizer,
        text={
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 2 * TEXT_WIDTH,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision={"out_hidden_size": TEXT_WIDTH, "patch_size": 2},
    )
    transformer = architecture.build_transformer(_LAYERS, _HEADS, LATENT_CHANNELS, TEXT_WIDTH)
    return Parts(tokenizer, text_encoder, build_vae(), transformer, architecture.build_scheduler())


def build_vae() -> AutoencoderKLQwenImage:
    """A VAE with two 2x downsamplings; training sets its latent mean."""
    vae = AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    nn.init.ones_(vae.decoder.conv_out.bias)  # most pixels are white
    return vae.eval()


def code_of(images: Image) -> Code:
    """What latent means are anchored to: the first principal components of these pictures' 4 x 4 blocks."""
    mean, components = linear_code(to_pixels(images), LATENT_CHANNELS)

    def code(pixels: torch.Tensor) -> torch.Tensor:
        centred = blocks(pixels) - mean.view(1, -1, 1, 1, 1)
        return _CODE_SCALE * torch.einsum("kc,nc...->nk...", components, centred)

    return code


def save(parts: Parts, directory: Path) -> None:
    """Write a ``QwenImagePipeline`` directory, the VAE and the DiT in float16; all load as float32."""
    architecture.save(parts, directory)
    store_halves(directory, "transformer", "vae")
