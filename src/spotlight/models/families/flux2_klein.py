"""FLUX.2-klein (4B and 9B, distilled and base), over diffusers' ``Flux2KleinPipeline``.

Traps of the reference:
- The shift depends on the number of steps, too.
- Text is padded to ``max_text_tokens``, and the transformer attends to the padding: another limit gives other
  pictures.
- Position ids have four axes: time, row, column, text token.
- Latents are normalised by the running statistics of the VAE's BatchNorm, per packed channel.
- The pipeline takes initial latents before packing, and negative prompts only as embeddings.
- A distilled pipeline (``is_distilled``) silently ignores guidance: here it is an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily, pack, unpack
from spotlight.models.family_facts import ActivationCosts, Dimensions, dimensions, read_models
from spotlight.models.shared.checks import require_even_split
from spotlight_files.lora_names import FLUX2
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

_TEXT_LAYERS = 3
"""Hidden states of the text encoder that are joined; which ones is the pipeline's default (9, 18 and 27)."""


class Flux2Klein(ModelFamily):
    """A FLUX.2-klein model of any size."""

    name = "flux2-klein"
    pipeline_class = "Flux2KleinPipeline"
    components = {
        "transformer": PipelineComponent(("Flux2Transformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLFlux2",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2TokenizerFast", "Qwen2Tokenizer"), weights=False),
        "text_encoder": PipelineComponent(("Qwen3ForCausalLM",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
        "to_qkv_mlp_proj",  # not the single blocks' to_out: as a suffix it matches other modules, too
    )
    lora_names = {"comfyui": FLUX2, "kohya": FLUX2}
    activations = ActivationCosts(
        lora=18.4, full=26.5, elementwise=12.5, checkpointed=1.6, forward=21.5, decode=6.5
    )
    packed = True
    pads_last = pads_prompts = True  # the model attends to padding, without a mask
    guidance_argument: ClassVar[str | None] = "guidance_scale"
    splits_sequence = True
    text_tokens_max = 512
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(files, layers=("num_layers", "num_single_layers"))

    @classmethod
    def negative_argument(cls, prompt: str) -> str:
        """As embeddings: the pipeline itself knows only the empty negative prompt."""
        return f"negative_prompt_embeds=pipe.encode_prompt({prompt!r})[0]"

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Without a text mask nothing can be padded: all tokens together must divide."""
        require_even_split(degree, tokens + text_tokens, "FLUX.2")

    @classmethod
    def check_guidance(cls, files: PipelineFiles, scale: float, key: str = "true_cfg_scale") -> None:
        super().check_guidance(files, scale, key)
        if scale > 1 and files.setting("is_distilled"):
            raise ModelError(
                f"{key} is {scale:g}; expected 1: {files.root} is distilled (is_distilled in "
                "model_index.json), and its pipeline ignores guidance. Set it to 1, or use a base model"
            )

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        channels = 4 * self.vae.config.latent_channels
        width, _ = self.text_size("text_encoder", "hidden_size")
        joined = _TEXT_LAYERS * width if isinstance(width, int) else None
        return {
            "patch_size": (1, "the pipeline packs 2x2 latents itself"),
            "in_channels": (channels, "4 x the VAE's latent_channels"),
            "out_channels": (channels, "in_channels"),
            "sum of axes_dims_rope": (self.config.attention_head_dim, "attention_head_dim"),
            "joint_attention_dim": (joined, f"{_TEXT_LAYERS} x the text encoder's hidden_size"),
            "guidance_embeds": (self.embedded_guidance is not None, "only FLUX.2-dev takes a scale"),
        }

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: three hidden states of the text encoder side by side, padding included."""
        return {"embeds": (self.max_text_tokens, self.config.joint_attention_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings, cut and padded to ``max_text_tokens``."""
        embeds, _ = pipeline.encode_prompt(
            prompt, device=self.text_device, max_sequence_length=self.max_text_tokens
        )
        return {"embeds": embeds[0]}

    def dynamic_shift(self, steps: int, size: MediaSize) -> dict[str, float]:
        """The pipeline's own: between that of 10 and of 200 steps, each linear in tokens."""
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        if not self.scheduler.config.get("use_dynamic_shifting"):
            return {}
        return {"mu": compute_empirical_mu(self.dimensions.tokens(size), steps)}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Position ids have four axes: time, row, column, text token."""
        rows, columns = (torch.arange(n, device=self.device) for n in self.dimensions.grid(size))
        text, zero = condition["embeds"], rows[:1]
        words = torch.arange(text.shape[1], device=self.device)
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=self.rounded(sigma),
            guidance=None if embedded is None else torch.full_like(sigma, embedded),
            encoder_hidden_states=text,
            txt_ids=torch.cartesian_prod(zero, zero, zero, words)[None],
            img_ids=torch.cartesian_prod(zero, rows, columns, zero)[None],
        )

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        norm = self.vae.bn
        std = torch.sqrt(norm.running_var + self.vae.config.batch_norm_eps)
        grid = unpack(latents * std + norm.running_mean, self.dimensions.grid(size))
        return self.output_of(self.vae.decode, grid).unsqueeze(2)

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        norm = self.vae.bn
        std = torch.sqrt(norm.running_var + self.vae.config.batch_norm_eps)
        latents = pack(self.vae.encode(frames.squeeze(2)).latent_dist.mode())
        normalised: Tensor = (latents - norm.running_mean) / std
        return normalised
