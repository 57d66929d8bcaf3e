"""Reward for coloured shapes on white: GenEval's strict score and a graded one from a classical detector.

Pixels that differ from white (Chebyshev distance in RGB) form connected components; specks are dropped. A
component's colour is the palette's nearest to its median; its shape is the one whose template, fitted to its
bounding box, overlaps it most. Deterministic; no torch.

* ``strict``: GenEval's 0 or 1 (``evaluate_images.py`` of https://github.com/djghosh13/geneval), with
  template overlap as confidence.
* ``graded``: in [0, 1], for training. Optimal assignment of expected to detected objects by softened shape
  and colour scores, over max(expected, detected); averaged with one clause per position relation.

Components that resemble nothing still count as detected for ``graded``: filling the canvas never pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from spotlight_rewards.geneval.requirements import MetadataFormat, Requirement, Requirements
from spotlight_rewards.geneval.verdicts import direction
from spotlight_rewards.reward import Function, Image, RewardInputError
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

PALETTE: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (40, 90, 230),
    "yellow": (240, 200, 40),
}
"""sRGB. The smallest channel is always 40, so half coverage has the same threshold for every colour."""

SHAPES = ("circle", "square", "triangle")
TrainOn = Literal["graded", "strict"]
FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.METADATA,
    example=Example(
        "shapes",
        score=(1, 1),
        prompt="a red circle left of a blue square",
        metadata={
            "tag": "position",
            "include": [
                {"class": "square", "color": "blue", "count": 1},
                {"class": "circle", "color": "red", "count": 1, "position": ["left of", 0]},
            ],
        },
    ),
)

_COLORS = tuple(PALETTE)
_FORMAT = MetadataFormat("shapes", SHAPES, PALETTE)
_PALETTE_RGB = np.array([PALETTE[name] for name in _COLORS], dtype=np.float64)
_FOREGROUND_MIN = (
    255 - 40
) / 2  # Chebyshev distance from white at which a palette colour covers half a pixel
_SPECK_AREA_MAX = 8 / 1024  # of the image's area: eight pixels of a 32 x 32 image
_SIDE_MIN, _SIDE_MAX = 1 / 8, 1 / 2  # of the image's shorter side; rendered objects are a quarter of it
_IMAGE_SIDE_MIN_PX = 24
_IOU_MIN = 0.7  # strict: minimum IoU to have a class
_IOU_FULL, _IOU_MARGIN = 0.85, 0.2  # graded: saturation, and the width of the ramp between two shapes
_COLOR_DISTANCE_MAX = 110.0  # strict: maximum distance to have a colour
_COLOR_FULL, _COLOR_ZERO, _COLOR_MARGIN = 45.0, 135.0, 120.0  # graded, RGB units
_SUPERSAMPLING = 8
_KEPT_PIXELS = 2**24
"""For boxes of one size, to a factor of two; 64 MB of float32."""


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """One detected component.

    Attributes:
        box: (left, top, right, bottom) in pixels, right and bottom exclusive.
        shape: None if it resembles none or its size is implausible.
        color: None if none is near.
        overlap: IoU with the template of each of :data:`SHAPES`; zeros if its size is implausible.
        distance: Euclidean RGB distance of its median colour to each palette colour.
    """

    box: tuple[int, int, int, int]
    shape: str | None
    color: str | None
    overlap: NDArray[np.float64]
    distance: NDArray[np.float64]


def shapes(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    train_on: TrainOn = "graded",
) -> dict[str, list[float]]:
    """Score images of coloured shapes against GenEval metadata.

    Args:
        images: uint8 [height, width, 3], at least 24 pixels per side.
        prompts: used in error messages only.
        metadata: one GenEval record per image (``include``, optionally ``exclude``).
        train_on: which of the two scores becomes ``score``.

    Returns:
        ``score``, ``strict`` (0 or 1) and ``graded`` (0 to 1).

    Raises:
        RewardInputError: unknown ``train_on``, or an invalid record (names prompt and field).
        ValueError: lengths differ, or an image has the wrong type or size.
    """
    require_one_each(images, prompts, metadata)
    check(prompts, metadata, train_on=train_on)
    strict, graded = [], []
    for image, prompt, record in zip(images, prompts, metadata, strict=True):
        requirements, components = parse_requirements(prompt, record), detect(image)
        strict.append(strict_score(components, requirements))
        graded.append(graded_score(components, requirements))
    return {"score": list(graded if train_on == "graded" else strict), "strict": strict, "graded": graded}


def require_one_each(
    images: Sequence[object],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    kind: str = "images",
) -> None:
    """Raise ValueError unless there are as many of each."""
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"got {len(images)} {kind}, {len(prompts)} prompts and {len(metadata)} metadata records; "
            "give one of each per sample"
        )


def check(
    prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, train_on: TrainOn = "graded"
) -> None:
    """Raise :class:`RewardInputError` for invalid settings or the first prompt that cannot be scored."""
    if train_on not in get_args(TrainOn):
        raise RewardInputError(
            f"shapes reward: train_on is {train_on!r}; expected one of {', '.join(get_args(TrainOn))}"
        )
    for prompt, record in zip(prompts, metadata, strict=True):
        parse_requirements(prompt, record)


def parse_requirements(prompt: str, metadata: Mapping[str, Any]) -> Requirements:
    """Parse one GenEval record. Raises :class:`RewardInputError` naming the prompt and the field."""
    return _FORMAT.parse(prompt, metadata)


def _kept(function: Function) -> Function:
    """Keep what was made for thousands of small boxes, or a few large ones, which take as much memory."""

    @cache
    def of_area(bits: int) -> Any:
        return lru_cache(maxsize=min(4096, _KEPT_PIXELS >> bits))(function)

    @wraps(function)
    def found(*box: Any) -> Any:
        *_, width, height = box
        return of_area((width * height).bit_length())(*box)

    return cast(Function, found)


@_kept
def coverage(shape: str, width: int, height: int) -> NDArray[np.float32]:
    """Share of each pixel covered by a shape that fills its box: [height, width] in [0, 1].

    Circles become ellipses, triangles point up. The array is cached and read-only.
    """
    y, x = np.ogrid[0 : height * _SUPERSAMPLING, 0 : width * _SUPERSAMPLING]
    u = (x + 0.5) / (width * _SUPERSAMPLING) * 2 - 1  # [-1, 1] across the box
    v = (y + 0.5) / (height * _SUPERSAMPLING) * 2 - 1
    inside = {
        "circle": u**2 + v**2 <= 1,
        "square": np.ones((v.size, u.size), dtype=bool),
        "triangle": np.abs(u) <= (v + 1) / 2,
    }[shape]
    blocks = inside.reshape(height, _SUPERSAMPLING, width, _SUPERSAMPLING)
    result: NDArray[np.float32] = blocks.mean(axis=(1, 3), dtype=np.float32)
    result.setflags(write=False)
    return result


@_kept
def _templates(width: int, height: int) -> NDArray[np.bool_]:
    fitted = []
    for shape in SHAPES:
        # Thin tips cover less than half a pixel and vanish, so the shape may be larger than its visible part:
        # take the first size whose visible part fills the box.
        mask = coverage(shape, width, height) > 0.5
        for grow_y, grow_x in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0)):
            visible = coverage(shape, width + grow_x, height + grow_y) > 0.5
            rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
            if rows.size == height and columns.size == width:
                mask = visible[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                break
        fitted.append(mask)
    return np.stack(fitted)


def detect(image: Image) -> list[DetectedObject]:
    """Find the objects of an image, ordered by their top-left pixel.

    Raises:
        ValueError: the image is not uint8 [height, width, 3] with sides of at least 24 pixels.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image is {image.dtype} {list(image.shape)}; expected uint8 [height, width, 3]")
    height, width = image.shape[:2]
    if min(height, width) < _IMAGE_SIDE_MIN_PX:
        raise ValueError(
            f"image is {width} x {height}; shapes need at least {_IMAGE_SIDE_MIN_PX} pixels a side"
        )
    labels, found = ndimage.label(255 - image.min(axis=2).astype(np.int16) > _FOREGROUND_MIN)
    areas = np.bincount(labels.ravel(), minlength=found + 1)
    boxes = ndimage.find_objects(labels)
    kept = [k for k in range(1, found + 1) if areas[k] >= _SPECK_AREA_MAX * height * width]
    return [_component(image, labels[boxes[k - 1]] == k, boxes[k - 1]) for k in kept]


