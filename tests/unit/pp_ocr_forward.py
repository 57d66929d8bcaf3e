"""PP-OCR's forward written out independently, on the weights of a transformers model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spotlight_rewards.reading.tiny_pp_ocr import DETECTOR_BLOCKS, RECOGNIZER_BLOCKS

Weights = dict[str, torch.Tensor]


class Layers:
    """Operations of PaddleOCR's layers on the weights of a state, in double precision."""

    def __init__(self, weights: Weights) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def conv(self, x: torch.Tensor, name: str, stride: object = 1, groups: int = 1) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        padding = tuple(side // 2 for side in weight.shape[2:])
        run = F.conv1d if weight.dim() == 3 else F.conv2d
        return run(x, weight, bias, stride=stride, padding=padding, groups=groups)

    def grow(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.conv_transpose2d(x, weight, bias, stride=2)

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
                y = F.relu(
                    self.conv(x.mean((2, 3), keepdim=True), f"{at}.token_squeeze_excitation.convolutions.0")
                )
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
    for at, each in enumerate(layers.backbone(pixels.double(), "model.backbone.encoder", DETECTOR_BLOCKS)):
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
    x = F.conv_transpose2d(
        x, up["head.conv_up.convolution.weight"], up["head.conv_up.convolution.bias"], stride=2
    )
    x = F.relu(layers.norm(x, "head.conv_up.norm"))
    x = F.conv_transpose2d(x, up["head.conv_final.weight"], up["head.conv_final.bias"], stride=2)
    return 1 / (1 + (-x[:, 0]).exp())


def recognizer_forward(weights: Weights, pixels: torch.Tensor) -> torch.Tensor:
    """Probability of every character at every step [batch, steps, characters]."""
    layers = Layers(weights)
    x = layers.backbone(pixels.double(), "model.backbone.encoder", RECOGNIZER_BLOCKS)[-1]
    x = F.avg_pool2d(x, (3, 2))[:, :, 0]
    x = F.hardswish(layers.norm(layers.conv(x, "head.conv1", groups=x.shape[1]), "head.norm1"))
    x = F.hardswish(layers.norm(layers.conv(x, "head.conv2"), "head.norm2")).transpose(1, 2)
    for name in ("head.fc1", "head.fc2"):
        x = x @ layers.weights[f"{name}.weight"].T + layers.weights[f"{name}.bias"]
    return x.softmax(-1)
