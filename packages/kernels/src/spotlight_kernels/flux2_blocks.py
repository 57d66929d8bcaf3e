"""Blocks of FLUX.2, as ``Flux2TransformerBlock`` and ``Flux2SingleTransformerBlock`` compute them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2AttnProcessor,
    Flux2ParallelSelfAttnProcessor,
)
from torch import Tensor

from spotlight_kernels import blocks, flux_blocks
from spotlight_kernels.blocks import Angles, New, Normed, pairs
from spotlight_kernels.lora import Again, project
from spotlight_kernels.operators import gated_add, gated_halves


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
        again: Again | None = None,
    ) -> Tensor:
        """As diffusers' own."""
        turned: Any = blocks.Turned(attn, attn.head_dim, pairs(image_rotary_emb))
        (wide,) = project(hidden_states, [attn.to_qkv_mlp_proj], again)
        turned.to_qkv_mlp_proj, turned.mlp_act_fn = (lambda _: wide), gated_halves
        return super().__call__(turned, hidden_states, attention_mask)  # type: ignore[no-any-return]


def _parts(made: Tensor, count: int, batch: int) -> Sequence[Tensor] | None:
    """Shift, scale, gate, and so on, each [batch, width]; None where they differ by token."""
    if made.ndim == 3:
        if made.shape[1] != 1:
            return None
        made = made[:, 0]
    return made.expand(batch, -1).chunk(count, dim=-1)


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
    of_image, of_text = _parts(temb_mod_img, 6, batch), _parts(temb_mod_txt, 6, batch)
    if of_image is None or of_text is None:
        given = (hidden_states, encoder_hidden_states, temb_mod_img, temb_mod_txt, image_rotary_emb, options)
        return type(self).forward(self, *given)  # type: ignore[no-any-return]
    image = Normed.of(hidden_states, of_image, self.norm1.eps)
    text = Normed.of(encoder_hidden_states, of_text, self.norm1_context.eps)
    return blocks.two_streams(self, image, text, image_rotary_emb=image_rotary_emb, **options)


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
    parts, options = _parts(temb_mod, 3, len(hidden_states)), joint_attention_kwargs or {}
    if parts is None:
        given = (hidden_states, encoder_hidden_states, temb_mod, image_rotary_emb, options)
        return type(self).forward(self, *given, split_hidden_states, text_seq_len)  # type: ignore[no-any-return]
    x = hidden_states
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, x], dim=1)
    stream = Normed.of(x, parts, self.norm.eps)
    branch = self.attn(
        hidden_states=stream.out, image_rotary_emb=image_rotary_emb, again=stream.again, **options
    )
    x = gated_add(stream.x, branch, stream.rest[0], rounded=True)
    if not split_hidden_states:
        return x
    text = text_seq_len or 0
    return blocks.split(x, text, x.shape[1] - text)


def _double_trouble(block: Any) -> str | None:
    norms = block.norm1, block.norm1_context
    return blocks.first(blocks.two_streams_trouble(block, *norms), blocks.fused_projections(block.attn))


def _single_trouble(block: Any) -> str | None:
    norms = blocks.norm_trouble(block.attn)
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
