"""From a map of text probabilities to boxes, and from boxes to upright strips: what stands around PP-OCR.

Steps and constants are those of PaddleOCR's ``DBPostProcess`` and ``get_rotate_crop_image``, except that rows
of a page are told apart by half a box's height instead of 10 pixels. Imports opencv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.reward import Image

Quad: TypeAlias = NDArray[np.float32]
"""[4, 2]: upper left, upper right, lower right, lower left corner, each x and y."""

THRESHOLD, BOX_THRESHOLD, UNCLIP_RATIO = 0.3, 0.6, 1.5
_SIDE_MIN_PX = 3
_BOXES_MAX = 1000
_UPRIGHT_RATIO = 1.5
"""Height / width from which a strip is text that runs downwards, and is turned."""


def find_boxes(probability: NDArray[np.float32], height: int, width: int) -> list[Quad]:
    """Boxes of text in reading order.

    Args:
        probability: [map height, map width], that a pixel belongs to text.
        height, width: of the picture that the boxes are meant for.
    """
    scale = np.array([width / probability.shape[1], height / probability.shape[0]])
    ink = (probability > THRESHOLD).astype(np.uint8)
    contours, _ = cv2.findContours(ink, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    boxes = []
    for contour in contours[:_BOXES_MAX]:
        center, sides, angle = cv2.minAreaRect(contour)
        if min(sides) < _SIDE_MIN_PX:
            continue
        if mean_inside(probability, _corners(center, sides, angle)) < BOX_THRESHOLD:
            continue
        # The map shrinks text by a distance of area x ratio / perimeter on each side.
        grown = sides[0] * sides[1] * UNCLIP_RATIO / (sides[0] + sides[1])
        if min(sides) + grown < _SIDE_MIN_PX + 2:
            continue
        corners = _corners(center, (sides[0] + grown, sides[1] + grown), angle)
        boxes.append(np.clip(np.round(corners * scale), 0, [width, height]).astype(np.float32))
    return [box for row in rows(boxes) for box in row]


def mean_inside(probability: NDArray[np.float32], box: Quad) -> float:
    """Mean of the map within a box."""
    limit = np.array(probability.shape[::-1]) - 1
    low = np.clip(np.floor(box.min(0)), 0, limit).astype(int)
    high = np.clip(np.ceil(box.max(0)), 0, limit).astype(int)
    part = probability[low[1] : high[1] + 1, low[0] : high[0] + 1]
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(mask, [(box - low).astype(np.int32)], 1)
    return float(cv2.mean(part, mask)[0])


def rows(boxes: Sequence[Quad]) -> list[list[Quad]]:
    """Rows from top to bottom, each from left to right."""
    found: list[list[Quad]] = []
    for box in sorted(boxes, key=lambda each: float(each[0, 1])):
        if found and box[0, 1] - found[-1][0][0, 1] < _height(found[-1][0]) / 2:
            found[-1].append(box)
        else:
            found.append([box])
    return [sorted(row, key=lambda each: float(each[0, 0])) for row in found]


def cut_out(image: Image, box: Quad) -> Image:
    """The box as an upright strip [height, width, 3], at least one pixel a side."""
    width = max(int(max(_length(box[0] - box[1]), _length(box[2] - box[3]))), 1)
    height = max(int(_height(box)), 1)
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    strip = cv2.warpPerspective(
        image,
        cv2.getPerspectiveTransform(box, target),
        (width, height),
        borderMode=cv2.BORDER_REPLICATE,
        flags=cv2.INTER_CUBIC,
    )
    return np.ascontiguousarray(np.rot90(strip) if height / width >= _UPRIGHT_RATIO else strip)


def _corners(center: Sequence[float], sides: Sequence[float], angle: float) -> Quad:
    points = cv2.boxPoints((center, sides, angle))
    points = points[np.argsort(points[:, 0], kind="stable")]
    left, right = (half[np.argsort(half[:, 1], kind="stable")] for half in (points[:2], points[2:]))
    return np.stack([left[0], right[0], right[1], left[1]]).astype(np.float32)


def _height(box: Quad) -> float:
    return max(_length(box[0] - box[3]), _length(box[1] - box[2]))


def _length(edge: NDArray[Any]) -> float:
    return float(np.linalg.norm(edge))
