"""Blocks of Z-Image, as diffusers' ``ZImageTransformerBlock`` computes them."""

from __future__ import annotations

from typing import Any

from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import Tensor

from spotlight_kernels import blocks
from spotlight_kernels.blocks import New
from spotlight_kernels.feed_forward import gated_feed_forward
from spotlight_kernels.lora import Again
from spotlight_kernels.operators import Modulation, gated_add


class ZImageProcessor(ZSingleStreamAttnProcessor):  # type: ignore[misc]
    """Attention whose norm and rotation are one operator for queries and keys each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
        again: Again | None = None,
    ) -> Tensor:
        """As diffusers' own."""
        size, angles = attn.inner_dim // attn.heads, blocks.complex_angles(freqs_cis)
        turned = blocks.Turned.of(attn, size, angles, hidden_states, again)
        return super().__call__(turned, hidden_states, encoder_hidden_states, attention_mask)  # type: ignore[no-any-return]


def forward(
    self: Any,
    x: Tensor,
    attn_mask: Tensor,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    """As ``ZImageTransformerBlock.forward``."""
    if noise_mask is not None:  # modulation by token
        given = (x, attn_mask, freqs_cis, adaln_input, noise_mask, adaln_noisy, adaln_clean)
        return type(self).forward(self, *given)  # type: ignore[no-any-return]
    scale = gate = scale_mlp = gate_mlp = None
    if self.modulation:
        scale, gate, scale_mlp, gate_mlp = self.adaLN_modulation(adaln_input).chunk(4, dim=1)
        gate, gate_mlp = gate.tanh(), gate_mlp.tanh()
    eps = self.attention_norm1.eps
    by = Modulation(scale=scale, weight=self.attention_norm1.weight)
    x, out, again = blocks.normed(x, None, by, eps)
    branch = self.attention(out, attention_mask=attn_mask, freqs_cis=freqs_cis, again=again)
    by = Modulation(gate, scale_mlp, weight=self.ffn_norm1.weight, branch_weight=self.attention_norm2.weight)
    x, out, again = blocks.normed(x, branch, by, eps)
    mlp, weight = self.feed_forward, self.ffn_norm2.weight
    branch = gated_feed_forward(out, (mlp.w1, mlp.w3), mlp.w2, again)
    return gated_add(x, branch, gate_mlp, rounded=True, branch_weight=weight, eps=eps)


def _trouble(block: Any) -> str | None:
    norms = (block.attention_norm1, block.attention_norm2, block.ffn_norm1, block.ffn_norm2)
    if any(type(norm) is not RMSNorm or norm.weight is None or norm.bias is not None for norm in norms):
        return "its streams have no RMSNorm with weights alone"
    if len({norm.eps for norm in norms}) > 1:
        return "its norms have several eps"
    return blocks.norm_trouble(block.attention, optional=True)


def _example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    angles = blocks.unit_angles(new, 2, image, block.head_dim // 2)
    given = {"x": new(2, image, block.dim), "attn_mask": None, "freqs_cis": angles}
    if block.modulation:
        given["adaln_input"] = new(2, block.adaLN_modulation[0].in_features)
    return given


JOINT = blocks.Kind(forward, _trouble, _example, {ZSingleStreamAttnProcessor: ZImageProcessor})
