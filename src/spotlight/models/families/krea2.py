"""Krea 2 (Raw, and the distilled Turbo), over diffusers' ``Krea2Pipeline``.

Traps of the reference:
- Its ``guidance_scale`` is one less than that of true guidance: 0 is none.
- A prompt is padded in the middle of its template, to ``max_sequence_length``. The transformer masks the
  padding and text has no positions, so here it is left out.
- Text is a stack of hidden states, of 12 layers of the text encoder; in a condition they stand side by side.
- Noise levels are cast to ``dtype`` as they are, not times 1000.
- A distilled pipeline (``is_distilled``) has the same shift at every size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.families.qwen_image import QwenVaeFamily
from spotlight.models.family import ConditionBatch, MediaSize
from spotlight.models.family_facts import ActivationCosts, read_models
from spotlight.models.shared.checks import require_equal
from spotlight_files.lora_names import KREA2
from spotlight_files.pipeline_files import PipelineComponent

_TEXT_LAYERS = [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35]
"""The pipeline's default ``text_encoder_select_layers``."""
_DISTILLED_SHIFT = 1.15


class Krea2(QwenVaeFamily):
    """A Krea 2 model."""

    name = "krea-2"
    pipeline_class = "Krea2Pipeline"
    components = {
        "transformer": PipelineComponent(("Krea2Transformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLQwenImage",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
        "text_encoder": PipelineComponent(
            ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"), weights=True, lazy=True
        ),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_gate", "to_out.0"),
        *("ff.gate", "ff.up", "ff.down"),
    )
    lora_names = {"comfyui": KREA2, "kohya": KREA2}
    activations = ActivationCosts(
        lora=22.5, full=29.7, elementwise=11.2, checkpointed=1.5, forward=15.0, decode=21.0
    )
    guidance_argument = "guidance_scale"
    published, tiny_models = read_models(__file__)

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        return {"guidance_scale": scale - 1}

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        return {
            "in_channels": (4 * self.vae.config.z_dim, "4 x the VAE's z_dim"),
            "sum of axes_dims_rope": (self.config.attention_head_dim, "attention_head_dim"),
            "num_text_layers": (len(_TEXT_LAYERS), "as many as the pipeline joins"),
            "text_hidden_dim": self.text_size("text_encoder", "hidden_size"),
        }

    def check_parts(self) -> None:
        super().check_parts()
        wanted = {
            "patch_size": (2, "latents are packed 2x2"),
            "text_encoder_select_layers": (_TEXT_LAYERS, "those of the published models"),
        }
        found = {key: self.files.setting(key) for key in wanted}
        stated = {key: value for key, value in found.items() if value is not None}
        require_equal(self.files.root / "model_index.json", found, {key: wanted[key] for key in stated})

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: the hidden states of the text encoder's layers side by side."""
        return {"embeds": (text_tokens, self.config.num_text_layers * self.config.text_hidden_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings, cut at ``max_text_tokens``, without padding."""
        embeds, mask = pipeline.encode_prompt(
            prompt, device=self.text_device, max_sequence_length=self.max_text_tokens
        )
        return {"embeds": embeds[0][mask[0]].flatten(1)}

    def dynamic_shift(self, steps: int, size: MediaSize) -> dict[str, float]:
        """Linear in tokens, or that of all distilled models."""
        found = super().dynamic_shift(steps, size)
        return {"mu": _DISTILLED_SHIFT} if found and self.files.setting("is_distilled") else found

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Masked text at the origin, then the picture's tokens by row and column."""
        text, zero = condition["embeds"], torch.zeros(1, device=self.device)
        layers = self.config.num_text_layers
        rows, columns = (torch.arange(n, device=self.device) for n in self.dimensions.grid(size))
        positions = torch.cartesian_prod(zero, rows.float(), columns.float())
        return self.output_of(
            model,
            hidden_states=latents,
            encoder_hidden_states=text.reshape(*text.shape[:2], layers, -1),
            timestep=sigma.to(self.dtype),
            position_ids=torch.cat([positions.new_zeros(text.shape[1], 3), positions]),
            encoder_attention_mask=condition.mask("embeds"),
        )
