"""LoRA files under the names of :mod:`spotlight_files.lora_names`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spotlight_files.lora_file import part_prefix
from spotlight_files.lora_names import LayerNames, Layout
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.files import fsync_path


def save_renamed(
    directory: Path,
    stem: str,
    layers: Mapping[str, Tensor],
    alpha: float,
    names: LayerNames,
    layout: Layout,
    transformers: Mapping[str, Callable[[str], int]],
) -> list[Path]:
    """Write ``directory/STEM.safetensors``, and of each further transformer ``STEM-COMPONENT.safetensors``.

    B is written times alpha / rank, so nothing has to be scaled; kohya's alphas are the ranks.

    Args:
        layers: see :func:`spotlight_files.pipeline_export.save_lora`.
        transformers: how many rows the weight of a layer has, by diffusers' name, of each component.

    Raises:
        ModelError: a layer that has no name there.
    """
    components = list(transformers)
    files: dict[Path, dict[str, Tensor]] = {}
    for number, (component, rows) in enumerate(transformers.items()):
        prefix = part_prefix(component, components)
        own = {
            key.removeprefix(prefix): tensor.detach().float().cpu()
            for key, tensor in layers.items()
            if key.startswith(prefix)
        }
        file = directory / f"{stem}{f'-{component}' * bool(number)}.safetensors"
        files[file] = {
            key: tensor.contiguous()
            for name, pair in _fused(own, alpha, names, rows, layout).items()
            for key, tensor in _LAYOUTS[layout](name, *pair).items()
        }
    directory.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        partial = file.with_name(f"partial-{file.name}")
        save_file(tensors, partial, {"format": "pt"})
        fsync_path(partial)
        partial.replace(file)
    fsync_path(directory)
    return list(files)


def _fused(
    layers: Mapping[str, Tensor], alpha: float, names: LayerNames, rows: Callable[[str], int], layout: Layout
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and scaled B by the model's own names."""
    found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    parts: dict[str, list[str]] = {}
    for key, down in layers.items():
        module = key.removesuffix(".lora_A.weight")
        if module == key:
            continue
        own, wholes = _own_name(module, names, layout)
        parts[own] = wholes
        up = layers[f"{module}.lora_B.weight"] * (alpha / down.shape[0])
        found.setdefault(own, {})[module] = (down, up)
    return {own: _block_diagonal(pairs, parts[own], rows) for own, pairs in found.items()}


def _own_name(module: str, names: LayerNames, layout: Layout) -> tuple[str, list[str]]:
    for own, wholes in names.items():
        for whole in wholes:
            if match := re.fullmatch(re.escape(whole).replace(r"\*", r"(\d+)"), module):
                (number,) = match.groups()
                return own.replace("*", number), [each.replace("*", number) for each in wholes]
    raise ModelError(
        f"{layout} has no name for the adapted layer {module!r}; expected attention and feed-forward layers "
        "of the blocks only: export without --format, or merge it with --merged"
    )


def _block_diagonal(
    pairs: Mapping[str, tuple[Tensor, Tensor]], wholes: Sequence[str], rows: Callable[[str], int]
) -> tuple[Tensor, Tensor]:
    heights = [pairs[each][1].shape[0] if each in pairs else rows(each) for each in wholes]
    downs = [pairs[each][0] for each in wholes if each in pairs]
    up, top, left = torch.zeros(sum(heights), sum(len(down) for down in downs)), 0, 0
    for each, height in zip(wholes, heights, strict=True):
        if each in pairs:
            part = pairs[each][1]
            up[top : top + height, left : left + part.shape[1]] = part
            left += part.shape[1]
        top += height
    return torch.cat(downs), up


def _comfyui(name: str, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    return {f"diffusion_model.{name}.lora_A.weight": down, f"diffusion_model.{name}.lora_B.weight": up}


def _kohya(name: str, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    flat = f"lora_unet_{name.replace('.', '_')}"
    return {
        f"{flat}.lora_down.weight": down,
        f"{flat}.lora_up.weight": up,
        f"{flat}.alpha": torch.tensor(float(len(down))),
    }


_LAYOUTS: Mapping[Layout, Callable[[str, Tensor, Tensor], dict[str, Tensor]]] = {
    "comfyui": _comfyui,
    "kohya": _kohya,
}
