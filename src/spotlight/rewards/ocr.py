"""Reward for text that can be read: the prompt says which in double quotes, Tesseract reads the picture.

The target is the text between the first pair of double quotes. Target and reading are compared without
white space and in lower case: distance 0 if the target is a substring of the reading, else the
Levenshtein distance, at most len(target). Reward = 1 - distance / len(target), in [0, 1].
A picture is read in up to three ways (see ``_WAYS``), and the best reading counts.
The formula is Flow-GRPO's (``flow_grpo/ocr.py`` of https://github.com/yifan123/flow_grpo, arXiv
2505.05470), the reader is Tesseract 5 through ``tesserocr`` (its wheel brings the engine along; the
language data is a package of the operating system).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image as PILImage

from spotlight.rewards.reward import Image, RewardInputError, RewardSetupError

_READABLE_HEIGHT_PX = 128
"""Smaller pictures are enlarged to at least this. Two or three letters of 14 px on 32 x 32: read right
.80 of the time as they are, .97 at 64, .98-.99 from 128 on."""

_OTSU, _SAUVOLA = "0", "2"
_WAYS = ((_OTSU, False), (_SAUVOLA, False), (_SAUVOLA, True))
"""(Thresholding, inverted): one global threshold finds plain dark-on-light and light-on-dark text, local
ones find text in a scene, in the polarity they are given. Read right, each way alone and all together: 2
letters on 32 x 32: 1.0, .79, .70, 1.0; words on a plate in a 512 x 512 scene: .23, .53, .61, .84."""

_SYSTEM_DATA_DIRECTORIES = (
    "/usr/share/tesseract-ocr/*/tessdata",  # Debian, Ubuntu
    "/usr/share/tesseract/tessdata",  # Fedora
    "/usr/share/tessdata",  # Arch
    "/usr/local/share/tessdata",
    "/opt/homebrew/share/tessdata",
)


class _Engine(Protocol):
    """What is used of ``tesserocr.PyTessBaseAPI``."""

    def SetVariable(self, name: str, value: str) -> bool: ...  # noqa: N802

    def SetImageBytes(  # noqa: N802
        self, imagedata: bytes, width: int, height: int, bytes_per_pixel: int, bytes_per_line: int
    ) -> None: ...

    def SetSourceResolution(self, ppi: int) -> None: ...  # noqa: N802

    def GetUTF8Text(self) -> str: ...  # noqa: N802


def ocr(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    language: str = "eng",
) -> dict[str, list[float]]:
    """Score how much of each prompt's quoted text can be read in its image.

    Args:
        images: pictures [height, width, 3], uint8.
        prompts: each with its target in straight double quotes.
        metadata: not looked at.
        language: Tesseract's name of the language data, several joined by ``+`` (``eng+chi_sim``).

    Returns:
        ``score`` in [0, 1], and ``exact``: 1 where the target was read in full, else 0.

    Raises:
        RewardInputError: a prompt without quoted text.
        RewardSetupError: ``tesserocr`` or the language data is missing.
    """
    targets = [target_of(prompt) for prompt in prompts]
    scores = [_score(target, image, language) for target, image in zip(targets, images, strict=True)]
    return {"score": scores, "exact": [float(score == 1.0) for score in scores]}


def check(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, language: str = "eng") -> None:
    """Open Tesseract and find every prompt's target. Raises as :func:`ocr` does."""
    _engine(language)
    for prompt in prompts:
        target_of(prompt)


def target_of(prompt: str) -> str:
    """Return the text to draw, without white space and in lower case. Raises :class:`RewardInputError`."""
    pieces = prompt.split('"', 2)
    target = _normalized(pieces[1]) if len(pieces) == 3 else ""
    if not target:
        found = (
            "has nothing between its double quotes" if len(pieces) == 3 else "has no text in double quotes"
        )
        raise RewardInputError(
            f"ocr reward: the prompt {prompt!r} {found}; expected the text to draw in straight double "
            'quotes, as in: a shop sign that says "OPEN". Correct the prompt\'s line in the prompts file.'
        )
    return target


