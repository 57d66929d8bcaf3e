"""What Tesseract reads in white noise, in noisy words and in scenes: the figures behind the reward ``ocr``.

    python -m benchmarks.ocr_readings
    python -m benchmarks.ocr_readings --pictures 40 --json build/ocr_readings.json

First table: how often a random target is read exactly in white noise, where there is none to read. Second:
the mean score of one word by each way of thresholding, and by the best of the three.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from benchmarks._measure import report
from spotlight_rewards.ocr import Thresholding, ocr, readings
from spotlight_rewards.reading.legibility import is_short, legibility, normalized

WORDS = ("ANCHOR", "BAKERY", "CANDLE", "FESTIVAL", "GUITAR", "LIGHTHOUSE", "MARKET", "WINDOW")
WAYS: tuple[Thresholding, ...] = ("otsu", "sauvola", "sauvola-inverted", "best")
KINDS = (("plain", 0), ("noise", 60), ("noise", 120), ("noise", 180), ("scene", 0), ("other", 0))
SIZES_PX = (128, 256, 512)
TARGETS = 60


def main(
    pictures: Annotated[int, typer.Option(min=1, help="Pictures per size, and per kind of picture.")] = 12,
    json: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
) -> None:
    """Print both tables."""
    rng = np.random.default_rng(0)
    report(
        json,
        f"Tesseract, {pictures} pictures",
        targets_read_in_white_noise=white_noise(pictures, rng),
        mean_score_of_a_word=[score_of(*kind, pictures, rng) for kind in KINDS],
    )


def white_noise(pictures: int, rng: np.random.Generator) -> list[dict[str, object]]:
    """Shares of targets found where there is none, by containment alone and by this reward."""
    noise = [rng.integers(0, 256, (px, px, 3), dtype=np.uint8) for px in SIZES_PX for _ in range(pictures)]
    everything = [list(readings(image)) for image in noise]
    sure = [list(readings(image, sure_only=True)) for image in noise]
    rows: list[dict[str, object]] = []
    for letters in (1, 2, 3, 4, 5):
        targets = ["".join(rng.choice(list(string.ascii_lowercase), letters)) for _ in range(TARGETS)]
        contained = [any(t in normalized(r) for r in read) for t in targets for read in everything]
        found = [
            any(legibility(t, r) == 1 for r in read)
            for t in targets
            for read in (sure if is_short(t) else everything)
        ]
        rows.append({"letters": letters, "contained": np.mean(contained), "by this reward": np.mean(found)})
    return rows


def score_of(kind: str, sigma: float, pictures: int, rng: np.random.Generator) -> dict[str, object]:
    """The mean by each way of thresholding, of one kind of picture."""
    drawn = rng.choice(WORDS, pictures)
    images = [scene(word, rng) if kind == "scene" else sign(word, sigma, rng) for word in drawn]
    asked = np.roll(WORDS, 1)[np.searchsorted(WORDS, drawn)] if kind == "other" else drawn
    prompts = [f'"{word}"' for word in asked]
    scores = {way: ocr(images, prompts, [{}] * pictures, thresholding=way)["score"] for way in WAYS}
    return {"picture": kind, "noise": sigma, **{way: np.mean(found) for way, found in scores.items()}}


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
