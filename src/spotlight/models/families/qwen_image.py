"""Qwen-Image, over diffusers' ``QwenImagePipeline``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.family import (
    ConditionBatch,
    MediaSize,
    ModelError,
    ModelFamily,
    decode_normalised,
    encode_normalised,
    pack,
    unpack,
)
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    config_integer,
    config_list,
    dimensions,
    read_models,
)
from spotlight_files.lora_names import QWEN
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DROPPED_TOKENS = 34
"""The template's tokens before the prompt, by Qwen's tokenizer; the pipeline drops this many with any."""
TOKENIZER_MAX_TOKENS = 1024


class QwenVaeFamily(ModelFamily):
    """Qwen-Image's VAE, a video's, whose latents are packed 2x2."""

    packed = True

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(
            files,
            patch_px=2 * 2 ** len(config_list(files, "vae", "temperal_downsample")),
            vae_width=config_integer(files, "vae", "base_dim"),
        )

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        return decode_normalised(self.vae, unpack(latents, self.dimensions.grid(size)).unsqueeze(2))

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        return pack(encode_normalised(self.vae, frames).squeeze(2))


class QwenImage(QwenVaeFamily):
    """A Qwen-Image model of any size.

    Guidance rescales each token to the norm of its conditional prediction, as in the pipeline.
    """

    name = "qwen-image"
    pipeline_class = "QwenImagePipeline"
    components = {
        "transformer": PipelineComponent(("QwenImageTransformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLQwenImage",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
        "text_encoder": PipelineComponent(("Qwen2_5_VLForConditionalGeneration",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
    lora_names = {"comfyui": QWEN, "kohya": QWEN}
    activations = ActivationCosts(
        lora=20.0, full=27.0, elementwise=11.2, checkpointed=1.5, forward=15.0, decode=21.0
    )
    reuses_blocks = True
    splits_sequence = True
    text_recipe = f"{TEMPLATE}|drop {DROPPED_TOKENS}|max {TOKENIZER_MAX_TOKENS}"
    text_tokens_max = TOKENIZER_MAX_TOKENS
    published, tiny_models = read_models(__file__)

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        z_dim, other = self.vae.config.z_dim, "it belongs to another pipeline"
        return {
            "patch_size": (2, "the pipeline packs 2x2 latents"),
            "in_channels": (4 * z_dim, "4 x the VAE's z_dim"),
            "out_channels": (z_dim, "the VAE's z_dim"),
            "sum of axes_dims_rope": (self.config.attention_head_dim, "attention_head_dim"),
            "joint_attention_dim": self.text_size("text_encoder", "hidden_size"),
            "guidance_embeds": (False, "guidance-distilled models are not supported"),
            "use_additional_t_cond": (False, other),
            "use_layer3d_rope": (False, other),
        }

    def unread_layers(self) -> tuple[str, ...]:
        *_, (last, _) = self.transformer.get_submodule("transformer_blocks").named_children()
        return f"transformer_blocks.{last}.attn.to_add_out.", f"transformer_blocks.{last}.txt_mlp."

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: the text encoder's last hidden state."""
        return {"embeds": (text_tokens, self.config.joint_attention_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """Template, dropped tokens and truncation exactly as in the pipeline."""
        tokens = pipeline.tokenizer(
            [TEMPLATE.format(prompt)],
            max_length=TOKENIZER_MAX_TOKENS + DROPPED_TOKENS,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_device)
        output = pipeline.text_encoder(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            output_hidden_states=True,
            logits_to_keep=1,  # logits are unused, and a full vocabulary per token is large
        )
        embeds: Tensor = output.hidden_states[-1][0, DROPPED_TOKENS:][: self.max_text_tokens]
        if embeds.shape[0] == 0:
            raise ModelError(
                f"prompt {prompt!r} has {tokens.input_ids.shape[1]} tokens with the template, but the "
                f"pipeline drops the first {DROPPED_TOKENS}: the tokenizer of {self.files.root} does not "
                "split the template as Qwen's does"
            )
        return {"embeds": embeds}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Masked text, time as the pipeline rounds it."""
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=self.rounded(sigma),
            encoder_hidden_states=condition["embeds"],
            encoder_hidden_states_mask=condition.mask("embeds"),
            img_shapes=[[(1, *self.dimensions.grid(size))]] * latents.shape[0],
        )

    def combine(self, prediction: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Each token is rescaled to the norm of its conditional prediction."""
        combined = super().combine(prediction, negative, scale)
        length = torch.norm(prediction, dim=-1, keepdim=True)
        rescaled: Tensor = combined * (length / torch.norm(combined, dim=-1, keepdim=True))
        return rescaled
