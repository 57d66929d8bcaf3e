"""Load a pipeline's transformers: from files, without weights, or to be filled once they are sharded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from spotlight.models.experts import Experts, denoisers
from spotlight.models.shared.quantised import Quantize, hold
from spotlight.models.skeleton import (
    allocate,
    check_files,
    fill_from_files,
    fill_from_module,
    load_weights,
    skeleton,
)
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles, read_json, weight_files
from spotlight_rewards.base.files import at_home


@dataclass(frozen=True, slots=True)
class TransformerFiles:
    """Where the weights of a pipeline's transformers are.

    Attributes:
        sources: directory or file of safetensors, by component name.
        key: configuration key that names them, for errors.
    """

    sources: Mapping[str, Path]
    key: str

    def reader(self) -> Callable[[str], Tensor]:
        """Reads single tensors by their names in the module that :func:`load_transformers` makes.

        Raises:
            ModelError: the tensor is in none of the files, or they cannot be found; when called.
        """
        sources = {f"{name}." if len(self.sources) > 1 else "": each for name, each in self.sources.items()}

        @cache
        def files(prefix: str) -> dict[str, Path]:
            found, source = dict[str, Path](), sources[prefix]
            for path in weight_files(source, self.key) if source.is_dir() else [source]:
                with safe_open(path, framework="pt") as file:
                    found |= dict.fromkeys(file.keys(), path)
            return found

        def read(name: str) -> Tensor:
            prefix = next(prefix for prefix in sources if name.startswith(prefix))
            own = name.removeprefix(prefix)
            if own not in files(prefix):
                raise ModelError(f"{self.key}: no tensor {own!r} in {sources[prefix]}: it has changed")
            with safe_open(files(prefix)[own], framework="pt") as file:
                tensor: Tensor = file.get_tensor(own)
            return tensor

        return read

    def read(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Give modules memory on ``device`` where they have none, and the same weights, which are read once.

        Args:
            modules: alike, and sharded alike.

        Raises:
            ModelError: unreadable, or weights of another model.
        """
        first, *others = map(denoisers, modules)
        for name, part in first.items():
            allocate(part, device)
            fill_from_files(part, self.sources[name], self.key)
            for other in others:
                allocate(other[name], device)
                fill_from_module(other[name], part)


def weight_sources(files: PipelineFiles, names: Sequence[str], override: str | None) -> TransformerFiles:
    """The pipeline's own weights, or those of ``override``: see ``ModelFamily.load``."""
    if override is None:
        return TransformerFiles({name: files.folder(name) for name in names}, "model.path")
    source = at_home(override)
    sources = {name: source if len(names) == 1 else source / name for name in names}
    return TransformerFiles(sources, "model.transformer")


def load_transformers(
    files: PipelineFiles,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    weights: TransformerFiles | None,
    *,
    deferred: bool,
    quantize: Quantize = "none",
) -> nn.Module:
    """One transformer, or several as :class:`Experts`.

    Args:
        weights: None leaves them to :func:`spotlight.models.skeleton.filling`.
        deferred: leaves them to :meth:`TransformerFiles.read`.
        quantize: how linear layers are held: see :mod:`spotlight.models.shared.quantised`.

    Raises:
        ModelError: unreadable, or weights of another model.
    """
    plain = quantize == "none" and not deferred
    own = weights is not None and weights.key == "model.path" and plain
    parts: dict[str, Any] = {}
    for name in names:
        kind = component_type(files, name)
        if own:
            part = load_weights(kind, files, name, dtype, device)
        else:
            part = skeleton(kind, files.config(name), dtype, device, deferred=not plain)
        hold(part, quantize)
        if weights is not None and weights.key != "model.path":
            _check_config(part, weights.sources[name], weights.key)
        if weights is not None and deferred:
            check_files(part, weights.sources[name], weights.key)
        parts[name] = part
    module: nn.Module = next(iter(parts.values())) if len(parts) == 1 else Experts(parts)
    if weights is None and not plain:
        allocate(module, device)
    if weights is not None and not own and not deferred:
        weights.read([module], device)
    return module


def _check_config(module: Any, source: Path, key: str) -> None:
    """Refuse weights whose own ``config.json`` describes another model, which shapes need not show."""
    if (source / "model_index.json").is_file():
        raise ModelError(
            f"{key}: {source} is a whole pipeline; expected its transformer: {source}/transformer"
        )
    if not (source / "config.json").is_file():
        return
    found = read_json(source / "config.json")
    parameters = inspect.signature(type(module).__init__).parameters
    for name, expected in module.config.items():
        if name.startswith("_") or name == "sample_size" or name not in parameters:
            continue  # nothing depends on sample_size
        value = found.get(name, parameters[name].default)
        if _plain(value) != _plain(expected):
            raise ModelError(
                f"{key}: {source}/config.json has {name} = {value!r}; expected {expected!r}, as the pipeline "
                "of model.path: it is of another model"
            )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def component_type(files: PipelineFiles, component: str) -> Any:
    import diffusers

    return getattr(diffusers, files.component_class(component) or "")
