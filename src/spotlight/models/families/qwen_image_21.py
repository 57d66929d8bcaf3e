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

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models import tiny
from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    PublishedModel,
    config_integer,
)
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.latents import latent_statistics
from spotlight.models.shared.published_vaes import causal_vae
from spotlight.models.shared.rows import by_kind

_PX_PER_TOKEN = 16
"""Fixed in the pipeline, whatever the VAE's configuration."""
_SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


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
    activations = ActivationCosts(lora=27.3, full=33.4, checkpointed=1.2, forward=15.0, decode=21.0)
    packed = True
    always_masks = True  # text is causal
    captures_graphs = False
    cuts_prompts = False
    published = {
        "Qwen/Qwen-Image-2.1": PublishedModel(
            configs={
                "transformer": {
                    "_class_name": "QwenImage21Transformer2DModel",
                    "patch_size": 1,
                    "in_channels": 64,
                    "out_channels": 64,
                    "num_layers": 32,
                    "attention_head_dim": 128,
                    "num_attention_heads": 32,
                    "context_in_dim": 4096,
                    "mlp_ratio": 3,
                    "axes_dims_rope": [16, 56, 56],
                    "causal_condition": True,
                },
                "vae": causal_vae(
                    "AutoencoderKLQwenImage21",
                    decoder_base_dim=144,
                    z_dim=64,
                    dim_mult=[1, 2, 4, 8, 8],
                    temperal_downsample=[False, True, True, True],
                    is_residual=True,
                    in_channels=4,
                    out_channels=4,
                ),
            },
            parameters=7.1e9,
            text_parameters=8.8e9,
            source="diffusers' defaults",
        )
    }

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """From the configurations of transformer and VAE."""
        heads, per_head = (
            config_integer(files, "transformer", key) for key in ("num_attention_heads", "attention_head_dim")
        )
        decoder = "decoder_base_dim" if files.config("vae").get("decoder_base_dim") else "base_dim"
        return Dimensions(
            layers=config_integer(files, "transformer", "num_layers"),
            width=heads * per_head,
            heads=heads,
            channels=config_integer(files, "transformer", "in_channels"),
            patch_px=_PX_PER_TOKEN,
            vae_width=config_integer(files, "vae", decoder),
            unit_px=2 * _PX_PER_TOKEN,
        )

    def check_parts(self) -> None:
        """Sizes of transformer, VAE and text encoder that must agree."""
        config, vae = self.config, self.vae.config
        text = self.files.config("text_encoder").get("text_config")
        text_width = text.get("hidden_size") if isinstance(text, dict) else None
        halvings = len(vae.dim_mult) - 1
        require_equal(
            self.files.folder("transformer") / "config.json",
            {
                "patch_size": (config.patch_size, 1, "the pipeline does not pack latents"),
                "in_channels": (config.in_channels, vae.z_dim, "the VAE's z_dim"),
                "out_channels": (config.out_channels or config.in_channels, vae.z_dim, "the VAE's z_dim"),
                "sum of axes_dims_rope": (
                    sum(config.axes_dims_rope),
                    config.attention_head_dim,
                    "attention_head_dim",
                ),
                "context_in_dim": (config.context_in_dim, text_width, "the text encoder's hidden_size"),
                "pixels per latent of the VAE": (2**halvings, _PX_PER_TOKEN, "fixed in the pipeline"),
            },
        )

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: the text encoder's last hidden state before its final norm."""
        return {"embeds": (text_tokens, self.config.context_in_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings."""
        embeds: Tensor = pipeline.encode_prompt(prompt, device=self.device)[0][0]
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

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """Linear and shifted, unless the pipeline fixes the levels (``sample_sigmas``)."""
        fixed = self.files.setting("sample_sigmas")
        if fixed is None:
            super().set_timesteps(steps, size)
            return
        self.scheduler.set_timesteps(device="cpu", sigmas=fixed, **self.dynamic_shift(steps, size))

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
            output: Tensor = model(
                hidden_states=latents[rows],
                timestep=timestep[rows],
                encoder_hidden_states=texts[rows, :length],
                img_shapes=[[(1, *self.dimensions.grid(size))]] * len(rows),
                img_mask=is_image.expand(len(rows), -1),
                return_dict=False,
            )[0]
            return output[:, -tokens:]

        return by_kind(model, condition.lengths["embeds"], run)

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo the normalisation, decode, drop alpha."""
        grid = latents.transpose(1, 2).reshape(-1, latents.shape[-1], 1, *self.dimensions.grid(size))
        mean, std = latent_statistics(self.vae, grid)
        decoded: Tensor = self.vae.decode(grid * std + mean, return_dict=False)[0]
        return decoded[:, :3]

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """See :meth:`ModelFamily.tiny`; the VAE's factor is always 16, as the pipeline's."""
        from diffusers import (
            AutoencoderKLQwenImage21,
            FlowMatchEulerDiscreteScheduler,
            QwenImage21Transformer2DModel,
        )

        channels, heads, layers, text_width, vae_width, residual = (
            (8, 2, 2, 32, 12, True),
            (4, 4, 1, 48, 16, True),
            (12, 1, 3, 64, 16, False),
            (16, 2, 2, 32, 12, True),
        )[variant]
        special = (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
            *("<|image_pad|>", "<|video_pad|>"),
        )
        tokenizer = tiny.qwen2_tokenizer([f"system\n{_SYSTEM_PROMPT}", "user\n assistant\n"], special)
        tiny.write_pipeline(
            cls.pipeline_class,
            directory,
            seed,
            transformer=QwenImage21Transformer2DModel(
                in_channels=channels,
                out_channels=channels,
                num_layers=layers,
                attention_head_dim=16,
                num_attention_heads=heads,
                context_in_dim=text_width,
                axes_dims_rope=(4, 6, 6),
            ),
            vae=AutoencoderKLQwenImage21(
                base_dim=4,
                decoder_base_dim=vae_width,
                z_dim=channels,
                dim_mult=[1] * 5,
                num_res_blocks=1,
                temperal_downsample=[False, True, True, True],
                latents_mean=[0.1 * i - 0.5 for i in range(channels)],
                latents_std=[1 + 0.1 * i for i in range(channels)],
                is_residual=residual,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
            ),
            processor=tokenizer,
            text_encoder=tiny.qwen3_vl_text_encoder(tokenizer, text_width),
        )
        _make_processor(directory)


def _make_processor(directory: Path) -> None:
    """Complete the tokenizer to a Qwen3VLProcessor, which cannot be made without torchvision."""
    folder, index_file = directory / "processor", directory / "model_index.json"
    vision = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    config = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **vision},
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **vision},
    }
    (folder / "processor_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    index = json.loads(index_file.read_text()) | {"processor": ["transformers", "Qwen3VLProcessor"]}
    index_file.write_text(json.dumps(index, indent=2))
