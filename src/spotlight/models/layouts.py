"""What planning knows about a DiT family, without loading the model or torch.

Measured values (``tests/contract/test_plan_reality.py``) are floats stored per token, layer and unit of
width, independent of the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spotlight.models.model_errors import ModelError
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of one pipeline, from its ``config.json`` files.

    Attributes:
        layers: blocks of the DiT.
        width: hidden size of the DiT.
        channels: of the packed latents.
        patch_px: side of the pixel square that becomes one token.
        vae_width: channels of the VAE's outermost layers.
    """

    layers: int
    width: int
    channels: int
    patch_px: int
    vae_width: int


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """A family's constants.

    Attributes:
        loader: ``module:function`` of its :class:`~spotlight.models.family.FamilyLoader`; may import torch.
        pipeline_class: the ``_class_name`` in ``model_index.json``.
        components: requirements per folder.
        dimensions: reads the sizes of a pipeline; raises :class:`ModelError`.
        lora_targets: name suffixes of the layers that LoRA adapts by default.
        reuses_blocks: whether previews may reuse its blocks' residuals (``exploration.step_cache``).
        kept_lora: values per layer stored for the backward pass when training adapters only.
        kept_full: the same when training all weights.
        kept_checkpointed: the same with gradient checkpointing (the layer's inputs).
        forward_peak: peak values of a forward without gradient.
        decode_peak: peak values of decoding, per pixel and unit of the VAE's base width.
    """

    loader: str
    pipeline_class: str
    components: Mapping[str, PipelineComponent]
    dimensions: Callable[[PipelineFiles], Dimensions]
    lora_targets: tuple[str, ...]
    reuses_blocks: bool
    kept_lora: float
    kept_full: float
    kept_checkpointed: float
    forward_peak: float
    decode_peak: float


def check_size(height: int, width: int, unit: int, why: str) -> None:
    """Raise :class:`ModelError` unless both sides (pixels) are positive multiples of ``unit``.

    Args:
        why: where the unit comes from.
    """
    for side, value in (("height", height), ("width", width)):
        if value < unit or value % unit:
            below = max(value // unit, 1) * unit
            near = [below] if value <= unit else [below, below + unit]
            raise ModelError(
                f"{side} is {value}; expected a multiple of {unit} pixels ({why}); "
                f"nearest: {' or '.join(map(str, near))}"
            )


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
