"""What Tesseract reads in white noise, in noisy words and in scenes: the figures behind the reward ``ocr``.

    python -m benchmarks.ocr_readings
    python -m benchmarks.ocr_readings --pictures 40

First table: how often a random target is read exactly in white noise, where there is none to read. Second:
the mean score of one word by each way of thresholding, and by the best of the three.
"""

from __future__ import annotations

import string
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from spotlight_rewards.ocr import Thresholding, ocr, readings
from spotlight_rewards.reading.legibility import is_short, legibility, normalized

WORDS = ("ANCHOR", "BAKERY", "CANDLE", "FESTIVAL", "GUITAR", "LIGHTHOUSE", "MARKET", "WINDOW")
WAYS: tuple[Thresholding, ...] = ("otsu", "sauvola", "sauvola-inverted", "best")
KINDS = (("plain", 0), ("noise", 60), ("noise", 120), ("noise", 180), ("scene", 0), ("other", 0))
SIZES_PX = (128, 256, 512)
TARGETS = 60


def main(
    pictures: Annotated[int, typer.Option(min=1, help="Pictures per size, and per kind of picture.")] = 12,
) -> None:
    """Print both tables."""
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (px, px, 3), dtype=np.uint8) for px in SIZES_PX for _ in range(pictures)]
    everything = [list(readings(image)) for image in noise]
    sure = [list(readings(image, sure_only=True)) for image in noise]
    print("White noise: letters of the target, read exactly by containment alone, by this reward")
    for letters in (1, 2, 3, 4, 5):
        targets = ["".join(rng.choice(list(string.ascii_lowercase), letters)) for _ in range(TARGETS)]
        contained = [any(t in normalized(r) for r in read) for t in targets for read in everything]
        found = [
            any(legibility(t, r) == 1 for r in read)
            for t in targets
            for read in (sure if is_short(t) else everything)
        ]
        print(f"{letters}  {np.mean(contained):.4f}  {np.mean(found):.4f}")
    print("Mean score of a word: " + ", ".join(WAYS))
    for kind, sigma in (
        ("plain", 0),
        ("noise", 60),
        ("noise", 120),
        ("noise", 180),
        ("scene", 0),
        ("other", 0),
    ):
        drawn = rng.choice(WORDS, pictures)
        images = [scene(word, rng) if kind == "scene" else sign(word, sigma, rng) for word in drawn]
        asked = np.roll(WORDS, 1)[np.searchsorted(WORDS, drawn)] if kind == "other" else drawn
        prompts = [f'"{word}"' for word in asked]
        means = [np.mean(ocr(images, prompts, [{}] * pictures, thresholding=way)["score"]) for way in WAYS]
        print(f"{kind} {sigma or ''}".ljust(10), "  ".join(f"{mean:.2f}" for mean in means), flush=True)


def sign(word: str, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """A word in black on white, 128 x 256, under Gaussian noise."""
    picture = Image.new("RGB", (256, 128), "white")
    font = ImageFont.load_default(size=36)
    ImageDraw.Draw(picture).text((128, 64), word, fill="black", font=font, anchor="mm")
    return np.clip(np.asarray(picture) + rng.normal(0, sigma, (128, 256, 3)), 0, 255).astype(np.uint8)


def scene(word: str, rng: np.random.Generator) -> np.ndarray:
    """A plate with a word, dark on light or light on dark, in a colourful scene of 512 x 512."""
    colours = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    ground = Image.fromarray(colours).resize((512, 512), Image.Resampling.BICUBIC)
    ink, paper = (("black", "beige"), ("beige", "black"))[rng.integers(2)]
    plate = Image.new("RGB", (360, 90), paper)
    font = ImageFont.load_default(size=50)
    ImageDraw.Draw(plate).text((180, 45), word, fill=ink, font=font, anchor="mm")
    ground.paste(plate, (int(rng.integers(0, 152)), int(rng.integers(0, 422))))
    return np.asarray(ground)


if __name__ == "__main__":
    typer.run(main)
