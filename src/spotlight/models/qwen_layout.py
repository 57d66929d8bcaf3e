"""Qwen-Image's constants, separate from the model code: planning starts without torch."""

from __future__ import annotations

from spotlight.models.layouts import Dimensions, FamilyLayout, config_integer, config_list
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles


def _dimensions(files: PipelineFiles) -> Dimensions:
    heads, per_head = (
        config_integer(files, "transformer", key) for key in ("num_attention_heads", "attention_head_dim")
    )
    return Dimensions(
        layers=config_integer(files, "transformer", "num_layers"),
        width=heads * per_head,
        channels=config_integer(files, "transformer", "in_channels"),
        patch_px=2 * 2 ** len(config_list(files, "vae", "temperal_downsample")),
        vae_width=config_integer(files, "vae", "base_dim"),
    )


QWEN_IMAGE = FamilyLayout(
    loader="spotlight.models.qwen_image:QwenImage.load",
    pipeline_class="QwenImagePipeline",
    components={
        "transformer": PipelineComponent(("QwenImageTransformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLQwenImage",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
        "text_encoder": PipelineComponent(("Qwen2_5_VLForConditionalGeneration",), weights=True, lazy=True),
    },
    dimensions=_dimensions,
    lora_targets=(
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    ),
    reuses_blocks=True,
    kept_lora=20.0,
    kept_full=27.0,
    kept_checkpointed=1.5,
    forward_peak=15.0,
    decode_peak=21.0,
)
