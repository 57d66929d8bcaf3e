"""Blocks of Stable Diffusion 3 and 3.5, as diffusers' ``JointTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import New
from spotlight_kernels.operators import Modulation, add_norm, gated_add


class SD3Processor(JointAttnProcessor2_0):  # type: ignore[misc]
    """Attention whose norms and joins are one operator for queries, keys and values each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As diffusers' own, which reads no mask either: outputs of the image, and of the text if given."""
        image, text = hidden_states, encoder_hidden_states
        of_text, size = None if text is None else (text, None), attn.inner_dim // attn.heads
        parts = blocks.joint(attn, size, of_text, (image, None), text_first=False)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if text is None:
            return attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).to(image.dtype)))  # type: ignore[no-any-return]
        image, text = blocks.outputs(attended, image, image.shape[1], text.shape[1])
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text


def forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """As ``JointTransformerBlock.forward``: text, image."""
    options = joint_attention_kwargs or {}
    if self._chunk_size is not None:  # its MLPs run in chunks
        return type(self).forward(self, hidden_states, encoder_hidden_states, temb, options)  # type: ignore[no-any-return]
    image, image_in, parts = blocks.modulated(
        hidden_states, self.norm1, temb, 9 if self.use_dual_attention else 6
    )
    norm = self.norm1_context
    if self.context_pre_only:
        scale, shift = norm.linear(norm.silu(temb).to(encoder_hidden_states.dtype)).chunk(2, dim=1)
        by = Modulation(scale=scale, shift=shift)
        text, text_in = add_norm(encoder_hidden_states, None, by, norm.norm.eps, rounded=True)
    else:
        text, text_in, text_parts = blocks.modulated(encoder_hidden_states, norm, temb, 6)
    branch, text_branch = self.attn(hidden_states=image_in, encoder_hidden_states=text_in, **options)
    if self.use_dual_attention:
        shift, scale, gate = parts[4:]
        by = Modulation(scale=scale, shift=shift)
        image, own_in = add_norm(image, None, by, self.norm1.norm.eps, rounded=True)
        image = gated_add(image, branch, parts[0], rounded=True)
        branch, parts = self.attn2(hidden_states=own_in, **options), (gate, *parts[1:4])
    image = blocks.feed_forward(image, branch, parts, self.norm2, self.ff)
    if self.context_pre_only:
        return None, image
    return blocks.feed_forward(text, text_branch, text_parts, self.norm2_context, self.ff_context), image


def _trouble(block: Any) -> str | None:
    norms = [block.norm1.norm, block.norm1_context.norm, block.norm2]
    if not block.context_pre_only:
        norms.append(block.norm2_context)
    own = None if block.attn2 is None else blocks.norm_trouble(block.attn2, "norm_q", "norm_k", optional=True)
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    return blocks.first(
        blocks.layer_norm_trouble(*norms), blocks.norm_trouble(block.attn, *names, optional=True), own
    )


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    width = block.attn.query_dim
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        "temb": new(2, width),
    }


JOINT = blocks.Kind(forward, _trouble, _example, {JointAttnProcessor2_0: SD3Processor})
