"""Blocks of Qwen-Image-2.1, as diffusers' ``QwenImage21TransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21AttnProcessor
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import New
from spotlight_kernels.feed_forward import gated_feed_forward
from spotlight_kernels.lora import Again
from spotlight_kernels.operators import Modulation, gated_add


class QwenImage21Processor(QwenImage21AttnProcessor):  # type: ignore[misc]
    """Attention whose norm and rotation are one operator for queries and keys each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Any | None = None,
        rotary_emb: Tensor | None = None,
        again: Again | None = None,
        **options: Any,
    ) -> Tensor:
        """As diffusers' own."""
        size, angles = attn.inner_dim // attn.heads, blocks.complex_angles(rotary_emb)
        turned = blocks.Turned.of(attn, size, angles, hidden_states, again)
        return super().__call__(turned, hidden_states, attention_mask, **options)  # type: ignore[no-any-return]


def forward(
    self: Any,
    hidden_states: Tensor,
    modulation: Tensor,
    rotary_emb: Tensor | None = None,
    attention_mask: Any | None = None,
    target_token_mask: Tensor | None = None,
    layer_cache: Any | None = None,
    kv_cache_mode: str | None = None,
    cache_write_slice: slice | None = None,
    segments: list[tuple[int, int, bool]] | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """As ``QwenImage21TransformerBlock.forward``."""
    scale, gate, scale_mlp, gate_mlp = modulation.chunk(4, dim=-1)
    by = Modulation(scale=scale, chosen=target_token_mask)
    x, out, again = blocks.normed(hidden_states, None, by, self.img_norm1.eps)
    branch = self.attn(
        hidden_states=out,
        attention_mask=attention_mask,
        rotary_emb=rotary_emb,
        layer_cache=layer_cache,
        kv_cache_mode=kv_cache_mode,
        cache_write_slice=cache_write_slice,
        segments=segments,
        key_valid=key_valid,
        again=again,
    )
    by = Modulation(gate.tanh(), scale_mlp, chosen=target_token_mask)
    x, out, again = blocks.normed(x, branch, by, self.img_norm2.eps)
    mlp = self.img_mlp
    branch = gated_feed_forward(out, (mlp.gate_layer, mlp.proj), mlp.out, again)
    return gated_add(x, branch, gate_mlp.tanh(), rounded=True, chosen=target_token_mask)


def _trouble(block: Any) -> str | None:
    return blocks.first(
        blocks.layer_norm_trouble(block.img_norm1, block.img_norm2),
        blocks.norm_trouble(block.attn),
        blocks.fused_projections(block.attn),
    )


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    width, tokens = block.attn.to_q.in_features, text + image
    angles = blocks.unit_angles(new, tokens, block.attn.inner_dim // block.attn.heads // 2)
    return {
        "hidden_states": new(2, tokens, width),
        "modulation": new(3, 4 * width),
        "rotary_emb": angles,
        "target_token_mask": torch.arange(tokens, device=angles.device) >= text,
        "segments": [(0, text, True)],
    }


JOINT = blocks.Kind(forward, _trouble, _example, {QwenImage21AttnProcessor: QwenImage21Processor})
