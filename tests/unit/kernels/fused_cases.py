"""Blocks of every class, small."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTransformerBlock,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from diffusers.models.transformers.transformer_krea2 import Krea2TextFusionBlock, Krea2TransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21TransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn

WIDTH, HEADS, SIZE = 24, 3, 8
CASES: Mapping[str, Callable[[], nn.Module]] = {
    "FLUX.1": lambda: FluxTransformerBlock(WIDTH, HEADS, SIZE),
    "FLUX.1, single": lambda: FluxSingleTransformerBlock(WIDTH, HEADS, SIZE),
    "FLUX.2": lambda: Flux2TransformerBlock(WIDTH, HEADS, SIZE),
    "FLUX.2, single": lambda: Flux2SingleTransformerBlock(WIDTH, HEADS, SIZE),
    "HunyuanVideo": lambda: HunyuanVideoTransformerBlock(HEADS, SIZE, 2.0),
    "HunyuanVideo, single": lambda: HunyuanVideoSingleTransformerBlock(HEADS, SIZE, 2.0),
    "HunyuanVideo 1.5": lambda: HunyuanVideo15TransformerBlock(HEADS, SIZE, 2.0),
    "Krea 2": lambda: Krea2TransformerBlock(4 * SIZE, WIDTH, 4, 2, 1e-5),
    "Krea 2, text": lambda: Krea2TextFusionBlock(WIDTH, HEADS, HEADS, 2 * WIDTH, 1e-5),
    "Qwen-Image": lambda: QwenImageTransformerBlock(WIDTH, HEADS, SIZE),
    "Qwen-Image-2.1": lambda: QwenImage21TransformerBlock(WIDTH, HEADS, SIZE),
    "SD3": lambda: JointTransformerBlock(WIDTH, HEADS, SIZE),
    "SD3.5": lambda: JointTransformerBlock(WIDTH, HEADS, SIZE, qk_norm="rms_norm", use_dual_attention=True),
    "SD3.5, last": lambda: JointTransformerBlock(
        WIDTH, HEADS, SIZE, qk_norm="rms_norm", context_pre_only=True
    ),
    "Wan": lambda: WanTransformerBlock(WIDTH, 2 * WIDTH, HEADS, cross_attn_norm=True),
    "Wan, from images": lambda: WanTransformerBlock(WIDTH, 2 * WIDTH, HEADS, added_kv_proj_dim=WIDTH),
    "Z-Image": lambda: ZImageTransformerBlock(0, WIDTH, HEADS, HEADS, 1e-5, True),
    "Z-Image, refiner": lambda: ZImageTransformerBlock(0, WIDTH, HEADS, HEADS, 1e-5, False, modulation=False),
}
