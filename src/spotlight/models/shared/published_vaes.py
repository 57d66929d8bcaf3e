"""Configurations of VAEs that several published models use."""

from __future__ import annotations

from collections.abc import Mapping


def image_vae(scaling_factor: float, shift_factor: float) -> Mapping[str, object]:
    """``AutoencoderKL`` of 16 channels, of FLUX.1, Stable Diffusion 3.5 and Z-Image."""
    return {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "latent_channels": 16,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def causal_vae(class_name: str, **changes: object) -> Mapping[str, object]:
    """The causal video VAE of Wan2.1; Qwen-Image and later models have variants of it."""
    return {
        "_class_name": class_name,
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        **changes,
    }