def _component(image: Image, mask: NDArray[np.bool_], box: tuple[slice, slice]) -> DetectedObject:
    rows, columns = box
    height, width = mask.shape
    shorter = min(image.shape[:2])
    if _SIDE_MIN * shorter <= min(height, width) and max(height, width) <= _SIDE_MAX * shorter:
        templates = _templates(width, height)
        overlap = (templates & mask).sum(axis=(1, 2)) / (templates | mask).sum(axis=(1, 2))
    else:
        overlap = np.zeros(len(SHAPES))
    distance = np.linalg.norm(_PALETTE_RGB - np.median(image[box][mask], axis=0), axis=1)
    best, nearest = int(overlap.argmax()), int(distance.argmin())
    return DetectedObject(
        box=(columns.start, rows.start, columns.stop, rows.stop),
        shape=SHAPES[best] if overlap[best] >= _IOU_MIN else None,
        color=_COLORS[nearest] if distance[nearest] <= _COLOR_DISTANCE_MAX else None,
        overlap=overlap,
        distance=distance,
    )


def _along(relation: str, a: DetectedObject, b: DetectedObject) -> float:
    dx, dy = direction(np.array(a.box, dtype=np.float64), np.array(b.box, dtype=np.float64))
    return {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]


def strict_score(components: Sequence[DetectedObject], wanted: Requirements) -> float:
    """GenEval's score: 1.0 if every ``include`` and no ``exclude`` entry is met, else 0.0."""
    by_shape: dict[str, list[DetectedObject]] = {
        shape: sorted((c for c in components if c.shape == shape), key=lambda c: -c.overlap.max())
        for shape in SHAPES
    }
    matched: list[list[DetectedObject]] = []
    for need in wanted.include:
        found = by_shape[need.name][: need.count]
        if len(found) < need.count:
            return 0.0
        if need.color is not None and any(c.color != need.color for c in found):
            return 0.0
        if need.relation is not None:
            pairs = ((a, b) for a in found for b in matched[need.target])
            if any(_along(need.relation, a, b) <= 0.5 for a, b in pairs):
                return 0.0
        matched.append(found)
    too_many = any(len(by_shape[shape]) >= count for shape, count in wanted.exclude)
    return 0.0 if too_many else 1.0


