"""Reward for legible text: Tesseract reads the image, the prompt quotes the target.

Target and formula are in ``reading/legibility.py``. By default the best of up to three readings counts. Of
targets of one to three letters only confident words count.

Needs Tesseract 5 through ``tesserocr``: the wheel includes the engine, but not the language data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from PIL import Image as PILImage

from spotlight_rewards.reading.legibility import (
    KnownCharacters,
    is_short,
    legibility,
    missing_scripts,
    target_of,
)
from spotlight_rewards.reading.tesseract_data import readable_characters
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.reward_registry import require_package

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=("Tesseract's eng.traineddata",),
    licence="Apache-2.0",
    example=Example("sign", score=(1, 1), prompt='a sign that says "OPEN"', wrong_prompt='a sign: "JAZZ"'),
)

Thresholding = Literal["best", "otsu", "sauvola", "sauvola-inverted"]

_READABLE_HEIGHT_PX = 128
"""Smaller images are enlarged to at least this height. Accuracy on two or three 14 px letters in a 32 x 32
image: .80 as is, .97 at 64 px, .98-.99 from 128 px on.
"""

_READABLE_SIDE_PX = 768
"""Larger pictures are reduced to it. Words in 1280 x 1280 scenes (``benchmarks.ocr_sizes``): letters of 13 to
38 px read the same, in a third of the time; larger ones read better (128 px: .13 as is, 1.0 reduced).
"""

_WAYS: Mapping[Thresholding, tuple[str, bool]] = {
    "otsu": ("0", False),
    "sauvola": ("2", False),
    "sauvola-inverted": ("2", True),
}
"""Tesseract's number, and whether the picture is inverted. Global thresholding (Otsu) suits plain text of
either polarity, local thresholding (Sauvola) text in a scene, in one polarity. Mean scores of each alone and
of the best (``benchmarks/ocr_readings.py``): a word on a plate in a scene .33, 1.0, .92, 1.0; a word under
noise (sigma 120 of 255) .42, 0, .37, .69; another word than the target .03, .03, 0, .03.
"""

_SURE_MIN_PERCENT = 60.0
"""Confidence of the words that count for a short target; the highest in white noise was 58."""

_LANGUAGES = {
    "Arabic": "ara", "Cjk": "chi_sim", "Cyrillic": "rus", "Devanagari": "hin", "Greek": "ell",
    "Hangul": "kor", "Hebrew": "heb", "Hiragana": "jpn", "Katakana": "jpn", "Latin": "eng", "Thai": "tha",
}  # fmt: skip
"""Language data by script, for remedies."""

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

    def GetTSVText(self, page_number: int) -> str: ...  # noqa: N802

    def GetLoadedLanguages(self) -> list[str]: ...  # noqa: N802


@best_with(batch_size=4, cores_per_process=2)
def ocr(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    language: str = "eng",
    thresholding: Thresholding = "best",
) -> dict[str, list[float]]:
    """Score how much of each prompt's quoted text can be read in its image.

    Args:
        images: uint8 [height, width, 3].
        prompts: each with its target in straight double quotes.
        metadata: ignored.
        language: Tesseract's language data, several joined by ``+`` (``eng+chi_sim``).
        thresholding: how ink is told from ground; ``best``: the best score of all three ways.

    Returns:
        ``score`` in [0, 1], and ``exact``: 1 if the target was read in full, else 0.

    Raises:
        RewardInputError: a prompt without quoted text, or whose text the language data cannot read.
        RewardSetupError: ``tesserocr`` or the language data is missing, or an unknown ``thresholding``.
    """
    targets = [_target(prompt, language) for prompt in prompts]
    ways = _ways(thresholding)
    scores = [_score(target, image, language, ways) for target, image in zip(targets, images, strict=True)]
    return {"score": scores, "exact": [float(score == 1.0) for score in scores]}


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    language: str = "eng",
    thresholding: Thresholding = "best",
) -> None:
    """Open Tesseract and parse every prompt's target. Raises as :func:`ocr` does."""
    _ways(thresholding)
    _engine(language)
    for prompt in prompts:
        _target(prompt, language)


