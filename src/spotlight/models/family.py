"""A DiT family over a diffusers pipeline. A new family is one module with a subclass of :class:`ModelFamily`
and one line of :data:`spotlight.registry.FAMILIES`.

The base class locates and checks the pipeline, loads its parts, caches embeddings and exports. A family
states its facts (``FamilyTraits``) and implements ``read_dimensions``, ``embed``, ``condition_shapes``,
``predict`` and ``decode_frames``, the pipeline's arithmetic taken apart.

Invariants:
- With the ODE sampler and the same initial latents, pictures equal those of the diffusers pipeline.
- Unlike in the pipeline, only the forward runs in the transformer's dtype: guidance, noise levels and the VAE
  are float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spotlight.models.condition import Condition as Condition
from spotlight.models.condition import ConditionBatch as ConditionBatch
from spotlight.models.condition import Guidance as Guidance
from spotlight.models.condition import Instruction as Instruction
from spotlight.models.condition import ModelInput as ModelInput
from spotlight.models.condition import collate, guidance_pass
from spotlight.models.experts import by_rows, denoisers
from spotlight.models.family_facts import Dimensions, FamilyTraits
from spotlight.models.kernels.attention import explaining_masks
from spotlight.models.media import MediaSize as MediaSize
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.flop_count import ForwardLog
from spotlight.models.shared.noise_levels import scheduler_config, shift
from spotlight.models.shared.quantised import Quantize
from spotlight.models.shared.transformer_files import (
    TransformerFiles,
    component_type,
    load_transformers,
    weight_sources,
)
from spotlight.models.skeleton import load_weights, persistent_buffers
from spotlight.models.text.prompt_encoder import EmbeddingsCache, PromptEncoder, called_versions
from spotlight.models.tiny import write_pipeline
from spotlight_files import pipeline_export
from spotlight_files.model_errors import ModelError as ModelError
from spotlight_files.model_errors import storing
from spotlight_files.pipeline_files import (
    PipelineFiles,
    is_denoiser,
    transformer_names,
    without_transformer_weights,
)

_NOT_STORED = (
    "Free some space there or name a directory that can be written, then run the same command again: "
    "the run's checkpoints are as they were."
)


class ModelFamily(FamilyTraits, ABC):
    """A model of one family. Use :meth:`load`.

    Rollout and training share :meth:`velocity`. It takes the module to run, so that adapters, copies and
    sharded modules all use the same code.

    Attributes:
        transformer: frozen, in ``dtype``; possibly without weights (see :meth:`load`). Two transformers
            divided by noise level are one :class:`~spotlight.models.experts.Experts`.
        vae: frozen, float32.
        device: of transformer and VAE.
        text_device: of the text encoders.
        dtype: of the transformer's weights and inputs.
        config: diffusers' configuration of the (first) transformer.
        dimensions: of this pipeline.
    """

    def __init__(
        self,
        files: PipelineFiles,
        transformer: nn.Module,
        vae: Any,
        scheduler: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        embeddings_cache: Path,
        max_text_tokens: int,
        text_device: torch.device | None = None,
        unread: TransformerFiles | None = None,
    ) -> None:
        self.check_text_limit(max_text_tokens)
        self._unread = unread
        self.files, self.transformer, self.vae, self.scheduler = files, transformer, vae, scheduler
        self.device, self.dtype, self.max_text_tokens = device, dtype, max_text_tokens
        self.text_device = device if text_device is None else text_device
        self.config: Any = denoisers(transformer)["transformer"].config
        self.dimensions = self.read_dimensions(files)
        for part in denoisers(transformer).values():
            self.adapt(part)
        text = {name: part for name, part in self.components.items() if not is_denoiser(name)}
        cache = EmbeddingsCache(
            root=embeddings_cache,
            model=files.identity(*text, *(["vae"] if self.references_max else [])),
            template=f"{self.pipeline_class}|{self.text_recipe}|{called_versions()}",
            max_tokens=max_text_tokens,
            dtype=dtype,
        )
        self._prompts = PromptEncoder(files, self.text_pipeline, text, self._embed, cache, self.text_device)
        self._schedule = lru_cache(maxsize=256)(self._visited_sigmas)
        self.check_parts()

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
        text_device: torch.device | None = None,
        read_transformer: bool = True,
        transformer: str | None = None,
        deferred: bool = False,
        quantize: Quantize = "none",
    ) -> Self:
        """Load transformer, VAE and scheduler; the text encoders are loaded on the first uncached prompt.

        Args:
            path: pipeline directory or hub id.
            device: where to put the model.
            dtype: of transformer and text encoders: float32 or bfloat16.
            revision: of a hub id.
            embeddings_cache: directory for prompt embeddings.
            max_text_tokens: limit per prompt (the pipeline's ``max_sequence_length``).
            text_device: where prompts are embedded; default: ``device``.
            read_transformer: False leaves the weights to :func:`spotlight.models.skeleton.filling`; of the
                transformer's files only config.json is needed.
            transformer: directory or file of safetensors with the weights, in place of the pipeline's; of
                two transformers, a directory with one of each component's name.
            deferred: leaves the transformer's parameters on the meta device, without memory, to be read by
                :meth:`read_weights`, once it is sharded or the text encoder freed. Their files are checked at
                once.
            quantize: how the transformer's linear layers are held (:mod:`spotlight.models.shared.quantised`).

        Raises:
            ModelError: the model is unusable; where possible, before weights are read.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"dtype of the transformer is {dtype}; expected torch.float32 or torch.bfloat16")
        device = torch.device(device)
        own = read_transformer and transformer is None
        wanted = cls.components if own else without_transformer_weights(cls.components)
        files = cls.locate(path, revision, wanted)
        scheduler, names = cls.make_scheduler(files), cls.transformers(files)
        weights = weight_sources(files, names, transformer) if read_transformer else None
        module = load_transformers(files, names, dtype, device, weights, deferred=deferred, quantize=quantize)
        return cls(
            files,
            module,
            load_weights(component_type(files, "vae"), files, "vae", torch.float32, device),
            scheduler,
            device,
            dtype,
            embeddings_cache=embeddings_cache,
            max_text_tokens=max_text_tokens,
            text_device=text_device,
            unread=weights if deferred else None,
        )

    # -- what a family implements ---------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """The sizes of a pipeline; raises :class:`ModelError`."""

    @abstractmethod
    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of :meth:`embed` for a prompt of ``text_tokens`` tokens."""

    @abstractmethod
    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """One prompt's tensors, from a diffusers pipeline that has only tokenizers and text encoders."""

    @abstractmethod
    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """One forward of a transformer: the velocity e - x0, in the shape of ``latents``.

        Args:
            latents: [batch, *latent_shape], on the device in ``dtype``.
            sigma: [batch], on the device in float32.
            embedded: guidance scale that the model takes as an input; None: it takes none.
        """

    @abstractmethod
    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """The VAE's output for final float32 latents: [batch, 3, frames, height, width], in [-1, 1]."""

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        """The inverse of :meth:`decode_frames`; what the VAE draws is at its mode.

        Raises:
            ModelError: the family trains on no pictures of data.
        """
        raise ModelError(
            f"model family {type(self).__name__} encodes no pictures, on which algorithm.name=sft and stored "
            "pairs are trained: take another family, or an algorithm that trains on rollouts"
        )

    # -- where families differ ------------------------------------------------------------------------------

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """Write a small random pipeline of the real classes, about 1 MB.

        Args:
            seed: of the weights.
            variant: of :attr:`tiny_models`.
        """
        write_pipeline(cls, directory, seed, variant)

    def text_pipeline(self, **parts: Any) -> Any:
        """The pipeline that :meth:`embed` gets, of its tokenizers and text encoders."""
        import diffusers

        return getattr(diffusers, self.pipeline_class)(**parts, transformer=None, vae=None, scheduler=None)

    def embed_instruction(self, pipeline: Any, instruction: Instruction) -> dict[str, Tensor]:
        """As :meth:`embed`, of a prompt about reference pictures and of its negative prompt
        (``negative_embeds``). Raises :class:`ModelError`.
        """
        raise ModelError(
            f"prompt {instruction.text!r} has {len(instruction.references)} reference pictures; "
            f"model.family={self.name} takes none: use a family that edits pictures"
        )

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """For the memory plan: pixels of one sample that :meth:`decode_frames` works on at once."""
        return size.pixels

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        """Of one sample's latents, in the layout that the pipeline denoises (see :attr:`packed`)."""
        self.check_size(size)
        dimensions = self.dimensions
        if self.packed:
            return dimensions.tokens(size), dimensions.channels
        channels: int = self.config.get("out_channels") or self.config.in_channels
        patch = math.isqrt(dimensions.channels // channels)
        frames = (dimensions.latent_frames(size),) if self.video else ()
        rows, columns = dimensions.grid(size)
        return channels, *frames, patch * rows, patch * columns

    def combine(self, prediction: Tensor, negative: Tensor, scale: float) -> Tensor:
        """True guidance: the velocity from that of the prompt and that of the negative prompt."""
        return negative + scale * (prediction - negative)

    def first_transformer(self, sigma: Tensor) -> Tensor | None:
        """[batch] bool, rows for the first of two transformers; None: there is one."""
        return None

    @classmethod
    def size_arguments(cls, height: int, width: int, frames: int) -> dict[str, object]:
        """What the diffusers pipeline's call takes for a size."""
        size: dict[str, object] = {"height": height, "width": width}
        return size | {"num_frames": frames} if cls.video else size

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        """What the same call takes for this guidance, besides ``negative_prompt``.

        Args:
            scale: of true guidance.
            embedded: see :attr:`Guidance.embedded`.
        """
        arguments: dict[str, object] = {} if cls.guidance_argument is None else {cls.guidance_argument: scale}
        return arguments if embedded is None else arguments | {"guidance_scale": embedded}

    @classmethod
    def negative_argument(cls, prompt: str) -> str:
        """The same call's argument for a negative prompt, as code."""
        return f"negative_prompt={prompt!r}"

    @classmethod
    def check_text_limit(cls, tokens: int) -> None:
        """Raise :class:`ModelError` (``max_text_tokens is ..``) beyond :attr:`text_tokens_max`."""
        if not 1 <= tokens <= cls.text_tokens_max:
            raise ModelError(f"max_text_tokens is {tokens}; expected 1 to {cls.text_tokens_max}")

    @classmethod
    def check_guidance(cls, files: PipelineFiles, scale: float, key: str = "true_cfg_scale") -> None:
        """Raise :class:`ModelError` (``<key> is ..``) if the pipeline has no true guidance, or ignores it."""
        if scale > 1 and cls.guidance_argument is None:
            raise ModelError(
                f"{key} is {scale:g}; expected 1: {cls.pipeline_class} takes no negative prompt. Set it to "
                "1; its guidance is rollout.embedded_guidance"
            )

    @classmethod
    def check_steps(cls, files: PipelineFiles, steps: int, key: str = "steps") -> None:
        """Raise :class:`ModelError` (``<key> is ..``) if the pipeline has another number of steps."""

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Raise :class:`ModelError` (``degrees has ..``) if forwards cannot be split over ``degree`` GPUs.

        Args:
            tokens: of one sample.
            text_tokens: limit per prompt.
        """

    @classmethod
    def check_reference_split(
        cls, files: PipelineFiles, degree: int, tokens: int, text_tokens: int, reference: str
    ) -> None:
        """As :meth:`check_split`, of samples with this reference picture; errors name the whole key."""

    def adapt(self, transformer: nn.Module) -> None:
        """Change how a transformer of diffusers' computes, not what."""

    def check_parts(self) -> None:
        """Raise :class:`ModelError` if the loaded parts belong to different models."""
        path = self.files.folder("transformer") / "config.json"
        require_equal(path, self.config, self.wanted_config())

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        """What the transformer's configuration must say, for :func:`require_equal`."""
        return {}

    def text_size(self, component: str, key: str) -> tuple[object, str]:
        """A size that a text encoder's configuration states, and where, for :func:`require_equal`."""
        config = self.files.config(component)
        nested = config.get("text_config")
        return (nested if isinstance(nested, dict) else config).get(key), f"{component}'s {key}"

    @classmethod
    def make_scheduler(cls, files: PipelineFiles) -> Any:
        """diffusers' flow-matching Euler scheduler with the pipeline's configuration."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_config(scheduler_config(files))

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """Set the scheduler's noise levels as the pipeline does: linear, with any dynamic shift."""
        sigmas = np.linspace(1.0, 1 / steps, steps)
        self.scheduler.set_timesteps(device="cpu", sigmas=sigmas, **self.dynamic_shift(steps, size))

    def dynamic_shift(self, steps: int, size: MediaSize) -> dict[str, float]:
        """The scheduler's argument ``mu``, if its shift depends on the size: by default linear in tokens."""
        config = self.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return {}
        mu = shift(
            self.dimensions.tokens(size),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return {"mu": mu}

    @classmethod
    def transformers(cls, files: PipelineFiles) -> list[str]:
        """Component names of the pipeline's transformers."""
        return [name for name in transformer_names(cls.components) if files.component_class(name) is not None]

    # -- what is the same for all ---------------------------------------------------------------------------

    def velocity(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        guidance: Guidance | None,
        size: MediaSize,
        log: ForwardLog | None = None,
    ) -> Tensor:
        """Predicted velocity e - x0, float32, shape of ``latents`` [batch, *latent_shape]; sigma: [batch].

        Args:
            log: notes the forwards.

        Raises:
            ModelError: the model takes a guidance scale and ``guidance`` has none.
        """
        guidance = guidance or Guidance()
        embedded, avoided = self._embedded(guidance), guidance.negative if guidance.scale > 1 else None
        sigma = sigma.to(self.device)
        if log is not None:
            log.begin(len(latents))

        def run(part: nn.Module, rows: Tensor | slice) -> Tensor:
            inputs = latents[rows].to(self.device, self.dtype), sigma[rows]

            def forward(given: ConditionBatch, name: str) -> Tensor:
                texts = given.at(rows)
                with guidance_pass(part, name), explaining_masks():
                    velocity = self.predict(part, *inputs, texts, embedded, size)
                self._check_shape(velocity, inputs[0])
                if log is not None:
                    log.note(size, texts.size, texts.lengths, part)
                return velocity.float()

            if avoided is None:
                return forward(condition, "cond")
            both = guidance.passes(lambda: forward(condition, "cond"), lambda: forward(avoided, "uncond"))
            return self.combine(*both, guidance.scale)

        return by_rows(model, self.first_transformer(sigma), run)

    def rounded(self, sigma: Tensor) -> Tensor:
        """Noise levels as most pipelines round them: times 1000, cast to ``dtype``, divided by 1000."""
        timestep: Tensor = (sigma * self.scheduler.config.num_train_timesteps).to(self.dtype)
        return timestep / 1000

    def unread_layers(self) -> tuple[str, ...]:
        """Beginnings of names of the transformer's layers that no velocity depends on: a last block's text.

        They have no gradient and are left as they are, also where compiled blocks give them one of zeros.
        """
        return ()

    def check_size(self, size: MediaSize) -> None:
        """Raise :class:`ModelError`, naming the nearest valid sizes, if the size does not fit the patches."""
        self.dimensions.check_size(size, video=self.video)

    def sigmas(self, steps: int, size: MediaSize) -> Tensor:
        """The schedule: [steps + 1] float32 on the CPU, from 1 to 0, shift applied."""
        if steps < 1:
            raise ModelError(f"number of denoising steps is {steps}; expected at least 1")
        self.check_steps(self.files, steps)
        self.check_size(size)
        return self._schedule(steps, size).clone()

    def encode(self, prompts: Sequence[ModelInput]) -> list[Condition]:
        """Embed prompts, on the CPU, through the disk cache."""
        return self._prompts.encode(prompts)

    def not_embedded(self, prompts: Sequence[ModelInput]) -> list[ModelInput]:
        """The distinct prompts that the disk cache lacks; reads no file but reference pictures."""
        return self._prompts.missing(prompts)

    @property
    def deferred(self) -> bool:
        """Whether the transformer still lacks its weights: they are left to :meth:`read_weights`."""
        return self._unread is not None

    def read_weights(self, modules: Sequence[nn.Module]) -> None:
        """Read a deferred transformer's weights, once, into it and copies, all sharded alike or not.

        Raises:
            ModelError: they cannot be read.
        """
        if self._unread is None:
            raise RuntimeError("read_weights() of a transformer whose weights were read before")
        self._unread.read(modules, self.device)
        self._unread = None

    def free_text_encoder(self) -> None:
        """Release the text encoders' memory; a later miss loads them again."""
        self._prompts.free()

    def negatives(self, conditions: Sequence[Condition], common: Condition) -> ConditionBatch:
        """Of the negative prompt for each of ``conditions``, collated; ``common`` is that of no pictures."""
        return self.collate([condition.negative(common) for condition in conditions])

    def collate(self, conditions: Sequence[Condition]) -> ConditionBatch:
        """Pad to the longest and move to the device, in the transformer's dtype.

        Raises:
            ModelError: the widths are another text encoder's.
        """
        owner = f"the transformer in {self.files.root}"
        return collate(conditions, self.condition_shapes(1), self.device, self.dtype, owner)

    @torch.no_grad()
    def decode_float(self, latents: Tensor, size: MediaSize) -> NDArray[np.float32]:
        """Decode final latents: [batch, frames, height, width, 3] float32 in [0, 1]."""
        decoded = self.decode_frames(latents.to(self.device, torch.float32), size)
        frames = (decoded * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
        return frames.cpu().float().numpy()

    def latent_gradient(self, latents: Tensor, gradient: NDArray[np.float32], size: MediaSize) -> Tensor:
        """Of a value by one picture's final latents, in their shape on the CPU, through the VAE in float32.

        Args:
            gradient: of the value by the picture's pixels in [0, 1], [height, width, 3].
        """
        if getattr(self.vae, "_supports_gradient_checkpointing", False):
            self.vae.enable_gradient_checkpointing()  # a decoder's activations take gigabytes
        leaf = latents[None].to(self.device, torch.float32).requires_grad_()
        with torch.enable_grad():
            pixels = (self.decode_frames(leaf, size) * 0.5 + 0.5).clamp(0, 1)
        by_pixels = torch.from_numpy(gradient.copy()).to(self.device).permute(2, 0, 1)[None, :, None]
        (found,) = torch.autograd.grad(pixels, leaf, by_pixels)
        return found[0].cpu()

    @torch.no_grad()
    def encode_pictures(self, pictures: NDArray[np.uint8], size: MediaSize) -> Tensor:
        """Float32 latents of [batch, height, width, 3] uint8, on the device; inverse of :meth:`decode`."""
        frames = torch.from_numpy(pictures.copy()).to(self.device).permute(0, 3, 1, 2).unsqueeze(2)
        return self.encode_frames(frames.float() / 127.5 - 1, size)

    def decode(self, latents: Tensor, size: MediaSize) -> NDArray[np.uint8]:
        """Decode final latents: [batch, frames, height, width, 3] uint8."""
        frames: NDArray[np.uint8] = (self.decode_float(latents, size) * 255).round().astype(np.uint8)
        return frames

    def save_lora(
        self, directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> Path:
        """Write a LoRA for plain diffusers' ``load_lora_weights``; returns the file.

        ``layers`` is peft's adapter state dict; ``metadata`` peft's LoraConfig fields.
        """
        with storing("the LoRA", directory, _NOT_STORED):
            names = list(denoisers(self.transformer))
            return pipeline_export.save_lora(directory, layers, metadata, names, self.native_layers)

    def save_merged(
        self,
        directory: Path,
        state: Mapping[str, Tensor],
        *,
        replace: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Write a whole pipeline directory whose transformer holds ``state``; returns it.

        ``state`` needs parameters only: buffers never change.
        An existing pipeline directory is an error unless ``replace`` is set.

        Args:
            dtype: of the files; default: the model's.
        """
        with storing("the merged pipeline", directory, _NOT_STORED):
            return pipeline_export.save_merged(
                self.files,
                self.components,
                directory,
                persistent_buffers(self.transformer) | dict(state),
                self.dtype if dtype is None else dtype,
                replace=replace,
            )

    def _embed(self, pipeline: Any, prompt: ModelInput) -> dict[str, Tensor]:
        if isinstance(prompt, Instruction):
            return self.embed_instruction(pipeline, prompt)
        return self.embed(pipeline, prompt)

    def _check_shape(self, velocity: Tensor, latents: Tensor) -> None:
        """Another shape would be broadcast silently."""
        shape = getattr(velocity, "shape", None)
        if shape != latents.shape:
            found = f"a {type(velocity).__name__}" if shape is None else f"a tensor of shape {list(shape)}"
            raise ModelError(
                f"model family {type(self).__module__}:{type(self).__qualname__}: its predict returned "
                f"{found}; expected the velocity in the shape of the latents, {list(latents.shape)}. Undo "
                "patches and leave out what is not the latents' own, such as tokens of reference pictures."
            )

    def _embedded(self, guidance: Guidance) -> float | None:
        if not self.config.get("guidance_embeds"):
            return None
        if guidance.embedded is None:
            raise ModelError(
                f"no embedded guidance for the transformer in {self.files.root}, which takes a scale; "
                f"{self.embedded_guidance} is usual"
            )
        return guidance.embedded

    def _visited_sigmas(self, steps: int, size: MediaSize) -> Tensor:
        with np.errstate(invalid="ignore"):
            self.set_timesteps(steps, size)
        sigmas: Tensor = self.scheduler.sigmas.float().cpu().clone()
        if not bool((sigmas.diff() < 0).all()):  # NaN included: one step with shift_terminal divides 0 by 0
            raise ModelError(
                f"{steps} denoising steps give the noise levels {sigmas.tolist()} with the scheduler of "
                f"{self.files.root}; expected falling ones: use at least 2 steps"
            )
        return sigmas


# -- latents between the layout that a transformer denoises and the one that a VAE decodes ------------------


def unpack(latents: Tensor, grid: tuple[int, int]) -> Tensor:
    """Packed latents [batch, rows * columns, 4 * channels] as [batch, channels, 2 * rows, 2 * columns].

    Args:
        grid: rows and columns of tokens.
    """
    rows, columns = grid
    channels = latents.shape[-1] // 4
    split = latents.reshape(-1, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return split.reshape(-1, channels, 2 * rows, 2 * columns)


def pack(latents: Tensor) -> Tensor:
    """The inverse of :func:`unpack`: latents [batch, channels, height, width] as [batch, tokens, values]."""
    batch, channels, height, width = latents.shape
    split = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(batch, height // 2 * (width // 2), 4 * channels)


def latent_statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """``latents_mean`` and ``latents_std`` of a VAE's configuration, shaped for 5-D latents."""
    mean, std = (
        torch.tensor(vae.config[key], device=latents.device).view(1, -1, 1, 1, 1)
        for key in ("latents_mean", "latents_std")
    )
    return mean, std


def decode_normalised(vae: Any, latents: Tensor) -> Tensor:
    """Undo the normalisation of 5-D latents by ``latents_mean`` and ``latents_std``, and decode."""
    mean, std = latent_statistics(vae, latents)
    # Inverted twice, as in the pipelines: dividing by 1/std is not bitwise multiplying by std.
    decoded: Tensor = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    return decoded


def encode_normalised(vae: Any, frames: Tensor) -> Tensor:
    """The inverse of :func:`decode_normalised`."""
    latents: Tensor = vae.encode(frames).latent_dist.mode()
    mean, std = latent_statistics(vae, latents)
    return (latents - mean) / std


def encode_image(vae: Any, frames: Tensor) -> Tensor:
    """The inverse of :func:`decode_image`: [batch, channels, height, width]."""
    latents: Tensor = vae.encode(frames.squeeze(2)).latent_dist.mode()
    scaled: Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return scaled


def decode_image(vae: Any, latents: Tensor) -> Tensor:
    """Undo an image VAE's scale and shift and decode: [batch, 3, 1, height, width]."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    decoded: Tensor = vae.decode(scaled, return_dict=False)[0]
    return decoded.unsqueeze(2)
