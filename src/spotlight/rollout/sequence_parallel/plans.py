"""Where transformers are split whose diffusers class has no ``_cp_plan``, in diffusers' own terms.

HunyuanVideo: the token refiner runs whole on every rank, on the padded text and its mask. Image and text
tokens are split before the first block, and the positions where they are made. Every block gets one mask for
both, which is split as they are (``TokenShares.joint``).
"""

from __future__ import annotations

from collections.abc import Mapping

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

_TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
_MASK = {"attention_mask": ContextParallelInput(split_dim=3, expected_dims=4)}
_POSITIONS = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)

PLANS: Mapping[str, Mapping[str, object]] = {
    "HunyuanVideoTransformer3DModel": {
        "rope": {0: _POSITIONS, 1: _POSITIONS},
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "transformer_blocks.*": _MASK,
        "single_transformer_blocks.*": _MASK,
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
}
"""By diffusers class."""
