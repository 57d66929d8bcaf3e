"""Export: files and directories that plain diffusers loads.

Invariant: the target path only ever holds complete output: it is written beside it and renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from spotlight.models.family import ModelError
from spotlight.models.pipeline_files import PipelineFiles

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file name that ``load_lora_weights(directory)`` expects."""
_INDEX = "model_index.json"
_SHARD_SIZE = "5GB"


def save_lora(directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]) -> Path:
    """Write ``directory/pytorch_lora_weights.safetensors``, replacing an existing one.

    Args:
        layers: an unsharded adapter under peft's state-dict names (``WeightSlots.state``).
        metadata: peft's LoraConfig fields (``LoraSlots.metadata``); without them diffusers assumes
            alpha = rank.

    Raises:
        ModelError: no layers.
    """
    from diffusers import QwenImagePipeline

    if not layers:
        raise ModelError("a LoRA without layers cannot be written: was the model fully fine-tuned?")
    partial = f"partial-{LORA_FILE}"
    QwenImagePipeline.save_lora_weights(
        directory,
        transformer_lora_layers={n: t.detach().to("cpu", copy=True).contiguous() for n, t in layers.items()},
        transformer_lora_adapter_metadata=dict(metadata),
        weight_name=partial,
    )
    return (directory / partial).replace(directory / LORA_FILE)


def save_merged(
    files: PipelineFiles,
    directory: Path,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    replace: bool = False,
) -> Path:
    """Write a pipeline directory: ``state`` as its transformer, copies of everything else.

    Args:
        files: the pipeline the transformer came from.
        directory: must not exist or be empty.
        state: the whole transformer (``WeightSlots.merged_state``).
        dtype: of the weights written.
        replace: allow replacing an existing pipeline directory, once the new one is complete.

    Raises:
        ModelError: the directory is not empty (with ``replace``: nor a pipeline), or ``state`` does not fit.
    """
    replaceable = replace and (directory / _INDEX).is_file()
    if directory.exists() and not replaceable and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} exists and is not empty: remove it or name another directory")
    transformer = _assemble(files, state, dtype)
    for component in ("vae", "text_encoder"):
        files.fetch(component)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = _emptied(directory.with_name(f".{directory.name}.partial"))
    try:
        partial.mkdir()
        shutil.copy2(files.root / _INDEX, partial)
        for component in ("scheduler", "tokenizer", "text_encoder", "vae"):
            shutil.copytree(files.folder(component), partial / component)
        transformer.save_pretrained(partial / "transformer", max_shard_size=_SHARD_SIZE)
        if directory.exists():
            outgoing = _emptied(directory.with_name(f".{directory.name}.replaced"))
            directory.replace(outgoing)
            partial.replace(directory)
            shutil.rmtree(outgoing)
        else:
            partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _emptied(directory: Path) -> Path:
    if directory.exists():  # left behind by a killed writer
        shutil.rmtree(directory)
    return directory


def _assemble(
    files: PipelineFiles, state: Mapping[str, Tensor], dtype: torch.dtype
) -> QwenImageTransformer2DModel:
    with torch.device("meta"):  # no memory, no random numbers: every tensor comes from ``state``
        transformer = QwenImageTransformer2DModel.from_config(files.config("transformer"))
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    try:
        transformer.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"the weights to merge are not those of the transformer in {files.root}: {error}"
        ) from error
    return transformer
