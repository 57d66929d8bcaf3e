"""A transformer of every family predicts the same velocity with fused operators, and learns the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_z_image
from torch import Tensor, nn

from spotlight.models import peft_layers
from spotlight.models.condition import Condition
from spotlight.models.experts import denoisers
from spotlight.models.family import MediaSize
from spotlight.models.kernels.fused import use_fused, use_reference
from spotlight.models.peft_layers import LoraSpec
from spotlight.registry import FAMILIES
from spotlight_kernels import fuse as fusing

CPU = torch.device("cpu")
TEXT = 3
MASKED = ("hunyuan-video", "qwen-image", "z-image")
"""Families that mask what a prompt is shorter than another."""


class Predicting:
    """A tiny model of a family with adapters, where it masks on two prompts of unequal length."""

    def __init__(self, name: str, folder: Path) -> None:
        kind = FAMILIES.load(name)
        kind.tiny(folder / "pipeline", seed=0)
        self.family = kind.load(
            folder / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=folder
        )
        self.family.max_text_tokens = TEXT
        self.model = next(iter(denoisers(self.family.transformer).values()))
        if name == "wan":  # its tiny heads are 12 wide
            self.model = type(self.model).from_config({**self.model.config, "attention_head_dim": 16})  # type: ignore[attr-defined]
        layers = peft_layers.inject(
            self.model, LoraSpec(2, 4.0, self.family.lora_targets, seed=3), ["policy"]
        )
        torch.manual_seed(0)
        for layer in layers.values():
            nn.init.normal_(layer.lora_B["policy"].weight, 0, 0.5)
        side = self.family.dimensions.unit_px or self.family.dimensions.patch_px
        self.size = MediaSize(side, 2 * side, frames=1)
        rows = 2 if name in MASKED else 1
        self.latents = torch.randn(rows, *self.family.latent_shape(self.size)).requires_grad_()
        self.batch = self.family.collate([self._condition(TEXT - i) for i in range(rows)])

    def _condition(self, tokens: int) -> Condition:
        shapes = self.family.condition_shapes(tokens)
        return Condition(
            {name: torch.randn(min(shape[0], TEXT) if len(shape) > 1 else shape[0], *shape[1:])
             for name, shape in shapes.items()}
        )  # fmt: skip

    def __call__(self) -> Tensor:
        levels = torch.linspace(0.3, 0.6, len(self.latents))
        return self.family.predict(
            self.model, self.latents, levels, self.batch, self.family.embedded_guidance, self.size
        )

    def gradients(self) -> list[Tensor]:
        leaves = [self.latents, *(each for each in self.model.parameters() if each.requires_grad)]
        velocity = self()
        slope = torch.arange(velocity.numel()).view_as(velocity).cos()
        found = torch.autograd.grad(velocity, leaves, slope, allow_unused=True)  # the last block's text
        return [velocity.detach(), *(each for each in found if each is not None)]


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-2))


@pytest.mark.parametrize(
    "name", ["flux", "flux2-klein", "hunyuan-video", "qwen-image", "qwen-image-2.1", "sd3", "wan", "z-image"]
)
def test_a_model_computes_fused_what_it_does_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "distance", lambda *_: 0.0)  # test_fused_blocks.py compares
    monkeypatch.setattr(transformer_z_image, "SEQ_MULTI_OF", 2)  # tokens are slow
    predicting = Predicting(name, tmp_path)
    wanted = predicting.gradients()
    assert use_fused(predicting.model, CPU, asked=True)
    peft_layers.fuse(predicting.model)
    model: Any = predicting.model
    model.enable_gradient_checkpointing()
    found = predicting.gradients()
    assert max(map(far, found, wanted)) < 1e-5
    assert not torch.equal(found[0], wanted[0]), "other operators ran"
    with torch.no_grad():
        assert torch.equal(predicting(), found[0])
    model.disable_gradient_checkpointing()
    use_reference(model)
    assert all(map(torch.equal, predicting.gradients(), wanted))
