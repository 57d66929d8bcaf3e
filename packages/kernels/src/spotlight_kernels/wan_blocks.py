"""Blocks of Wan 2.1 and 2.2, as diffusers' ``WanTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from spotlight_kernels import blocks
from spotlight_kernels.blocks import Angles, New
from spotlight_kernels.feed_forward import through
from spotlight_kernels.lora import Again, project
from spotlight_kernels.operators import Modulation, gated_add


class WanProcessor(WanAttnProcessor):  # type: ignore[misc]
    """Attention whose norm over all heads and rotation are one operator for queries and keys each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Angles = None,
        again: Again | None = None,
    ) -> Tensor:
        """As diffusers' own."""
        angles = None
        if rotary_emb is not None:
            cos, sin = rotary_emb  # [1, tokens, 1, size]
            angles = cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]
        x, text, size = hidden_states, encoder_hidden_states, attn.inner_dim // attn.heads
        if text is None:
            turned = blocks.Turned.of(attn, size, angles, x, again)
        else:
            if attn.add_k_proj is not None:  # the last 512 tokens are text, others an image's
                text = text[:, -512:]
            made = *project(x, [attn.to_q], again), *project(text, [attn.to_k, attn.to_v])
            turned = blocks.Turned(attn, size, angles, made)
        return super().__call__(turned, x, encoder_hidden_states, attention_mask)  # type: ignore[no-any-return]


def forward(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Angles
) -> Tensor:
    """As ``WanTransformerBlock.forward``."""
    if temb.ndim == 4:  # modulation by token
        return type(self).forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb)  # type: ignore[no-any-return]
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (self.scale_shift_table + temb.float()).unbind(1)
    by = Modulation(scale=scale, shift=shift)
    x, out, again = blocks.normed(hidden_states, None, by, self.norm1.eps, rounded=False)
    branch = self.attn1(out, None, None, rotary_emb, again=again)
    if isinstance(self.norm2, nn.Identity):
        x = gated_add(x, branch, gate, rounded=False)
        branch = self.attn2(x, encoder_hidden_states, None, None)
    else:
        rows = len(x), -1
        scale, shift = (self.norm2.weight.float() - 1).expand(rows), self.norm2.bias.float().expand(rows)
        by = Modulation(gate, scale, shift)
        x, out, again = blocks.normed(x, branch, by, self.norm2.eps, rounded=False)
        branch = self.attn2(out, encoder_hidden_states, None, None, again=again)
    by = Modulation(scale=scale_mlp, shift=shift_mlp)
    x, out, again = blocks.normed(x, branch, by, self.norm3.eps, rounded=False)
    return gated_add(x, through(self.ffn, out, again), gate_mlp, rounded=False)


def _trouble(block: Any) -> str | None:
    norms = (block.norm1, block.norm3)
    if any(type(norm) is not FP32LayerNorm or norm.weight is not None for norm in norms):
        return "its streams have no LayerNorm without weights"
    return blocks.first(
        *(blocks.norm_trouble(attn) for attn in (block.attn1, block.attn2)),
        *(blocks.fused_projections(attn) for attn in (block.attn1, block.attn2)),
    )


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    width = block.attn1.inner_dim
    cos, sin = blocks.repeated_angles(new, image, width // block.attn1.heads)
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        "temb": new(2, 6, width).to(torch.float32),
        "rotary_emb": (cos[None, :, None], sin[None, :, None]),
    }


CROSS = blocks.Kind(forward, _trouble, _example, {WanAttnProcessor: WanProcessor})
