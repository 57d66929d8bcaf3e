"""Train the network of the reward ``shape-counter``: ``python -m tools.testbed.counter [OUT]``.

Three kinds of pictures in equal parts, of which a half is blurred and has noise: scenes of random shapes;
scenes whose objects are pale, overlap or run into each other; and what the testbed draws in four and in ten
steps. Numbers are what the exact detector counts there, so the network learns what does not count. Takes
seven CPU minutes on one core; the same seed gives the same weights on the same kind of CPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import QwenImagePipeline
from safetensors.torch import save_file
from torch import Tensor

from spotlight.testbed import PIPELINE_DIR
from spotlight_rewards.reward import Image
from spotlight_rewards.shape_counter import COUNT_MAX, HEADS, WEIGHTS, WIDTHS, logits, pixels_of
from spotlight_rewards.shapes import PALETTE, SHAPES, coverage, detect
from tools.testbed.prompts import split
from tools.testbed.scenes import IMAGE_SIDE_PX, render, sample_scene
from tools.testbed.scores import ScoreRecipe, generate

STEPS, BATCH, PICTURES, HIDDEN = 5000, 128, 6000, 64
DRAWN_IN = (4, 4, 10)
"""Denoising steps of equal parts of the testbed's pictures."""
HELD_OUT = 600


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


def tidy(count: int, seed: int) -> list[Image]:
    """Scenes as the testbed was trained on them, of any shapes and colours."""
    rng, pictures = np.random.default_rng(seed), []
    for _ in range(count):
        kinds = rng.integers(0, len(SHAPES) * len(PALETTE), rng.integers(0, 8))
        include = [
            {"class": SHAPES[kind // len(PALETTE)], "color": list(PALETTE)[kind % len(PALETTE)], "count": 1}
            for kind in kinds
        ]
        pictures.append(render(sample_scene({"include": include}, rng) if include else ()))
    return pictures


def untidy(count: int, seed: int) -> list[Image]:
    """Objects of any place, size and proportions, some pale, some in two colours."""
    rng, pictures = np.random.default_rng(seed), []
    colors = np.array(list(PALETTE.values()), dtype=np.float64)
    for _ in range(count):
        canvas = np.full((IMAGE_SIDE_PX, IMAGE_SIDE_PX, 3), 255.0)
        for _ in range(rng.integers(1, 9)):
            height, width = rng.integers(5, 12, 2) if rng.random() < 0.5 else [rng.integers(7, 11)] * 2
            top, left = (
                rng.integers(0, IMAGE_SIDE_PX - height + 1),
                rng.integers(0, IMAGE_SIDE_PX - width + 1),
            )
            mask = coverage(str(rng.choice(SHAPES)), int(width), int(height))[..., None]
            alpha = mask * (rng.uniform(0.1, 1) if rng.random() < 0.5 else 1)
            color = colors[rng.integers(len(colors))]
            if rng.random() < 0.2:
                color = color + rng.uniform(0, 1) * (colors[rng.integers(len(colors))] - color)
            box = canvas[top : top + height, left : left + width]
            box[:] = (1 - alpha) * box + alpha * color
        pictures.append(np.rint(canvas).astype(np.uint8))
    return pictures


def drawn(count: int, seed: int) -> list[Image]:
    """The testbed's, of its prompts for training."""
    train, _ = split()
    rng, pipeline = np.random.default_rng(seed), QwenImagePipeline.from_pretrained(PIPELINE_DIR)
    prompts = [
        str(record["prompt"])
        for record in train
        if record["tag"] in ("counting", "two_object", "single_object")
    ]
    pictures: list[Image] = []
    for part, steps in enumerate(DRAWN_IN):
        chosen = [prompts[at] for at in rng.integers(0, len(prompts), count // len(DRAWN_IN))]
        pictures += list(generate(pipeline, chosen, ScoreRecipe(steps=steps), seed + part))
    return pictures


def numbers_of(pictures: Sequence[Image]) -> Tensor:
    """What the detector counts, of every head: [pictures, heads]."""
    rows = []
    for picture in pictures:
        found = detect(picture)
        kinds = Counter(each.shape for each in found) + Counter((each.shape, each.color) for each in found)
        rows.append(
            [min(kinds[shape if color is None else (shape, color)], COUNT_MAX) for shape, color in HEADS]
        )
    return torch.tensor(rows)


def worn(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A half of the pictures slightly blurred and with noise."""
    count = len(pixels)
    strength = 0.5 * torch.rand(count, 1, 1, 1, generator=generator)
    blurred = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    noise = 0.12 * torch.randn(pixels.shape, generator=generator)
    half = (torch.rand(count, 1, 1, 1, generator=generator) < 0.5).float()
    return (pixels + half * strength * (blurred - pixels + noise)).clamp(0, 1)


def right(weights: dict[str, Tensor], pixels: Tensor, numbers: Tensor) -> float:
    """Share of numbers that are right."""
    with torch.no_grad():
        return (logits(weights, pixels).argmax(-1) == numbers).all(1).float().mean().item()


def main(out: Path) -> None:
    """Train and write."""
    torch.set_num_threads(1)
    weights, generator = initial(0), torch.Generator().manual_seed(1)
    makers = (tidy, untidy, drawn)
    pictures = [each for maker in makers for each in maker(PICTURES, 2)]
    pixels, numbers = pixels_of(pictures), numbers_of(pictures)
    held = {
        maker.__name__: (pixels_of(some), numbers_of(some))
        for maker in makers
        for some in [maker(HELD_OUT, 9)]
    }
    optimizer = torch.optim.Adam(weights.values(), lr=2e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        rows = torch.randint(len(pixels), (BATCH,), generator=generator)
        found = logits(weights, worn(pixels[rows], generator))
        loss = F.cross_entropy(found.flatten(0, 1), numbers[rows].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        rates.step()
        if step % 500 == 499:
            shown = ", ".join(f"{name} {right(weights, *some):.3f}" for name, some in held.items())
            print(f"step {step + 1}: loss {loss.item():.4f}, all numbers right: {shown}", flush=True)
    save_file({name: tensor.detach().half().float() for name, tensor in weights.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else WEIGHTS)
