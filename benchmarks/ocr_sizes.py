"""Does ``ocr`` read large pictures as well when they are made smaller first? Figures behind its size limit.

    python -m benchmarks.ocr_sizes
    python -m benchmarks.ocr_sizes --side 1280 --pictures 60

Scenes with a word on a plate, letters of several heights; each is read as it is and reduced to each limit.
Per limit: mean score, paired difference to the full size with its standard error, and CPU time.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from benchmarks.ocr_readings import WORDS
from spotlight_rewards import ocr as ocr_module
from spotlight_rewards.ocr import ocr, reduced

LIMITS_PX = (1024, 768)
LETTERS = (0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
"""Heights of the letters as shares of the side."""


def main(
    side: Annotated[int, typer.Option(min=256, help="Height and width of the pictures, px.")] = 1280,
    pictures: Annotated[int, typer.Option(min=2, help="Pictures per height of letters.")] = 24,
) -> None:
    """Print one line per height of letters and limit."""
    ocr_module._READABLE_SIDE_PX = side  # the limit in question
    rng = np.random.default_rng(0)
    print(f"{side} px; letters, limit, mean score, difference ± standard error, CPU ms")
    for share in LETTERS:
        drawn = rng.choice(WORDS, pictures)
        scenes = [large_scene(word, side, share, rng) for word in drawn]
        full, full_ms = scored(scenes, drawn, side)
        print(
            f"{share * side:5.0f} px   none  {full.mean():.3f}                   {full_ms:6.0f}", flush=True
        )
        for limit in LIMITS_PX:
            found, ms = scored(scenes, drawn, limit)
            change = found - full
            error = change.std(ddof=1) / np.sqrt(pictures)
            figures = f"{found.mean():.3f}  {change.mean():+.3f} ± {error:.3f}  {ms:6.0f}"
            print(f"{share * side:5.0f} px  {limit:5}  {figures}", flush=True)


def scored(scenes: list[np.ndarray], words: np.ndarray, limit: int) -> tuple[np.ndarray, float]:
    """Scores at a limit, and CPU milliseconds per picture, reduction included."""
    began_s = time.process_time()
    images = [reduced(scene, limit) for scene in scenes]
    found = ocr(images, [f'"{word}"' for word in words], [{}] * len(words))["score"]
    return np.array(found), 1e3 * (time.process_time() - began_s) / len(words)


def large_scene(word: str, side: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """A plate with a word, dark on light or light on dark, in a colourful scene with some noise."""
    colours = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    ground = Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC)
    ink, paper = (("black", "beige"), ("beige", "black"))[rng.integers(2)]
    font = ImageFont.load_default(size=round(share * side / 0.72))  # the share is that of capitals
    width, height = (round(size * 1.3) for size in font.getbbox(word)[2:])
    plate = Image.new("RGB", (width, height), paper)
    ImageDraw.Draw(plate).text((width / 2, height / 2), word, fill=ink, font=font, anchor="mm")
    place = int(rng.integers(0, max(1, side - width))), int(rng.integers(0, max(1, side - height)))
    ground.paste(plate, place)
    noisy = np.asarray(ground) + rng.normal(0, 12, (side, side, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    typer.run(main)
