"""The reward ``ocr-neural`` on real model classes: forward, boxes, strips, reading, and every way to fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from safetensors.torch import load_file, save_file
from tests.unit.pp_ocr_forward import detector_forward, recognizer_forward

from spotlight_rewards.models import pretrained_model
from spotlight_rewards.reading.ocr_neural import OcrNeural
from spotlight_rewards.reading.pp_ocr import TextDetector, TextRecognizer, read_settings
from spotlight_rewards.reading.text_boxes import cut_out, find_boxes
from spotlight_rewards.reading.text_lines import read_pictures
from spotlight_rewards.reading.tiny_pp_ocr import CHARACTERS, save_tiny_recognizer
from spotlight_rewards.reward import RewardInputError, RewardSetupError
from spotlight_rewards.reward_registry import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return OcrNeural().tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def readers(models: dict[str, str]) -> tuple[TextDetector, TextRecognizer]:
    return TextDetector(models["detector"], CPU, 2), TextRecognizer(models["recognizer"], CPU, 3)


def pictures(count: int, *sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [
        np.array(PILImage.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height)))
        for height, width in sizes or [(128, 192)] * count
    ]


def weights_of(source: str) -> dict[str, torch.Tensor]:
    return load_file(Path(source) / "model.safetensors")


def test_both_models_equal_an_independent_forward(
    models: dict[str, str],
    readers: tuple[TextDetector, TextRecognizer],
    record_property: Callable[[str, float], None],
) -> None:
    detector, recognizer = readers
    images = pictures(2)
    pixels = torch.stack([detector.prepare(image) for image in images])
    expected = detector_forward(weights_of(models["detector"]), pixels).numpy()
    difference = float(np.abs(np.stack(detector.maps(images)) - expected).max())
    record_property("ocr-neural/difference", difference)
    assert difference < 1e-4
    strips = torch.stack([recognizer.prepare(image[:40]) for image in images])
    probabilities = recognizer_forward(weights_of(models["recognizer"]), strips)
    lines = recognizer.read([image[:40] for image in images])
    for line, each in zip(lines, probabilities, strict=True):
        best, index = each.max(-1)
        kept = [at for at in range(len(index)) if index[at] and (not at or index[at] != index[at - 1])]
        assert line.text == "".join(CHARACTERS[int(index[at])] for at in kept)
        confidence = float(best[kept].mean())
        record_property("ocr-neural/difference", abs(line.confidence - confidence))
        assert line.confidence == pytest.approx(confidence, abs=1e-4)


@pytest.mark.parametrize("angle", [0, 12, -20])
def test_a_box_of_the_map_becomes_its_grown_box_in_the_picture(angle: float) -> None:
    probability = np.zeros((160, 320), np.float32)
    corners = cv2.boxPoints(((150, 80), (120, 20), angle))
    cv2.fillPoly(probability, [corners.round().astype(np.int32)], 0.9)
    cv2.fillPoly(probability, [np.array([[5, 5], [40, 5], [40, 20], [5, 20]])], 0.5)  # not sure enough
    (box,) = find_boxes(probability, 320, 640)
    grown = 120 * 20 * 1.5 / (120 + 20)
    expected = cv2.boxPoints(((150, 80), (120 + grown, 20 + grown), angle)) * 2
    distance = np.linalg.norm(box[:, None] - expected[None], axis=2).min(1)
    assert distance.max() < 5
    assert box[0, 0] < box[1, 0]
    assert box[0, 1] < box[3, 1]


def test_boxes_come_in_reading_order() -> None:
    probability = np.zeros((200, 200), np.float32)
    for left, top in ((120, 22), (10, 20), (60, 100), (10, 150), (130, 146)):
        probability[top : top + 20, left : left + 40] = 1
    found = [tuple(box.mean(0).round(-1)) for box in find_boxes(probability, 200, 200)]
    assert [x for x, _ in found] == pytest.approx([30, 140, 80, 30, 150], abs=11)


def test_a_turned_strip_is_cut_out_upright() -> None:
    upright = np.zeros((200, 200, 3), np.uint8)
    upright[90:110, 50:100], upright[90:110, 100:150] = (255, 0, 0), (0, 0, 255)
    turn = cv2.getRotationMatrix2D((100, 100), 20, 1)
    turned = cv2.warpAffine(upright, turn, (200, 200))
    corners = np.array([[50, 90], [150, 90], [150, 110], [50, 110]], np.float32)
    box = cv2.transform(corners[None], turn)[0].astype(np.float32)
    strip = cut_out(turned, box).astype(int)
    assert strip.shape[:2] in ((19, 100), (20, 100), (19, 99), (20, 99))
    assert np.abs(strip[4:16, 5:45].mean((0, 1)) - [255, 0, 0]).max() < 12
    assert np.abs(strip[4:16, 55:95].mean((0, 1)) - [0, 0, 255]).max() < 12
    downwards = cut_out(upright.transpose(1, 0, 2).copy(), corners[:, ::-1][[0, 3, 2, 1]].copy())
    assert downwards.shape[1] > downwards.shape[0]


@pytest.mark.parametrize(
    ("shape", "width"), [((48, 100), 100), ((24, 50), 100), ((48, 9999), 3200), ((96, 10), 5)]
)
def test_strips_keep_their_proportions(
    readers: tuple[TextDetector, TextRecognizer], shape: tuple[int, int], width: int
) -> None:
    recognizer = readers[1]
    assert recognizer.scaled_width(*shape) == width
    assert recognizer.prepare(np.zeros((*shape, 3), np.uint8)).shape == (3, 48, max(width, 320))


def test_a_reading_does_not_depend_on_its_batch(readers: tuple[TextDetector, TextRecognizer]) -> None:
    images = pictures(0, (128, 192), (64, 96), (128, 192), (200, 40))
    together = read_pictures(*readers, images)
    alone = [read_pictures(*readers, [image])[0] for image in images]
    assert [[line.text for line in lines] for lines in together] == [
        [line.text for line in lines] for lines in alone
    ]
    assert any(together)


def test_scores_have_their_curves_and_their_weights(models: dict[str, str]) -> None:
    reward = load("ocr-neural", models)
    found = reward.function(pictures(2), ['a sign "Hello World"'] * 2, [{}] * 2)
    assert isinstance(found, dict)
    assert set(found) == {"score", "exact", "lines"}
    assert all(0 <= score < 1 for score in found["score"])
    assert reward.scored_by is not None
    assert str(reward.scored_by()).count("@") == 2


def test_broken_weights_are_a_failure_and_never_a_zero(models: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "det"
    broken.mkdir()
    for file in Path(models["detector"]).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    state = weights_of(models["detector"])
    save_file(state | {"head.conv_final.bias": torch.full((1,), torch.nan)}, broken / "model.safetensors")
    with pytest.raises(ValueError, match="detector returned numbers that are not finite"):
        OcrNeural(**models | {"detector": str(broken)})(pictures(1), ['"Hello"'], [{}])
    save_file({name: each for name, each in state.items() if "up" not in name}, broken / "model.safetensors")
    with pytest.raises(RewardSetupError, match=r"detector is .* which lacks"):
        OcrNeural(**models | {"detector": str(broken)}).check([], [])


class TestSetUp:
    def test_what_cannot_be_read_is_refused_before_any_work(self, models: dict[str, str]) -> None:
        with pytest.raises(RewardInputError, match="ocr-neural reward: the prompt 'a cat' has no text"):
            OcrNeural(**models).check(['"fine"', "a cat"], [{}] * 2)
        with pytest.raises(
            RewardInputError, match=r"Georgian characters, of which the recognizer .* has none"
        ):
            OcrNeural(**models).check(['"გამარჯობა"'], [{}])
        OcrNeural(**models).check(['"привет"'], [{}])

    def test_missing_weights_name_the_remedy(self, models: dict[str, str], tmp_path: Path) -> None:
        with pytest.raises(RewardSetupError, match=r"no preprocessor_config\.json.*PP-OCRv6_tiny_rec"):
            OcrNeural(**models | {"recognizer": str(tmp_path)}).check([], [])
        few = save_tiny_recognizer(tmp_path / "few", CHARACTERS[:10])
        with pytest.raises(RewardSetupError, match=rf"lists 10 characters; expected {len(CHARACTERS)}"):
            OcrNeural(**models | {"recognizer": str(few)}).check([], [])
        (few / "preprocessor_config.json").write_text("{")
        with pytest.raises(RewardSetupError, match=r"no preprocessor_config\.json that can be read"):
            OcrNeural(**models | {"recognizer": str(few)}).check([], [])

    def test_settings_are_checked(self, models: dict[str, str]) -> None:
        with pytest.raises(RewardSetupError, match="batch_size is 0"):
            OcrNeural(**models | {"batch_size": 0}).check([], [])  # type: ignore[arg-type]
        with pytest.raises(RewardSetupError, match="device is 'gpu'"):
            OcrNeural(**models | {"device": "gpu"}).check([], [])

    def test_without_opencv_the_extra_is_named(
        self, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cv2", None)
        with pytest.raises(RewardSetupError, match=r"pip install 'spotlight-rewards\[ocr-neural\]'"):
            OcrNeural(**models).check([], [])


def test_the_detector_looks_at_the_configured_size(models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "det"
    folder.mkdir()
    for file in Path(models["detector"]).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    expected = {"max": (96, 128), "min": (96, 128), "resize_long": (96, 128)}
    for kind, size in expected.items():
        limit = 96 if kind == "min" else 128
        settings = {"limit_side_len": limit, "limit_type": kind}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        given = (48, 64) if kind != "max" else (192, 256)
        assert TextDetector(str(folder), CPU, 1).scaled(*given) == size


def test_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[48, 320]")
    with pytest.raises(RewardSetupError, match="it holds list, no object"):
        read_settings(str(tmp_path), {}, "key", "remedy")


def test_without_a_hub_settings_are_not_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def cached_file(source: str, name: str, **options: object) -> str:
        asked.append(options)
        raise OSError("not in the cache")

    monkeypatch.setattr(pretrained_model, "unreachable", lambda: "the hub cannot be reached")
    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    with pytest.raises(RewardSetupError, match="the hub cannot be reached, and it was not downloaded before"):
        read_settings("org/model", {}, "key", "remedy")
    assert asked == [{"local_files_only": True}]
