"""Blocks of Stable Diffusion 3 and 3.5, as diffusers' ``JointTransformerBlock`` computes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import Normed
from spotlight_kernels.operators import gated_add


class SD3Processor(JointAttnProcessor2_0):  # type: ignore[misc]
    """Attention whose norms and joins are one operator for queries, keys and values each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        again: blocks.Inputs = (None, None),
        *args: object,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As diffusers' own, which reads no mask either: outputs of the image, and of the text if given."""
        image, text = hidden_states, encoder_hidden_states
        of_text, size = None if text is None else (text, None), attn.inner_dim // attn.heads
        parts = blocks.joint(attn, size, of_text, (image, None), again, text_first=False)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        streams = [(image.shape[1], attn.to_out[0])]
        if text is not None:
            streams.append((text.shape[1], None if attn.context_pre_only else attn.to_add_out))
        image, *others = blocks.outputs(attended, image, *streams)
        image = attn.to_out[1](image)
        return (image, others[0]) if others else image


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
    image = Normed.adaptive(hidden_states, self.norm1, temb, 9 if self.use_dual_attention else 6)
    norm = self.norm1_context
    if self.context_pre_only:
        scale, shift = norm.linear(norm.silu(temb).to(encoder_hidden_states.dtype)).chunk(2, dim=1)
        text = Normed.of(encoder_hidden_states, (shift, scale), norm.norm.eps)
    else:
        text = Normed.adaptive(encoder_hidden_states, norm, temb, 6)
    branch, text_branch = self.attn(
        hidden_states=image.out, encoder_hidden_states=text.out, again=(image.again, text.again), **options
    )
    if self.use_dual_attention:
        gate, *mlp, shift, scale, own_gate = image.rest
        own = Normed.of(image.x, (shift, scale, own_gate, *mlp), self.norm1.norm.eps)
        image = replace(own, x=gated_add(own.x, branch, gate, rounded=True))
        branch = self.attn2(hidden_states=own.out, again=(own.again, None), **options)
    finished = image.finished(branch, self.norm2.eps, self.ff)
    if self.context_pre_only:
        return None, finished
    return text.finished(text_branch, self.norm2_context.eps, self.ff_context), finished


def _trouble(block: Any) -> str | None:
    norms = [block.norm1.norm, block.norm1_context.norm, block.norm2]
    if not block.context_pre_only:
        norms.append(block.norm2_context)
    own = None if block.attn2 is None else blocks.norm_trouble(block.attn2, optional=True)
    joint = blocks.norm_trouble(block.attn, added=True, optional=True)
    return blocks.first(blocks.layer_norm_trouble(*norms), joint, own)


JOINT = blocks.Kind(forward, _trouble, blocks.two_streams_example, {JointAttnProcessor2_0: SD3Processor})
