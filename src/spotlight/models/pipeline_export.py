"""LoRA files and pipeline directories, as plain diffusers loads them.

Invariant: the target path only ever holds complete output: it is written beside it and renamed.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from spotlight.models.model_errors import ModelError
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.skeleton import keeps_float32

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file name that ``load_lora_weights(directory)`` expects."""
_INDEX = "model_index.json"
_TRANSFORMER = "transformer"
_SHARD_SIZE = "5GB"


def save_lora(
    pipeline_class: str,
    directory: Path,
    layers: Mapping[str, Tensor],
    metadata: Mapping[str, object],
    transformers: Sequence[str] = (_TRANSFORMER,),
) -> Path:
    """Write ``directory/pytorch_lora_weights.safetensors``, replacing an existing one.

    Of several transformers, each but the first has its file in ``directory/<component>``: diffusers loads it
    by ``load_lora_weights(directory / "transformer_2", load_into_transformer_2=True)``.

    Args:
        pipeline_class: diffusers' class that will load it.
        layers: an unsharded adapter under peft's state-dict names (``WeightSlots.state``); of several
            transformers, with their component's name before each.
        transformers: their components.
        metadata: peft's LoraConfig fields (``LoraSlots.metadata``); without them diffusers assumes
            alpha = rank.

    Raises:
        ModelError: no layers.
    """
    import diffusers

    if not layers:
        raise ModelError("a LoRA without layers cannot be written: was the model fully fine-tuned?")
    partial = f"partial-{LORA_FILE}"
    for name in reversed(transformers):
        folder, prefix = _lora_folder(directory, name), _prefix(name, transformers)
        getattr(diffusers, pipeline_class).save_lora_weights(
            folder,
            transformer_lora_layers={
                key.removeprefix(prefix): tensor.detach().to("cpu", copy=True).contiguous()
                for key, tensor in layers.items()
                if key.startswith(prefix)
            },
            transformer_lora_adapter_metadata=dict(metadata),
            weight_name=partial,
        )
        written = (folder / partial).replace(folder / LORA_FILE)
    return written


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA read from disk.

    Attributes:
        layers: under peft's state-dict names, e.g. ``blocks.0.to_q.lora_A.weight``.
        rank, alpha: of every layer.
    """

    layers: Mapping[str, Tensor]
    rank: int
    alpha: float


def read_lora(pipeline_class: str, path: str, transformers: Sequence[str] = (_TRANSFORMER,)) -> LoraFile:
    """A LoRA in any layout that diffusers' pipeline class understands, from a file, a directory or a hub id.

    Args:
        transformers: components; of several, directories as :func:`save_lora` writes them.

    Raises:
        ModelError: unreadable, not a LoRA of the transformer, or layers of different ranks.
    """
    found = {name: _read_lora(pipeline_class, str(_lora_folder(Path(path), name))) for name in transformers}
    if len({(file.rank, file.alpha) for file in found.values()}) != 1:
        raise ModelError(
            f"model.lora: the transformers' LoRAs in {path} differ in rank or alpha; expected one"
        )
    first = found[_TRANSFORMER]
    layers = {
        f"{_prefix(name, transformers)}{key}": tensor
        for name, file in found.items()
        for key, tensor in file.layers.items()
    }
    return LoraFile(layers, first.rank, first.alpha)


def _read_lora(pipeline_class: str, path: str) -> LoraFile:
    import diffusers

    where = Path(path).expanduser()
    folder = str(where.parent if where.is_file() else where if where.is_dir() else path)
    file = where.name if where.is_file() else None
    reader = getattr(diffusers, pipeline_class).lora_state_dict
    # Some classes take the layers' alphas out, and return them on request only.
    apart = {"return_alphas": True} if "return_alphas" in inspect.signature(reader).parameters else {}
    try:
        tensors, *taken, metadata = reader(
            folder, weight_name=file, use_safetensors=True, return_lora_metadata=True, **apart
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.lora: cannot read a LoRA from {path} ({error}): give a .safetensors file, a directory "
            f"with {LORA_FILE}, or a hub id"
        ) from error
    layers = {
        name.removeprefix(f"{_TRANSFORMER}."): tensor.float()
        for name, tensor in tensors.items()
        if name.startswith(f"{_TRANSFORMER}.") and not name.endswith(".alpha")
    }
    stated = {**tensors, **((taken[0] if taken else None) or {})}
    alphas = {float(value) for name, value in stated.items() if name.endswith(".alpha")}
    ranks = {int(tensor.shape[0]) for name, tensor in layers.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1:
        found = f"ranks {sorted(ranks)}" if ranks else f"{len(tensors)} tensors, none of a transformer's LoRA"
        raise ModelError(
            f"model.lora: {path} has {found}; expected one rank for all layers of the transformer: merge it "
            "into the transformer with diffusers' fuse_lora and give that as model.transformer"
        )
    (rank,) = ranks
    others = sorted(name for name in tensors if not name.startswith(f"{_TRANSFORMER}."))
    if others:
        raise ModelError(
            f"model.lora: {path} has {len(others)} tensors besides the transformer's, first {others[0]!r}; "
            "expected none: text encoders are used as they are. Give a file without them"
        )
    about = metadata or {}
    scales = ("rank_pattern", "alpha_pattern", "use_rslora")
    patterns = [key for key in scales if about.get(f"{_TRANSFORMER}.{key}")]
    if len(alphas) > 1 or patterns:
        raise ModelError(
            f"model.lora: {path} scales its layers differently ({patterns or sorted(alphas)}); expected one "
            "rank and alpha: merge it into the transformer with diffusers' fuse_lora and give that as "
            "model.transformer"
        )
    alpha = alphas.pop() if alphas else float(about.get(f"{_TRANSFORMER}.lora_alpha", rank))
    return LoraFile(layers, rank, alpha)


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
    replaceable = replace and (directory / _INDEX).is_file()
    if directory.exists() and not replaceable and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} exists and is not empty: remove it or name another directory")
    present = {name: part for name, part in components.items() if files.component_class(name) is not None}
    transformers = _assemble(
        files, [name for name in present if name.startswith("transformer")], state, dtype
    )
    for name, part in present.items():
        if part.weights and name not in transformers:
            files.fetch(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _emptied(directory.with_name(f".{directory.name}.partial"))
    try:
        partial.mkdir()
        shutil.copy2(files.root / _INDEX, partial)
        for name in present:
            if name in transformers:
                transformers[name].save_pretrained(partial / name, max_shard_size=_SHARD_SIZE)
            else:
                shutil.copytree(files.folder(name), partial / name)
        _put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename a complete directory, to the name of one that it replaces."""
    if not directory.exists():
        partial.replace(directory)
        return
    outgoing = _emptied(directory.with_name(f".{directory.name}.replaced"))
    directory.replace(outgoing)
    partial.replace(directory)
    shutil.rmtree(outgoing)


def _lora_folder(directory: Path, transformer: str) -> Path:
    return directory if transformer == _TRANSFORMER else directory / transformer


def _prefix(transformer: str, transformers: Sequence[str]) -> str:
    return f"{transformer}." if len(transformers) > 1 else ""


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
        prefix = _prefix(name, names)
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
