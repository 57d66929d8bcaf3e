"""How well and how fast the rewards for legible text read drawn words.

    python -m benchmarks.ocr_readers --json build/ocr_readers.json
    python -m benchmarks.ocr_readers --words 60 --reader ocr --reader ocr-onnx

Words of 3 to 8 letters, in several fonts, sizes, colours and pictures, plain or under noise, blur, rotation
or on a coloured scene. All readers get the same pictures, in turn; columns are the share read exactly by kind
of picture, the share in which another word of the same length was found instead (which should be 0), and CPU
milliseconds a picture, in one process.

``place known`` cuts the word's strip out of the picture and reads that alone (``find: false``); ``rapidocr``
is its own pipeline with its own settings. ``ocr-neural`` needs its weights: ``--detector``, ``--recognizer``.
"""

from __future__ import annotations

import json
import platform
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFilter, ImageFont

from spotlight_rewards.ocr import ocr
from spotlight_rewards.reading.legibility import legibility
from spotlight_rewards.reading.ocr_neural import DETECTOR, RECOGNIZER, OcrNeural
from spotlight_rewards.reading.ocr_onnx import OcrOnnx

Pixels: TypeAlias = NDArray[np.uint8]
Read: TypeAlias = Callable[[Sequence["Drawn"], Sequence[str]], Sequence[float]]

KINDS = ("plain", "noise", "blur", "rotation", "scene")
SIDES_PX = (128, 256, 512)
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSansMono.ttf",
    "LiberationSerif-Italic.ttf",
)
"""Those that the system has; Pillow's own font is always among the drawn ones."""
BATCH = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """A word in a picture [height, width, 3], and the strip that holds it."""

    word: str
    kind: str
    picture: Pixels
    strip: Pixels


