"""Train the network of the reward ``shape-counter``: ``python -m tools.testbed.counter [OUT]``.

Scenes of random shapes, of which a half is blurred and has noise, as pictures that are being learned. Takes a
few minutes on one core; the same seed gives the same weights on the same kind of CPU.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from spotlight_rewards.shape_counter import COUNT_MAX, HEADS, WEIGHTS, WIDTHS, logits, pixels_of
from spotlight_rewards.shapes import PALETTE, SHAPES
from tools.testbed.scenes import SceneObject, render, sample_scene

STEPS, BATCH, SCENES, HIDDEN = 6000, 128, 12000, 64


def initial(seed: int) -> dict[str, Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        inputs = int(np.prod(shape[1:]))
        weights: Tensor = torch.randn(shape, generator=generator) * (2 / inputs) ** 0.5
        return weights.requires_grad_()

    found: dict[str, Tensor] = {}
    for index, (width, after) in enumerate(pairwise(WIDTHS)):
        found[f"conv{index}.weight"] = drawn(after, width, 3, 3)
        found[f"conv{index}.bias"] = torch.zeros(after, requires_grad=True)
    outputs = len(HEADS) * (COUNT_MAX + 1)
    for name, shape in (("hidden", (HIDDEN, WIDTHS[-1])), ("heads", (outputs, HIDDEN))):
        found[f"{name}.weight"] = drawn(*shape)
        found[f"{name}.bias"] = torch.zeros(shape[0], requires_grad=True)
    return found


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pixels [count, 3, 32, 32] in [0, 1], and the numbers of every head [count, heads]."""
    rng = np.random.default_rng(seed)
    pictures, numbers = [], []
    for _ in range(count):
        kinds = rng.integers(0, len(SHAPES) * len(PALETTE), rng.integers(0, 8))
        include = [
            {"class": SHAPES[kind // len(PALETTE)], "color": list(PALETTE)[kind % len(PALETTE)], "count": 1}
            for kind in kinds
        ]
        scene = sample_scene({"include": include}, rng) if include else ()
        pictures.append(render(scene))
        numbers.append([_number(scene, *head) for head in HEADS])
    return pixels_of(pictures), torch.tensor(numbers)


def _number(scene: tuple[SceneObject, ...], shape: str, color: str | None) -> int:
    return min(sum(each.shape == shape and color in (None, each.color) for each in scene), COUNT_MAX)


def worn(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A half of the pictures blurred and with noise."""
    count = len(pixels)
    strength = torch.rand(count, 1, 1, 1, generator=generator)
    blurred = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    noise = 0.12 * torch.randn(pixels.shape, generator=generator)
    half = (torch.rand(count, 1, 1, 1, generator=generator) < 0.5).float()
    return (pixels + half * strength * (blurred - pixels + noise)).clamp(0, 1)


def right(weights: dict[str, Tensor], pixels: Tensor, numbers: Tensor) -> float:
    """Share of pictures of which every number is right."""
    with torch.no_grad():
        return (logits(weights, pixels).argmax(-1) == numbers).all(1).float().mean().item()


def main(out: Path) -> None:
    """Train and write."""
    torch.set_num_threads(1)
    weights, generator = initial(0), torch.Generator().manual_seed(1)
    pixels, numbers = scenes(SCENES, 2)
    held = scenes(1000, 3)
    optimizer = torch.optim.Adam(weights.values(), lr=2e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        rows = torch.randint(SCENES, (BATCH,), generator=generator)
        found = logits(weights, worn(pixels[rows], generator))
        loss = F.cross_entropy(found.flatten(0, 1), numbers[rows].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        if step % 1000 == 999:
            print(
                f"step {step + 1}: loss {loss.item():.4f}, held out right {right(weights, *held):.3f}",
                flush=True,
            )
    save_file({name: tensor.detach().half().float() for name, tensor in weights.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else WEIGHTS)
