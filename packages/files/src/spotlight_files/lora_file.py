"""Reads a LoRA in any layout of diffusers or peft, as one adapter of one rank and alpha.

Invariant: every tensor of a file is used, or the file is refused.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import download, is_hub_id, read_json
from spotlight_rewards.base.files import at_home, open_regular

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file name that ``load_lora_weights(directory)`` expects."""
TRANSFORMER = "transformer"
_PEFT_CONFIG = "adapter_config.json"
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError)
_MERGE = "merge it into the transformer with diffusers' fuse_lora and give that as model.transformer"


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

    def with_alpha(self, alpha: float) -> LoraFile:
        """The same update of the weights, B scaled for another alpha."""
        scales = {True: self.alpha / alpha, False: 1.0}
        layers = {name: tensor * scales[".lora_B." in name] for name, tensor in self.layers.items()}
        return LoraFile(layers, self.rank, alpha)


def lora_folder(directory: Path, transformer: str) -> Path:
    """Where the LoRA of one of a pipeline's transformers is in its directory."""
    return directory if transformer == TRANSFORMER else directory / transformer


def lora_of(path: str, transformer: str) -> str:
    """The LoRA of one of a pipeline's transformers, as it was given: ``./name/lora`` is no hub id."""
    return path if transformer == TRANSFORMER else f"{path}/{transformer}"


def part_prefix(transformer: str, transformers: Sequence[str]) -> str:
    """What precedes the names of a transformer's tensors where there are several."""
    return f"{transformer}." if len(transformers) > 1 else ""


def read_lora(pipeline_class: str, path: str, transformers: Sequence[str] = (TRANSFORMER,)) -> LoraFile:
    """A LoRA in any layout that diffusers' pipeline class understands, or of peft with its configuration.

    Args:
        path: a file, a directory or a hub id with one.
        transformers: components; of several, directories as ``save_lora`` writes them.

    Raises:
        ModelError: unreadable, several files, not a LoRA of the transformer, tensors that would not be used,
            or layers of different ranks.
    """
    found = {name: _read(pipeline_class, lora_of(path, name)) for name in transformers}
    if len({(file.rank, file.alpha) for file in found.values()}) != 1:
        raise ModelError(
            f"model.lora: the transformers' LoRAs in {path} differ in rank or alpha; expected one"
        )
    first = found[TRANSFORMER]
    layers = {
        f"{part_prefix(name, transformers)}{key}": tensor
        for name, file in found.items()
        for key, tensor in file.layers.items()
    }
    return LoraFile(layers, first.rank, first.alpha)


def _read(pipeline_class: str, path: str) -> LoraFile:
    try:
        file = lora_file_of(path)
        tensors, about = _opened(file)
        converted, alphas = _converted(pipeline_class, tensors, path)
        return _of_one_rank(converted, alphas, about, path)
    except ModelError:
        raise
    except _UNREADABLE as error:
        raise ModelError(
            f"model.lora: cannot read a LoRA from {path} ({error}): give a .safetensors file, a directory "
            f"with {LORA_FILE}, or a hub id"
        ) from error


def lora_file_of(path: str) -> Path:
    """The file of a LoRA; a hub's is downloaded. Raises ModelError if there is none, or several."""
    where = at_home(path)
    if where.is_file():
        return where
    hub = not where.is_dir()
    if hub and not is_hub_id(path):
        raise ModelError(
            f"model.lora: cannot read a LoRA from {path}, which does not exist: give a .safetensors file, a "
            f"directory with {LORA_FILE}, or a hub id"
        )
    names = _on_hub(path) if hub else [each.name for each in where.iterdir()]
    files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if len(files) != 1:
        raise ModelError(
            f"model.lora: {path} has {len(files)} .safetensors files{': ' * bool(files)}{', '.join(files)}; "
            "expected one: name the file that is meant" + hub * " (of a hub model, downloaded)"
        )
    return (download(path, None, [files[0], _PEFT_CONFIG]) if hub else where) / files[0]


