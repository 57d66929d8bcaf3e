"""Blocks of Qwen-Image and Qwen-Image-Edit, as diffusers' ``QwenImageTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn

from spotlight_kernels.lora import project
from spotlight_kernels.operators import HeadStream, add_norm, gated_add, join_heads


def trouble(block: Any) -> str | None:
    """Why a block cannot be fused; None if it can."""
    if block.zero_cond_t:
        return "its modulation differs by token (zero_cond_t)"
    norms = (block.attn.norm_q, block.attn.norm_k, block.attn.norm_added_q, block.attn.norm_added_k)
    if any(getattr(norm, "weight", None) is None or norm.bias is not None for norm in norms):
        return "its queries and keys have no RMSNorm with weights alone"
    return None


def example(block: Any, new: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Arguments of a small forward; ``new(*shape)`` draws a tensor. And which outputs to compare."""
    half, width, (image, text) = block.attention_head_dim // 2, block.dim, (70, 5)
    angles = [torch.polar(torch.ones(n, half), torch.randn(n, half)) for n in (image, text)]
    device = new(1).device
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        "encoder_hidden_states_mask": None,
        "temb": new(2, width),
        "image_rotary_emb": tuple(each.to(device) for each in angles),
    }, (0, 1)


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
    ) -> tuple[Tensor, Tensor]:
        """As :class:`QwenDoubleStreamAttnProcessor2_0`: the image's and the text's outputs."""
        image, text = hidden_states, encoder_hidden_states
        size, eps = attn.inner_dim // attn.heads, attn.norm_q.eps
        turns: list[Any] = [None, None]
        if image_rotary_emb is not None:
            turns = [torch.view_as_real(each).unbind(-1) for each in image_rotary_emb]

        texts = project(text, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        images = project(image, (attn.to_q, attn.to_k, attn.to_v))

        def joint(of: int, norms: tuple[Any, Any] | None) -> Tensor:
            weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
            angles = (None, None) if norms is None else (turns[1], turns[0])
            values = (texts[of], images[of])
            streams = [HeadStream(*each) for each in zip(values, weights, angles, strict=True)]
            return join_heads(streams, size, eps, rounded=True)

        attended = dispatch_attention_fn(
            joint(0, (attn.norm_added_q, attn.norm_q)),
            joint(1, (attn.norm_added_k, attn.norm_k)),
            joint(2, None),
            attn_mask=_joint_mask(image, encoder_hidden_states_mask),
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        parts = attended.flatten(2, 3).to(image.dtype).split([text.shape[1], image.shape[1]], 1)
        out = attn.to_out[0](parts[1].contiguous())
        return attn.to_out[1](out), attn.to_add_out(parts[0].contiguous())


PROCESSORS = (QwenDoubleStreamAttnProcessor2_0, QwenImageProcessor)
"""The class of diffusers, and the one that replaces it."""


def _joint_mask(image: Tensor, text: Tensor | None) -> Tensor | None:
    if text is None:
        return None
    ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
    return torch.cat([text, ones], dim=1)[:, None, None, :]


def forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the block's own; ``modulate_index`` is None: only blocks that :func:`trouble` refuses have one."""
    streams = []
    for x, made in ((hidden_states, self.img_mod(temb)), (encoder_hidden_states, self.txt_mod(temb))):
        shift, scale, *rest = made.chunk(6, dim=-1)
        streams.append((*add_norm(x, None, None, scale, shift, self.img_norm1.eps, rounded=True), rest))
    (image, image_in, image_rest), (text, text_in, text_rest) = streams
    branches = self.attn(
        hidden_states=image_in,
        encoder_hidden_states=text_in,
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image, text = (
        _feed_forward(x, branch, rest, mlp, self.img_norm2.eps)
        for x, branch, rest, mlp in (
            (image, branches[0], image_rest, self.img_mlp),
            (text, branches[1], text_rest, self.txt_mlp),
        )
    )
    return text, image


def _feed_forward(x: Tensor, branch: Tensor, rest: list[Tensor], mlp: nn.Module, eps: float) -> Tensor:
    gate, shift, scale, gate_mlp = rest
    x, normed = add_norm(x, branch, gate, scale, shift, eps, rounded=True)
    return gated_add(x, mlp(normed), gate_mlp, rounded=True)
