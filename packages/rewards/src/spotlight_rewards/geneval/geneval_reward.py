"""The reward ``geneval``: GenEval's evaluation of a picture, with a detector that installs.

The detector finds objects (``mask2former.py``), CLIP names their colours where a prompt asks for one
(``object_colors.py``), and ``verdicts.py`` judges. Starts without torch, which its models import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from spotlight_rewards.geneval.requirements import MetadataFormat, Requirements
from spotlight_rewards.geneval.verdicts import (
    OBJECTS_MAX,
    Colors,
    Objects,
    graded_score,
    is_correct,
    present_objects,
    to_color,
)
from spotlight_rewards.geneval.vocabulary import COLORS, OBJECTS, TAGS
from spotlight_rewards.reward import Curves, Image, Reward, RewardSetupError, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.geneval.mask2former import InstanceDetector
    from spotlight_rewards.geneval.object_colors import ColorClassifier

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"
TrainedScore = Literal["graded", "strict"]
FACTS = RewardFacts(
    runs_on="GPU",
    typical=(0, 1),
    reads=Reads.METADATA,
    weights=(DETECTOR, CLIP),
    licence="Apache-2.0, MIT",
    example=Example(
        "shapes",
        score=(0, 1),
        prompt="a photo of a dog",
        metadata={"tag": "single_object", "include": [{"class": "dog", "count": 1}]},
    ),
)

_FORMAT = MetadataFormat("geneval", OBJECTS, COLORS, count_max=OBJECTS_MAX)


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class GenEval(Reward):
    """Score pictures against GenEval metadata: objects, counts, colours, positions.

    Metadata is one GenEval record per picture (``tag``, ``include``, optionally ``exclude``). ``score``,
    ``strict`` (GenEval's 0 or 1), ``graded`` (Flow-GRPO's, at most 1, negative for many surplus objects) and
    ``objects``, the number that count as present: 0 throughout tells a broken detector from a weak model.

    Attributes:
        detector: hub id or directory of a Mask2Former of COCO's 80 classes.
        clip: hub id or directory of the CLIP that names colours.
        train_on: which of the two scores becomes ``score``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures, and objects, in a forward.
    """

    detector: str = DETECTOR
    clip: str = CLIP
    train_on: TrainedScore = "graded"
    device: str = "auto"
    batch_size: int = 4

    def __post_init__(self) -> None:
        if self.train_on not in get_args(TrainedScore):
            raise RewardSetupError(
                f"geneval reward: train_on is {self.train_on!r}; expected one of "
                f"{', '.join(get_args(TrainedScore))}"
            )

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """Raises ValueError: lengths differ, a picture is too elongated, or outputs are not finite."""
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"got {len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata records; "
                "give one of each per sample"
            )
        wanted = [_wanted(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        finder, classifier = self._models
        present = [
            present_objects(found, record["tag"])
            for found, record in zip(finder.detect(images), metadata, strict=True)
        ]
        return _scores(present, wanted, _colors(classifier, images, present, wanted), self.train_on)

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`RewardInputError` for the first prompt that cannot be scored."""
        for prompt, record in zip(prompts, metadata, strict=True):
            _wanted(prompt, record)

    def scored_by(self) -> str:
        """Load the models; which detector and which CLIP score, each as ``SOURCE@DIGEST`` of its weights."""
        return " ".join(model.identity for model in self._models)

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.geneval.tiny_detector import save_tiny_detector
        from spotlight_rewards.preference.tiny_clip import save_tiny_clip

        detector, clip = save_tiny_detector(folder / "detector"), save_tiny_clip(folder / "clip")
        return {"detector": str(detector), "clip": str(clip), "device": "auto"}

    @cached_property
    def _models(self) -> tuple[InstanceDetector, ColorClassifier]:
        from spotlight_rewards.geneval.mask2former import InstanceDetector
        from spotlight_rewards.geneval.object_colors import ColorClassifier
        from spotlight_rewards.models.pretrained_model import find_device

        size = self.batch_size
        if not isinstance(size, int) or size < 1:
            raise RewardSetupError(f"geneval reward: batch_size is {size!r}; expected 1 or more")
        found = find_device(self.device, "geneval reward: device")
        return InstanceDetector(self.detector, found, size), ColorClassifier(self.clip, found, size)


def _colors(
    classifier: ColorClassifier,
    images: Sequence[Image],
    present: Sequence[Objects],
    wanted: Sequence[Requirements],
) -> Colors:
    asked = [
        (image, each)
        for image, objects, need in zip(images, present, wanted, strict=True)
        for each in to_color(objects, need)
    ]
    return dict(zip((each for _, each in asked), classifier.classify(asked), strict=True))


def _scores(
    present: Sequence[Objects], wanted: Sequence[Requirements], colors: Colors, train_on: TrainedScore
) -> dict[str, list[float]]:
    judged = [(objects, need, colors) for objects, need in zip(present, wanted, strict=True)]
    strict = [float(is_correct(*each)) for each in judged]
    graded = [graded_score(*each) for each in judged]
    return {
        "score": list(graded if train_on == "graded" else strict),
        "strict": strict,
        "graded": graded,
        "objects": [float(sum(map(len, objects.values()))) for objects in present],
    }


def _wanted(prompt: str, record: Mapping[str, Any]) -> Requirements:
    if record.get("tag") not in TAGS:  # it decides the detector's threshold
        raise _FORMAT.error(prompt, "tag", record.get("tag"), f"one of {', '.join(TAGS)}")
    return _FORMAT.parse(prompt, record)
