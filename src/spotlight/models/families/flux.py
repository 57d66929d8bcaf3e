"""FLUX.1 (dev, and schnell, which takes no guidance), over diffusers' ``FluxPipeline``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize
from spotlight.models.family_facts import ActivationCosts, Dimensions, dimensions, read_models
from spotlight.models.shared.checks import require_even_split
from spotlight.models.shared.image_vae import ScaledVaeFamily
from spotlight_files.lora_names import FLUX
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles


class Flux(ScaledVaeFamily):
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
    lora_names = {"comfyui": FLUX, "kohya": FLUX}
    activations = ActivationCosts(
        lora=14.5, full=23.0, elementwise=11.8, checkpointed=1.5, forward=15.5, decode=6.5
    )
    embedded_guidance = 3.5
    packed = True
    pads_last = pads_prompts = True  # the model attends to padding, without a mask
    splits_sequence = True
    text_tokens_max = 512
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(files, layers=("num_layers", "num_single_layers"))

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Without a text mask nothing can be padded: all tokens together must divide."""
        require_even_split(degree, tokens + text_tokens, "FLUX")

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        config = self.config
        return {
            "patch_size": (1, "the pipeline packs 2x2 latents itself"),
            "in_channels": (4 * self.vae.config.latent_channels, "4 x the VAE's latent_channels"),
            "out_channels": (config.in_channels, "in_channels: other pipelines add an image as channels"),
            "sum of axes_dims_rope": (config.attention_head_dim, "attention_head_dim"),
            "joint_attention_dim": self.text_size("text_encoder_2", "d_model"),
            "pooled_projection_dim": self.text_size("text_encoder", "hidden_size"),
        }

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
            prompt, device=self.text_device, max_sequence_length=self.max_text_tokens
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
        """The guidance scale is an input."""
        positions = self.positions(self.dimensions.grid(size))
        return self.forward(model, latents, sigma, condition, embedded, positions)

    def positions(self, grid: tuple[int, int], picture: int = 0) -> Tensor:
        """[tokens, 3]: picture, row and column of each."""
        rows, columns = grid
        ids = torch.full([rows, columns, 3], picture, device=self.device, dtype=self.dtype)
        ids[..., 1] = torch.arange(rows, device=self.device)[:, None]
        ids[..., 2] = torch.arange(columns, device=self.device)
        return ids.view(-1, 3)

    def forward(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        positions: Tensor,
    ) -> Tensor:
        """As :meth:`predict`, of tokens at ``positions``; text has none."""
        text = condition["embeds"]
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=self.rounded(sigma),
            guidance=None if embedded is None else torch.full_like(sigma, embedded),
            pooled_projections=condition["pooled"],
            encoder_hidden_states=text,
            txt_ids=positions.new_zeros(text.shape[1], 3),
            img_ids=positions,
        )
