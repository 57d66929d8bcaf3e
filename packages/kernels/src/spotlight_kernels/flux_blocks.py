"""Blocks of FLUX.1, as ``FluxTransformerBlock`` and ``FluxSingleTransformerBlock`` compute them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import Angles, New, Normed, pairs


class FluxProcessor(FluxAttnProcessor):  # type: ignore[misc]
    """Attention whose norms, rotations and joins are one operator for queries, keys and values each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles = None,
        again: blocks.Inputs = (None, None),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As diffusers' own: the outputs of the image, and of the text if it is a stream of its own."""
        image, text = hidden_states, encoder_hidden_states
        if text is None:
            turned = blocks.Turned.of(attn, attn.head_dim, pairs(image_rotary_emb), image, again[0])
            return super().__call__(turned, image, None, attention_mask)  # type: ignore[no-any-return]
        length = text.shape[1]
        of_text, of_image = pairs(image_rotary_emb, 0, length), pairs(image_rotary_emb, length)
        streams = (text, of_text), (image, of_image)
        return blocks.joint_attention(
            self, attn, attn.head_dim, *streams, again, attention_mask, text_first=True
        )


def double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Angles = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``FluxTransformerBlock.forward``: text, image."""
    image = Normed.adaptive(hidden_states, self.norm1, temb, 6)
    text = Normed.adaptive(encoder_hidden_states, self.norm1_context, temb, 6)
    options = joint_attention_kwargs or {}
    return blocks.two_streams(self, image, text, image_rotary_emb=image_rotary_emb, **options)


def single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Angles = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    """As ``FluxSingleTransformerBlock.forward``: text, image."""
    lengths = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
    joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    options = joint_attention_kwargs or {}
    x = blocks.single_stream(self, joint, temb, image_rotary_emb=image_rotary_emb, **options)
    return blocks.split(x, *lengths)


def _double_trouble(block: Any) -> str | None:
    norms = block.norm1.norm, block.norm1_context.norm
    return blocks.first(blocks.two_streams_trouble(block, *norms), blocks.fused_projections(block.attn))


def _single_trouble(block: Any) -> str | None:
    return blocks.first(
        blocks.layer_norm_trouble(block.norm.norm),
        blocks.norm_trouble(block.attn),
        blocks.fused_projections(block.attn),
    )


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    found = blocks.two_streams_example(block, new, image, text)
    return found | {"image_rotary_emb": blocks.repeated_angles(new, text + image, block.attn.head_dim)}


DOUBLE = blocks.Kind(double, _double_trouble, _example, {FluxAttnProcessor: FluxProcessor})
SINGLE = blocks.Kind(single, _single_trouble, _example, {FluxAttnProcessor: FluxProcessor})
