"""LoRA files under the names that ComfyUI and kohya's scripts give a model's layers.

Both run the models' own code, whose names are not diffusers', and in which layers that diffusers keeps apart
may be one: query, key and value are rows of a single weight. Their LoRAs then are one of a larger rank, block
by block, with the same product.

A :data:`LayerNames` has those names, ``*`` standing for a block's number, each with diffusers' names of the
rows in their order. A family lists one for each layout; a layout that it lacks is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from spotlight.models.lora_file import part_prefix
from spotlight.models.model_errors import ModelError
from spotlight_rewards.base.files import fsync_path

Layout = Literal["comfyui", "kohya"]
LayerNames = Mapping[str, tuple[str, ...]]

_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_FLUX_ENDS = ("net.0.proj", "net.2")


def same_names(ends: Sequence[str], block: str = "transformer_blocks.*") -> LayerNames:
    """Of a model whose own code has diffusers' names."""
    return {f"{block}.{end}": (f"{block}.{end}",) for end in ends}


def renamed(ends: Mapping[str, str], block: str = "blocks.*") -> LayerNames:
    """Of a model whose blocks have the same name in both, and their layers have not."""
    return {f"{block}.{own}": (f"{block}.{end}",) for end, own in ends.items()}


def _double(qkv: str, proj: str, mlp: Sequence[str], ends: Sequence[str] = _FLUX_ENDS) -> LayerNames:
    """A block with a stream of its own for text, as FLUX has it."""
    ours, own = "transformer_blocks.*", "double_blocks.*"
    names: dict[str, tuple[str, ...]] = {}
    for stream, attention, out, feed in (
        ("img", _QKV, "to_out.0", "ff"),
        ("txt", _ADDED_QKV, "to_add_out", "ff_context"),
    ):
        names[f"{own}.{stream}_{qkv}"] = tuple(f"{ours}.attn.{each}" for each in attention)
        names[f"{own}.{stream}_{proj}"] = (f"{ours}.attn.{out}",)
        for theirs, end in zip(mlp, ends, strict=True):
            names[f"{own}.{stream}_{theirs}"] = (f"{ours}.{feed}.{end}",)
    return names


def _single() -> LayerNames:
    ours = "single_transformer_blocks.*"
    inner = (*(f"{ours}.attn.{each}" for each in _QKV), f"{ours}.proj_mlp")
    return {"single_blocks.*.linear1": inner, "single_blocks.*.linear2": (f"{ours}.proj_out",)}


def _refiner(qkv: str, proj: str, mlp: Sequence[str]) -> LayerNames:
    ours = "context_embedder.token_refiner.refiner_blocks.*"
    own = "txt_in.individual_token_refiner.blocks.*"
    return {
        f"{own}.{qkv}": tuple(f"{ours}.attn.{each}" for each in _QKV),
        f"{own}.{proj}": (f"{ours}.attn.to_out.0",),
    } | {f"{own}.{theirs}": (f"{ours}.ff.{end}",) for theirs, end in zip(mlp, _FLUX_ENDS, strict=True)}


def _sd3() -> LayerNames:
    ours, own = "transformer_blocks.*", "joint_blocks.*"
    names: dict[str, tuple[str, ...]] = {}
    for side, module, attention, out, feed in (
        ("x_block", "attn", _QKV, "to_out.0", "ff"),
        ("context_block", "attn", _ADDED_QKV, "to_add_out", "ff_context"),
        ("x_block", "attn2", _QKV, "to_out.0", ""),
    ):
        names[f"{own}.{side}.{module}.qkv"] = tuple(f"{ours}.{module}.{each}" for each in attention)
        names[f"{own}.{side}.{module}.proj"] = (f"{ours}.{module}.{out}",)
        if feed:
            for theirs, end in zip(("fc1", "fc2"), _FLUX_ENDS, strict=True):
                names[f"{own}.{side}.mlp.{theirs}"] = (f"{ours}.{feed}.{end}",)
    return names


def _z_image(*, fused: bool) -> LayerNames:
    names: dict[str, tuple[str, ...]] = {}
    for block in ("layers.*", "noise_refiner.*", "context_refiner.*"):
        attention = [f"{block}.attention.{each}" for each in _QKV]
        if fused:
            names |= {f"{block}.attention.qkv": tuple(attention)}
            names |= {f"{block}.attention.out": (f"{block}.attention.to_out.0",)}
        else:
            names |= {each: (each,) for each in (*attention, f"{block}.attention.to_out.0")}
        names |= same_names([f"feed_forward.w{number}" for number in (1, 2, 3)], block)
    return names


_NATIVE = ("attn.qkv", "attn.proj", ("mlp.0", "mlp.2"))
FLUX = {**_double(*_NATIVE), **_single()}
FLUX2 = {
    **_double(*_NATIVE, ("linear_in", "linear_out")),
    "single_blocks.*.linear1": ("single_transformer_blocks.*.attn.to_qkv_mlp_proj",),
    "single_blocks.*.linear2": ("single_transformer_blocks.*.attn.to_out",),
}
HUNYUAN_COMFYUI = {**FLUX, **_refiner("self_attn.qkv", "self_attn.proj", ("mlp.0", "mlp.2"))}
HUNYUAN_KOHYA = {
    **_double("attn_qkv", "attn_proj", ("mlp.fc1", "mlp.fc2")),
    **_single(),
    **_refiner("self_attn_qkv", "self_attn_proj", ("mlp.fc1", "mlp.fc2")),
}
QWEN = same_names(
    [f"attn.{each}" for each in (*_QKV, "to_out.0", *_ADDED_QKV, "to_add_out")]
    + [f"{stream}_mlp.{each}" for stream in ("img", "txt") for each in _FLUX_ENDS]
)
SD3 = _sd3()
Z_IMAGE_COMFYUI, Z_IMAGE_KOHYA = _z_image(fused=True), _z_image(fused=False)


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
        layers: see :func:`spotlight.models.pipeline_export.save_lora`.
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
