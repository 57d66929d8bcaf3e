"""LoRA files and pipeline directories, as plain diffusers loads them.

Invariant: the target path only ever holds complete output, also after a power cut: it is written beside it,
forced to disk and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spotlight_files.lora_file import LORA_FILE, TRANSFORMER, lora_folder, part_prefix
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles, transformer_names
from spotlight_rewards.base.files import fsync_path, fsync_tree

_INDEX = "model_index.json"
_SHARD_SIZE = "5GB"


def save_lora(
    directory: Path,
    layers: Mapping[str, Tensor],
    metadata: Mapping[str, object],
    transformers: Sequence[str] = (TRANSFORMER,),
    native: Mapping[str, str] | None = None,
) -> Path:
    """Write ``directory/pytorch_lora_weights.safetensors``, replacing an existing one.

    Of several transformers, each but the first has its file in ``directory/<component>``: diffusers loads it
    by ``load_lora_weights(directory / "transformer_2", load_into_transformer_2=True)``.

    B is written times alpha / rank, and alpha as the rank: ComfyUI and others do not read the metadata, and
    apply B A as it is.

    Args:
        layers: an unsharded adapter under peft's state-dict names (``WeightSlots.state``); of several
            transformers, with their component's name before each.
        metadata: peft's LoraConfig fields (``LoraSlots.metadata``).
        transformers: their components.
        native: see ``FamilyTraits.native_layers``; the names are diffusers' where it lacks one.

    Raises:
        ModelError: no layers.
    """
    if not layers:
        raise ModelError("a LoRA without layers cannot be written: was the model fully fine-tuned?")
    rank, alpha = (float(str(metadata[field])) for field in ("r", "lora_alpha"))
    scales = {True: alpha / rank, False: 1.0}
    about = {f"{TRANSFORMER}.{field}": value for field, value in metadata.items()}
    about[f"{TRANSFORMER}.lora_alpha"] = metadata["r"]
    stated = json.dumps(about, indent=2, sort_keys=True, default=sorted)
    partial = f"partial-{LORA_FILE}"
    for name in reversed(transformers):
        folder, prefix = lora_folder(directory, name), part_prefix(name, transformers)
        own = {
            key.removeprefix(prefix): (tensor.detach().cpu() * scales[".lora_B." in key]).contiguous()
            for key, tensor in layers.items()
            if key.startswith(prefix)
        }
        folder.mkdir(parents=True, exist_ok=True)
        named = dict(zip(_file_names(list(own), native or {}), own.values(), strict=True))
        save_file(named, folder / partial, {"format": "pt", "lora_adapter_metadata": stated})
        fsync_path(folder / partial)
        written = (folder / partial).replace(folder / LORA_FILE)
        for changed in (folder, folder.parent):
            fsync_path(changed)
    return written


def keeps_float32(kind: type[nn.Module], name: str) -> bool:
    """Whether diffusers keeps this tensor in float32 when it loads the class in another dtype."""
    kept: Iterable[str] | None = getattr(kind, "_keep_in_fp32_modules", None)
    return not set(kept or ()).isdisjoint(name.split("."))


def _file_names(keys: Sequence[str], native: Mapping[str, str]) -> list[str]:
    renamed = []
    for key in keys:
        layer, half = key.split(".lora_")
        own = [layer.removesuffix(end) + native[end] for end in native if layer.endswith(f".{end}")]
        renamed += [f"diffusion_model.{name}.lora_{half}" for name in own]
    return renamed if len(renamed) == len(keys) else [f"{TRANSFORMER}.{key}" for key in keys]


def save_merged(
    files: PipelineFiles,
    components: Mapping[str, PipelineComponent],
    directory: Path,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    replace: bool = False,
) -> Path:
    """Write a pipeline directory: ``state`` as its transformer, copies of everything else.

    Args:
        files: the pipeline the transformer came from.
        components: of its family.
        directory: must not exist or be empty.
        state: the whole transformer (``WeightSlots.merged_state``), or all of them, with their component's
            name before each tensor's.
        dtype: of the weights written.
        replace: allow replacing an existing pipeline directory, once the new one is complete.

    Raises:
        ModelError: the directory is not empty (with ``replace``: nor a pipeline), or ``state`` does not fit.
    """
    _require_place(directory, replace=replace)
    present = {name: part for name, part in components.items() if files.component_class(name) is not None}
    transformers = _assemble(files, transformer_names(present), state, dtype)
    for name, part in present.items():
        if part.weights and name not in transformers:
            files.fetch(name)
    place = directory.resolve()  # of a link, what it leads to
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = _emptied(place.with_name(f".{place.name}.partial"))
    try:
        partial.mkdir()
        shutil.copy2(files.root / _INDEX, partial)
        for name in present:
            if name in transformers:
                transformers[name].save_pretrained(partial / name, max_shard_size=_SHARD_SIZE)
            else:
                shutil.copytree(files.folder(name), partial / name)
        fsync_tree(partial)
        _put_in_place(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _require_place(directory: Path, *, replace: bool) -> None:
    replaceable = replace and (directory / _INDEX).is_file()
    if directory.exists() and not replaceable and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} exists and is not empty: remove it or name another directory")
    if directory.name in ("", ".."):
        raise ModelError(f"{directory} is a folder you are in, which cannot be replaced: name another")


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename a complete directory, to the name of one that it replaces, which stays until that is durable."""
    outgoing = directory.with_name(f".{directory.name}.replaced")
    if directory.exists():
        directory.replace(_emptied(outgoing))
    partial.replace(directory)
    fsync_path(directory.parent)
    _emptied(outgoing)


def _emptied(directory: Path) -> Path:
    if directory.exists():  # left behind by a killed writer
        shutil.rmtree(directory)
    return directory


def _assemble(
    files: PipelineFiles, names: Sequence[str], state: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    import diffusers

    assembled = {}
    for name in names:
        prefix = part_prefix(name, names)
        with torch.device("meta"):  # no memory, no random numbers: every tensor comes from ``state``
            kind = getattr(diffusers, files.component_class(name) or "")
            transformer = kind.from_config(files.config(name))
        tensors = {
            key.removeprefix(prefix): tensor.detach()
            .to("cpu", torch.float32 if keeps_float32(kind, key) else dtype)
            .contiguous()
            for key, tensor in state.items()
            if key.startswith(prefix)
        }
        try:
            transformer.load_state_dict(tensors, strict=True, assign=True)
        except RuntimeError as error:
            raise ModelError(
                f"the weights to merge are not those of the {name} in {files.root}: {error}"
            ) from error
        assembled[name] = transformer
    return assembled
