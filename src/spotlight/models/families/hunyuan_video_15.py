"""HunyuanVideo 1.5 text-to-video, over diffusers' ``HunyuanVideo15Pipeline``.

Traps of the reference:
- The guidance scale belongs to a component, the guider, and is no argument of the call.
- Letters between quotation marks are a second text, which ByT5 encodes; without any it has no tokens.
- Its attention makes a mask of all pairs of tokens, 12 GB for 720p and 121 frames; here it is of the keys.
- Its text encoders pad to 1,000 and 256 tokens, and 729 stand for a picture: all masked, so left out here.
- The pipeline loads no LoRA; its transformer does.
- The VAE decodes all frames at once, and can only decode one video at a time.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor, nn

from spotlight.models.condition import EMBEDS
from spotlight.models.family import ConditionBatch, MediaSize, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    config_integer,
    dimensions,
    read_models,
)
from spotlight.models.shared.checks import after_template, require_equal
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

GLYPHS = "glyphs"
"""Of a condition: what ByT5 makes of the letters in quotation marks."""
_UNTILED_PX = 5 * 512 * 512
"""Pixels of a video up to which the VAE decodes whole frames, as the pipeline does."""
_TILE_PX = 256 * 256


class HunyuanVideo15(ModelFamily):
    """A HunyuanVideo 1.5 model that makes videos of text; distilled ones take no guidance."""

    name = "hunyuan-video-1.5"
    pipeline_class = "HunyuanVideo15Pipeline"
    components = {
        "transformer": PipelineComponent(("HunyuanVideo15Transformer3DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLHunyuanVideo15",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "guider": PipelineComponent(("ClassifierFreeGuidance",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
        "tokenizer_2": PipelineComponent(("ByT5Tokenizer",), weights=False),
        "text_encoder": PipelineComponent(("Qwen2_5_VLTextModel",), weights=True, lazy=True),
        "text_encoder_2": PipelineComponent(("T5EncoderModel",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    activations = ActivationCosts(
        lora=19.2, full=25.4, elementwise=11.2, checkpointed=1.2, forward=12.0, decode=6.0
    )
    video = True
    usual_frames_per_latent = 4
    always_masks = True
    pads_last = True
    captures_graphs = False  # it sorts text before padding by the mask's values
    cuts_prompts = False
    loads_lora = False
    text_tokens_max = 1000
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(
            files,
            latents="out_channels",
            patch_px=config_integer(files, "vae", "spatial_compression_ratio"),
            frames_per_latent=config_integer(files, "vae", "temporal_compression_ratio"),
        )

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """Of all frames; of large videos, of a tile of each."""
        return size.pixels if size.pixels <= _UNTILED_PX else size.frames * _TILE_PX

    @classmethod
    def loading_lines(cls, scale: float, text_tokens: int) -> tuple[str, ...]:
        return (
            f"pipe.guider = pipe.guider.new(guidance_scale={scale!r}, enabled=True)",
            f"pipe.tokenizer_max_length = {text_tokens}",
        )

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        """None: see :meth:`loading_lines`."""
        return {}

    def adapt(self, transformer: nn.Module) -> None:
        """Mask keys alone: what padding attends to, no token reads. Once for a transformer."""
        blocks: Any = transformer.get_submodule("transformer_blocks")
        for block in blocks:
            block.attn.set_processor(HunyuanVideoAttnProcessor2_0())
            block.attn.register_forward_pre_hook(_mask_keys, with_kwargs=True)

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        channels = self.vae.config.latent_channels
        return {
            "patch_size": (1, "a latent is a token"),
            "patch_size_t": (1, "a latent is a token"),
            "in_channels": (2 * channels + 1, "latents, latents of a picture, its mask"),
            "out_channels": (channels, "the VAE's latent_channels"),
            "task_type": ("t2v", "image-to-video is not supported"),
            "use_meanflow": (False, "models of a few mean steps are not supported"),
            "text_embed_dim": self.text_size("text_encoder", "hidden_size"),
            "text_embed_2_dim": self.text_size("text_encoder_2", "d_model"),
        }

    def check_parts(self) -> None:
        super().check_parts()
        usual = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
        file = "guider_config.json"
        require_equal(
            self.files.folder("guider") / file,
            usual | self.files.config("guider", file),
            {key: (value, "guidance is the usual one, in all steps") for key, value in usual.items()},
        )

    def unread_layers(self) -> tuple[str, ...]:
        *_, (last, _) = self.transformer.get_submodule("transformer_blocks").named_children()
        return f"transformer_blocks.{last}.attn.to_add_out.", f"transformer_blocks.{last}.ff_context."

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """Linear from 1 towards 0 in ``steps`` steps, then shifted."""
        self.scheduler.set_timesteps(device="cpu", sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: Qwen's third last hidden state; ``glyphs``: ByT5's last, here of a prompt without."""
        return {EMBEDS: (text_tokens, self.config.text_embed_dim), GLYPHS: (0, self.config.text_embed_2_dim)}

    def text_pipeline(self, **parts: Any) -> Any:
        """The pipeline's constructor reads the VAE's configuration."""
        return diffusers.HunyuanVideo15Pipeline(**parts, transformer=None, vae=self.vae, scheduler=None)

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings without padding."""
        pipeline.tokenizer_max_length = self.max_text_tokens
        embeds, mask, glyphs, lettered = pipeline.encode_prompt(prompt, device=self.text_device)
        kept = after_template(embeds[0, mask[0].bool()], prompt, self.files, "Qwen")
        return {EMBEDS: kept, GLYPHS: glyphs[0, lettered[0].bool()]}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Two masked texts, and no picture: its latents and mask are zeros."""
        batch, channels, *grid = latents.shape
        picture = latents.new_zeros(batch, channels + 1, *grid)
        return self.output_of(
            model,
            hidden_states=torch.cat([latents, picture], dim=1),
            timestep=(sigma * self.scheduler.config.num_train_timesteps).to(self.dtype),
            encoder_hidden_states=condition[EMBEDS],
            encoder_attention_mask=_mask(condition, EMBEDS),
            encoder_hidden_states_2=condition[GLYPHS],
            encoder_attention_mask_2=_mask(condition, GLYPHS),
            image_embeds=torch.zeros(
                batch, 0, self.config.image_embed_dim, device=latents.device, dtype=latents.dtype
            ),
        )

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo the scale; decode each video by itself, large ones in tiles."""
        self.vae.use_slicing, self.vae.use_tiling = True, size.pixels > _UNTILED_PX
        return self.output_of(self.vae.decode, latents / self.vae.config.scaling_factor)


def _mask_keys(attn: nn.Module, args: tuple[()], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    mask = F.pad(given["attention_mask"], (given["hidden_states"].shape[1], 0), value=True)
    return args, given | {"attention_mask": mask[:, None, None]}


def _mask(condition: ConditionBatch, name: str) -> Tensor:
    """As the transformer takes it: always one."""
    mask, sequence = condition.mask(name), condition[name]
    if mask is None:
        return torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device)
    return mask
