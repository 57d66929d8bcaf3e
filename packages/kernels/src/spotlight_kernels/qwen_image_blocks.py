"""Blocks of Qwen-Image and Qwen-Image-Edit, as diffusers' ``QwenImageTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn

from spotlight_kernels.feed_forward import feed_forward, is_usual
from spotlight_kernels.lora import Again, project
from spotlight_kernels.operators import HeadStream, add_norm, add_norm_again, gated_add, join_heads


def trouble(block: Any) -> str | None:
    """Why a block cannot be fused; None if it can."""
    if block.zero_cond_t:
        return "its modulation differs by token (zero_cond_t)"
    if not (is_usual(block.img_mlp) and is_usual(block.txt_mlp)):
        return "its feed-forward part is not two products around a GELU"
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
        again: tuple[Again | None, Again | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:
        """As :class:`QwenDoubleStreamAttnProcessor2_0`: the image's and the text's outputs.

        Args:
            again: how the inputs of image and text are computed once more; None: they are kept.
        """
        image, text = hidden_states, encoder_hidden_states
        size, eps = attn.inner_dim // attn.heads, attn.norm_q.eps
        turns: list[Any] = [None, None]
        if image_rotary_emb is not None:
            turns = [torch.view_as_real(each).unbind(-1) for each in image_rotary_emb]

        images = project(image, (attn.to_q, attn.to_k, attn.to_v), again[0])
        texts = project(text, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), again[1])

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
        out = project(parts[1], [attn.to_out[0]])[0]
        return attn.to_out[1](out), project(parts[0], [attn.to_add_out])[0]


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
    eps = self.img_norm1.eps
    image = _Stream(hidden_states, self.img_mod(temb), eps)
    text = _Stream(encoder_hidden_states, self.txt_mod(temb), eps)
    branches = self.attn.processor(
        self.attn,
        hidden_states=image.normed,
        encoder_hidden_states=text.normed,
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        again=(image.again, text.again),
        **(joint_attention_kwargs or {}),
    )
    outputs = [
        stream.finished(branch, mlp)
        for stream, branch, mlp in zip((image, text), branches, (self.img_mlp, self.txt_mlp), strict=True)
    ]
    return outputs[1], outputs[0]


class _Stream:
    """Image or text on its way through a block, from its first norm on."""

    def __init__(self, x: Tensor, made: Tensor, eps: float) -> None:
        shift, scale, *self._rest = made.chunk(6, dim=-1)
        self._x, self.normed = add_norm(x, None, None, scale, shift, eps, rounded=True)
        self.again = Again(add_norm_again, (self._x, scale, shift, eps, True))
        self._eps = eps

    def finished(self, branch: Tensor, mlp: nn.Module) -> Tensor:
        """The block's output, given that of the attention."""
        gate, shift, scale, gate_mlp = self._rest
        x, normed = add_norm(self._x, branch, gate, scale, shift, self._eps, rounded=True)
        again = Again(add_norm_again, (x, scale, shift, self._eps, True))
        return gated_add(x, feed_forward(mlp, normed, again), gate_mlp, rounded=True)
