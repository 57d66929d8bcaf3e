"""Blocks of Krea 2: those of the joint sequence, text first, and those that fuse the text encoder's layers.

The weights of norms are stored around 0, and in float32 also where the rest is not.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_krea2 import Krea2AttnProcessor, Krea2RMSNorm
from torch import Tensor
from torch.autograd.function import once_differentiable

from spotlight_kernels import blocks
from spotlight_kernels.blocks import Angles, New
from spotlight_kernels.feed_forward import through
from spotlight_kernels.lora import Again, project
from spotlight_kernels.operators import HeadStream, Modulation, gated_add, join_heads

_OFFSET = 1.0


class Krea2Processor(Krea2AttnProcessor):  # type: ignore[misc]
    """Attention whose norm and rotation are one operator for queries and keys each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles = None,
        again: Again | None = None,
    ) -> Tensor:
        """As diffusers' own."""
        layers = (attn.to_q, attn.to_k, attn.to_v, attn.to_gate)
        query, key, value, gate = project(hidden_states, layers, again)
        angles, size = blocks.pairs(image_rotary_emb), attn.head_dim
        query, key = (
            join_heads([HeadStream(x, norm.weight, angles)], size, norm.eps, rounded=False, offset=_OFFSET)
            for x, norm in ((query, attn.norm_q), (key, attn.norm_k))
        )
        value = value.view(*value.shape[:2], -1, size)
        if (shared := attn.num_heads // attn.num_kv_heads) > 1:
            key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
        attended = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        return project(_gated(attended, gate), [attn.to_out[0]], Again(_gated, (attended, gate)))[0]


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``, which keeps nothing else for its backward."""
    return _Gated.apply(x, gate)  # type: ignore[no-any-return, no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * torch.sigmoid(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        share = torch.sigmoid(gate)
        return gradient * share, torch.ops.aten.sigmoid_backward(gradient * x, share)


def forward(
    self: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Angles,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """As ``Krea2TransformerBlock.forward``."""
    if temb.shape[1] != 1:  # modulation by token
        return type(self).forward(self, hidden_states, temb, image_rotary_emb, attention_mask)  # type: ignore[no-any-return]
    parts = temb.reshape(len(temb), 6, -1) + self.scale_shift_table
    scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = parts.unbind(1)
    by = Modulation(scale=scale, shift=shift, weight=self.norm1.weight)
    x, out, again = blocks.normed(hidden_states, None, by, self.norm1.eps, offset=_OFFSET)
    branch = self.attn(out, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb, again=again)
    by = Modulation(gate, scale_mlp, shift_mlp, self.norm2.weight)
    x, out, again = blocks.normed(x, branch, by, self.norm2.eps, offset=_OFFSET)
    return gated_add(x, through(self.ff, out, again), gate_mlp, rounded=True)


def fusion(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """As ``Krea2TextFusionBlock.forward``."""
    shape = hidden_states.shape
    # Each token of text may be a sequence, of 12 layers: more than the second side of a grid can count.
    rows = hidden_states.reshape(1, -1, shape[-1])
    by = Modulation(weight=self.norm1.weight)
    x, out, again = blocks.normed(rows, None, by, self.norm1.eps, offset=_OFFSET)
    branch = self.attn(out.view(shape), attention_mask=attention_mask, again=again)
    by = Modulation(weight=self.norm2.weight)
    x, out, again = blocks.normed(x, branch.reshape(x.shape), by, self.norm2.eps, offset=_OFFSET)
    return (x + through(self.ff, out, again)).view(shape)


def _trouble(block: Any) -> str | None:
    attn = block.attn
    if any(type(norm) is not Krea2RMSNorm for norm in (block.norm1, block.norm2, attn.norm_q, attn.norm_k)):
        return "its norms are not all of the class Krea2RMSNorm"
    return blocks.odd_heads(attn.head_dim)


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    width, tokens = block.attn.hidden_size, text + image
    sequence = new(2, tokens, width)
    return {
        "hidden_states": sequence,
        "temb": new(2, 1, 6 * width),
        "image_rotary_emb": blocks.repeated_angles(new, tokens, block.attn.head_dim),
        "attention_mask": blocks.padded(sequence, 0)[:, None, None],
    }


def _text_example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    sequence = new(2, image, block.attn.hidden_size)
    return {"hidden_states": sequence, "attention_mask": blocks.padded(sequence, 0)[:, None, None]}


JOINT = blocks.Kind(forward, _trouble, _example, {Krea2AttnProcessor: Krea2Processor})
FUSION = blocks.Kind(fusion, _trouble, _text_example, {Krea2AttnProcessor: Krea2Processor})