def main(
    words: Annotated[int, typer.Option(min=5, help="How many to draw, equally many of each kind.")] = 500,
    reader: Annotated[list[str] | None, typer.Option(help="Only these; all by default.")] = None,
    detector: Annotated[str, typer.Option(help="Of ocr-neural.")] = DETECTOR,
    recognizer: Annotated[str, typer.Option(help="Of ocr-neural.")] = RECOGNIZER,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table there, too.")] = None,
) -> None:
    """Print the table."""
    drawn = draw_all(words, np.random.default_rng(0))
    every = made(detector, recognizer)
    if unknown := sorted(set(reader or ()) - set(every)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(every)}")
    readers = {name: every[name] for name in reader or every}
    table = compared(drawn, readers)
    print("reader".ljust(24), *(kind.rjust(9) for kind in (*KINDS, "all", "other", "CPU ms")))
    for name, row in table.items():
        cells = [f"{row[kind]:9.3f}" for kind in (*KINDS, "all", "other")]
        print(name.ljust(24), *cells, f"{row['cpu_ms']:9.1f}")
    if json_path is not None:
        packages = ("rapidocr", "onnxruntime", "tesserocr", "pillow")
        record = {
            "words": len(drawn),
            "fonts": [name for name, _ in fonts()],
            "machine": platform.processor() or platform.machine(),
            "versions": {name: version(name) for name in packages},
            "readers": table,
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def made(detector: str, recognizer: str) -> Mapping[str, Read]:
    """Every reader: scores in [0, 1] of pictures, for the words asked for."""
    onnx, strips = OcrOnnx(), OcrOnnx(find=False)
    neural = OcrNeural(detector=detector, recognizer=recognizer, device="cpu")
    return {
        "ocr": lambda drawn, asked: _score(ocr, [each.picture for each in drawn], asked),
        "ocr, otsu": lambda drawn, asked: ocr(
            [each.picture for each in drawn], _prompts(asked), [{}] * len(asked), thresholding="otsu"
        )["score"],
        "ocr-onnx": lambda drawn, asked: _score(onnx, [each.picture for each in drawn], asked),
        "ocr-onnx, place known": lambda drawn, asked: _score(strips, [each.strip for each in drawn], asked),
        "rapidocr": _rapidocr(),
        "ocr-neural": lambda drawn, asked: _score(neural, [each.picture for each in drawn], asked),
    }


def compared(drawn: Sequence[Drawn], readers: Mapping[str, Read]) -> dict[str, dict[str, float]]:
    """Rows by reader; readers take turns, batch by batch."""
    spent = dict.fromkeys(readers, 0.0)
    right: dict[str, list[float]] = {name: [] for name in readers}
    wrong: dict[str, list[float]] = {name: [] for name in readers}
    words = [each.word for each in drawn]
    others = [_another(word, words) for word in words]
    for read in readers.values():  # opened, and compiled, before the clock starts
        read(drawn[:1], words[:1])
    for start in range(0, len(drawn), BATCH):
        part = range(start, min(start + BATCH, len(drawn)))
        pictures = [drawn[index] for index in part]
        for name, read in readers.items():
            began = time.process_time()
            right[name] += read(pictures, [words[index] for index in part])
            spent[name] += time.process_time() - began
            wrong[name] += read(pictures, [others[index] for index in part])
    return {
        name: {
            **{kind: _exact(right[name], [each.kind == kind for each in drawn]) for kind in KINDS},
            "all": _exact(right[name], [True] * len(drawn)),
            "other": _exact(wrong[name], [True] * len(drawn)),
            "cpu_ms": 1000 * spent[name] / len(drawn),
        }
        for name in readers
    }


def draw_all(words: int, rng: np.random.Generator) -> list[Drawn]:
    """Equally many pictures of each kind."""
    faces = fonts()
    return [_draw(KINDS[index % len(KINDS)], faces, rng) for index in range(words)]


def fonts() -> list[tuple[str, Callable[[int], ImageFont.FreeTypeFont | ImageFont.ImageFont]]]:
    """Names, and how to open each at a size."""
    found: list[tuple[str, Callable[[int], Any]]] = [("Pillow's", lambda px: ImageFont.load_default(size=px))]
    for name in FONTS:
        try:
            ImageFont.truetype(name, 12)
        except OSError:
            continue
        found.append((name, partial(ImageFont.truetype, name)))
    return found


def _draw(kind: str, faces: Sequence[tuple[str, Callable[[int], Any]]], rng: np.random.Generator) -> Drawn:
    letters = string.ascii_uppercase if rng.random() < 0.5 else string.ascii_lowercase
    word = "".join(rng.choice(list(letters), rng.integers(3, 9)))
    side = int(rng.choice(SIDES_PX))
    _, face = faces[int(rng.integers(len(faces)))]
    font = face(int(side * rng.uniform(0.09, 0.16)))
    ink = tuple(int(each) for each in rng.integers(0, 100, 3))
    paper = tuple(int(each) for each in rng.integers(170, 256, 3))
    if rng.random() < 0.5:
        ink, paper = paper, ink
    if kind == "scene":
        colours = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        ground = PILImage.fromarray(colours).resize((side, side), PILImage.Resampling.BICUBIC)
    else:
        ground = PILImage.new("RGB", (side, side), paper)
    left, top, right, bottom = ImageDraw.Draw(ground).textbbox((0, 0), word, font=font)
    wide, tall = int(right - left), int(bottom - top)
    pad = max(2, tall // 4)
    x = int(rng.integers(pad, max(pad + 1, side - wide - pad)))
    y = int(rng.integers(pad, max(pad + 1, side - tall - pad)))
    box = (x - pad, y - pad, x + wide + pad, y + tall + pad)
    if kind == "scene":
        ImageDraw.Draw(ground).rectangle(box, fill=paper)
    ImageDraw.Draw(ground).text((x - left, y - top), word, fill=ink, font=font)
    if kind == "blur":
        ground = ground.filter(ImageFilter.GaussianBlur(tall / 14))
    if kind == "rotation":
        centre = (x + wide / 2, y + tall / 2)
        ground = ground.rotate(
            float(rng.uniform(-15, 15)), PILImage.Resampling.BICUBIC, center=centre, fillcolor=paper
        )
    pixels = np.asarray(ground)
    if kind == "noise":
        pixels = np.clip(pixels + rng.normal(0, 40, pixels.shape), 0, 255).astype(np.uint8)
    strip = pixels[max(box[1], 0) : box[3], max(box[0], 0) : box[2]]
    return Drawn(word, kind, np.ascontiguousarray(pixels), np.ascontiguousarray(strip))


def _rapidocr() -> Read:
    from rapidocr import RapidOCR

    engine: Any = None

    def read(drawn: Sequence[Drawn], asked: Sequence[str]) -> list[float]:
        nonlocal engine
        if engine is None:
            threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
            engine = RapidOCR(params={"Global.log_level": "critical", **threads})
        texts = [engine(each.picture[..., ::-1]).txts or () for each in drawn]
        return [
            legibility(word.casefold(), "\n".join(found)) for word, found in zip(asked, texts, strict=True)
        ]

    return read


def _another(word: str, words: Sequence[str]) -> str:
    same = [each for each in words if len(each) == len(word) and each.casefold() != word.casefold()]
    return same[0] if same else word[::-1] + "x"


def _prompts(asked: Sequence[str]) -> list[str]:
    return [f'"{word}"' for word in asked]


def _score(reward: Any, pictures: Sequence[Pixels], asked: Sequence[str]) -> list[float]:
    found: list[float] = reward(pictures, _prompts(asked), [{}] * len(asked))["score"]
    return found


def _exact(scores: Sequence[float], counts: Sequence[bool]) -> float:
    return float(np.mean([score == 1.0 for score, count in zip(scores, counts, strict=True) if count]))


if __name__ == "__main__":
    typer.run(main)
