"""The components of a tiny Wan pipeline, untrained: the real classes, small.

Guarantees about the pipeline directory: 5 frames of 32 x 32 become latents [16, 2, 8, 8], that is 32 tokens;
every word of the prompts is one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from tools.testbed.architecture import store_halves
from tools.testbed.video.prompts import split

LATENT_CHANNELS = 16
TEXT_WIDTH = 64
TEXT_TOKENS = 8
"""Text tokens that the DiT was trained with, padding included: it attends to padding."""
_FALLBACK = [chr(code) for code in range(33, 127)]


@dataclass(frozen=True, slots=True)
class Parts:
    """The five components of a pipeline."""

    tokenizer: T5Tokenizer
    text_encoder: UMT5EncoderModel
    vae: AutoencoderKLWan
    transformer: WanTransformer3DModel
    scheduler: UniPCMultistepScheduler


def build(seed: int) -> Parts:
    """All components with random weights from ``seed``."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    vae = build_vae()
    return Parts(tokenizer, build_text_encoder(tokenizer), vae, build_transformer(), build_scheduler())


def assemble(parts: Parts) -> WanPipeline:
    """The components as a diffusers pipeline."""
    return WanPipeline(
        tokenizer=parts.tokenizer,
        text_encoder=parts.text_encoder,
        vae=parts.vae,
        transformer=parts.transformer,
        scheduler=parts.scheduler,
    )


def build_tokenizer() -> T5Tokenizer:
    """T5's tokenizer with the words of the prompts, and letters for all others."""
    words = {word for records in split() for record in records for word in record["prompt"].split()}
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces = [*((f"▁{word}", -2.0) for word in sorted(words)), *((letter, -3.0) for letter in _FALLBACK)]
    return T5Tokenizer(vocab=[*specials, *pieces], extra_ids=0, model_max_length=512)


def build_text_encoder(tokenizer: T5Tokenizer) -> UMT5EncoderModel:
    """A two-layer UMT5 of width 64."""
    config = UMT5Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return UMT5EncoderModel(config).eval()


def build_vae() -> AutoencoderKLWan:
    """A VAE with two downsamplings of space and time; training sets its latent mean."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        scale_factor_spatial=4,
        scale_factor_temporal=4,
    ).eval()


def build_transformer() -> WanTransformer3DModel:
    """A DiT of 4 layers and 4 heads of 32, with a zero-initialised output."""
    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=384,
        num_layers=4,
        rope_max_seq_len=64,
    )
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer.eval()


def build_scheduler() -> UniPCMultistepScheduler:
    """Wan's scheduler with a shift for few tokens."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0)


def save(parts: Parts, directory: Path) -> None:
    """Write a ``WanPipeline`` directory.

    DiT and VAE are stored in float16, which diffusers loads as float32 unless asked; the text encoder stays
    in float32, since transformers loads what is stored.
    """
    assemble(parts).save_pretrained(directory)
    store_halves(directory, "transformer", "vae")
