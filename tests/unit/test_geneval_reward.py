"""The reward ``geneval`` on real model classes: detections, colours, verdicts, and every way to fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.unit.geneval_models import CLIP_SIDE, save_clip, save_detector, sure_checkpoint
from tests.unit.geneval_oracle import COLORS, Case, graded, random_metadata, verdict

from spotlight_rewards.geneval.geneval_reward import GenEval
from spotlight_rewards.geneval.mask2former import UNREAD, InstanceDetector
from spotlight_rewards.geneval.object_colors import ColorClassifier
from spotlight_rewards.geneval.vocabulary import OBJECTS, TAGS
from spotlight_rewards.models.pretrained_model import weights_digest
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import RewardFailure
from spotlight_rewards.reward import RewardInputError, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig

CPU = torch.device("cpu")
DOG = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"detector": str(save_detector(folder / "detector")), "clip": str(save_clip(folder / "clip"))}


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    """Smooth random colours, elongated, so that a picture of 800 pixels' height costs little."""
    rng = np.random.default_rng(seed)
    small = [rng.integers(0, 256, (5, 9, 3), dtype=np.uint8) for _ in sizes]
    return [
        np.array(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC))
        for each, (height, width) in zip(small, sizes, strict=True)
    ]


def seen_by_the_detector(
    detector: InstanceDetector, image: np.ndarray
) -> list[tuple[str, float, np.ndarray, np.ndarray]]:
    """mmdet's steps on the model's outputs, query by query and at full size: (class, score, box, mask)."""
    height, width = image.shape[:2]
    scale = min(800 / min(height, width), 1333 / max(height, width))
    new = int(height * scale + 0.5), int(width * scale + 0.5)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    pixels = F.interpolate(pixels, size=new, mode="bilinear", align_corners=False).round()
    canvas = torch.full((1, 3, -(-new[0] // 32) * 32, -(-new[1] // 32) * 32), 128.0)
    canvas[:, :, : new[0], : new[1]] = pixels
    canvas -= torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1)
    canvas /= torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
    with torch.no_grad():
        outputs = detector.model(canvas)
    masks = F.interpolate(outputs.masks_queries_logits, size=canvas.shape[2:], mode="bilinear")
    masks = F.interpolate(masks[:, :, : new[0], : new[1]], size=(height, width), mode="bilinear")[0]
    classes = outputs.class_queries_logits[0].softmax(-1)[:, :80]
    found = []
    for index in classes.flatten().argsort(descending=True)[:100].tolist():
        query, label = divmod(index, 80)
        inside = masks[query] > 0
        if inside.any():
            score = float(classes[query, label] * masks[query].sigmoid()[inside].mean())
            rows, columns = (torch.nonzero(inside.any(axis))[:, 0] for axis in (1, 0))
            box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            found.append((OBJECTS[label], score, np.array(box, dtype=np.float32), inside.numpy()))
    return found


def test_detections_are_those_of_the_official_steps(
    models: dict[str, str], record_property: Callable[[str, float], None]
) -> None:
    detector = InstanceDetector(models["detector"], CPU, batch_size=2)
    images = pictures((24, 320), (40, 300), (24, 320))
    met = 0
    for image, found in zip(images, detector.detect(images), strict=True):
        expected = [each for each in seen_by_the_detector(detector, image) if each[1] > 0.3]
        assert len(found) == len(expected)
        met += len(found)
        for each, (name, score, box, mask) in zip(
            sorted(found, key=lambda each: -each.score),
            sorted(expected, key=lambda each: -each[1]),
            strict=True,
        ):
            assert each.name == name
            record_property("geneval/difference", abs(each.score - score))
            assert each.score == pytest.approx(score, abs=1e-5)
            # A pixel whose logit is 0 within rounding may fall on either side.
            assert np.abs(each.box - box).max() <= 1
            assert (each.mask != mask).mean() < 1e-3
    assert met > 8


def color_seen(
    classifier: ColorClassifier,
    directions: torch.Tensor,
    image: np.ndarray,
    box: np.ndarray,
    mask: np.ndarray,
) -> str:
    """GenEval's steps with Pillow and transformers' own features."""
    picture = Image.fromarray(image)
    grey = Image.new("RGB", picture.size, color="#999")
    crop = Image.composite(picture, grey, Image.fromarray(mask)).crop(tuple(map(float, box)))
    width, height = crop.size
    crop = crop.resize(
        (CLIP_SIDE, int(CLIP_SIDE * height / width))
        if width <= height
        else (int(CLIP_SIDE * width / height), CLIP_SIDE),
        Image.Resampling.BICUBIC,
    )
    left, top = round((crop.width - CLIP_SIDE) / 2.0), round((crop.height - CLIP_SIDE) / 2.0)
    pixels = np.asarray(crop)[top : top + CLIP_SIDE, left : left + CLIP_SIDE] / 255
    pixels = (pixels - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    with torch.no_grad():
        pixels = torch.tensor(pixels).permute(2, 0, 1)[None].float()
        seen = classifier.model.get_image_features(pixels).pooler_output[0]
    return COLORS[int((directions @ seen).argmax())]


def color_directions(classifier: ColorClassifier, name: str) -> torch.Tensor:
    rows = []
    for color in COLORS:
        texts = [
            f"a photo of a {color} {name}",
            f"a photo of a {color}-colored {name}",
            f"a photo of a {color} object",
        ]
        with torch.no_grad():
            features = [
                classifier.model.get_text_features(
                    **classifier._tokenizer(text, return_tensors="pt")
                ).pooler_output[0]
                for text in texts
            ]
        mean = torch.stack([each / each.norm() for each in features]).mean(0)
        rows.append(mean / mean.norm())
    return torch.stack(rows)


def test_scores_are_the_official_verdicts_on_those_detections(models: dict[str, str]) -> None:
    detector = InstanceDetector(models["detector"], CPU, batch_size=1)
    classifier = ColorClassifier(models["clip"], CPU, batch_size=3)
    images = pictures(*[(24, 320)] * 2, seed=1)
    names = tuple({each.name for found in detector.detect(images) for each in found})
    assert len(names) > 1
    directions = {name: color_directions(classifier, name) for name in names}
    cases, colors_met, raw = [], set(), []
    for image, found in zip(images, detector.detect(images), strict=True):
        rows = [
            (each, color_seen(classifier, directions[each.name], image, each.box, each.mask))
            for each in found
        ]
        colors_met |= {color for _, color in rows}
        raw.append(rows)
    rng = np.random.default_rng(0)
    for index in range(12):
        rows = raw[index % 2]
        metadata = random_metadata(rng, names, str(rng.choice(TAGS)))
        for entry in metadata["include"]:
            if "color" in entry and rng.random() < 0.7:
                entry["color"] = str(rng.choice(sorted(colors_met)))
        boxes = tuple(
            np.array(
                [[*each.box, each.score] for each, _ in rows if each.name == name], dtype=np.float32
            ).reshape(-1, 5)
            for name in names
        )
        colors = tuple(tuple(color for each, color in rows if each.name == name) for name in names)
        cases.append(Case(names, boxes, colors, metadata))
    metadata = [case.metadata for case in cases]
    reward = GenEval(**models, train_on="strict")  # type: ignore[arg-type]
    scores: Any = reward([images[index % 2] for index in range(12)], ["a prompt"] * 12, metadata)
    assert scores["strict"] == [float(verdict(case)) for case in cases] == scores["score"]
    assert scores["graded"] == [graded(case) for case in cases]
    assert 0 < sum(scores["strict"]) < 12
    assert len(colors_met) > 1


@pytest.mark.slow  # seconds to start: test_rewards_pool.py has the same of a reward without models
def test_what_scored_stands_in_every_result_of_a_pool(models: dict[str, str]) -> None:
    images = pictures((24, 320), (24, 320))
    spec = RewardConfig(name="geneval", params=models | {"batch_size": 1}, isolation_s=60)
    with RewardPool([spec]) as pool:
        with pytest.raises(RewardInputError, match=r"metadata field 'tag' of prompt 'a dog' is missing"):
            pool.check(["a dog"], [{"include": DOG["include"]}])
        elongated = np.zeros((4, 400, 3), np.uint8)
        found = pool.score([*images, elongated], ["a dog"] * 3, [DOG] * 3).samples
    for sample in found[:2]:
        scorer = sample.scores["geneval"].scored_by
        detector, clip = scorer.split()
        assert detector.startswith("openmmlab/detector.pth:")
        assert clip.startswith(f"{models['clip']}@")
    assert isinstance(found[2], RewardFailure)
    assert "the picture of 400 x 4 is scaled to 1333 x 13" in found[2].message


def refusal(**params: Any) -> str:
    with pytest.raises(RewardSetupError) as error:
        GenEval(**params)(pictures((24, 320)), ["a dog"], [DOG])
    return str(error.value)


def test_models_that_are_missing_incomplete_or_others_are_refused_with_the_remedy(
    models: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    message = refusal(**models | {"detector": "./gone"})
    assert "detector is './gone', which is no directory" in message
    assert "spotlight rewards convert-geneval CHECKPOINT OUT" in message
    assert "transformers reads no Mask2Former" in refusal(**models | {"detector": str(tmp_path)})
    assert "transformers reads no CLIPModel" in refusal(**models | {"clip": str(tmp_path)})
    assert "device is 'gpu'" in refusal(**models | {"device": "gpu"})
    assert "batch_size is 0" in refusal(**models | {"batch_size": 0})
    broken = save_detector(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    lost = next(name for name in weights if name.endswith("sampling_offsets.weight"))
    save_file(
        {name: each for name, each in weights.items() if name != lost},
        broken / "model.safetensors",
        {"format": "pt"},
    )
    assert f"lacks 1 of the weights of Mask2FormerForUniversalSegmentation, first '{lost}'" in refusal(
        **models | {"detector": str(broken)}
    )
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    config = json.loads((broken / "config.json").read_text())
    config["id2label"] = {index: f"LABEL_{index}" for index in range(80)}
    (broken / "config.json").write_text(json.dumps(config))
    assert "expected COCO's 80 in their order" in refusal(**models | {"detector": str(broken)})


def test_a_model_that_returns_no_numbers_is_an_error_and_not_a_zero(
    models: dict[str, str], tmp_path: Path
) -> None:
    broken = {"panoptic_head.cls_embed.bias": torch.full((81,), torch.nan)}
    detector = save_detector(tmp_path / "nan", **broken)
    with pytest.raises(ValueError, match="detector returned numbers that are not finite"):
        GenEval(**models | {"detector": str(detector)})(pictures((24, 320)), ["a dog"], [DOG])


def test_the_digest_tells_other_weights_and_nothing_else() -> None:
    from spotlight_rewards.geneval.openmmlab import converted_model

    state = sure_checkpoint()
    model = converted_model(state)
    digest = weights_digest(model, UNREAD)
    model.model.pixel_level_module.encoder.swin.layernorm.weight.data += 1
    assert weights_digest(model, UNREAD) == weights_digest(converted_model(state), UNREAD) == digest
    model.class_predictor.bias.data[3] += 1e-3
    assert weights_digest(model, UNREAD) != digest


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RewardSetupError, match="train_on is 'both'; expected one of graded, strict"):
        GenEval(train_on="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 1 images, 0 prompts and 0 metadata"):
        GenEval()(pictures((24, 320)), [], [])


def test_the_reward_itself_starts_without_torch() -> None:
    import subprocess

    code = "import sys, spotlight_rewards.geneval.geneval_reward; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
