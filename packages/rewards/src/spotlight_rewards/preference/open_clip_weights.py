"""HPS v2.1's CLIP ViT-H-14, whose checkpoint has open_clip's names, in transformers' CLIPModel.

Apart from names, open_clip keeps query, key and value of an attention in one matrix, and its projections
transposed. The number of heads stands in no tensor: it follows from ViT-H-14's widths of a head.

Facts: https://github.com/mlfoundations/open_clip (``model.py``, ``transformer.py``, ``ViT-H-14.json``), and
the picture's way into the model from ``src/open_clip/transform.py`` of https://github.com/tgxs002/HPSv2.
Imported in the reward's own process only: it imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from spotlight_rewards.models.pretrained_model import (
    by_part,
    converted_state,
    find_device,
    find_file,
    load_tokenizer,
    read_tensors,
    renamed,
    tensors_digest,
)
from spotlight_rewards.preference.clip_towers import MEAN, STD, ClipTowers
from spotlight_rewards.reward import Image, RewardSetupError

FILES = ("HPS_v2.1_compressed.safetensors", "HPS_v2.1_compressed.pt")
PIXELS_HEAD, TEXT_HEAD = 80, 64
"""Widths of a head of the two towers of ViT-H-14."""
_REMEDY = (
    "Name xswu/HPSv2, or the file or directory that `hf download xswu/HPSv2 HPS_v2.1_compressed.pt` left; "
    "and laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or a directory with its tokenizer."
)
_BLOCK = r"(visual\.|)transformer\.resblocks\.(\d+)\."
_TO_BLOCK = r"{tower}encoder.layers.\2."
_RENAMED = {
    r"visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"visual\.ln_pre\.": "vision_model.pre_layrnorm.",
    r"visual\.ln_post\.": "vision_model.post_layernorm.",
    r"visual\.proj$": "visual_projection.weight",
    _BLOCK + r"ln_(\d)\.": _TO_BLOCK + r"layer_norm\3.",
    _BLOCK + r"attn\.in_proj_": _TO_BLOCK + "self_attn.{part}_proj.",
    _BLOCK + r"attn\.out_proj\.": _TO_BLOCK + "self_attn.out_proj.",
    _BLOCK + r"mlp\.c_fc\.": _TO_BLOCK + "mlp.fc1.",
    _BLOCK + r"mlp\.c_proj\.": _TO_BLOCK + "mlp.fc2.",
    r"token_embedding\.": "text_model.embeddings.token_embedding.",
    r"positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"ln_final\.": "text_model.final_layer_norm.",
    r"text_projection$": "text_projection.weight",
    r"logit_scale$": "logit_scale",
}
"""Beginning of a name in open_clip -> in transformers. ``{part}``: split into q, k and v."""
_TRANSPOSED = {"visual.proj", "text_projection"}


def load_hps(weights: str, tokenizer: str, device: str, batch_size: int) -> ClipTowers:
    """Load HPS v2.1. Raises RewardSetupError."""
    key = "hps reward: weights"
    place = find_device(device, "hps reward: device")
    path = find_file(weights, FILES, key=key, remedy=_REMEDY)
    state = read_tensors(path, key=key, remedy=_REMEDY)
    try:
        model = converted_clip(state)
    except RewardSetupError as error:
        raise RewardSetupError(f"{key} is {path}: {error} {_REMEDY}") from error
    return ClipTowers(
        "hps", model.requires_grad_(False).to(place), f"{weights}@{tensors_digest(state)}",
        tokenizer=load_tokenizer(tokenizer, key="hps reward: tokenizer", remedy=_REMEDY),
        prepare=partial(prepare, side_px=model.config.vision_config.image_size),
        soft=partial(fitted, side_px=model.config.vision_config.image_size),
        batch_size=batch_size,
    )  # fmt: skip


def prepare(images: Sequence[Image], side_px: int) -> torch.Tensor:
    """[pictures, 3, side, side], as HPSv2 does: the longer side scaled to ``side_px``, the rest black.

    With torchvision's resize of tensors from version 0.17 on, which has an anti-aliasing filter.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1) for image in images]
    return torch.cat([fitted(each[None].float() / 255, side_px) for each in tensors])


def fitted(pixels: torch.Tensor, side_px: int) -> torch.Tensor:
    """The same of pixels [pictures, 3, height, width] in [0, 1], differentiable."""
    height, width = pixels.shape[2:]
    scale = side_px / max(height, width)
    if scale != 1:
        size = (round(height * scale), round(width * scale))
        pixels = F.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
    below, right = (side_px - side for side in pixels.shape[2:])
    pixels = F.pad(pixels, (right // 2, right - right // 2, below // 2, below - below // 2))
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    return (pixels - mean) / std


def converted_clip(state: Mapping[str, torch.Tensor]) -> Any:
    """transformers' CLIPModel with a checkpoint's weights in float32, in evaluation mode.

    Raises:
        RewardSetupError: a name or a shape that does not map, or a weight without a counterpart.
    """
    from transformers import CLIPModel

    model = CLIPModel(_config(state)).eval()
    expected = "expected those of a CLIP ViT-H-14."
    model.load_state_dict(converted_state(state, model.state_dict(), _targets, expected))
    return model


def _targets(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if target := renamed(name, _RENAMED):
        target = target.replace("{tower}", "vision_model." if name.startswith("visual.") else "text_model.")
        yield from by_part(target, tensor.T if name in _TRANSPOSED else tensor)


def _config(state: Mapping[str, torch.Tensor]) -> Any:
    """The architecture, as the tensors' shapes tell it. Raises RewardSetupError."""
    from transformers import CLIPConfig

    def size(name: str, axis: int = 0) -> int:
        if name not in state or state[name].dim() <= axis:
            raise RewardSetupError(f"{name!r} is missing.")
        return state[name].shape[axis]

    def tower(blocks: str, width: int, head: int) -> dict[str, Any]:
        numbers = {match[1] for name in state if (match := re.match(re.escape(blocks) + r"(\d+)\.", name))}
        if width % head:
            raise RewardSetupError(f"the width of {blocks}0 is {width}, not a multiple of {head}.")
        return {
            "hidden_size": width,
            "intermediate_size": size(f"{blocks}0.mlp.c_fc.weight"),
            "num_hidden_layers": len(numbers),
            "num_attention_heads": width // head,
            "hidden_act": "gelu",
        }

    patch = size("visual.conv1.weight", -1)
    vocabulary = size("token_embedding.weight")
    text = tower("transformer.resblocks.", size("token_embedding.weight", 1), TEXT_HEAD)
    pixels = tower("visual.transformer.resblocks.", size("visual.class_embedding"), PIXELS_HEAD)
    return CLIPConfig(
        text_config={
            **text,
            "vocab_size": vocabulary,
            "max_position_embeddings": size("positional_embedding"),
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
        vision_config={
            **pixels,
            "patch_size": patch,
            "image_size": patch * isqrt(size("visual.positional_embedding") - 1),
        },
        projection_dim=size("text_projection", 1),
    )
