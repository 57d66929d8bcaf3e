"""GenEval's detector in transformers: Mask2Former with a Swin-S backbone, raw scores, no exclusive masks.

``post_process_instance_segmentation`` is not used: it cuts at a score of its own, reads masks at 384 x 384
and lets each pixel belong to one object. Here, as in the official pipeline (mmdet 2.x,
``mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco``): score = class probability x mean probability of the
mask's pixels, masks at the picture's size, overlaps kept. Imported in the reward's own process only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from spotlight_rewards.geneval.verdicts import SCORE_MIN, Detection
from spotlight_rewards.geneval.vocabulary import OBJECTS
from spotlight_rewards.models.batches import same_shape
from spotlight_rewards.models.pretrained_model import load_pretrained
from spotlight_rewards.reward import Image, RewardSetupError

UNREAD = r"(^criterion\.|\.swin\.layernorm\.)"
"""The loss's weights and the norm of Swin's last layer, which the feature maps are taken before."""

_SHORT_MAX_PX, _LONG_MAX_PX = 800, 1333
_DIVISOR_PX = 32
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_PADDING = 128.0
_DETECTIONS_MAX = 100
_SAME_NAMES_MIN = 60
_REMEDY = (
    "Name facebook/mask2former-swin-small-coco-instance, a directory that `hf download` filled with it "
    "elsewhere, or what `spotlight rewards convert-geneval CHECKPOINT OUT` made of OpenMMLab's weights."
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture's sizes (height, width): as given, scaled for the detector, and padded."""

    given: tuple[int, int]
    scaled: tuple[int, int]
    padded: tuple[int, int]


class InstanceDetector:
    """Finds COCO's 80 classes.

    Args:
        source: hub id or directory.
        batch_size: pictures of one size in a forward.

    Raises:
        RewardSetupError: the weights are missing, incomplete, or of other classes.
    """

    def __init__(self, source: str, device: torch.device, batch_size: int) -> None:
        from transformers import Mask2FormerForUniversalSegmentation

        key = "geneval reward: detector"
        self.model, self.identity = load_pretrained(
            Mask2FormerForUniversalSegmentation,
            source, key=key, remedy=_REMEDY, unread=UNREAD, device=device,
        )  # fmt: skip
        self._device, self._batch_size = device, batch_size
        labels = self.model.config.id2label
        same = sum(labels.get(index) == name for index, name in enumerate(OBJECTS))
        if len(labels) != len(OBJECTS) or same < _SAME_NAMES_MIN:
            raise RewardSetupError(
                f"{key} is {source!r}, whose {len(labels)} labels begin with {list(labels.values())[:3]}; "
                f"expected COCO's 80 in their order. {_REMEDY}"
            )
        backbone = self.model.config.backbone_config
        # transformers' Swin shrinks its windows, for good, at the first picture whose last map fits into one.
        self._padded_min_px = 0
        if backbone.model_type == "swin":
            last_stride = backbone.patch_size * 2 ** (len(backbone.depths) - 1)
            self._padded_min_px = (backbone.window_size + 1) * last_stride

    def detect(self, images: Sequence[Image]) -> list[list[Detection]]:
        """All objects with a score above 0.3, by picture.

        Args:
            images: uint8 [height, width, 3].

        Raises:
            ValueError: a picture is too long for its width, or the model's outputs are not finite.
        """
        frames = [self._frame(image) for image in images]
        found: dict[int, list[Detection]] = {}
        for part in same_shape([frame.padded for frame in frames], self._batch_size):
            found |= zip(part, self._batch([(images[i], frames[i]) for i in part]), strict=True)
        return [found[index] for index in range(len(images))]

    def _frame(self, image: Image) -> Frame:
        height, width = image.shape[:2]
        factor = min(_SHORT_MAX_PX / min(height, width), _LONG_MAX_PX / max(height, width))
        scaled = int(height * factor + 0.5), int(width * factor + 0.5)
        padded = tuple(-(-side // _DIVISOR_PX) * _DIVISOR_PX for side in scaled)
        if min(padded) < self._padded_min_px:
            raise ValueError(
                f"the picture of {width} x {height} is scaled to {scaled[1]} x {scaled[0]}; GenEval's "
                f"detector needs {self._padded_min_px} pixels a side. Render pictures less elongated."
            )
        return Frame((height, width), scaled, (padded[0], padded[1]))

    @torch.inference_mode()
    def _batch(self, items: Sequence[tuple[Image, Frame]]) -> list[list[Detection]]:
        pixels = torch.stack([prepare(image, frame, self._device) for image, frame in items])
        outputs = self.model(pixel_values=pixels)
        logits, masks = outputs.class_queries_logits, outputs.masks_queries_logits
        if not (torch.isfinite(logits).all() and torch.isfinite(masks).all()):
            raise ValueError(
                "GenEval's detector returned numbers that are not finite; its weights may be broken"
            )
        return [
            list(instances(classes, shapes, frame))
            for classes, shapes, (_, frame) in zip(logits, masks, items, strict=True)
        ]


def prepare(image: Image, frame: Frame, device: torch.device) -> torch.Tensor:
    """[3, height, width]: scaled without anti-aliasing, rounded, padded right and below, normalised."""
    pixels = torch.from_numpy(np.ascontiguousarray(image)).to(device).permute(2, 0, 1)[None].float()
    pixels = F.interpolate(pixels, frame.scaled, mode="bilinear", align_corners=False).round()[0]
    below, right = (padded - scaled for padded, scaled in zip(frame.padded, frame.scaled, strict=True))
    pixels = F.pad(pixels, (0, right, 0, below), value=_PADDING)
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (_MEAN, _STD))
    return (pixels - mean) / std


def instances(class_logits: torch.Tensor, mask_logits: torch.Tensor, frame: Frame) -> Iterator[Detection]:
    """The detections of one picture that can matter.

    Args:
        class_logits: [queries, classes + 1], the last: no object.
        mask_logits: [queries, height, width] at a quarter of the padded size.
    """
    classes = class_logits.shape[1] - 1
    probabilities = class_logits.softmax(-1)[:, :-1].flatten()
    top, flat = probabilities.topk(min(_DETECTIONS_MAX, len(probabilities)), sorted=False)
    likely = top > 0.99 * SCORE_MIN  # a mask's mean is at most 1: the others cannot exceed the threshold
    top, flat = top[likely], flat[likely]
    if not len(top):
        return
    logits = F.interpolate(
        mask_logits[None, flat // classes], frame.padded, mode="bilinear", align_corners=False
    )
    logits = logits[:, :, : frame.scaled[0], : frame.scaled[1]]
    logits = F.interpolate(logits, frame.given, mode="bilinear", align_corners=False)[0]
    masks = logits > 0
    area = masks.flatten(1).sum(1)
    scores = top * (logits.sigmoid() * masks).flatten(1).sum(1) / (area + 1e-6)
    for label, score, mask in zip(
        (flat % classes).tolist(), scores.cpu().numpy(), masks.cpu().numpy(), strict=True
    ):
        if score > np.float32(SCORE_MIN):
            yield Detection(OBJECTS[label], score, box_of(mask), mask)


def box_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(left, top, right, bottom) of a mask that is not empty, right and bottom exclusive."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=np.float32)
