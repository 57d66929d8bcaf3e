"""The components of the tiny Qwen-Image pipeline, untrained: the real classes, small.

Guarantees about the pipeline directory: 32 x 32 images become 16 x 16 x 12 VAE latents, that is 64 tokens of
48 channels; the prompt template is exactly 34 tokens, as with the real tokenizer; a prompt of n words gives n
+ 5 embeddings of width 64; the scheduler shifts like Qwen-Image's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from tools.testbed.prompts import split

LATENT_CHANNELS = 12
TEXT_WIDTH = 64
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The pipeline's own template; a contract test compares it with diffusers'.
PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The five components of a pipeline."""

    tokenizer: Qwen2Tokenizer
    text_encoder: Qwen2_5_VLForConditionalGeneration
    vae: AutoencoderKLQwenImage
    transformer: QwenImageTransformer2DModel
    scheduler: FlowMatchEulerDiscreteScheduler


def build(seed: int, layers: int = 4) -> Parts:
    """All components with random weights from ``seed``; ``layers`` of the DiT."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(prompt_words())
    return Parts(
        tokenizer, build_text_encoder(tokenizer), build_vae(), build_transformer(layers), build_scheduler()
    )


def assemble(parts: Parts) -> QwenImagePipeline:
    """The components as a diffusers pipeline."""
    return QwenImagePipeline(
        scheduler=parts.scheduler,
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        transformer=parts.transformer,
    )


def prompt_words() -> set[str]:
    """The words of this testbed's prompts."""
    return {word for records in split() for record in records for word in record["prompt"].split()}


def build_tokenizer(words: Collection[str]) -> Qwen2Tokenizer:
    """A byte-level BPE with Qwen's pre-tokenizer; every one of ``words`` and of the template is one token."""
    # Twice, because a word without a leading space, at the start of a prompt, is another token.
    corpus = [PROMPT_TEMPLATE, *(f"{word} {word}" for word in sorted(words))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # more than needed: merging ends when every word is one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    specials = "|".join(map(re.escape, SPECIAL_TOKENS))
    learner.train_from_iterator([piece for text in corpus for piece in re.split(specials, text)], trainer)
    learned = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=4096,
    )


def build_text_encoder(
    tokenizer: Qwen2Tokenizer, text: Mapping[str, Any] = {}, vision: Mapping[str, Any] = {}
) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen2.5-VL of width 64, with a minimal vision tower, which the pipeline does not use.

    Args:
        text, vision: settings of the two that differ.
    """
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 8) * 8,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": special["<|endoftext|>"],
            "eos_token_id": special["<|im_end|>"],
            **text,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
            **vision,
        },
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def build_vae() -> AutoencoderKLQwenImage:
    """A VAE with one 2x downsampling; training sets its latent mean."""
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1],
        num_res_blocks=0,
        temperal_downsample=[False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    ).eval()


def build_transformer(
    layers: int, heads: int = 4, channels: int = LATENT_CHANNELS, text_width: int = TEXT_WIDTH
) -> QwenImageTransformer2DModel:
    """A DiT with heads of 32, with zero-initialised adaLN and output."""
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * channels,
        out_channels=channels,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        axes_dims_rope=(8, 12, 12),
    )
    for block in transformer.transformer_blocks:
        for modulation in (block.img_mod, block.txt_mod):
            nn.init.zeros_(modulation[1].weight)
            nn.init.zeros_(modulation[1].bias)
    for linear in (transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer.eval()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's scheduler configuration."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        time_shift_type="exponential",
    )


def save(parts: Parts, directory: Path) -> None:
    """Write a ``QwenImagePipeline`` directory in float32.

    transformers loads components in their stored dtype, and the pipeline takes the latents' dtype from the
    text encoder, so half-precision files would silently lower the precision of everything.
    """
    assemble(parts).save_pretrained(directory)


def halve(module: nn.Module) -> None:
    """Round parameters in place to float16, keeping float32."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())


def store_halves(directory: Path, *names: str) -> None:
    """Store diffusers' components of a saved pipeline in float16, which loads as float32 unless asked."""
    components = DiffusionPipeline.from_pretrained(directory).components
    for name in names:
        components[name].half().save_pretrained(directory / name)


def coarsen(module: nn.Module) -> None:
    """Round parameters in place to float16's 11 significant bits, keeping float32 and its range.

    The 13 zero bits per number let the files in the repository compress to about two thirds, at a relative
    error of 2^-11.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            mantissa, exponent = torch.frexp(parameter)
            parameter.copy_(torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent))
