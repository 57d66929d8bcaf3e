"""CLIP in plain tensor operations on a checkpoint's own names, one picture and one text at a time.

Written from the papers' and open_clip's module definitions, without transformers and without the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Weights = Mapping[str, Tensor]
MEAN, STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])


@dataclass(frozen=True)
class Names:
    """Where one tower's tensors are. ``attention``: of one matrix (open_clip), or of three."""

    block: str
    norms: tuple[str, str]
    mlp: tuple[str, str]
    attention: str
    out: str
    one_matrix: bool


HUB = {
    tower: Names(f"{tower}.encoder.layers.", ("layer_norm1", "layer_norm2"), ("mlp.fc1", "mlp.fc2"),
                 "self_attn.", "self_attn.out_proj", False)
    for tower in ("vision_model", "text_model")
}  # fmt: skip
OPEN = {
    tower: Names(f"{tower}transformer.resblocks.", ("ln_1", "ln_2"), ("mlp.c_fc", "mlp.c_proj"),
                 "attn.in_proj_", "attn.out_proj", True)
    for tower in ("visual.", "")
}  # fmt: skip


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights: Weights, names: Names, block: str, x: Tensor, heads: int, causal: bool) -> Tensor:
    tokens, width = x.shape
    if names.one_matrix:
        both = x @ weights[f"{block}{names.attention}weight"].T + weights[f"{block}{names.attention}bias"]
        parts = [both[:, at : at + width] for at in (0, width, 2 * width)]
    else:
        parts = [
            x @ weights[f"{block}{names.attention}{each}_proj.weight"].T
            + weights[f"{block}{names.attention}{each}_proj.bias"]
            for each in "qkv"
        ]
    found = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        query, key, value = (each[:, part] for each in parts)
        likeness = query @ key.T / math.sqrt(width // heads)
        if causal:
            likeness = likeness + torch.full((tokens, tokens), -torch.inf).triu(1)
        found.append(likeness.softmax(-1) @ value)
    return (
        torch.cat(found, -1) @ weights[f"{block}{names.out}.weight"].T + weights[f"{block}{names.out}.bias"]
    )


def blocks(
    weights: Weights, names: Names, x: Tensor, *, heads: int, quick: bool, causal: bool = False
) -> Tensor:
    count = len({name[len(names.block) :].split(".")[0] for name in weights if name.startswith(names.block)})
    for index in range(count):
        block = f"{names.block}{index}."
        x = x + attention(weights, names, block, norm(weights, block + names.norms[0], x), heads, causal)
        first, second = (block + name for name in names.mlp)
        inner = norm(weights, block + names.norms[1], x) @ weights[f"{first}.weight"].T
        inner = inner + weights[f"{first}.bias"]
        inner = (
            inner * torch.sigmoid(1.702 * inner) if quick else inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        )
        x = x + inner @ weights[f"{second}.weight"].T + weights[f"{second}.bias"]
    return x


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum())


def hub_picture(weights: Weights, pixels: Tensor, heads: int) -> Tensor:
    """Unit vector of [3, side, side] with transformers' names."""
    tower = "vision_model."
    kernel = weights[f"{tower}embeddings.patch_embedding.weight"]
    patches = F.conv2d(pixels[None], kernel, stride=kernel.shape[-1])[0].flatten(1).T
    x = torch.cat([weights[f"{tower}embeddings.class_embedding"][None], patches])
    x = norm(weights, f"{tower}pre_layrnorm", x + weights[f"{tower}embeddings.position_embedding.weight"])
    x = blocks(weights, HUB["vision_model"], x, heads=heads, quick=True)
    return unit(norm(weights, f"{tower}post_layernorm", x[0]) @ weights["visual_projection.weight"].T)


def hub_text(weights: Weights, tokens: Sequence[int], heads: int) -> Tensor:
    """Unit vector of tokens, from the first to the end token, with transformers' names."""
    tower = "text_model."
    x = weights[f"{tower}embeddings.token_embedding.weight"][list(tokens)]
    x = x + weights[f"{tower}embeddings.position_embedding.weight"][: len(tokens)]
    x = blocks(weights, HUB["text_model"], x, heads=heads, quick=True, causal=True)
    return unit(norm(weights, f"{tower}final_layer_norm", x[-1]) @ weights["text_projection.weight"].T)


def open_picture(weights: Weights, pixels: Tensor, heads: int) -> Tensor:
    """As :func:`hub_picture`, with open_clip's names and exact GELU."""
    kernel = weights["visual.conv1.weight"]
    patches = F.conv2d(pixels[None], kernel, stride=kernel.shape[-1])[0].flatten(1).T
    x = torch.cat([weights["visual.class_embedding"][None], patches]) + weights["visual.positional_embedding"]
    x = blocks(weights, OPEN["visual."], norm(weights, "visual.ln_pre", x), heads=heads, quick=False)
    return unit(norm(weights, "visual.ln_post", x[0]) @ weights["visual.proj"])


def open_text(weights: Weights, tokens: Sequence[int], heads: int) -> Tensor:
    """As :func:`hub_text`, with open_clip's names and exact GELU."""
    x = weights["token_embedding.weight"][list(tokens)] + weights["positional_embedding"][: len(tokens)]
    x = blocks(weights, OPEN[""], x, heads=heads, quick=False, causal=True)
    return unit(norm(weights, "ln_final", x[-1]) @ weights["text_projection"])


def normalised(pixels: np.ndarray) -> Tensor:
    """[height, width, 3] in [0, 1] to CLIP's [3, height, width]."""
    return torch.tensor((pixels - MEAN) / STD).permute(2, 0, 1).float()


def cropped(image: np.ndarray, side: int) -> Tensor:
    """CLIP's way: the shorter side scaled by Pillow's bicubic filter, the middle of the longer one."""
    height, width = image.shape[:2]
    longer = int(side * max(height, width) / min(height, width))
    size = (side, longer) if width <= height else (longer, side)
    scaled = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)) / 255
    top, left = ((length - side) // 2 for length in scaled.shape[:2])
    return normalised(scaled[top : top + side, left : left + side])


def padded(image: np.ndarray, side: int) -> Tensor:
    """HPSv2's way: the longer side scaled by a bicubic filter, the picture in the middle of black.

    The filter is Pillow's (a = -.5, widened by the reduction), written out as one matrix per axis.
    """
    scale = side / max(image.shape[:2])
    rows, columns = (bicubic(length, round(length * scale)) for length in image.shape[:2])
    scaled = np.einsum("yh,hwc,xw->yxc", rows, image / 255, columns)
    canvas = np.zeros((side, side, 3))
    top, left = ((side - length) // 2 for length in scaled.shape[:2])
    canvas[top : top + scaled.shape[0], left : left + scaled.shape[1]] = scaled
    return normalised(canvas)


def bicubic(before: int, after: int) -> np.ndarray:
    """[after, before]: each row the filter's weights of one new pixel."""
    ratio = before / after
    reach = max(ratio, 1.0)
    centres = (np.arange(after) + 0.5) * ratio
    x = np.abs((np.arange(before) + 0.5)[None] - centres[:, None]) / reach
    a = -0.5
    near, far = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdims=True)
