"""Tiny random PP-OCR models of the real classes, and their forward written out independently."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
import torch.nn.functional as F

CHARACTERS = ["blank", *string.ascii_letters, *string.digits, " "]
Weights = dict[str, torch.Tensor]

_DETECTOR = {
    "stem_type": "small",
    "stem_channels": [3, 4, 8],
    "block_configs": [
        [[3, 8, 8, 1, True]],
        [[3, 8, 12, 2, False]],
        [[3, 12, 16, 2, False]],
        [[3, 16, 16, 2, True]],
    ],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_RECOGNIZER = {
    "stem_type": "small",
    "stem_channels": [3, 4, 8],
    "block_configs": [
        [[3, 8, 8, 1, True]],
        [[3, 8, 12, (2, 1), False]],
        [[3, 12, 16, (2, 1), False]],
        [[3, 16, 16, 1, False]],
    ],
    "out_features": ["stage4"],
}


def save_detector(out: Path) -> Path:
    """A detector whose random map crosses the thresholds in blobs."""
    from transformers import PPOCRV6SmallDetConfig, PPOCRV6SmallDetForObjectDetection

    config = PPOCRV6SmallDetConfig(
        backbone_config={"model_type": "pp_lcnet_v4", **_DETECTOR},
        neck_out_channels=16,
        layer_list_out_channels=[8, 12, 16, 16],
        reduction=2,
    )
    model = PPOCRV6SmallDetForObjectDetection(config)
    _randomize(model, seed=1)
    model.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps({"limit_side_len": 320}))
    return out


def save_recognizer(out: Path, characters: list[str] = CHARACTERS) -> Path:
    """A recognizer whose random answers are sure."""
    from transformers import PPOCRV6TinyRecConfig, PPOCRV6TinyRecForTextRecognition

    config = PPOCRV6TinyRecConfig(
        backbone_config={"model_type": "pp_lcnet_v4", **_RECOGNIZER},
        hidden_size=12,
        head_out_channels=len(CHARACTERS),
    )
    model = PPOCRV6TinyRecForTextRecognition(config)
    _randomize(model, seed=2)
    model.head.fc2.weight.data *= 30
    model.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps({"character_list": characters}))
    return out


def _randomize(model: torch.nn.Module, seed: int) -> None:
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


class Layers:
    """Operations of PaddleOCR's layers on the weights of a state, in double precision."""

    def __init__(self, weights: Weights) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def conv(self, x: torch.Tensor, name: str, stride: object = 1, groups: int = 1) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        padding = tuple(side // 2 for side in weight.shape[2:])
        run = F.conv1d if weight.dim() == 3 else F.conv2d
        return run(x, weight, bias, stride=stride, padding=padding, groups=groups)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean, var, weight, bias = (
            self.weights[f"{name}.{part}"].view(shape)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def layer(self, x: torch.Tensor, name: str, stride: object = 1, groups: int = 1) -> torch.Tensor:
        return self.norm(self.conv(x, f"{name}.convolution", stride, groups), f"{name}.normalization")

    def backbone(self, x: torch.Tensor, name: str, blocks: list) -> list[torch.Tensor]:
        """PP-LCNetV4 with its small stem: the map after every stage."""
        x = self.layer(F.gelu(self.layer(x, f"{name}.convolution.conv1", 2)), f"{name}.convolution.conv2", 2)
        maps = []
        for stage, (block,) in enumerate(blocks):
            at = f"{name}.blocks.{stage}.blocks.0"
            _, inside, outside, stride, excited = block
            same = inside == outside and stride == 1
            x = (self.conv if same else self.layer)(x, f"{at}.token_conv", stride, inside)
            if excited:
                y = F.relu(self.conv(x.mean((2, 3), keepdim=True), f"{at}.token_squeeze_excitation.convolutions.0"))
                y = self.conv(y, f"{at}.token_squeeze_excitation.convolutions.2")
                x = x * (y / 6 + 0.5).clamp(0, 1)
            y = self.layer(F.gelu(self.layer(x, f"{at}.channel_conv1")), f"{at}.channel_conv2")
            x = x + y if same else y
            maps.append(x)
        return maps

    def excite(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = F.relu(self.conv(x.mean((2, 3), keepdim=True), f"{name}.conv1"))
        return x * (0.2 * self.conv(y, f"{name}.conv2") + 0.5).clamp(0, 1)


def detector_forward(weights: Weights, pixels: torch.Tensor) -> torch.Tensor:
    """Text probability of every pixel [batch, height, width]."""
    layers = Layers(weights)
    found = []
    for at, each in enumerate(layers.backbone(pixels.double(), "model.backbone.encoder", _DETECTOR["block_configs"])):
        y = layers.conv(each, f"model.neck.insert_conv.{at}.in_conv")
        found.append(y + layers.excite(y, f"model.neck.insert_conv.{at}.squeeze_excitation_block"))
    for at in (2, 1, 0):
        found[at] = found[at] + found[at + 1].repeat_interleave(2, 2).repeat_interleave(2, 3)
    parts = []
    for at, each in enumerate(found):
        name = f"model.neck.input_conv.{at}"
        y = layers.conv(each, f"{name}.depthwise_convolution", groups=each.shape[1])
        y = layers.conv(y, f"{name}.pointwise_convolution")
        y = y + layers.excite(y, f"{name}.squeeze_excitation_module")
        parts.append(y.repeat_interleave(2**at, 2).repeat_interleave(2**at, 3))
    x = torch.cat(parts[::-1], 1)
    x = F.relu(layers.norm(layers.conv(x, "head.conv_down.convolution"), "head.conv_down.norm"))
    up = layers.weights
    x = F.conv_transpose2d(x, up["head.conv_up.convolution.weight"], up["head.conv_up.convolution.bias"], stride=2)
    x = F.relu(layers.norm(x, "head.conv_up.norm"))
    x = F.conv_transpose2d(x, up["head.conv_final.weight"], up["head.conv_final.bias"], stride=2)
    return 1 / (1 + (-x[:, 0]).exp())


def recognizer_forward(weights: Weights, pixels: torch.Tensor) -> torch.Tensor:
    """Probability of every character at every step [batch, steps, characters]."""
    layers = Layers(weights)
    x = layers.backbone(pixels.double(), "model.backbone.encoder", _RECOGNIZER["block_configs"])[-1]
    x = F.avg_pool2d(x, (3, 2))[:, :, 0]
    x = F.hardswish(layers.norm(layers.conv(x, "head.conv1", groups=x.shape[1]), "head.norm1"))
    x = F.hardswish(layers.norm(layers.conv(x, "head.conv2"), "head.norm2")).transpose(1, 2)
    for name in ("head.fc1", "head.fc2"):
        x = x @ layers.weights[f"{name}.weight"].T + layers.weights[f"{name}.bias"]
    return x.softmax(-1)
