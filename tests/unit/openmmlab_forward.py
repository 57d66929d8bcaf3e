"""OpenMMLab's Mask2Former in plain tensor operations on a checkpoint's own names, and random checkpoints.

Written from mmdet 2.x's modules, without transformers and without the package; one picture at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
PIXELS = "panoptic_head.pixel_decoder"
QUERIES = "panoptic_head.transformer_decoder"


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny detector; everything else is as in OpenMMLab's."""

    width: int = 4
    depths: tuple[int, ...] = (2, 1, 2, 2)
    heads: tuple[int, ...] = (1, 2, 2, 4)
    window: int = 3
    hidden: int = 64
    attention_heads: int = 4
    encoder_layers: int = 2
    decoder_layers: int = 4
    queries: int = 6
    classes: int = 80


def layer(name: str, *size: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", size
    if bias:
        yield f"{name}.bias", size[:1]


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint; norms are known by their names."""
    widths = [shape.width * 2**stage for stage in range(4)]
    yield from backbone_shapes(shape, widths)
    yield from pixel_decoder_shapes(shape, widths)
    yield from query_decoder_shapes(shape)


def backbone_shapes(shape: Shape, widths: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from layer("backbone.patch_embed.projection", shape.width, 3, 4, 4)
    yield from layer("backbone.patch_embed.norm", shape.width)
    for stage, (width, depth, heads) in enumerate(zip(widths, shape.depths, shape.heads, strict=True)):
        for block in range(depth):
            name = f"backbone.stages.{stage}.blocks.{block}"
            yield f"{name}.attn.w_msa.relative_position_bias_table", ((2 * shape.window - 1) ** 2, heads)
            yield from layer(f"{name}.attn.w_msa.qkv", 3 * width, width)
            yield from layer(f"{name}.attn.w_msa.proj", width, width)
            yield from layer(f"{name}.ffn.layers.0.0", 4 * width, width)
            yield from layer(f"{name}.ffn.layers.1", width, 4 * width)
            yield from layer(f"{name}.norm1", width)
            yield from layer(f"{name}.norm2", width)
        if stage < 3:
            yield from layer(f"backbone.stages.{stage}.downsample.norm", 4 * width)
            yield from layer(
                f"backbone.stages.{stage}.downsample.reduction", 2 * width, 4 * width, bias=False
            )
        yield from layer(f"backbone.norm{stage}", width)


def pixel_decoder_shapes(shape: Shape, widths: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    for level in range(3):
        yield from layer(f"{PIXELS}.input_convs.{level}.conv", hidden, widths[3 - level], 1, 1)
        yield from layer(f"{PIXELS}.input_convs.{level}.gn", hidden)
    for index in range(shape.encoder_layers):
        name = f"{PIXELS}.encoder.layers.{index}"
        points = shape.attention_heads * 3 * 4
        yield from layer(f"{name}.attentions.0.sampling_offsets", 2 * points, hidden)
        yield from layer(f"{name}.attentions.0.attention_weights", points, hidden)
        yield from layer(f"{name}.attentions.0.value_proj", hidden, hidden)
        yield from layer(f"{name}.attentions.0.output_proj", hidden, hidden)
        yield from layer(f"{name}.ffns.0.layers.0.0", 40, hidden)
        yield from layer(f"{name}.ffns.0.layers.1", hidden, 40)
        yield from layer(f"{name}.norms.0", hidden)
        yield from layer(f"{name}.norms.1", hidden)
    yield f"{PIXELS}.level_encoding.weight", (3, hidden)
    yield from layer(f"{PIXELS}.lateral_convs.0.conv", hidden, widths[0], 1, 1, bias=False)
    yield from layer(f"{PIXELS}.lateral_convs.0.gn", hidden)
    yield from layer(f"{PIXELS}.output_convs.0.conv", hidden, hidden, 3, 3, bias=False)
    yield from layer(f"{PIXELS}.output_convs.0.gn", hidden)
    yield from layer(f"{PIXELS}.mask_feature", hidden, hidden, 1, 1)


def query_decoder_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    for index in range(shape.decoder_layers):
        name = f"{QUERIES}.layers.{index}"
        for attention in range(2):
            yield f"{name}.attentions.{attention}.attn.in_proj_weight", (3 * hidden, hidden)
            yield f"{name}.attentions.{attention}.attn.in_proj_bias", (3 * hidden,)
            yield from layer(f"{name}.attentions.{attention}.attn.out_proj", hidden, hidden)
        yield from layer(f"{name}.ffns.0.layers.0.0", 48, hidden)
        yield from layer(f"{name}.ffns.0.layers.1", hidden, 48)
        for norm in range(3):
            yield from layer(f"{name}.norms.{norm}", hidden)
    yield from layer(f"{QUERIES}.post_norm", hidden)
    for name, rows in (("query_embed", shape.queries), ("query_feat", shape.queries), ("level_embed", 3)):
        yield f"panoptic_head.{name}.weight", (rows, hidden)
    yield from layer("panoptic_head.cls_embed", shape.classes + 1, hidden)
    for index in (0, 2, 4):
        yield from layer(f"panoptic_head.mask_embed.{index}", hidden, hidden)


def random_checkpoint(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Weights with which every tensor matters, and the windows' stored indices."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, size in tensor_shapes(shape):
        scale = (
            1.0 if len(size) < 2 or "level" in name or "query" in name else (2 / math.prod(size[1:])) ** 0.5
        )
        state[name] = torch.randn(size, generator=generator) * scale
        if ".norm" in name or ".gn." in name or "post_norm" in name:
            state[name] = 0.3 * state[name] + (1 if name.endswith(".weight") else 0)
        if "sampling_offsets.bias" in name:
            state[name] *= 2
        if name.endswith("relative_position_bias_table"):
            index = name.replace("bias_table", "index")
            state[index] = window_index(shape.window)
    return state


def window_index(window: int) -> Tensor:
    """Row of the bias table for every pair of a window's places."""
    places = [(row, column) for row in range(window) for column in range(window)]
    return torch.tensor(
        [
            [(a[0] - b[0] + window - 1) * (2 * window - 1) + a[1] - b[1] + window - 1 for b in places]
            for a in places
        ]
    )


def forward(state: Weights, shape: Shape, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Class logits [queries, classes + 1] and mask logits [queries, h, w] of pixels [3, height, width]."""
    maps = backbone(state, shape, pixels)
    memories, mask_features = pixel_decoder(state, shape, maps)
    return query_decoder(state, shape, memories, mask_features)


def linear(state: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def norm(state: Weights, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * state[f"{name}.weight"] + state[f"{name}.bias"]


def conv_norm(state: Weights, name: str, x: Tensor, padding: int = 0) -> Tensor:
    x = F.conv2d(x[None], state[f"{name}.conv.weight"], state.get(f"{name}.conv.bias"), padding=padding)
    return F.group_norm(x, 32, state[f"{name}.gn.weight"], state[f"{name}.gn.bias"])[0]


def feed_forward(state: Weights, name: str, x: Tensor, activation=torch.relu) -> Tensor:
    return linear(state, f"{name}.layers.1", activation(linear(state, f"{name}.layers.0.0", x)))


def backbone(state: Weights, shape: Shape, pixels: Tensor) -> list[Tensor]:
    """Four maps [channels, h, w], from stride 4 to stride 32."""
    name = "backbone.patch_embed"
    x = F.conv2d(
        pixels[None], state[f"{name}.projection.weight"], state[f"{name}.projection.bias"], stride=4
    )[0]
    x = norm(state, f"{name}.norm", x.permute(1, 2, 0))
    maps = []
    for stage, depth in enumerate(shape.depths):
        for index in range(depth):
            block = f"backbone.stages.{stage}.blocks.{index}"
            shift = shape.window // 2 if index % 2 else 0
            inner = norm(state, f"{block}.norm1", x)
            x = x + shifted_windows(
                state, f"{block}.attn.w_msa", inner, shape.heads[stage], shape.window, shift
            )
            x = x + feed_forward(state, f"{block}.ffn", norm(state, f"{block}.norm2", x), F.gelu)
        maps.append(norm(state, f"backbone.norm{stage}", x).permute(2, 0, 1))
        if stage < 3:
            height, width = -(-x.shape[0] // 2), -(-x.shape[1] // 2)
            x = F.pad(x, (0, 0, 0, 2 * width - x.shape[1], 0, 2 * height - x.shape[0]))
            merged = F.unfold(x.permute(2, 0, 1)[None], kernel_size=2, stride=2)[0].T
            merged = norm(state, f"backbone.stages.{stage}.downsample.norm", merged)
            x = linear(state, f"backbone.stages.{stage}.downsample.reduction", merged).view(height, width, -1)
    return maps


def shifted_windows(state: Weights, name: str, x: Tensor, heads: int, side: int, shift: int) -> Tensor:
    """Attention within windows of x [h, w, channels]; after a shift, only among what lay together before."""
    height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side)).roll((-shift, -shift), (0, 1))
    padded = x.shape[:2]
    region = torch.zeros(padded, dtype=torch.long)
    if shift:
        for axis, length in enumerate(padded):
            place = torch.arange(length)
            part = (place >= length - side).long() + (place >= length - shift).long()
            region += part.view(-1, 1) * 3 if axis == 0 else part
    bias = state[f"{name}.relative_position_bias_table"][state[f"{name}.relative_position_index"]]
    out = torch.empty_like(x)
    for top in range(0, padded[0], side):
        for left in range(0, padded[1], side):
            window = slice(top, top + side), slice(left, left + side)
            query, key, value = (
                part.view(side * side, heads, -1).transpose(0, 1)
                for part in linear(state, f"{name}.qkv", x[window].reshape(-1, channels)).chunk(3, dim=-1)
            )
            score = query @ key.transpose(1, 2) / (channels // heads) ** 0.5 + bias.permute(2, 0, 1)
            apart = region[window].flatten()
            score = score - 100 * (apart[:, None] != apart[None])
            mixed = (score.softmax(-1) @ value).transpose(0, 1).reshape(-1, channels)
            out[window] = linear(state, f"{name}.proj", mixed).view(side, side, channels)
    return out.roll((shift, shift), (0, 1))[:height, :width]


def sine(channels: int, height: int, width: int) -> Tensor:
    """[h * w, channels]: the row in the first half, the column in the second."""
    half = channels // 2
    frequency = 10000 ** (2 * (torch.arange(half) // 2).double() / half)
    coded = []
    for length in (height, width):
        angle = (torch.arange(1, length + 1).double() / (length + 1e-6) * 2 * math.pi)[:, None] / frequency
        coded.append(torch.where(torch.arange(half) % 2 == 0, angle.sin(), angle.cos()))
    rows = coded[0][:, None].expand(height, width, half)
    columns = coded[1][None].expand(height, width, half)
    return torch.cat([rows, columns], dim=-1).reshape(-1, channels)


def pixel_decoder(state: Weights, shape: Shape, maps: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Three memories [channels, h, w] from low to high resolution, and the mask features."""
    inputs = [conv_norm(state, f"{PIXELS}.input_convs.{level}", maps[3 - level]) for level in range(3)]
    sizes = [each.shape[1:] for each in inputs]
    x = torch.cat([each.flatten(1).T for each in inputs])
    encoding = state[f"{PIXELS}.level_encoding.weight"]
    places = torch.cat([sine(shape.hidden, *size) + encoding[level] for level, size in enumerate(sizes)])
    centers = torch.cat(
        [
            torch.cartesian_prod((torch.arange(h).double() + 0.5) / h, (torch.arange(w).double() + 0.5) / w)
            for h, w in sizes
        ]
    )
    for index in range(shape.encoder_layers):
        layer = f"{PIXELS}.encoder.layers.{index}"
        attended = deformable(
            state, f"{layer}.attentions.0", shape.attention_heads, x, x + places, centers, sizes
        )
        x = norm(state, f"{layer}.norms.0", x + attended)
        x = norm(state, f"{layer}.norms.1", x + feed_forward(state, f"{layer}.ffns.0", x))
    parts = x.split([h * w for h, w in sizes])
    memories = [part.T.view(-1, *size) for part, size in zip(parts, sizes, strict=True)]
    finer = conv_norm(state, f"{PIXELS}.lateral_convs.0", maps[0])
    finer = (
        finer + F.interpolate(memories[-1][None], finer.shape[1:], mode="bilinear", align_corners=False)[0]
    )
    finer = torch.relu(conv_norm(state, f"{PIXELS}.output_convs.0", finer, padding=1))
    weight, bias = state[f"{PIXELS}.mask_feature.weight"], state[f"{PIXELS}.mask_feature.bias"]
    return memories, F.conv2d(finer[None], weight, bias)[0]


def deformable(
    state: Weights,
    name: str,
    heads: int,
    x: Tensor,
    query: Tensor,
    centers: Tensor,
    sizes: Sequence[Sequence[int]],
) -> Tensor:
    """Every place samples four points of each of three levels, for each head; ``centers`` are (y, x)."""
    number, channels = x.shape
    value = linear(state, f"{name}.value_proj", x).view(number, heads, -1)
    offset = linear(state, f"{name}.sampling_offsets", query).view(number, heads, 3, 4, 2)
    weight = linear(state, f"{name}.attention_weights", query).view(number, heads, 12).softmax(-1)
    out = torch.zeros_like(value)
    start = 0
    for level, (height, width) in enumerate(sizes):
        source = value[start : start + height * width].view(height, width, heads, -1)
        start += height * width
        column = centers[:, 1, None, None] * width + offset[:, :, level, :, 0] - 0.5
        row = centers[:, 0, None, None] * height + offset[:, :, level, :, 1] - 0.5
        share = weight.view(number, heads, 3, 4)[:, :, level]
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            y, x_ = row.floor().long() + down, column.floor().long() + right
            near = (1 - (row - y).abs()) * (1 - (column - x_).abs()) * share
            near = near * ((y >= 0) & (y < height) & (x_ >= 0) & (x_ < width))
            head = torch.arange(heads)[None, :, None]
            out += (near[..., None] * source[y.clamp(0, height - 1), x_.clamp(0, width - 1), head]).sum(2)
    return linear(state, f"{name}.output_proj", out.reshape(number, channels))


def query_decoder(
    state: Weights, shape: Shape, memories: Sequence[Tensor], mask_features: Tensor
) -> tuple[Tensor, Tensor]:
    keys = [
        memory.flatten(1).T + state["panoptic_head.level_embed.weight"][level]
        for level, memory in enumerate(memories)
    ]
    places = [sine(shape.hidden, *memory.shape[1:]) for memory in memories]
    embed, x = state["panoptic_head.query_embed.weight"], state["panoptic_head.query_feat.weight"]

    def predicted(x: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(state, f"{QUERIES}.post_norm", x)
        mask = normed
        for index in (0, 2, 4):
            mask = linear(state, f"panoptic_head.mask_embed.{index}", mask)
            mask = torch.relu(mask) if index < 4 else mask
        return linear(state, "panoptic_head.cls_embed", normed), torch.einsum(
            "qc,chw->qhw", mask, mask_features
        )

    for index in range(shape.decoder_layers):
        level, layer = index % 3, f"{QUERIES}.layers.{index}"
        size = memories[level].shape[1:]
        mask = F.interpolate(predicted(x)[1][None], size, mode="bilinear", align_corners=False)[0]
        hidden = mask.flatten(1).sigmoid() < 0.5
        hidden[hidden.all(1)] = False
        query, key, value = x + embed, keys[level] + places[level], keys[level]
        attended = attention(state, f"{layer}.attentions.0.attn", shape, query, key, value, hidden)
        x = norm(state, f"{layer}.norms.0", x + attended)
        attended = attention(state, f"{layer}.attentions.1.attn", shape, x + embed, x + embed, x)
        x = norm(state, f"{layer}.norms.1", x + attended)
        x = norm(state, f"{layer}.norms.2", x + feed_forward(state, f"{layer}.ffns.0", x))
    return predicted(x)


def attention(
    state: Weights,
    name: str,
    shape: Shape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None = None,
) -> Tensor:
    """Attention of several heads, with the three projections in one matrix."""
    weights = state[f"{name}.in_proj_weight"].chunk(3)
    biases = state[f"{name}.in_proj_bias"].chunk(3)
    query, key, value = (
        F.linear(x, weight, bias).view(len(x), shape.attention_heads, -1).transpose(0, 1)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    score = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    if hidden is not None:
        score = score.masked_fill(hidden, -math.inf)
    mixed = (score.softmax(-1) @ value).transpose(0, 1).reshape(query.shape[1], -1)
    return linear(state, f"{name}.out_proj", mixed)