def _on_hub(name: str) -> list[str]:
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(name)
    except Exception as error:
        raise ModelError(
            f"model.lora: {name} is neither here nor can the hub be asked for its files ({error}): download "
            "the LoRA and give its file"
        ) from error


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A file's tensors, and peft's fields beside or within it."""
    open_regular(path).close()
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stored = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    config = path.with_name(_PEFT_CONFIG)
    if path.name == "adapter_model.safetensors" and config.is_file():
        named = {name.replace("base_model.model.", f"{TRANSFORMER}.", 1): t for name, t in tensors.items()}
        return named, read_json(config)
    about = json.loads(stored)
    return tensors, {name.removeprefix(f"{TRANSFORMER}."): value for name, value in about.items()}


def _converted(
    pipeline_class: str, tensors: Mapping[str, Tensor], path: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layers under diffusers' names, and the alphas, of which every tensor is found to be part."""
    import diffusers

    reader = getattr(getattr(diffusers, pipeline_class), "lora_state_dict", None)
    if reader is None:  # the pipeline loads no LoRA: its transformer does, which converts nothing
        return dict(tensors), {}
    # Some classes take the layers' alphas out, and return them on request only.
    apart = {"return_alphas": True} if "return_alphas" in inspect.signature(reader).parameters else {}
    # Converters rename, split, scale and drop: what has no gradient is in none of the results.
    leaves = {
        name: tensor.float().requires_grad_()
        for name, tensor in tensors.items()
        if not name.endswith(".alpha")
    }
    given = {name: leaves[name] * 1 if name in leaves else tensor for name, tensor in tensors.items()}
    try:
        with torch.enable_grad():
            found, *taken, _ = reader(given, return_lora_metadata=True, **apart)
    except Exception as error:
        raise ModelError(
            f"model.lora: {path} is not a LoRA that {pipeline_class} of diffusers can convert "
            f"({type(error).__name__}: {error}); expected names as its save_lora_weights writes"
        ) from error
    traced = [tensor.sum() for tensor in found.values() if tensor.requires_grad]
    used = (
        torch.autograd.grad(traced, [*leaves.values()], allow_unused=True) if traced else [None] * len(leaves)
    )
    unused = sorted(name for name, gradient in zip(leaves, used, strict=True) if gradient is None)
    if unused:
        raise ModelError(
            f"model.lora: {path} has {len(unused)} tensors that {pipeline_class} does not use, first "
            f"{unused[0]!r}; expected a plain LoRA of its layers (no DoRA): merge it with what "
            "made it, and give the result as model.transformer"
        )
    detached = {name: tensor.detach() for name, tensor in found.items()}
    return detached, (taken[0] if taken else None) or {}


def _of_one_rank(
    tensors: Mapping[str, Tensor], taken: Mapping[str, Tensor], about: Mapping[str, object], path: str
) -> LoraFile:
    layers = {
        name.removeprefix(f"{TRANSFORMER}."): tensor.float()
        for name, tensor in tensors.items()
        if name.startswith(f"{TRANSFORMER}.") and not name.endswith(".alpha")
    }
    ranks = {int(tensor.shape[0]) for name, tensor in layers.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1:
        found = f"ranks {sorted(ranks)}" if ranks else f"{len(tensors)} tensors, none of a transformer's LoRA"
        raise ModelError(
            f"model.lora: {path} has {found}; expected one rank for all layers of the transformer: {_MERGE}"
        )
    (rank,) = ranks
    odd = sorted(name for name in layers if not name.endswith((".lora_A.weight", ".lora_B.weight")))
    if odd:
        raise ModelError(
            f"model.lora: {path} has {odd[0]!r}; expected a plain LoRA's A, B and alpha: {_MERGE}"
        )
    others = sorted(name for name in tensors if not name.startswith(f"{TRANSFORMER}."))
    if others:
        raise ModelError(
            f"model.lora: {path} has {len(others)} tensors besides the transformer's, first {others[0]!r}; "
            "expected none: text encoders are used as they are. Give a file without them"
        )
    stated = {name: float(each) for name, each in {**tensors, **taken}.items() if name.endswith(".alpha")}
    alphas = {*stated.values()}
    halves = [name for name in layers if name.endswith(".lora_A.weight")]
    if stated and len(stated) < len(halves):
        alphas.add(float(rank))  # what diffusers takes where none is stated
    patterns = [key for key in ("rank_pattern", "alpha_pattern", "use_rslora") if about.get(key)]
    if len(alphas) > 1 or patterns:
        raise ModelError(
            f"model.lora: {path} scales its layers differently ({patterns or sorted(alphas)}); expected one "
            f"rank and alpha: {_MERGE}"
        )
    alpha = alphas.pop() if alphas else float(str(about.get("lora_alpha", rank)))
    if not (rank > 0 and 0 < alpha < math.inf):
        raise ModelError(f"model.lora: {path} has rank {rank} and alpha {alpha}; expected numbers above 0")
    return LoraFile(layers, rank, alpha)
