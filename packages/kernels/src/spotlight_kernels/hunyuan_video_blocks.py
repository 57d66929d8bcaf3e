"""Blocks of HunyuanVideo, double and single, and of HunyuanVideo 1.5, double with a mask of the text; the
video comes first, and text is not rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import Angles, New, Normed, pairs


class HunyuanVideoProcessor(HunyuanVideoAttnProcessor2_0):  # type: ignore[misc]
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
        """As diffusers' own, of two streams; or of both in one, whose last tokens are not rotated."""
        video, text = hidden_states, encoder_hidden_states
        size, angles = attn.inner_dim // attn.heads, pairs(image_rotary_emb)
        if angles is not None and text is None:
            after = (0, 0, 0, video.shape[1] - len(angles[0]))
            angles = F.pad(angles[0], after, value=1.0), F.pad(angles[1], after)
        of_text = None if text is None else (text, None)
        return blocks.joint_attention(
            self, attn, size, of_text, (video, angles), again, attention_mask, text_first=False
        )


class HunyuanVideo15Processor(HunyuanVideoProcessor):
    """Attention within the tokens that are none of padding, which neither attends nor is attended to."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles = None,
        again: blocks.Inputs = (None, None),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As diffusers' own; ``attention_mask`` is of the text, [batch, tokens]."""
        assert attention_mask is not None, "as diffusers' own"
        valid = F.pad(attention_mask, (hidden_states.shape[1], 0), value=True).bool()
        mask = (valid[:, None, :] & valid[:, :, None])[:, None]
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb, again)


def double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Angles = None,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """As ``HunyuanVideoTransformerBlock.forward``: video, text."""
    video = Normed.adaptive(hidden_states, self.norm1, temb, 6)
    text = Normed.adaptive(encoder_hidden_states, self.norm1_context, temb, 6)
    given = {"attention_mask": attention_mask, "image_rotary_emb": freqs_cis}
    return blocks.two_streams(self, video, text, **given)[::-1]


def single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Angles = None,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, ...]:
    """As ``HunyuanVideoSingleTransformerBlock.forward``: video, text."""
    lengths = [hidden_states.shape[1], encoder_hidden_states.shape[1]]
    joint = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    given = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    return blocks.split(blocks.single_stream(self, joint, temb, **given), *lengths)


def _double_trouble(block: Any) -> str | None:
    return blocks.two_streams_trouble(block, block.norm1.norm, block.norm1_context.norm)


def _single_trouble(block: Any) -> str | None:
    norms = blocks.norm_trouble(block.attn)
    return blocks.first(blocks.layer_norm_trouble(block.norm.norm), norms)


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    name = "freqs_cis" if hasattr(block, "ff") else "image_rotary_emb"
    found = blocks.two_streams_example(block, new, image, text)
    return found | {name: blocks.repeated_angles(new, image, block.attn.inner_dim // block.attn.heads)}


def _masked_example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    found = _example(block, new, image, text)
    return found | {"attention_mask": blocks.padded(found["encoder_hidden_states"], -1)}


DOUBLE = blocks.Kind(double, _double_trouble, _example, {HunyuanVideoAttnProcessor2_0: HunyuanVideoProcessor})
SINGLE = blocks.Kind(single, _single_trouble, _example, {HunyuanVideoAttnProcessor2_0: HunyuanVideoProcessor})
DOUBLE_15 = replace(
    DOUBLE,
    example=_masked_example,
    processors={HunyuanVideo15AttnProcessor2_0: HunyuanVideo15Processor, **DOUBLE.processors},
)
"""HunyuanVideo's processor is known, too: Spotlight's family takes it, and masks keys alone, by a hook."""
