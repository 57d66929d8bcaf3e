"""A differentiable reward for the testbed: a small frozen network that counts shapes and their colours.

It stands for learned rewards: it can be fooled, and the exact detector (``shapes``) says when. Its weights
are made by ``python -m tools.testbed.counter``. Imports torch in the reward's own process only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spotlight_rewards.geneval.requirements import MetadataFormat, Requirements
from spotlight_rewards.reward import Curves, Gradient, Image, Reward, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.shapes import PALETTE, SHAPES

if TYPE_CHECKING:
    import torch

COUNT_MAX = 6
"""So many, or more."""
HEADS = (*((shape, None) for shape in SHAPES), *((shape, color) for shape in SHAPES for color in PALETTE))
"""What is counted: each shape, and each shape of each colour."""
WIDTHS = (3, 16, 32, 48)
WEIGHTS = Path(__file__).with_name("shape_counter.safetensors")
_FORMAT = MetadataFormat("shape-counter", SHAPES, PALETTE, COUNT_MAX)


@best_with(batch_size=64)
@dataclass(frozen=True, kw_only=True)
class ShapeCounter(Reward):
    """Score how sure a small network is that a picture has the shapes of GenEval's metadata, so many of each.

    ``score`` is the mean log-probability, at most 0, of the number of each shape, and of each shape of a
    colour that is asked for; where they are is not looked at.
    """

    facts: ClassVar = RewardFacts(
        runs_on="CPU", typical=(-3, 0), reads=Reads.METADATA, weights=("built in",), licence="Apache-2.0",
        example=Example("shapes", score=(-1.5, 0), prompt="a red circle and a blue square", metadata={
            "tag": "two_object",
            "include": [{"class": "circle", "color": "red", "count": 1},
                        {"class": "square", "color": "blue", "count": 1}],
        }),
    )  # fmt: skip

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """By the names of :func:`logits`."""
        from safetensors.torch import load_file

        return load_file(WEIGHTS)

    def scored_by(self) -> str:
        from spotlight_rewards.models.pretrained_model import tensors_digest

        return f"shape-counter@{tensors_digest(dict(self.weights))}"

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        for prompt, record in zip(prompts, metadata, strict=True):
            _FORMAT.parse(prompt, record)

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        import torch

        with torch.no_grad():
            found = self._scores(pixels_of(images), prompts, metadata)
        return {"score": found.tolist()}

    def gradient(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Gradient]:
        import torch

        pixels = pixels_of(images).requires_grad_()
        (found,) = torch.autograd.grad(self._scores(pixels, prompts, metadata).sum(), pixels)
        return list(found.permute(0, 2, 3, 1).numpy())

    def _scores(
        self, pixels: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """[pictures], of pixels [pictures, 3, height, width] in [0, 1]."""
        import torch

        chances = logits(self.weights, pixels).log_softmax(-1)
        rows = []
        for row, prompt, record in zip(chances, prompts, metadata, strict=True):
            wanted = counts_of(_FORMAT.parse(prompt, record))
            rows.append(torch.stack([row[head, count] for head, count in wanted.items()]).mean())
        return torch.stack(rows)


def logits(weights: Mapping[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """[pictures, heads, ``COUNT_MAX`` + 1] of pixels [pictures, 3, height, width] in [0, 1]."""
    import torch.nn.functional as F

    found = 1 - pixels  # white is nothing
    for index in range(len(WIDTHS) - 1):
        stride = 1 if index == 0 else 2
        found = F.conv2d(found, weights[f"conv{index}.weight"], weights[f"conv{index}.bias"], stride, 1)
        found = F.silu(found)
    # A sum, as the number of objects grows with the area they take.
    pooled = found.sum((2, 3)) / 16
    hidden = F.silu(F.linear(pooled, weights["hidden.weight"], weights["hidden.bias"]))
    heads = F.linear(hidden, weights["heads.weight"], weights["heads.bias"])
    return heads.view(len(pixels), len(HEADS), COUNT_MAX + 1)


def counts_of(wanted: Requirements) -> dict[int, int]:
    """By head, how many there should be."""
    found = dict.fromkeys(range(len(SHAPES)), 0)
    for need in wanted.include:
        found[HEADS.index((need.name, None))] += need.count
        if need.color is not None:
            head = HEADS.index((need.name, need.color))
            found[head] = found.get(head, 0) + need.count
    return {head: min(count, COUNT_MAX) for head, count in found.items()}


def pixels_of(images: Sequence[Image]) -> torch.Tensor:
    """[pictures, 3, height, width] float32 in [0, 1]."""
    import torch

    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
