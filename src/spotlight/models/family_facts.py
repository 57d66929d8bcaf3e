"""What planning knows about a model family without its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight_files.lora_names import LayerNames, Layout
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles, locate, transformer_names
from spotlight_rewards.registry import RegistryError


def target_pattern(target: str) -> str:
    """Regular expression of the whole module names that a LoRA target means: those with this end, where ``*``
    is any one part, e.g. ``single_transformer_blocks.*.proj_out`` without the ``proj_out`` after the blocks.
    """
    return r"(?:.*\.)?" + re.escape(target).replace(r"\*", r"[^.]+")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of one pipeline, from its ``config.json`` files.

    Attributes:
        layers: blocks of the DiT.
        width: hidden size of the DiT.
        heads: attention heads of the DiT.
        channels: latent values per token.
        patch_px: side of the pixel square that becomes one token.
        vae_width: channels of the VAE's outermost layers.
        frames_per_latent: frames that share one latent frame, after the first; 1 for pictures.
        unit_px: height and width are multiples of it; None: of ``patch_px``.
        side_max_px: largest height and width; None: any.
    """

    layers: int
    width: int
    heads: int
    channels: int
    patch_px: int
    vae_width: int
    frames_per_latent: int = 1
    unit_px: int | None = None
    side_max_px: int | None = None

    def latent_frames(self, size: MediaSize) -> int:
        """Latent frames: the first frame has one of its own."""
        return 1 + (size.frames - 1) // self.frames_per_latent

    def grid(self, size: MediaSize) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return size.height // self.patch_px, size.width // self.patch_px

    def tokens(self, size: MediaSize) -> int:
        """Tokens of one sample."""
        return self.latent_frames(size) * math.prod(self.grid(size))

    def check_size(self, size: MediaSize, *, video: bool) -> None:
        """Raise :class:`ModelError`, naming the nearest valid values, if the size does not fit.

        Args:
            video: whether the family has more than one frame.
        """
        for side, value in (("height", size.height), ("width", size.width)):
            unit = self.unit_px or self.patch_px
            if value < unit or value % unit:
                below = max(value // unit, 1) * unit
                near = [below] if value <= unit else [below, below + unit]
                raise ModelError(
                    f"{side} is {value}; expected a multiple of {unit} pixels (what one patch "
                    f"covers); nearest: {' or '.join(map(str, near))}"
                )
            if self.side_max_px is not None and value > self.side_max_px:
                raise ModelError(
                    f"{side} is {value}; expected at most {self.side_max_px}: the transformer has "
                    "no later positions"
                )
        if not video and size.frames != 1:
            raise ModelError(f"frames is {size.frames}; expected 1: this family makes pictures")
        if size.frames < 1 or (size.frames - 1) % self.frames_per_latent:
            below = 1 + max(size.frames - 1, 0) // self.frames_per_latent * self.frames_per_latent
            raise ModelError(
                f"frames is {size.frames}; expected 1 more than a multiple of {self.frames_per_latent} "
                f"(frames per latent frame); nearest: {below} or {below + self.frames_per_latent}"
            )


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Floats stored per token, layer and unit of width, independent of the model's size.

    Measured in ``tests/contract``: ``lora``, ``full`` and ``checkpointed`` on scaled-down models
    (``test_families.py``), ``forward`` and ``decode`` on published ones (``test_traced_memory.py``).

    Attributes:
        lora: for the backward pass when training adapters only.
        full: the same when training all weights.
        elementwise: for either with ``learner.recompute: elementwise`` (products and attention).
        checkpointed: for either with ``learner.recompute: blocks`` (the layer's inputs).
        forward: peak of a forward without gradient.
        decode: peak of decoding, per pixel decoded at once and unit of the VAE's base width.
    """

    lora: float
    full: float
    elementwise: float
    checkpointed: float
    forward: float
    decode: float


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A published model of a family, so that it can be planned for before it is downloaded.

    Attributes:
        configs: the ``config.json`` of transformer(s) and VAE, by component.
        parameters: of the transformer(s), as published.
        text_parameters: of the text encoders, as published.
        source: where ``configs`` were read, for the table in ``docs/families.md``.
        settings: values of ``model_index.json`` that change what the model can do.
    """

    configs: Mapping[str, Mapping[str, object]] = field(repr=False)
    parameters: float
    text_parameters: float
    source: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A small pipeline of a family, which :func:`spotlight.models.tiny.write_pipeline` makes.

    Attributes:
        model: the published model that is shrunk, by hub id.
        changes: to its components' configurations, and to ``model_index``. Of tokenizers and text encoders,
            arguments of what makes them.
    """

    model: str
    changes: Mapping[str, Mapping[str, Any]] = field(repr=False)


def read_models(module: str) -> tuple[Mapping[str, PublishedModel], Sequence[TinyModel]]:
    """Published models by hub id, and small ones, from the JSON file beside a family's module.

    Args:
        module: its ``__file__``.
    """
    found = json.loads(Path(module).with_suffix(".json").read_text(encoding="utf-8"))
    small = found.get("tiny", {"changes": {}, "variants": []})
    common, variants = small["changes"], small["variants"]
    tiny = [
        TinyModel(model, {part: common.get(part, {}) | own.get(part, {}) for part in common | own})
        for model, own in ((variant.pop("model"), variant) for variant in variants)
    ]
    return {name: PublishedModel(**each) for name, each in found["published"].items()}, tiny


def dimensions(
    files: PipelineFiles,
    *,
    patch_px: int | None = None,
    vae_width: int | None = None,
    layers: Sequence[str] = ("num_layers",),
    latents: str = "in_channels",
    latents_per_token: int = 1,
    frames_per_latent: int = 1,
    unit_px: int | None = None,
    side_max_px: int | None = None,
) -> Dimensions:
    """By the usual keys of a transformer's ``config.json``. Raises :class:`ModelError`.

    Args:
        patch_px: default: pixels of two latents of a VAE with ``block_out_channels``.
        vae_width: default: the first of those.
        layers: keys of the numbers of blocks, which are added up.
        latents: key of the number of channels of latents.
        latents_per_token: latents that the transformer itself makes a token of.
    """
    heads, per_head, channels = (
        config_integer(files, "transformer", key)
        for key in ("num_attention_heads", "attention_head_dim", latents)
    )
    if patch_px is None or vae_width is None:
        latent_px, outermost = block_widths(files)
        patch_px = 2 * latent_px if patch_px is None else patch_px
        vae_width = outermost if vae_width is None else vae_width
    return Dimensions(
        layers=sum(config_integer(files, "transformer", key) for key in layers),
        width=heads * per_head,
        heads=heads,
        channels=channels * latents_per_token,
        patch_px=patch_px,
        vae_width=vae_width,
        frames_per_latent=frames_per_latent,
        unit_px=unit_px,
        side_max_px=side_max_px,
    )


def block_widths(files: PipelineFiles) -> tuple[int, int]:
    """Pixels per latent of a VAE's blocks, each of which but the last halves the sides, and the outermost's
    channels. Raises :class:`ModelError`.
    """
    widths = config_list(files, "vae", "block_out_channels")
    return 2 ** (len(widths) - 1), int(str(widths[0]))


def config_integer(files: PipelineFiles, part: str, key: str) -> int:
    """An integer of ``<part>/config.json``. Raises :class:`ModelError`."""
    value = files.config(part).get(key)
    if not isinstance(value, int):
        raise ModelError(f"{files.root / part}/config.json has {key} = {value!r}; expected an integer")
    return value


def config_list(files: PipelineFiles, part: str, key: str) -> list[object]:
    """A list of ``<part>/config.json``. Raises :class:`ModelError`."""
    value = files.config(part).get(key)
    if not isinstance(value, list):
        raise ModelError(f"{files.root / part}/config.json has {key} = {value!r}; expected a list")
    return value


def _of_another_family(pipeline_class: object) -> str:
    """What to do about a pipeline of another class than a family's."""
    for name in FAMILIES:
        with suppress(RegistryError):  # a broken package is reported where its family is asked for
            if FAMILIES.load(name).pipeline_class == pipeline_class:
                return f"Set model.family={name}, or name another model.path"
    return f"Name another model.path: the families are {', '.join(FAMILIES)}"


class FamilyTraits:
    """What holds for every model of a family, as class attributes and methods."""

    name: ClassVar[str]
    """As in the registry."""
    pipeline_class: ClassVar[str]
    """The ``_class_name`` in ``model_index.json``, a class of diffusers."""
    other_pipelines: ClassVar[tuple[str, ...]] = ()
    """Those of folders that it reads, too."""
    components: ClassVar[Mapping[str, PipelineComponent]]
    """Requirements per folder. All but transformers, VAE and scheduler are tokenizers and text encoders."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Name suffixes of the linear layers that LoRA adapts by default."""
    native_layers: ClassVar[Mapping[str, str]] = {}
    """Ends of layers' names in the model's own code by those in diffusers, where ComfyUI reads only the
    former in a LoRA, and diffusers both.
    """
    lora_names: ClassVar[Mapping[Layout, LayerNames]] = {}
    """Layers' names where other programs run the model's own code, for ``spotlight export --format``."""
    activations: ClassVar[ActivationCosts]
    """For the memory plan."""
    usual_frames_per_latent: ClassVar[int] = 1
    """Frames that share a latent frame in published models, for plans made before a model is read."""
    packed: ClassVar[bool] = False
    """Whether latents are [tokens, channels]; else [channels, rows, columns], of videos [channels, latent
    frames, rows, columns]."""
    video: ClassVar[bool] = False
    """Whether it makes videos."""
    embedded_guidance: ClassVar[float | None] = None
    """Usual scale of a guidance-distilled model; None: the transformer takes none."""
    reuses_blocks: ClassVar[bool] = False
    """Whether previews may reuse its blocks' residuals (``exploration.step_cache``)."""
    splits_sequence: ClassVar[bool] = False
    """Whether its forward can be split over several GPUs (``fleet.sequence_parallel``)."""
    chooses_kernels: ClassVar[bool] = True
    """Whether diffusers dispatches its attention and names its repeated blocks (``model.attention``,
    ``model.compile``)."""
    always_masks: ClassVar[bool] = False
    """Whether its attention has a mask even if prompts are equally long: the flash kernels take none."""
    pads_last: ClassVar[bool] = False
    """Whether padding is never before another token, or there is none: all that the ``varlen`` kernels do
    with a mask is to count each row's tokens."""
    captures_graphs: ClassVar[bool] = True
    """Whether its forward can be captured (``model.cuda_graphs``): it reads no values back to the host."""
    cuts_prompts: ClassVar[bool] = True
    """Whether the diffusers pipeline's call takes ``max_sequence_length``."""
    loads_lora: ClassVar[bool] = True
    """Whether the diffusers pipeline itself loads a LoRA; else its transformer does."""
    text_recipe: ClassVar[str] = ""
    """Whatever :meth:`embed` depends on besides diffusers' code, e.g. a prompt template."""
    references_max: ClassVar[float] = 0
    """Most reference pictures of a prompt, which needs one then; 0: it takes none."""
    reference_tokens: ClassVar[int] = 0
    """For plans, tokens that a reference picture adds to a forward."""
    text_tokens_max: ClassVar[int] = 1024
    """Largest ``max_text_tokens``."""
    text_multiple: ClassVar[int] = 1
    """Its transformer pads each text to a multiple of so many tokens, and computes on all."""
    pads_prompts: ClassVar[bool] = False
    """Whether every prompt takes ``max_text_tokens`` of a forward."""
    guidance_argument: ClassVar[str | None] = "true_cfg_scale"
    """The pipeline's argument for the scale of true guidance; None: it has none."""
    published: ClassVar[Mapping[str, PublishedModel]] = {}
    """Published models by hub id; of our families, :func:`read_models`."""
    tiny_models: ClassVar[Sequence[TinyModel]] = ()
    """Four small variants: other widths, heads, layers and VAE factors."""

    @classmethod
    def locate(
        cls, path: str | Path, revision: str | None, components: Mapping[str, PipelineComponent] | None = None
    ) -> PipelineFiles:
        """A pipeline's files, with ``components`` or all of them; raises :class:`ModelError`."""
        wanted = cls.components if components is None else components
        return locate(path, revision, (cls.pipeline_class, *cls.other_pipelines), wanted, _of_another_family)

    @classmethod
    def loading_lines(cls, scale: float, text_tokens: int) -> tuple[str, ...]:
        """Code that makes diffusers' ``pipe`` draw as we do, where its call's arguments would not.

        Args:
            scale: of true guidance.
            text_tokens: limit per prompt, ``model.max_text_tokens``.
        """
        return ()

    @classmethod
    def planned_text_tokens(cls, words: int, most: int) -> int:
        """Estimated tokens of a prompt of ``words`` words: two per word plus a template's, up to ``most``."""
        return most if cls.pads_prompts else min(2 * words + 6, most)

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """For the memory plan: pixels of one sample that :meth:`decode_frames` works on at once."""
        return size.pixels

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
        """Raise :class:`ModelError` (``<key> is ..``) if the pipeline has no such guidance, or ignores it."""
        if not math.isfinite(scale):
            raise ModelError(f"{key} is {scale:g}; expected a finite number (1: none)")
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

    @classmethod
    def transformers(cls, files: PipelineFiles) -> list[str]:
        """Component names of the pipeline's transformers."""
        return [name for name in transformer_names(cls.components) if files.component_class(name) is not None]
