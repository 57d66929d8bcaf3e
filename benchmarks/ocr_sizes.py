"""Does ``ocr`` read large pictures as well when they are made smaller first? Figures behind its size limit.

    python -m benchmarks.ocr_sizes
    python -m benchmarks.ocr_sizes --side 1280 --pictures 60 --json build/ocr_sizes.json

Scenes with a word on a plate, letters of several heights; each is read as it is and reduced to each limit.
Per limit: mean score, paired difference to the full size with its standard error, and CPU time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from benchmarks._measure import report
from benchmarks.ocr_readings import WORDS
from spotlight_rewards import ocr as ocr_module
from spotlight_rewards.ocr import ocr, reduced

LIMITS_PX = (1024, 768)
LETTERS = (0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
"""Heights of the letters as shares of the side."""


def main(
    side: Annotated[int, typer.Option(min=256, help="Height and width of the pictures, px.")] = 1280,
    pictures: Annotated[int, typer.Option(min=2, help="Pictures per height of letters.")] = 24,
    json: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
) -> None:
    """Print one line per height of letters and limit."""
    ocr_module._READABLE_SIDE_PX = side  # the limit in question
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for share in LETTERS:
        drawn = rng.choice(WORDS, pictures)
        scenes = [large_scene(word, side, share, rng) for word in drawn]
        read = {limit: scored(scenes, drawn, limit) for limit in (side, *LIMITS_PX)}
        full, _ = read[side]
        for limit, (found, ms) in read.items():
            change = found - full
            rows.append(
                {
                    "letters_px": round(share * side),
                    "limit_px": limit,
                    "score": found.mean(),
                    "difference": change.mean(),
                    "standard_error": change.std(ddof=1) / np.sqrt(pictures),
                    "cpu_ms": ms,
                }
            )
    report(json, f"ocr, {side} px", rows=rows)


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
