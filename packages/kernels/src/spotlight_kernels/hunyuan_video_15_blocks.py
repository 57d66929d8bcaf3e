"""Blocks of HunyuanVideo 1.5: those of HunyuanVideo with two streams, and a mask of the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import Tensor

from spotlight_kernels import blocks, hunyuan_video_blocks
from spotlight_kernels.blocks import Angles, New
from spotlight_kernels.hunyuan_video_blocks import HunyuanVideoProcessor


class HunyuanVideo15Processor(HunyuanVideoProcessor):
    """Attention within the tokens that are none of padding, and within those that are."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles = None,
        again: blocks.Inputs = (None, None),
    ) -> tuple[Tensor, Tensor | None]:
        """As diffusers' own; ``attention_mask`` is of the text, [batch, tokens]."""
        assert attention_mask is not None, "as diffusers' own"
        valid = F.pad(attention_mask, (hidden_states.shape[1], 0), value=True).bool()
        mask = (valid[:, None, :] & valid[:, :, None])[:, None]
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb, again)


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    found = hunyuan_video_blocks._example(block, new, image, text)
    return found | {"attention_mask": blocks.padded(found["encoder_hidden_states"], -1)}


DOUBLE = replace(
    hunyuan_video_blocks.DOUBLE,
    example=_example,
    processors={
        HunyuanVideo15AttnProcessor2_0: HunyuanVideo15Processor,
        **hunyuan_video_blocks.DOUBLE.processors,
    },
)
"""A mask of keys alone is as good, since nobody reads what padding attends to: hence the other processor."""
