"""Blocks of FLUX.2, as ``Flux2TransformerBlock`` and ``Flux2SingleTransformerBlock`` compute them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2AttnProcessor,
    Flux2ParallelSelfAttnProcessor,
)
from torch import Tensor

from spotlight_kernels import blocks, flux_blocks
from spotlight_kernels.blocks import Angles, New, pairs
from spotlight_kernels.operators import Modulation, add_norm, gated_add


class Flux2Processor(Flux2AttnProcessor):  # type: ignore[misc]
    """Attention whose norms, rotations and joins are one operator for queries, keys and values each."""

    __call__ = flux_blocks.FluxProcessor.__call__


class Flux2ParallelProcessor(Flux2ParallelSelfAttnProcessor):  # type: ignore[misc]
    """Attention and MLP in one, whose norms and rotations are one operator for queries and keys each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles = None,
    ) -> Tensor:
        """As diffusers' own."""
        turned = blocks.Turned(attn, attn.head_dim, pairs(image_rotary_emb))
        return super().__call__(turned, hidden_states, attention_mask)  # type: ignore[no-any-return]


def _parts(made: Tensor, count: int, batch: int) -> list[tuple[Tensor, Tensor, Tensor]] | None:
    """Shift, scale and gate, ``count`` times, each [batch, width]; None where they differ by token."""
    if made.ndim == 3:
        if made.shape[1] != 1:
            return None
        made = made[:, 0]
    each = made.expand(batch, -1).chunk(3 * count, dim=-1)
    return [(each[i], each[i + 1], each[i + 2]) for i in range(0, 3 * count, 3)]


def double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Angles = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``Flux2TransformerBlock.forward``: text, image."""
    batch, options = len(hidden_states), joint_attention_kwargs or {}
    of_image, of_text = _parts(temb_mod_img, 2, batch), _parts(temb_mod_txt, 2, batch)
    if of_image is None or of_text is None:
        given = (hidden_states, encoder_hidden_states, temb_mod_img, temb_mod_txt, image_rotary_emb, options)
        return type(self).forward(self, *given)  # type: ignore[no-any-return]
    streams = []
    for x, ((shift, scale, gate), mlp), norm in (
        (hidden_states, of_image, self.norm1),
        (encoder_hidden_states, of_text, self.norm1_context),
    ):
        by = Modulation(scale=scale, shift=shift)
        streams.append((*add_norm(x, None, by, norm.eps, rounded=True), (gate, *mlp)))
    (image, image_in, image_parts), (text, text_in, text_parts) = streams
    branches = self.attn(
        hidden_states=image_in, encoder_hidden_states=text_in, image_rotary_emb=image_rotary_emb, **options
    )
    image = blocks.feed_forward(image, branches[0], image_parts, self.norm2, self.ff)
    return blocks.feed_forward(text, branches[1], text_parts, self.norm2_context, self.ff_context), image


def single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Angles = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """As ``Flux2SingleTransformerBlock.forward``: text and image, joined or apart."""
    parts, options = _parts(temb_mod, 1, len(hidden_states)), joint_attention_kwargs or {}
    if parts is None:
        given = (hidden_states, encoder_hidden_states, temb_mod, image_rotary_emb, options)
        return type(self).forward(self, *given, split_hidden_states, text_seq_len)  # type: ignore[no-any-return]
    x, ((shift, scale, gate),) = hidden_states, parts
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, x], dim=1)
    x, normed = add_norm(x, None, Modulation(scale=scale, shift=shift), self.norm.eps, rounded=True)
    x = gated_add(
        x, self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **options), gate, rounded=True
    )
    if not split_hidden_states:
        return x
    text = text_seq_len or 0
    return blocks.split(x, text, x.shape[1] - text)


def _double_trouble(block: Any) -> str | None:
    norms = (block.norm1, block.norm1_context, block.norm2, block.norm2_context)
    return blocks.first(
        blocks.layer_norm_trouble(*norms),
        blocks.norm_trouble(block.attn, "norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        blocks.fused_projections(block.attn),
    )


def _single_trouble(block: Any) -> str | None:
    norms = blocks.norm_trouble(block.attn, "norm_q", "norm_k")
    return blocks.first(blocks.layer_norm_trouble(block.norm), norms)


def _example(block: Any, new: New, image: int, text: int, single: bool) -> dict[str, Any]:
    width = block.attn.query_dim
    made = {"temb_mod": 3} if single else {"temb_mod_img": 6, "temb_mod_txt": 6}
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        **{name: new(2, 1, count * width) for name, count in made.items()},
        "image_rotary_emb": blocks.repeated_angles(new, text + image, block.attn.head_dim),
    }


DOUBLE = blocks.Kind(
    double,
    _double_trouble,
    partial(_example, single=False),
    {Flux2AttnProcessor: Flux2Processor},
)
SINGLE = blocks.Kind(
    single,
    _single_trouble,
    partial(_example, single=True),
    {Flux2ParallelSelfAttnProcessor: Flux2ParallelProcessor},
)
