"""FLUX.1 (dev, and schnell, which takes no guidance), over diffusers' ``FluxPipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models import tiny
from spotlight.models.family import ConditionBatch, MediaSize, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    PublishedModel,
    dual_stream_dimensions,
)
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.shared.checks import require_equal, require_even_split
from spotlight.models.shared.latents import decode_image, unpack
from spotlight.models.shared.published_vaes import image_vae


class Flux(ModelFamily):
    """A FLUX.1 model.

    - T5's embeddings are padded to ``max_text_tokens`` and the transformer sees the padding unmasked: another
      limit gives other pictures.
    - The guidance scale is an input of the distilled model; true guidance is possible on top of it.
    """

    name = "flux"
    pipeline_class = "FluxPipeline"
    components = {
        "transformer": PipelineComponent(("FluxTransformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKL",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("CLIPTokenizer", "CLIPTokenizerFast"), weights=False),
        "tokenizer_2": PipelineComponent(("T5TokenizerFast", "T5Tokenizer"), weights=False),
        "text_encoder": PipelineComponent(("CLIPTextModel",), weights=True, lazy=True),
        "text_encoder_2": PipelineComponent(("T5EncoderModel",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    activations = ActivationCosts(lora=14.5, full=23.0, checkpointed=1.5, forward=15.5, decode=6.5)
    embedded_guidance = 3.5
    packed = True
    pads_last = True  # the model attends to padding, without a mask
    splits_sequence = True
    text_tokens_max = 512
    published = {
        "black-forest-labs/FLUX.1-dev": PublishedModel(
            configs={
                "transformer": {
                    "_class_name": "FluxTransformer2DModel",
                    "attention_head_dim": 128,
                    "guidance_embeds": True,
                    "in_channels": 64,
                    "joint_attention_dim": 4096,
                    "num_attention_heads": 24,
                    "num_layers": 19,
                    "num_single_layers": 38,
                    "patch_size": 1,
                    "pooled_projection_dim": 768,
                },
                "vae": image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            },
            parameters=11.9e9,
            text_parameters=4.9e9,
            source="diffusers' defaults, `convert_flux_to_diffusers.py`",
        )
    }

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """From the configurations of transformer and VAE."""
        return dual_stream_dimensions(files)

    @classmethod
    def planned_text_tokens(cls, words: int, most: int) -> int:
        """All of them: prompts are padded."""
        return most

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Without a text mask nothing can be padded: all tokens together must divide."""
        require_even_split(degree, tokens + text_tokens, "FLUX")

    def check_parts(self) -> None:
        """Sizes of transformer, VAE and text encoders that must agree."""
        config, channels = self.config, self.vae.config.latent_channels
        require_equal(
            self.files.folder("transformer") / "config.json",
            {
                "patch_size": (config.patch_size, 1, "the pipeline packs 2x2 latents itself"),
                "in_channels": (config.in_channels, 4 * channels, "4 x the VAE's latent_channels"),
                "out_channels": (
                    config.out_channels or config.in_channels,
                    config.in_channels,
                    "in_channels: other pipelines add an image as channels",
                ),
                "sum of axes_dims_rope": (
                    sum(config.axes_dims_rope),
                    config.attention_head_dim,
                    "attention_head_dim",
                ),
                "joint_attention_dim": (
                    config.joint_attention_dim,
                    self.files.config("text_encoder_2").get("d_model"),
                    "text_encoder_2's d_model",
                ),
                "pooled_projection_dim": (
                    config.pooled_projection_dim,
                    self.files.config("text_encoder").get("hidden_size"),
                    "text_encoder's hidden_size",
                ),
            },
        )

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: T5's last hidden state, padding included; ``pooled``: CLIP's pooled output."""
        config = self.config
        return {
            "embeds": (self.max_text_tokens, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own ``encode_prompt``; it cuts CLIP's tokens at 77, T5's at ``max_text_tokens``."""
        embeds, pooled, _ = pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=self.max_text_tokens
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """The guidance scale is an input; text has no positions."""
        rows, columns = self.dimensions.grid(size)
        ids = torch.zeros(rows, columns, 3, device=self.device, dtype=self.dtype)
        ids[..., 1] = torch.arange(rows, device=self.device)[:, None]
        ids[..., 2] = torch.arange(columns, device=self.device)
        text = condition["embeds"]
        prediction: Tensor = model(
            hidden_states=latents,
            timestep=self.rounded(sigma),
            guidance=None if embedded is None else torch.full_like(sigma, embedded),
            pooled_projections=condition["pooled"],
            encoder_hidden_states=text,
            txt_ids=ids.new_zeros(text.shape[1], 3),
            img_ids=ids.view(-1, 3),
            return_dict=False,
        )[0]
        return prediction

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Unpack, undo scale and shift, decode."""
        return decode_image(self.vae, unpack(latents, self.dimensions.grid(size)))

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """See :meth:`ModelFamily.tiny`."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

        channels, heads, double, single, text_width, factor = (
            (4, 4, 1, 2, 32, 2), (8, 2, 2, 1, 24, 4), (4, 2, 1, 3, 16, 8), (8, 4, 2, 2, 32, 2),
        )[variant]  # fmt: skip
        tokenizer, tokenizer_2 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
        tiny.write_pipeline(
            cls.pipeline_class,
            directory,
            seed,
            transformer=FluxTransformer2DModel(
                in_channels=4 * channels,
                num_layers=double,
                num_single_layers=single,
                attention_head_dim=8,
                num_attention_heads=heads,
                joint_attention_dim=text_width,
                pooled_projection_dim=24,
                guidance_embeds=True,
                axes_dims_rope=(2, 2, 4),
            ),
            vae=tiny.image_vae(channels, factor, 8, scaling_factor=0.7, shift_factor=0.2),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            tokenizer=tokenizer,
            text_encoder=tiny.clip_text_encoder(tokenizer, 24),
            tokenizer_2=tokenizer_2,
            text_encoder_2=tiny.t5_text_encoder(tokenizer_2, text_width),
        )