def graded_score(components: Sequence[DetectedObject], wanted: Requirements) -> float:
    """Mean over a prompt's clauses, in [0, 1]: one for its objects, one per position relation."""
    expected = [(index, need) for index, need in enumerate(wanted.include) for _ in range(need.count)]
    scores = np.array([[_likeness(c, need) for c in components] for _, need in expected])
    scores = scores.reshape(len(expected), len(components))
    rows, columns = linear_sum_assignment(scores, maximize=True)
    clauses = [float(scores[rows, columns].sum()) / max(len(expected), len(components))]
    groups: list[list[tuple[float, DetectedObject]]] = [[] for _ in wanted.include]
    for row, column in zip(rows, columns, strict=True):
        groups[expected[row][0]].append((float(scores[row, column]), components[column]))
    for need, group in zip(wanted.include, groups, strict=True):
        if need.relation is not None:
            others = groups[need.target]
            held = [
                like_a * like_b * min(max(_along(need.relation, a, b) + 0.5, 0.0), 1.0)
                for like_a, a in group
                for like_b, b in others
            ]
            clauses.append(sum(held) / (need.count * wanted.include[need.target].count))
    return sum(clauses) / len(clauses)


def _likeness(component: DetectedObject, need: Requirement) -> float:
    wanted = SHAPES.index(need.name)
    others = np.delete(component.overlap, wanted).max()
    overlap = component.overlap[wanted]
    shape = _clip01(0.5 + (overlap - others) / _IOU_MARGIN) * _clip01(overlap / _IOU_FULL)
    if need.color is None:
        return shape
    wanted = _COLORS.index(need.color)
    distance = component.distance[wanted]
    rival = np.delete(component.distance, wanted).min()
    color = _clip01(0.5 + (rival - distance) / _COLOR_MARGIN)
    color *= _clip01((_COLOR_ZERO - distance) / (_COLOR_ZERO - _COLOR_FULL))
    return (shape + color) / 2


def _clip01(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)
