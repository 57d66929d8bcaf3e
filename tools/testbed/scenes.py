"""Scenes of coloured shapes: a prompt's metadata, randomly laid out and rendered.

Invariant: a scene holds exactly the objects of its metadata, in distinct cells of a 3 x 3 grid, at least two
pixels apart, so that the detector in ``spotlight_rewards/shapes.py`` reads every render back without error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.geneval.requirements import Requirements
from spotlight_rewards.reward import Image
from spotlight_rewards.shapes import PALETTE, coverage, parse_requirements

IMAGE_SIDE_PX = 32
_GRID = 3
_SIDES_PX = (8, 9)
_JITTER_PX = 1
_GAP_MIN_PX = 2
_TRIES_MAX = 1000


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One object: shape and colour by name; left, top and side of its square box in pixels."""

    shape: str
    color: str
    left: int
    top: int
    side: int


def sample_scene(metadata: Mapping[str, Any], rng: np.random.Generator) -> tuple[SceneObject, ...]:
    """Lay out the objects of one GenEval record; unspecified colours, cells, sizes and jitter are random.

    Raises:
        RewardInputError: the record is malformed.
        ValueError: more objects than cells, or no layout satisfies the relations.
    """
    prompt = str(metadata.get("prompt", ""))
    wanted = parse_requirements(prompt, metadata)
    total = sum(need.count for need in wanted.include)
    if total > _GRID**2:
        raise ValueError(f"prompt {prompt!r} asks for {total} objects; a scene has {_GRID**2} cells")
    for _ in range(_TRIES_MAX):
        cells = rng.permutation(_GRID**2)[:total]
        if not _relations_hold(wanted, cells):
            continue
        scene = _place(wanted, cells, rng)
        if _apart(scene):
            return scene
    raise ValueError(f"no layout found for prompt {prompt!r}; are its position relations contradictory?")


def render(scene: Sequence[SceneObject]) -> Image:
    """Draw a scene on white, anti-aliased: uint8 [32, 32, 3]."""
    canvas = np.full((IMAGE_SIDE_PX, IMAGE_SIDE_PX, 3), 255.0)
    for item in scene:
        alpha = coverage(item.shape, item.side, item.side)[..., None]
        box = canvas[item.top : item.top + item.side, item.left : item.left + item.side]
        box[:] = (1 - alpha) * box + alpha * np.array(PALETTE[item.color], dtype=np.float64)
    picture: Image = np.rint(canvas).astype(np.uint8)
    return picture


def render_all(records: Sequence[Mapping[str, Any]], seed: int) -> Image:
    """One new scene per record, deterministic given the seed: uint8 [records, 32, 32, 3]."""
    rng = np.random.default_rng(seed)
    return np.stack([render(sample_scene(record, rng)) for record in records])


def _relations_hold(wanted: Requirements, cells: NDArray[np.int64]) -> bool:
    """Stricter than GenEval's rule: the offset along the relation's axis must exceed the one across it."""
    ends = np.cumsum([need.count for need in wanted.include])
    groups = np.split(cells, ends[:-1])
    for need, group in zip(wanted.include, groups, strict=True):
        if need.relation is None:
            continue
        for cell in group:
            for other in groups[need.target]:
                down, right = cell // _GRID - other // _GRID, cell % _GRID - other % _GRID
                along, across = (right, down) if need.relation in ("left of", "right of") else (down, right)
                sign = -1 if need.relation in ("left of", "above") else 1
                if sign * along <= abs(across):
                    return False
    return True


def _place(
    wanted: Requirements, cells: NDArray[np.int64], rng: np.random.Generator
) -> tuple[SceneObject, ...]:
    pitch = IMAGE_SIDE_PX / _GRID
    scene: list[SceneObject] = []
    for need in wanted.include:
        for _ in range(need.count):
            row, column = divmod(int(cells[len(scene)]), _GRID)
            side = int(rng.choice(_SIDES_PX))
            jitter_x, jitter_y = rng.integers(-_JITTER_PX, _JITTER_PX + 1, size=2)
            left = round((column + 0.5) * pitch - side / 2) + int(jitter_x)
            top = round((row + 0.5) * pitch - side / 2) + int(jitter_y)
            color = need.color or str(rng.choice(list(PALETTE)))
            scene.append(SceneObject(need.name, color, left, top, side))
    return tuple(scene)


def _apart(scene: Sequence[SceneObject]) -> bool:
    """Whether all pairs of boxes are at least two pixels apart along one axis."""
    for index, a in enumerate(scene):
        for b in scene[index + 1 :]:
            gap_x = max(a.left, b.left) - min(a.left + a.side, b.left + b.side)
            gap_y = max(a.top, b.top) - min(a.top + a.side, b.top + b.side)
            if max(gap_x, gap_y) < _GAP_MIN_PX:
                return False
    return True
