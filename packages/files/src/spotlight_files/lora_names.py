"""The names that ComfyUI and kohya's scripts give a model's layers. Imports no torch.

Both run the models' own code, whose names are not diffusers', and in which layers that diffusers keeps apart
may be one: query, key and value are rows of a single weight. Their LoRAs then are one of a larger rank, block
by block, with the same product.

A :data:`LayerNames` has those names, ``*`` standing for a block's number, each with diffusers' names of the
rows in their order. A family lists one for each layout; a layout that it lacks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Layout = Literal["comfyui", "kohya"]
LayerNames = Mapping[str, tuple[str, ...]]

_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_FLUX_ENDS = ("net.0.proj", "net.2")


def same_names(ends: Sequence[str], block: str = "transformer_blocks.*") -> LayerNames:
    """Of a model whose own code has diffusers' names."""
    return {f"{block}.{end}": (f"{block}.{end}",) for end in ends}


def renamed(ends: Mapping[str, str]) -> LayerNames:
    """Of a model whose blocks have the same name in both, and their layers have not."""
    return {f"blocks.*.{own}": (f"blocks.*.{end}",) for end, own in ends.items()}


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


def _krea2() -> LayerNames:
    attention = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "gate": "to_gate", "wo": "to_out.0"}
    ends = {f"attn.{own}": f"attn.{end}" for own, end in attention.items()}
    ends |= {f"mlp.{each}": f"ff.{each}" for each in ("gate", "up", "down")}
    blocks = {"blocks.*": "transformer_blocks.*"}
    for kind in ("layerwise_blocks", "refiner_blocks"):
        blocks[f"txtfusion.{kind}.*"] = f"text_fusion.{kind}.*"
    return {f"{own}.{name}": (f"{ours}.{end}",) for own, ours in blocks.items() for name, end in ends.items()}


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
KREA2 = _krea2()
Z_IMAGE_COMFYUI, Z_IMAGE_KOHYA = _z_image(fused=True), _z_image(fused=False)
