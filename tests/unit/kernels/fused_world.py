"""Tiny models with fused operators, or with diffusers': interpreted, a token costs milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tests.invariant.learner_world import World
from torch import Tensor, nn

from spotlight.models import peft_layers
from spotlight.models.condition import Condition
from spotlight.models.experts import denoisers
from spotlight.models.family import Guidance, MediaSize, ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.shared.quantised import Quantize
from spotlight.models.slots import LoraSlots, Slot
from spotlight.registry import FAMILIES
from spotlight_kernels.fuse import fuse

CPU = torch.device("cpu")
TEXT = 3
MASKED = ("hunyuan-video", "hunyuan-video-1.5", "krea-2", "qwen-image", "z-image")
"""Families that mask what a prompt is shorter than another."""


def fuse_blocks(family: ModelFamily) -> None:
    """Before adapters are injected; without comparing, which ``test_fused_blocks.py`` does."""
    assert fuse(family.transformer, CPU, compare=False).left == {}


class FusedWorld(World):
    """The tiny Qwen-Image at two tokens a picture, and up to two a text; ``fresh`` ones are fused."""

    def __init__(self, pipeline: Path, cache: Path, *, fused: bool = True) -> None:
        super().__init__(pipeline, cache)
        self.size, self.fused = MediaSize(4, 8), fused
        self.conditions = [
            Condition({name: tensor[: 1 + i % 2] for name, tensor in each.tensors.items()})
            for i, each in enumerate(self.conditions)
        ]
        self.negative = self.conditions[0]

    def fresh(self, dtype: torch.dtype = torch.float32) -> ModelFamily:
        family = super().fresh(dtype)
        if self.fused:
            fuse_blocks(family)
        return family


class Predicting:
    """A tiny model of a family with adapters, where it masks on two prompts of unequal length."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        fused: bool = False,
        dtype: torch.dtype = torch.float32,
        extra: tuple[Slot, ...] = (),
        text: int = TEXT,
        quantize: Quantize = "none",
    ) -> None:
        kind = FAMILIES.load(name)
        if not (folder / "pipeline").exists():
            kind.tiny(folder / "pipeline", seed=0)
        self.family = kind.load(
            folder / "pipeline", device="cpu", dtype=dtype, embeddings_cache=folder, quantize=quantize
        )
        self.family.max_text_tokens = text
        if name == "wan":  # its tiny heads are 12 wide
            model: Any = self.family.transformer
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                wide = type(model).from_config({**model.config, "attention_head_dim": 16})
            self.family.transformer = _typed_as(wide, model)
        if fused:
            fuse_blocks(self.family)
        compute = None if dtype == torch.float32 else dtype
        spec = LoraSpec(2, 4.0, self.family.lora_targets, seed=3)
        self.slots = LoraSlots(self.family.transformer, spec, extra, compute=compute)
        if fused:
            peft_layers.fuse(self.family.transformer)
        self.model = next(iter(denoisers(self.family.transformer).values()))
        for i, slot in enumerate(("policy", *extra)):
            self.slots.load_state(slot, self.weights(i))
        torch.manual_seed(0)
        side = self.family.dimensions.unit_px or self.family.dimensions.patch_px
        self.size = MediaSize(side, 2 * side, frames=1)
        rows = 2 if name in MASKED else 1
        self.latents = torch.randn(rows, *self.family.latent_shape(self.size)).requires_grad_()
        self.conditions = [self._condition(text - i) for i in range(rows)]

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Of an adapter that does something."""
        generator = torch.Generator().manual_seed(seed)
        state = self.slots.state("policy")
        drawn = {
            n: 0.5 * torch.randn(t.shape, generator=generator) for n, t in state.items() if "lora_B" in n
        }
        return {name: tensor.clone() for name, tensor in state.items()} | drawn

    def _condition(self, tokens: int) -> Condition:
        shapes = self.family.condition_shapes(tokens)
        return Condition(
            {name: torch.randn(min(shape[0], tokens) if len(shape) > 1 else shape[0], *shape[1:])
             for name, shape in shapes.items()}
        )  # fmt: skip

    def __call__(self, rows: slice = slice(None)) -> Tensor:
        levels = torch.linspace(0.3, 0.6, len(self.latents))[rows]
        guidance = Guidance(1.0, None, self.family.embedded_guidance)
        batch = self.family.collate(self.conditions[rows])
        return self.family.velocity(self.model, self.latents[rows], levels, batch, guidance, self.size)

    def gradients(self, rows: slice = slice(None)) -> list[Tensor]:
        """The velocity, and gradients of latents and adapters."""
        leaves = [self.latents, *(each for each in self.model.parameters() if each.requires_grad)]
        velocity = self(rows)
        slope = torch.arange(velocity.numel()).view_as(velocity).cos()
        found = torch.autograd.grad(velocity, leaves, slope, allow_unused=True)  # the last block's text
        return [velocity.detach(), *(each for each in found if each is not None)]

    def exact_gradients(self) -> list[Tensor]:
        """The same in float64: float32 rounds, whichever operators compute it."""
        exact = copy.copy(self)
        exact.family = copy.copy(self.family)
        exact.family.dtype = torch.float64
        exact.model = copy.deepcopy(self.model).double()
        exact.latents = self.latents.detach().double().requires_grad_()
        exact.conditions = [
            Condition({name: tensor.double() for name, tensor in each.tensors.items()})
            for each in self.conditions
        ]
        return exact.gradients()


def _typed_as(model: nn.Module, other: nn.Module) -> nn.Module:
    """Some weights stay float32 where others do not."""
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.data = one.data.to(two.dtype)
    return model


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-2))
