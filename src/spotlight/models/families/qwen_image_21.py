"""Qwen-Image-2.1 and its Turbo, over diffusers' ``QwenImage21Pipeline``; text to image only.

Traps of the reference:
- Text and image are one sequence: the velocity is the tail of the transformer's output.
- The image's rotary positions follow the padded text, so only prompts of equal length can share a forward.
- The pipeline caches the text's keys and values after the first step; here they are always recomputed, since
  training needs their gradients.
- Pictures are RGBA; alpha is dropped, as PIL's ``convert("RGB")`` does.
- A pipeline may fix its noise levels (``sample_sigmas``) and with them the number of steps.
- Prompts are never cut: one longer than ``max_text_tokens`` is an error.
- The processor needs torchvision even for text: only its tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily, latent_statistics
from spotlight.models.family_facts import ActivationCosts, Dimensions, config_integer, dimensions, read_models
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.rows import by_kind
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

_PX_PER_TOKEN = 16
"""Fixed in the pipeline, whatever the VAE's configuration."""


class TextProcessor:
    """What the pipeline uses of ``Qwen3VLProcessor`` for text: tokenizer and chat markup."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2Tokenizer

        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder)

    def __call__(self, text: Sequence[str], **options: Any) -> Any:
        """Token ids and mask, as from the tokenizer."""
        return self.tokenizer(text, **options)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: object) -> list[list[int]]:
        """Token ids of the messages, which the pipeline counts to drop its system prompt."""
        text = "".join(
            f"<|im_start|>{message['role']}\n{part['text']}<|im_end|>\n"
            for message in messages
            for part in message["content"]
        )
        return [self.tokenizer(text).input_ids]


class QwenImage21(ModelFamily):
    """A Qwen-Image-2.1 model of any size. It is distilled: guidance is possible but not usual."""

    name = "qwen-image-2.1"
    pipeline_class = "QwenImage21Pipeline"
    components = {
        "transformer": PipelineComponent(("QwenImage21Transformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLQwenImage21",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "processor": PipelineComponent(("Qwen3VLProcessor",), weights=False, load=TextProcessor),
        "text_encoder": PipelineComponent(("Qwen3VLForConditionalGeneration",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("img_mlp.proj", "img_mlp.out", "img_mlp.gate_layer"),
    )
    activations = ActivationCosts(
        lora=27.3, full=33.4, elementwise=13.1, checkpointed=1.2, forward=15.0, decode=21.0
    )
    packed = True
    always_masks = True  # text is causal
    captures_graphs = False
    cuts_prompts = False
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        decoder = "decoder_base_dim" if files.config("vae").get("decoder_base_dim") else "base_dim"
        width = config_integer(files, "vae", decoder)
        return dimensions(files, patch_px=_PX_PER_TOKEN, vae_width=width, unit_px=2 * _PX_PER_TOKEN)

    def check_parts(self) -> None:
        vae, per_latent = self.vae.config, "pixels per latent of the VAE"
        require_equal(
            self.files.folder("transformer") / "config.json",
            {**self.config, per_latent: 2 ** (len(vae.dim_mult) - 1)},
            {
                "patch_size": (1, "the pipeline does not pack latents"),
                "in_channels": (vae.z_dim, "the VAE's z_dim"),
                "out_channels": (vae.z_dim, "the VAE's z_dim"),
                "sum of axes_dims_rope": (self.config.attention_head_dim, "attention_head_dim"),
                "context_in_dim": self.text_size("text_encoder", "hidden_size"),
                per_latent: (_PX_PER_TOKEN, "fixed in the pipeline"),
            },
        )

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: the text encoder's last hidden state before its final norm."""
        return {"embeds": (text_tokens, self.config.context_in_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        embeds: Tensor = pipeline.encode_prompt(prompt, device=self.text_device)[0][0]
        if embeds.shape[0] > self.max_text_tokens:
            raise ModelError(
                f"prompt {prompt!r} has {embeds.shape[0]} tokens with the template; expected at most "
                f"{self.max_text_tokens}: {self.pipeline_class} cuts no prompts, so raise "
                "model.max_text_tokens or shorten it"
            )
        return {"embeds": embeds}

    @classmethod
    def check_steps(cls, files: PipelineFiles, steps: int, key: str = "steps") -> None:
        """As many as the pipeline's fixed noise levels, if it has any."""
        fixed = files.setting("sample_sigmas")
        if fixed is not None and (not isinstance(fixed, list) or len(fixed) != steps):
            raise ModelError(
                f"{key} is {steps}; expected as many as {files.root}/model_index.json has sample_sigmas, "
                f"{fixed}. Set it to their number, or remove sample_sigmas for a linear schedule"
            )

    def given_sigmas(self, steps: int) -> Sequence[float] | NDArray[np.float64]:
        """Linear, unless the pipeline fixes them (``sample_sigmas``)."""
        fixed = self.files.setting("sample_sigmas")
        return super().given_sigmas(steps) if fixed is None else cast(Sequence[float], fixed)

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Rows whose text has equal length share a forward; the image is its output's tail."""
        timestep, texts, tokens = self.rounded(sigma), condition["embeds"], latents.shape[1]

        def run(length: int, rows: list[int]) -> Tensor:
            is_image = torch.arange(length + tokens // 4, device=self.device) >= length
            return self.output_of(
                model,
                hidden_states=latents[rows],
                timestep=timestep[rows],
                encoder_hidden_states=texts[rows, :length],
                img_shapes=[[(1, *self.dimensions.grid(size))]] * len(rows),
                img_mask=is_image.expand(len(rows), -1),
            )[:, -tokens:]

        return by_kind(model, condition.lengths["embeds"], run)

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        grid = latents.transpose(1, 2).reshape(-1, latents.shape[-1], 1, *self.dimensions.grid(size))
        mean, std = latent_statistics(self.vae, grid)
        return self.output_of(self.vae.decode, grid * std + mean)[:, :3]
