"""Export of trained weights, gathered from all ranks, to files that plain diffusers loads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.shared.sharded import gathered
from spotlight.models.shared.transformer_files import TransformerFiles
from spotlight.models.skeleton import persistent_buffers
from spotlight.models.slots import LoraSlots, Slot, WeightSlots
from spotlight.training.sharding import Ranks
from spotlight_files import pipeline_export
from spotlight_files.lora_names import Layout
from spotlight_files.model_errors import ModelError, storing
from spotlight_files.renamed_lora import save_renamed
from spotlight_files.update_rounding import UpdateRounding

_NOT_STORED = (
    "Free some space there or name a directory that can be written, then run the same command again: "
    "the run's checkpoints are as they were."
)


def lora_state(slots: WeightSlots, slot: Slot) -> dict[str, Tensor]:
    """A slot's adapter as peft's whole state dict on the CPU; every rank must call this.

    Raises:
        ModelError: the slots are full copies, or the slot has no adapter (``reference``).
    """
    if not isinstance(slots, LoraSlots):
        raise ModelError("the model was fully fine-tuned, so there is no LoRA: export the merged weights")
    return gathered(slots.state(slot))


def save_lora(
    family: ModelFamily, directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
) -> Path:
    """Write a LoRA for plain diffusers' ``load_lora_weights``; returns the file.

    ``layers`` is peft's adapter state dict; ``metadata`` peft's LoraConfig fields.
    """
    with storing("the LoRA", directory, _NOT_STORED):
        names = list(denoisers(family.transformer))
        return pipeline_export.save_lora(directory, layers, metadata, names, family.native_layers)


def save_merged(
    family: ModelFamily,
    directory: Path,
    state: Mapping[str, Tensor],
    *,
    replace: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a whole pipeline directory whose transformer holds ``state``; returns it.

    Args:
        state: parameters, whole; buffers never change.
        replace: an existing pipeline directory; else that is an error.
        dtype: of the files; default: the model's.
    """
    with storing("the merged pipeline", directory, _NOT_STORED):
        return pipeline_export.save_merged(
            family.files,
            family.components,
            directory,
            persistent_buffers(family.transformer) | dict(state),
            family.dtype if dtype is None else dtype,
            replace=replace,
        )


def export_lora(
    family: ModelFamily, slots: WeightSlots, slot: Slot, directory: Path, ranks: Ranks
) -> Path | None:
    """Write a slot's adapter for diffusers' ``load_lora_weights``; every rank must call this.

    Returns:
        The file on the main rank, None on the others.

    Raises:
        ModelError: see :func:`lora_state`.
    """
    state = lora_state(slots, slot)
    if not (ranks.is_main and isinstance(slots, LoraSlots)):
        return None
    return save_lora(family, directory, state, slots.metadata())


def export_renamed_lora(
    family: ModelFamily, slots: WeightSlots, slot: Slot, directory: Path, stem: str, layout: Layout
) -> list[Path]:
    """Write a slot's adapter as another program names its layers; see ``lora_names``. On one rank.

    Raises:
        ModelError: the family lacks that layout, or a layer has no name there; see :func:`lora_state`.
    """
    state = lora_state(slots, slot)
    assert isinstance(slots, LoraSlots)
    names = family.lora_names.get(layout)
    if names is None:
        able = ", ".join(sorted(family.lora_names)) or "none"
        raise ModelError(
            f"--format {layout}: how it names the layers of model family {family.name!r} is not known; "
            f"expected a format of {able}. Export without --format, for diffusers, or with --merged"
        )

    parts = {name: partial(_rows, part) for name, part in denoisers(family.transformer).items()}
    with storing("the LoRA", directory, "Free some space, or name another place with --out."):
        return save_renamed(directory, stem, state, slots.spec.alpha, names, layout, parts)


def _rows(transformer: nn.Module, name: str) -> int:
    """Of a layer's weight, adapted or not."""
    layer = transformer.get_submodule(name)
    return int(getattr(layer, "base_layer", layer).out_features)  # type: ignore[arg-type]


def export_merged(
    family: ModelFamily,
    slots: WeightSlots,
    slot: Slot,
    directory: Path,
    ranks: Ranks,
    *,
    replace: bool = False,
    rounding: UpdateRounding | None = None,
) -> Path | None:
    """Write a pipeline directory with a slot's merged weights; every rank must call this.

    Args:
        replace: overwrite an existing pipeline directory instead of raising.
        rounding: to another type than the model's, or measured.

    Returns:
        The directory on the main rank, None on the others.
    """
    state = slots.merged_state(slot, keep=ranks.is_main, rounding=rounding)
    if not ranks.is_main:
        return None
    dtype = None if rounding is None else rounding.dtype
    return save_merged(family, directory, state, replace=replace, dtype=dtype)


def measured_rounding(family: ModelFamily, dtype: torch.dtype, untrained: TransformerFiles) -> UpdateRounding:
    """Rounds a family's merged transformers to files of ``dtype``, of which diffusers keeps some in float32.

    Args:
        untrained: what a full fine-tune started from; read as needed.
    """
    kind = type(next(iter(denoisers(family.transformer).values())))

    def stored(name: str) -> torch.dtype:
        return torch.float32 if pipeline_export.keeps_float32(kind, name) else dtype

    return UpdateRounding(dtype, stored, untrained.reader())
