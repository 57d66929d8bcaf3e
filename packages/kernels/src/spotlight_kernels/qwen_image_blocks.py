"""Blocks of Qwen-Image and Qwen-Image-Edit, as diffusers' ``QwenImageTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import New, Normed


class QwenImageProcessor(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """Joint attention whose norms, rotations and joins are one operator for queries, keys and values each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        again: blocks.Inputs = (None, None),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As diffusers' own: the image's and the text's outputs."""
        image, text, size = hidden_states, encoder_hidden_states, attn.inner_dim // attn.heads
        of_image, of_text = (blocks.complex_angles(each) for each in image_rotary_emb or (None, None))
        mask, streams = _joint_mask(image, encoder_hidden_states_mask), ((text, of_text), (image, of_image))
        return blocks.joint_attention(self, attn, size, *streams, again, mask, text_first=True)


def _joint_mask(image: Tensor, text: Tensor | None) -> Tensor | None:
    if text is None:
        return None
    ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
    return torch.cat([text, ones], dim=1)[:, None, None, :]


def double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the block's own; ``modulate_index`` is None, as only blocks that cannot be fused have one."""
    image = Normed.of(hidden_states, self.img_mod(temb).chunk(6, dim=-1), self.img_norm1.eps)
    text = Normed.of(encoder_hidden_states, self.txt_mod(temb).chunk(6, dim=-1), self.txt_norm1.eps)
    branches = self.attn(
        hidden_states=image.out,
        encoder_hidden_states=text.out,
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        again=(image.again, text.again),
        **(joint_attention_kwargs or {}),
    )
    finished = image.finished(branches[0], self.img_norm2.eps, self.img_mlp)
    return text.finished(branches[1], self.txt_norm2.eps, self.txt_mlp), finished


def _trouble(block: Any) -> str | None:
    if block.zero_cond_t:
        return "its modulation differs by token (zero_cond_t)"
    return blocks.first(
        blocks.layer_norm_trouble(block.img_norm1, block.img_norm2, block.txt_norm1, block.txt_norm2),
        blocks.norm_trouble(block.attn, added=True),
    )


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    half, width = block.attention_head_dim // 2, block.dim
    angles = tuple(blocks.unit_angles(new, tokens, half) for tokens in (image, text))
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        "encoder_hidden_states_mask": None,
        "temb": new(2, width),
        "image_rotary_emb": angles,
    }


DOUBLE = blocks.Kind(double, _trouble, _example, {QwenDoubleStreamAttnProcessor2_0: QwenImageProcessor})
