"""Qwen-Image over a diffusers ``QwenImagePipeline``, with the pipeline's arithmetic taken apart.

Invariant: with the ODE sampler and the same initial latents, images equal ``QwenImagePipeline.__call__``
(contract test, 1e-5 in float32). Unlike the pipeline, only the forward runs in the transformer's dtype:
guidance, noise levels and the VAE are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    CacheMixin,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.models import ModelMixin
from numpy.typing import NDArray
from torch import Tensor, nn

from spotlight.models import qwen_export
from spotlight.models.family import Condition, ConditionBatch, Guidance, ImageSize, ModelError, ModelFamily
from spotlight.models.layouts import check_size
from spotlight.models.model_errors import storing
from spotlight.models.pipeline_files import PipelineFiles, locate
from spotlight.models.qwen_layout import QWEN_IMAGE
from spotlight.models.qwen_text import PromptEncoder
from spotlight.models.skeleton import skeleton

_NOT_STORED = (
    "Free some space there or name a directory that can be written, then run the same command again: "
    "the run's checkpoints are as they were."
)


class QwenImage:
    """A Qwen-Image model of any size; implements :class:`spotlight.models.family.ModelFamily`. Use
    :meth:`load`.

    Attributes:
        transformer: frozen, in ``dtype``; possibly without weights (see :meth:`load`).
        vae: frozen, float32.
        device: of transformer and VAE.
        dtype: of the transformer's weights and inputs.
    """

    name = "qwen-image"
    default_lora_targets: tuple[str, ...] = QWEN_IMAGE.lora_targets

    def __init__(
        self,
        files: PipelineFiles,
        transformer: QwenImageTransformer2DModel,
        vae: AutoencoderKLQwenImage,
        scheduler: FlowMatchEulerDiscreteScheduler,
        prompts: PromptEncoder,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.transformer: nn.Module = transformer
        self.vae = vae
        self.device, self.dtype = device, dtype
        self._files, self._scheduler, self._prompts = files, scheduler, prompts
        self._text_width = int(transformer.config.joint_attention_dim)
        self._channels = int(transformer.config.in_channels)
        self._vae_scale = 2 ** len(vae.temperal_downsample)
        self._images = VaeImageProcessor(vae_scale_factor=2 * self._vae_scale)
        self._latents_mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        # Inverted twice, as in the pipeline: dividing by 1/std is not bitwise multiplying by std.
        self._inverse_std = 1.0 / torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self._schedule = lru_cache(maxsize=256)(self._visited_sigmas)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        revision: str | None = None,
        embeddings_cache: Path,
        max_text_tokens: int = 512,
        read_transformer: bool = True,
    ) -> QwenImage:
        """Load transformer, VAE and scheduler; the text encoder is loaded on the first uncached prompt.

        Args:
            path: pipeline directory or hub id.
            device: where to put the model.
            dtype: of transformer and text encoder: float32 or bfloat16.
            revision: of a hub id.
            embeddings_cache: directory for prompt embeddings.
            max_text_tokens: limit per prompt (the pipeline's ``max_sequence_length``).
            read_transformer: False leaves the weights to :func:`spotlight.models.skeleton.filling`; of the
                transformer's files only config.json is needed.

        Raises:
            ModelError: the model is unusable; where possible, before weights are read.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"dtype of the transformer is {dtype}; expected torch.float32 or torch.bfloat16")
        components = dict(QWEN_IMAGE.components)
        if not read_transformer:
            components["transformer"] = replace(components["transformer"], weights=False, lazy=True)
        files = locate(
            path, revision=revision, pipeline_class=QWEN_IMAGE.pipeline_class, components=components
        )
        scheduler = _scheduler(files)
        device = torch.device(device)
        prompts = PromptEncoder(files, device, dtype, embeddings_cache, max_text_tokens)
        if read_transformer:
            transformer = _load_weights(QwenImageTransformer2DModel, files, "transformer", dtype, device)
        else:
            transformer = skeleton(QwenImageTransformer2DModel, files.config("transformer"), dtype, device)
        vae = _load_weights(AutoencoderKLQwenImage, files, "vae", torch.float32, device)
        _check_fit(files, transformer, vae)
        return cls(files, transformer, vae, scheduler, prompts, device, dtype)

    def check_size(self, size: ImageSize) -> None:
        """Raise :class:`ModelError` unless both sides are positive multiples of the latent patch."""
        why = f"VAE factor {self._vae_scale}, 2x2 patches"
        check_size(size.height, size.width, 2 * self._vae_scale, why)

    def latent_shape(self, size: ImageSize) -> tuple[int, int]:
        """(tokens, channels) of one image's packed latents."""
        rows, columns = self._patches(size)
        return rows * columns, self._channels

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        """The schedule: [steps + 1] float32 on the CPU, from 1 to 0, dynamic shift applied."""
        if steps < 1:
            raise ModelError(f"number of denoising steps is {steps}; expected at least 1")
        return self._schedule(steps, self.latent_shape(size)[0]).clone()

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """Embed prompts, on the CPU, through the disk cache."""
        return self._prompts.encode(prompts)

    def not_embedded(self, prompts: Sequence[str]) -> list[str]:
        """The distinct prompts that the disk cache lacks."""
        return self._prompts.missing(prompts)

    @property
    def text_encoder_loaded(self) -> bool:
        """Whether the text encoder is in memory."""
        return self._prompts.loaded

    def free_text_encoder(self) -> None:
        """Release the text encoder's memory."""
        self._prompts.free()

    def collate(self, conditions: Sequence[Condition]) -> ConditionBatch:
        """Zero-pad to the longest and move to the device, in the transformer's dtype.

        Raises:
            ModelError: the width is another text encoder's.
        """
        rows = [condition.embeds.to(self.device, self.dtype) for condition in conditions]
        for row in rows:
            if row.ndim != 2 or row.shape[1] != self._text_width:
                raise ModelError(
                    f"text embeddings of shape {list(row.shape)}; the transformer in {self._files.root} "
                    f"takes [tokens, {self._text_width}]: they come from another text encoder"
                )
        lengths = [row.shape[0] for row in rows]
        embeds = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if min(lengths) == max(lengths):
            return ConditionBatch(embeds, None)
        positions = torch.arange(max(lengths), device=self.device)
        return ConditionBatch(embeds, positions < torch.tensor(lengths, device=self.device)[:, None])

    def velocity(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        guidance: Guidance | None,
        size: ImageSize,
    ) -> Tensor:
        """Predicted velocity e - x0, float32, shape of ``latents`` [batch, tokens, channels]; sigma: [batch].

        With guidance, each token is rescaled to the norm of its conditional prediction.
        """
        prediction = self._predict(model, latents, sigma, condition, size, "cond")
        if guidance is None or guidance.scale <= 1:
            return prediction
        negative = self._predict(model, latents, sigma, guidance.negative, size, "uncond")
        combined = negative + guidance.scale * (prediction - negative)
        length = torch.norm(prediction, dim=-1, keepdim=True)
        rescaled: Tensor = combined * (length / torch.norm(combined, dim=-1, keepdim=True))
        return rescaled

    def decode(self, latents: Tensor, size: ImageSize) -> NDArray[np.uint8]:
        """Decode final latents to images: [batch, height, width, 3] uint8."""
        images: NDArray[np.uint8] = (self.decode_float(latents, size) * 255).round().astype(np.uint8)
        return images

    @torch.no_grad()
    def decode_float(self, latents: Tensor, size: ImageSize) -> NDArray[np.float32]:
        """Decode final latents: [batch, height, width, 3] float32 in [0, 1]."""
        rows, columns = self._patches(size)
        grid = latents.to(self.device, torch.float32).view(-1, rows, columns, self._channels // 4, 2, 2)
        grid = grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, self._channels // 4, 1, 2 * rows, 2 * columns)
        decoded = self.vae.decode(grid / self._inverse_std + self._latents_mean, return_dict=False)[0]
        images: NDArray[np.float32] = self._images.postprocess(decoded[:, :, 0], output_type="np")
        return images

    def save_lora(
        self, directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> Path:
        """Write a LoRA for plain diffusers' ``load_lora_weights``; returns the file."""
        with storing("the LoRA", directory, _NOT_STORED):
            return qwen_export.save_lora(directory, layers, metadata)

    def save_merged(self, directory: Path, state: Mapping[str, Tensor], *, replace: bool = False) -> Path:
        """Write a whole pipeline directory whose transformer holds ``state``, in ``dtype``; returns it."""
        with storing("the merged pipeline", directory, _NOT_STORED):
            return qwen_export.save_merged(self._files, directory, state, self.dtype, replace=replace)

    def _patches(self, size: ImageSize) -> tuple[int, int]:
        self.check_size(size)
        return size.height // (2 * self._vae_scale), size.width // (2 * self._vae_scale)

    def _predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        size: ImageSize,
        name: str,
    ) -> Tensor:
        # As the pipeline does, sigma -> timestep -> cast -> / 1000: each operation rounds.
        timestep = (sigma * self._scheduler.config.num_train_timesteps).to(self.device, self.dtype)
        with _named(model, name):
            prediction: Tensor = model(
                hidden_states=latents.to(self.device, self.dtype),
                timestep=timestep / 1000,
                encoder_hidden_states=condition.embeds,
                encoder_hidden_states_mask=condition.mask,
                img_shapes=[[(1, *self._patches(size))]] * latents.shape[0],
                return_dict=False,
            )[0]
        return prediction.float()

    def _visited_sigmas(self, steps: int, tokens: int) -> Tensor:
        config = self._scheduler.config
        mu = shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        with np.errstate(invalid="ignore"):
            self._scheduler.set_timesteps(
                steps, device="cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu
            )
        sigmas: Tensor = self._scheduler.sigmas.float().clone()
        if not bool((sigmas.diff() < 0).all()):  # NaN included: one step with shift_terminal divides 0 by 0
            raise ModelError(
                f"{steps} denoising steps give the noise levels {sigmas.tolist()} with the scheduler of "
                f"{self._files.root}; expected falling ones: use at least 2 steps"
            )
        return sigmas


def _named(model: nn.Module, name: str) -> AbstractContextManager[None]:
    # diffusers' step cache keeps conditional and unconditional passes apart by name.
    if not isinstance(model, CacheMixin) or not model.is_cache_enabled:
        return nullcontext()
    context: AbstractContextManager[None] = CacheMixin.cache_context(model, name)
    return context


def shift(tokens: int, base: int, largest: int, base_shift: float, max_shift: float) -> float:
    """The pipeline's ``calculate_shift``, in its order of operations."""
    slope = (max_shift - base_shift) / (largest - base)
    return tokens * slope + (base_shift - slope * base)


def _scheduler(files: PipelineFiles) -> FlowMatchEulerDiscreteScheduler:
    config = files.config("scheduler", "scheduler_config.json")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            raise ModelError(
                f"{files.folder('scheduler')}/scheduler_config.json sets {option}: the samplers here expect "
                "the plain flow-matching Euler schedule; set it to false"
            )
    return FlowMatchEulerDiscreteScheduler.from_config(config)


def _load_weights(
    kind: type[ModelMixin], files: PipelineFiles, component: str, dtype: torch.dtype, device: torch.device
) -> ModelMixin:
    folder = files.folder(component)
    # Load onto the GPU file by file: otherwise each rank would first hold a whole DiT in host memory.
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, report = kind.from_pretrained(
            files.root,
            subfolder=component,
            torch_dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placed,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"cannot load {kind.__name__} from {folder}: {error}") from error
    for what in ("missing", "unexpected"):
        keys = sorted(report[f"{what}_keys"])
        if keys:
            raise ModelError(
                f"{folder}: {len(keys)} {what} tensors, first {keys[0]!r}: config.json and weights do not "
                "belong together; copy or download the folder again"
            )
    return model.to(device).eval().requires_grad_(False)


def _check_fit(
    files: PipelineFiles, transformer: QwenImageTransformer2DModel, vae: AutoencoderKLQwenImage
) -> None:
    # Components of different models load without error; fail here rather than in the first forward.
    config, z_dim = transformer.config, vae.config.z_dim
    text = files.config("text_encoder")
    nested = text.get("text_config")
    text_width = (nested if isinstance(nested, dict) else text).get("hidden_size")
    expected = {
        "patch_size": (config.patch_size, 2, "the pipeline packs 2x2 latents"),
        "in_channels": (config.in_channels, 4 * z_dim, "4 x the VAE's z_dim"),
        "out_channels": (transformer.out_channels, z_dim, "the VAE's z_dim"),
        "sum of axes_dims_rope": (
            sum(config.axes_dims_rope),
            config.attention_head_dim,
            "attention_head_dim",
        ),
        "joint_attention_dim": (config.joint_attention_dim, text_width, "the text encoder's hidden_size"),
        "guidance_embeds": (config.guidance_embeds, False, "guidance-distilled models are not supported"),
        "use_additional_t_cond": (config.use_additional_t_cond, False, "it belongs to another pipeline"),
        "use_layer3d_rope": (config.use_layer3d_rope, False, "it belongs to another pipeline"),
    }
    for key, (found, wanted, why) in expected.items():
        if found != wanted:
            raise ModelError(
                f"{files.folder('transformer')}/config.json: {key} is {found}; expected {wanted} ({why})"
            )


if TYPE_CHECKING:
    _conforms: type[ModelFamily] = QwenImage