def readings(
    image: Image,
    language: str = "eng",
    ways: Sequence[Thresholding] = tuple(_WAYS),
    *,
    sure_only: bool = False,
) -> Iterator[str]:
    """Yield one reading of the image [height, width, 3] per way of thresholding, as read.

    Args:
        sure_only: leave out words of which Tesseract is less than 60 % sure.
    """
    enlarged = _enlarged(reduced(image, _READABLE_SIDE_PX))
    height, width, channels = enlarged.shape
    engine = _engine(language)
    for way in ways:
        number, inverted = _WAYS[way]
        pixels = 255 - enlarged if inverted else enlarged
        engine.SetVariable("thresholding_method", number)
        engine.SetImageBytes(pixels.tobytes(), width, height, channels, width * channels)
        engine.SetSourceResolution(150)  # images have none: Tesseract would guess and warn each time
        yield " ".join(_sure_words(engine.GetTSVText(0))) if sure_only else engine.GetUTF8Text()


def _sure_words(table: str) -> Iterator[str]:
    for line in table.splitlines():
        *_, confidence, word = line.split("\t")
        if float(confidence) >= _SURE_MIN_PERCENT:
            yield word


def _target(prompt: str, language: str) -> str:
    target = target_of(prompt)
    lacking = missing_scripts(target, _characters(language))
    if lacking:
        others = list(dict.fromkeys(_LANGUAGES[script] for script in lacking if script in _LANGUAGES))
        remedy = "Name language data that has them in params.language, or remove the prompt."
        if others:
            wider = "+".join([language, *others])
            remedy = f"Set params.language: {wider} ({_install_command(others)}), or remove the prompt."
        raise RewardInputError(
            f"ocr reward: the prompt {prompt!r} asks for {' and '.join(lacking)} characters, of which "
            f"Tesseract's language data {language!r} has none: the score could only be 0. {remedy}"
        )
    return target


def _ways(thresholding: Thresholding) -> Sequence[Thresholding]:
    if thresholding not in get_args(Thresholding):
        raise RewardSetupError(
            f"ocr reward: params.thresholding is {thresholding!r}; expected one of "
            f"{', '.join(get_args(Thresholding))}."
        )
    return tuple(_WAYS) if thresholding == "best" else (thresholding,)


def _score(target: str, image: Image, language: str, ways: Sequence[Thresholding]) -> float:
    best = 0.0
    for reading in readings(image, language, ways, sure_only=is_short(target)):
        best = max(best, legibility(target, reading))
        if best == 1.0:
            break
    return best


@lru_cache(maxsize=4)
def _characters(language: str) -> KnownCharacters:
    directory = _data_directory(language)
    names = _engine(language).GetLoadedLanguages()  # also those that the named ones load
    return KnownCharacters.of(
        each for name in names for each in readable_characters(directory / f"{name}.traineddata")
    )


def reduced(image: Image, side_px: int) -> Image:
    """The image with its longer side at most ``side_px``."""
    height, width, _ = image.shape
    if (longer := max(height, width)) <= side_px:
        return image
    size = max(1, round(width * side_px / longer)), max(1, round(height * side_px / longer))
    return np.asarray(PILImage.fromarray(image).resize(size, PILImage.Resampling.LANCZOS))


def _enlarged(image: Image) -> Image:
    height, width, _ = image.shape
    factor = -(-_READABLE_HEIGHT_PX // height)
    if factor == 1:
        return image
    bigger = PILImage.fromarray(image).resize((width * factor, height * factor), PILImage.Resampling.BICUBIC)
    return np.asarray(bigger)


@lru_cache(maxsize=4)  # opening takes 50-200 ms
def _engine(language: str) -> _Engine:
    # Read when its library is loaded: threads of one picture cost more than they gain, processes scale.
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")
    require_package("ocr", "tesserocr", "ocr")
    import tesserocr

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