def legibility(target: str, reading: str) -> float:
    """1 - distance / len(target); both texts normalized, ``target`` not empty."""
    if target in reading:
        return 1.0
    return 1.0 - min(levenshtein(target, reading), len(target)) / len(target)


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]


def _score(target: str, image: Image, language: str) -> float:
    best = 0.0
    for reading in readings(image, language):
        best = max(best, legibility(target, reading))
        if best == 1.0:
            break
    return best


def readings(image: Image, language: str = "eng") -> Iterator[str]:
    """Read a picture [height, width, 3] in every way; without white space and in lower case."""
    enlarged = _enlarged(image)
    height, width, channels = enlarged.shape
    engine = _engine(language)
    for thresholding, inverted in _WAYS:
        pixels = 255 - enlarged if inverted else enlarged
        engine.SetVariable("thresholding_method", thresholding)
        engine.SetImageBytes(pixels.tobytes(), width, height, channels, width * channels)
        engine.SetSourceResolution(150)  # a picture has none; Tesseract would guess, and complain, each time
        yield _normalized(engine.GetUTF8Text())


def _enlarged(image: Image) -> Image:
    height, width, _ = image.shape
    factor = -(-_READABLE_HEIGHT_PX // height)
    if factor == 1:
        return image
    bigger = PILImage.fromarray(image).resize((width * factor, height * factor), PILImage.Resampling.BICUBIC)
    return np.asarray(bigger)


def _normalized(text: str) -> str:
    return "".join(text.split()).lower()


@lru_cache(maxsize=4)
def _engine(language: str) -> _Engine:
    """Open Tesseract: 50-200 ms, hence once per process and language."""
    try:
        import tesserocr
    except ImportError as error:
        raise RewardSetupError(
            f"ocr reward: the Python package 'tesserocr' cannot be imported ({error}). "
            "Install it: pip install 'spotlight-rl[ocr]'"
        ) from error
    directory = _data_directory(language)
    try:
        engine: _Engine = tesserocr.PyTessBaseAPI(
            path=str(directory),
            lang=language,
            psm=tesserocr.PSM.SINGLE_BLOCK,
            variables={"debug_file": os.devnull},
        )
    except RuntimeError as error:
        raise RewardSetupError(
            f"ocr reward: Tesseract does not open the language data {language!r} in {directory} ({error}). "
            f"Install it anew: {_install_command(language.split('+'))}"
        ) from error
    return engine


def _data_directory(language: str) -> Path:
    """Find the directory that holds the language data, ``TESSDATA_PREFIX`` first."""
    names = language.split("+")
    directories = list(_data_directories())
    for directory in directories:
        if all((directory / f"{name}.traineddata").is_file() for name in names):
            return directory
    files = ", ".join(f"{name}.traineddata" for name in names)
    looked = ", ".join(map(str, directories)) or "no directory of Tesseract's was found"
    raise RewardSetupError(
        f"ocr reward: Tesseract's language data {files} is missing (looked in: {looked}). "
        f"Install it: {_install_command(names)}; or let TESSDATA_PREFIX name the directory that holds it."
    )


def _data_directories() -> Iterator[Path]:
    prefix = os.environ.get("TESSDATA_PREFIX")
    if prefix:  # Tesseract 4 and 5 take the directory itself, older instructions name its parent
        yield Path(prefix)
        yield Path(prefix) / "tessdata"
        return
    yield Path(sys.prefix) / "share" / "tessdata"  # conda
    for pattern in _SYSTEM_DATA_DIRECTORIES:
        yield from sorted(Path("/").glob(pattern.removeprefix("/")), reverse=True)


def _install_command(names: Sequence[str]) -> str:
    packages = " ".join(f"tesseract-ocr-{name.replace('_', '-')}" for name in names)
    return f"sudo apt-get install {packages}"
