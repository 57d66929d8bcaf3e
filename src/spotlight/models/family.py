"""A DiT family over a diffusers pipeline. A new family is one module with a subclass of :class:`ModelFamily`
and one line of :data:`spotlight.registry.FAMILIES`.

The base class locates and checks the pipeline, loads its parts and caches embeddings. A family
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
from collections.abc import Callable, Sequence
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
from spotlight.models.shared.noise_levels import falling, scheduler_config, shift
from spotlight.models.shared.quantised import Quantize
from spotlight.models.shared.transformer_files import (
    TransformerFiles,
    component_type,
    load_transformers,
    weight_sources,
)
from spotlight.models.skeleton import load_weights
from spotlight.models.text.prompt_encoder import EmbeddingsCache, PromptEncoder, called_versions
from spotlight.models.tiny import write_pipeline
from spotlight_files.model_errors import ModelError as ModelError
from spotlight_files.pipeline_files import (
    PipelineFiles,
    is_denoiser,
    without_transformer_weights,
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
        """Set the scheduler's noise levels as the pipeline does: as given to it, with any dynamic shift."""
        sigmas = self.given_sigmas(steps)
        self.scheduler.set_timesteps(device="cpu", sigmas=sigmas, **self.dynamic_shift(steps, size))

    def given_sigmas(self, steps: int) -> Sequence[float] | NDArray[np.float64]:
        """Noise levels that the pipeline gives to its scheduler: linear, without the last, 0.

        Of families whose pipelines give none, :meth:`set_timesteps` is overridden, and this is not asked.
        """
        return np.linspace(1.0, 1 / steps, steps)

    def dynamic_shift(self, steps: int, size: MediaSize) -> dict[str, float]:
        """The scheduler's argument ``mu``, if its shift depends on the size: by default linear in tokens."""
        config = self.scheduler.config
        return (
            {"mu": shift(self.dimensions.tokens(size), config)} if config.get("use_dynamic_shifting") else {}
        )

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

    @staticmethod
    def output_of(call: Callable[..., Any], *inputs: Any, **named: Any) -> Tensor:
        """What a transformer of diffusers, or a VAE's ``decode``, returns without its wrapping."""
        output: Tensor = call(*inputs, **named, return_dict=False)[0]
        return output

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
        frames = self.decode_frames(latents.to(self.device, torch.float32), size)
        return (frames * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).cpu().float().numpy()

    def decode(self, latents: Tensor, size: MediaSize) -> NDArray[np.uint8]:
        """Decode final latents: [batch, frames, height, width, 3] uint8."""
        frames: NDArray[np.uint8] = (self.decode_float(latents, size) * 255).round().astype(np.uint8)
        return frames

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
        return falling(self.scheduler.sigmas.float().cpu().clone(), self.files)


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
    return ModelFamily.output_of(vae.decode, latents / (1.0 / std) + mean)


def encode_normalised(vae: Any, frames: Tensor) -> Tensor:
    """The inverse of :func:`decode_normalised`."""
    latents: Tensor = vae.encode(frames).latent_dist.mode()
    mean, std = latent_statistics(vae, latents)
    return (latents - mean) / std
