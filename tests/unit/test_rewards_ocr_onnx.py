"""The reward ``ocr-onnx`` with the real reader from rapidocr's wheel."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image, ImageDraw, ImageFont

from spotlight_rewards.reading.ocr_onnx import DETECTOR, RECOGNIZER, OcrOnnx, _models_folder
from spotlight_rewards.reading.onnx_reader import OnnxDetector, OnnxRecognizer
from spotlight_rewards.reading.text_lines import read_pictures
from spotlight_rewards.reward import RewardInputError, RewardSetupError
from spotlight_rewards.reward_registry import load


def sign(text: str, size: tuple[int, int] = (192, 96), px: int = 36) -> np.ndarray:
    picture = Image.new("RGB", size, (250, 240, 220))
    middle = (size[0] // 2, size[1] // 2)
    font = ImageFont.load_default(size=px)
    ImageDraw.Draw(picture).text(middle, text, fill=(30, 20, 90), font=font, anchor="mm", align="center")
    return np.asarray(picture)


WORDS = {"OPEN": (192, 96), "Kettle": (320, 128), "two\nlines": (256, 256), "zebra 42": (400, 100)}


def test_words_are_read_and_others_are_not() -> None:
    pictures = [sign(word, size) for word, size in WORDS.items()]
    asked = [f'a sign that says "{word}"' for word in WORDS]
    found = OcrOnnx()(pictures, asked, [{}] * 4)
    assert found["score"] == found["exact"] == [1.0] * 4
    assert found["lines"] == [1, 1, 2, 1]
    wrong = OcrOnnx()(pictures, asked[1:] + asked[:1], [{}] * 4)
    assert max(wrong["score"]) < 0.5
    assert wrong["exact"] == [0.0] * 4


@pytest.mark.parametrize(("size", "px"), [((64, 24), 18), ((96, 32), 22), ((512, 64), 40)])
def test_a_line_is_read_as_it_is(size: tuple[int, int], px: int) -> None:
    pictures = [sign(word, size, px) for word in ("MASK", "HORSE", "LATCH")]
    found = OcrOnnx(find=False)(pictures, ['"MASK"', '"HORSE"', '"LATCH"'], [{}] * 3)
    assert found["exact"] == [1.0] * 3
    blank = np.full((24, 64, 3), 255, np.uint8)
    assert OcrOnnx(find=False)([blank], ['"MASK"'], [{}]) == {"score": [0.0], "exact": [0.0], "lines": [0.0]}


def test_a_reading_does_not_depend_on_its_batch() -> None:
    folder = _models_folder()
    readers = OnnxDetector(folder / DETECTOR, 1, 8), OnnxRecognizer(folder / RECOGNIZER, 1, 8)
    pictures = [sign(word, size) for word, size in WORDS.items()] * 2
    together = read_pictures(*readers, pictures)
    alone = [read_pictures(*readers, [each])[0] for each in pictures]
    assert [[line.text for line in lines] for lines in together] == [
        [line.text for line in lines] for lines in alone
    ]
    for many, one in zip(together, alone, strict=True):
        assert [line.confidence for line in many] == pytest.approx(
            [line.confidence for line in one], abs=1e-3
        )


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (700, 1), (3, 3), (40, 2000)])
def test_pictures_of_any_shape_are_scored(shape: tuple[int, int]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    for find in (True, False):
        (score,) = OcrOnnx(find=find)([picture], ['"OPEN"'], [{}])["score"]
        assert 0 <= score < 1


def test_what_scored_is_named() -> None:
    reward = load("ocr-onnx", {})
    assert reward.scored_by is not None
    detector, recognizer = str(reward.scored_by()).split()
    assert detector.startswith(f"{DETECTOR}@")
    assert recognizer.startswith(f"{RECOGNIZER}@")
    assert OcrOnnx(find=False).scored_by() == recognizer


def test_what_cannot_be_read_is_refused_before_any_work() -> None:
    with pytest.raises(RewardInputError, match="ocr-onnx reward: the prompt 'a cat' has no text"):
        OcrOnnx().check(['"fine"', "a cat"], [{}] * 2)
    with pytest.raises(RewardInputError, match="Georgian characters, of which PP-OCRv6 small has none"):
        OcrOnnx().check(['"გამარჯობა"'], [{}])
    OcrOnnx().check(['"OPEN"', '"开放"'], [{}] * 2)


@pytest.mark.parametrize("params", [{"threads": 0}, {"batch_size": 0}, {"batch_size": "8"}])
def test_settings_are_checked(params: Mapping[str, Any]) -> None:
    (name,) = params
    with pytest.raises(RewardSetupError, match=rf"params\.{name} is .*; expected 1 or more"):
        OcrOnnx(**params).check([], [])


class TestFiles:
    def test_a_missing_package_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spotlight_rewards.reading.ocr_onnx.find_spec", lambda name: None)
        with pytest.raises(RewardSetupError, match=r"'rapidocr' is missing.*\[ocr-onnx\]"):
            OcrOnnx().check([], [])

    def installed_at(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        models = folder / "models"
        models.mkdir()
        spec = ModuleSpec("rapidocr", None, origin=str(folder / "__init__.py"))
        monkeypatch.setattr("spotlight_rewards.reading.ocr_onnx.find_spec", lambda name: spec)
        return models

    def test_damaged_models_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = _models_folder()
        models = self.installed_at(tmp_path, monkeypatch)
        with pytest.raises(RewardSetupError, match=f"has no {DETECTOR}"):
            OcrOnnx().check([], [])
        (models / DETECTOR).write_bytes((whole / DETECTOR).read_bytes()[:1_000_000])
        shutil.copy(whole / RECOGNIZER, models)
        with pytest.raises(RewardSetupError, match=f"{DETECTOR} cannot be loaded"):
            OcrOnnx().check([], [])
        shutil.copy(whole / DETECTOR, models / RECOGNIZER)  # a model that reads nothing
        with pytest.raises(RewardSetupError, match="lists 0 characters"):
            OcrOnnx(find=False).check([], [])

    def test_numbers_that_are_not_finite_are_a_failure_and_never_a_zero(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reward = OcrOnnx(find=False)
        reward.check([], [])
        whole = onnxruntime.InferenceSession.run
        monkeypatch.setattr(
            onnxruntime.InferenceSession, "run", lambda *args: [each * np.nan for each in whole(*args)]
        )
        with pytest.raises(ValueError, match="numbers that are not finite"):
            reward([sign("OPEN")], ['"OPEN"'], [{}])


def test_the_wheel_is_found_without_importing_it() -> None:
    assert importlib.util.find_spec("rapidocr") is not None
    assert _models_folder().is_dir()
