"""Reward for legible text: Tesseract reads the image, the prompt quotes the target.

The target is the text between the first pair of double quotes; case and white space are ignored. Reward =
1 - distance / len(target), in [0, 1], with distance 0 if the reading contains the target, else Levenshtein's,
at most len(target). The best of up to three readings (``_WAYS``) counts.

Formula: Flow-GRPO (``flow_grpo/ocr.py`` of https://github.com/yifan123/flow_grpo, arXiv 2505.05470).
Needs Tesseract 5 through ``tesserocr``: the wheel includes the engine, but not the language data.
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
"""Smaller images are enlarged to at least this height. Accuracy on two or three 14 px letters in a 32 x 32
image: .80 as is, .97 at 64 px, .98-.99 from 128 px on.
"""

_OTSU, _SAUVOLA = "0", "2"
_WAYS = ((_OTSU, False), (_SAUVOLA, False), (_SAUVOLA, True))
"""(Thresholding, inverted). Global thresholding suits plain text of either polarity, local thresholding text
in a scene, in one polarity. Accuracy of each alone and of all: 2 letters on 32 x 32: 1.0, .79, .70, 1.0;
words on a plate in a 512 x 512 scene: .23, .53, .61, .84.
"""

_SYSTEM_DATA_DIRECTORIES = (
    "/usr/share/tesseract-ocr/*/tessdata",  # Debian, Ubuntu
    "/usr/share/tesseract/tessdata",  # Fedora
    "/usr/share/tessdata",  # Arch
    "/usr/local/share/tessdata",
    "/opt/homebrew/share/tessdata",
)


class _Engine(Protocol):
    """The part of ``tesserocr.PyTessBaseAPI`` used here."""

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
        images: uint8 [height, width, 3].
        prompts: each with its target in straight double quotes.
        metadata: ignored.
        language: Tesseract's language data, several joined by ``+`` (``eng+chi_sim``).

    Returns:
        ``score`` in [0, 1], and ``exact``: 1 if the target was read in full, else 0.

    Raises:
        RewardInputError: a prompt without quoted text.
        RewardSetupError: ``tesserocr`` or the language data is missing.
    """
    targets = [target_of(prompt) for prompt in prompts]
    scores = [_score(target, image, language) for target, image in zip(targets, images, strict=True)]
    return {"score": scores, "exact": [float(score == 1.0) for score in scores]}


def check(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, language: str = "eng") -> None:
    """Open Tesseract and parse every prompt's target. Raises as :func:`ocr` does."""
    _engine(language)
    for prompt in prompts:
        target_of(prompt)


def target_of(prompt: str) -> str:
    """The text to draw, in lower case without white space. Raises :class:`RewardInputError`."""
    pieces = prompt.split('"', 2)
    target = normalized(pieces[1]) if len(pieces) == 3 else ""
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
    """Minimum number of insertions, deletions and substitutions that turn ``a`` into ``b``."""
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
    """Yield one reading of the image [height, width, 3] per entry of ``_WAYS``, normalized."""
    enlarged = _enlarged(image)
    height, width, channels = enlarged.shape
    engine = _engine(language)
    for thresholding, inverted in _WAYS:
        pixels = 255 - enlarged if inverted else enlarged
        engine.SetVariable("thresholding_method", thresholding)
        engine.SetImageBytes(pixels.tobytes(), width, height, channels, width * channels)
        engine.SetSourceResolution(150)  # images have none: Tesseract would guess and warn each time
        yield normalized(engine.GetUTF8Text())


def _enlarged(image: Image) -> Image:
    height, width, _ = image.shape
    factor = -(-_READABLE_HEIGHT_PX // height)
    if factor == 1:
        return image
    bigger = PILImage.fromarray(image).resize((width * factor, height * factor), PILImage.Resampling.BICUBIC)
    return np.asarray(bigger)


def normalized(text: str) -> str:
    """Lower case without white space."""
    return "".join(text.split()).lower()


@lru_cache(maxsize=4)  # opening takes 50-200 ms
def _engine(language: str) -> _Engine:
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
            f"Install it again: {_install_command(language.split('+'))}"
        ) from error
    return engine


def _data_directory(language: str) -> Path:
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
    if prefix:  # Tesseract 4 and 5 expect the directory itself; older instructions name its parent
        yield Path(prefix)
        yield Path(prefix) / "tessdata"
        return
    yield Path(sys.prefix) / "share" / "tessdata"  # conda
    for pattern in _SYSTEM_DATA_DIRECTORIES:
        yield from sorted(Path("/").glob(pattern.removeprefix("/")), reverse=True)


def _install_command(names: Sequence[str]) -> str:
    packages = " ".join(f"tesseract-ocr-{name.replace('_', '-')}" for name in names)
    return f"sudo apt-get install {packages}"
