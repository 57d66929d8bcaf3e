"""Small random models of PP-OCR's classes, for trying a recipe without a download, and for tests."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PPOCRV6SmallDetConfig,
    PPOCRV6SmallDetForObjectDetection,
    PPOCRV6TinyRecConfig,
    PPOCRV6TinyRecForTextRecognition,
)

CHARACTERS = ("blank", *string.ascii_letters, *string.digits, " ", *"жωあア中한عאकก")
"""One letter of each other script, so that no prompt is refused that the real recognizer reads."""

DETECTOR_BLOCKS: list[list[list[Any]]] = [
    [[3, 8, 8, 1, True]],
    [[3, 8, 12, 2, False]],
    [[3, 12, 16, 2, False]],
    [[3, 16, 16, 2, True]],
]
RECOGNIZER_BLOCKS: list[list[list[Any]]] = [
    [[3, 8, 8, 1, True]],
    [[3, 8, 12, [2, 1], False]],
    [[3, 12, 16, [2, 1], False]],
    [[3, 16, 16, 1, False]],
]
"""Kernel, channels in and out, stride, squeeze and excitation: one block for each of four stages."""


def save_tiny_detector(folder: Path) -> Path:
    """Write a detector that sees text in blobs; returns the folder."""
    config = PPOCRV6SmallDetConfig(
        backbone_config=_backbone(DETECTOR_BLOCKS, [f"stage{at}" for at in range(1, 5)]),
        neck_out_channels=16,
        layer_list_out_channels=[8, 12, 16, 16],
        reduction=2,
    )
    model = PPOCRV6SmallDetForObjectDetection(config)
    _randomize(model, seed=1)
    model.head.conv_down.convolution.weight.data[:, 4:] *= 0.1  # mostly the coarsest map: blobs, no speckles
    for layer in (model.head.conv_up.convolution, model.head.conv_final):
        layer.weight.data[:] = layer.weight.data.mean((2, 3), keepdim=True)
    model.head.conv_final.weight.data *= 12
    model.head.conv_final.bias.data += 3
    return _saved(model, folder, {"limit_side_len": 320})


def save_tiny_recognizer(folder: Path, characters: Sequence[str] = CHARACTERS) -> Path:
    """Write a recognizer that is sure of what it reads; returns the folder."""
    config = PPOCRV6TinyRecConfig(
        backbone_config=_backbone(RECOGNIZER_BLOCKS, ["stage4"]),
        hidden_size=12,
        head_out_channels=len(CHARACTERS),
    )
    model = PPOCRV6TinyRecForTextRecognition(config)
    _randomize(model, seed=2)
    model.head.fc2.weight.data *= 30
    return _saved(model, folder, {"character_list": list(characters)})


def _backbone(blocks: list[list[list[Any]]], out_features: list[str]) -> dict[str, Any]:
    return {
        "model_type": "pp_lcnet_v4",
        "stem_type": "small",
        "stem_channels": [3, 4, 8],
        "block_configs": blocks,
        "out_features": out_features,
    }


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """transformers' own initial weights make all pictures alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        drawn = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(1 + 0.2 * drawn.abs())
        elif tensor.dim() > 1:
            tensor.copy_(drawn * (2 / tensor[0].numel()) ** 0.5)
        else:
            tensor.copy_(0.2 * drawn + (1 if "norm" in name and name.endswith("weight") else 0))


def _saved(model: Any, folder: Path, preprocessor: dict[str, Any]) -> Path:
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor), encoding="utf-8")
    return folder
