"""GenEval's verdicts on detections. Pure: numpy only, no models.

Source of thresholds, order of operations and arithmetic (float32): ``evaluation/evaluate_images.py`` of
https://github.com/djghosh13/geneval. Source of the graded score: ``reward_server/gen_eval.py`` of
https://github.com/yifan123/reward-server, on which Flow-GRPO trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.geneval.requirements import Requirement, Requirements

SCORE_MIN = 0.3
SCORE_MIN_COUNTING = 0.9
"""Minimum confidence, exclusive; the higher one for the tag ``counting``."""
OBJECTS_MAX = 16
"""The most confident objects of a class that count; overlapping ones are not suppressed."""
POSITION_THRESHOLD = 0.1
"""Share of the two extents by which the centres must differ."""


@dataclass(frozen=True, slots=True, eq=False)
class Detection:
    """One detected object; equal only to itself.

    Attributes:
        name: GenEval's class.
        score: confidence, float32.
        box: float32 (left, top, right, bottom) in pixels, right and bottom exclusive.
        mask: bool [height, width] of the whole picture.
    """

    name: str
    score: np.float32
    box: NDArray[np.float32]
    mask: NDArray[np.bool_]


Objects: TypeAlias = Mapping[str, Sequence[Detection]]
"""What counts as present: by class, most confident first."""
Colors: TypeAlias = Mapping[Detection, str]


def present_objects(detections: Sequence[Detection], tag: str) -> dict[str, list[Detection]]:
    """The detections that count under a prompt's tag, by class, most confident first."""
    score_min = np.float32(SCORE_MIN_COUNTING if tag == "counting" else SCORE_MIN)
    by_name: dict[str, list[Detection]] = {}
    for each in detections:
        if each.score > score_min:
            by_name.setdefault(each.name, []).append(each)
    # A stable ascending sort, read backwards: of equal scores, the last detected comes first.
    return {
        name: sorted(found, key=lambda each: each.score)[::-1][:OBJECTS_MAX]
        for name, found in by_name.items()
    }


def to_color(objects: Objects, wanted: Requirements) -> list[Detection]:
    """The objects whose colours the verdicts need, each once."""
    needed: dict[Detection, None] = {}
    for need in wanted.include:
        found = objects.get(need.name, ())
        if need.color is not None and len(found) >= need.count:
            needed |= dict.fromkeys(found[: need.count])
    return list(needed)


def is_correct(objects: Objects, wanted: Requirements, colors: Colors) -> bool:
    """GenEval's verdict: every ``include`` entry is met, and no ``exclude`` entry.

    An entry looks only at the ``count`` most confident objects of its class. A relation must hold between
    all of them and all of its target's; an unmet target fails it.

    Args:
        colors: of the objects that :func:`to_color` names.
    """
    correct = True
    met: list[Sequence[Detection] | None] = []
    for need in wanted.include:
        found = objects.get(need.name, ())[: need.count]
        holds = len(found) == need.count
        if holds and need.color is not None:
            holds = all(colors[each] == need.color for each in found)
        if holds and need.relation is not None:
            holds = _is_placed(found, need.relation, met[need.target])
        met.append(found if holds else None)
        correct &= holds
    return correct and not any(len(objects.get(name, ())) >= count for name, count in wanted.exclude)


def graded_score(objects: Objects, wanted: Requirements, colors: Colors) -> float:
    """Flow-GRPO's graded score: the mean of one or two terms per ``include`` entry, at most 1.

    Term of the number: 1 - |count - found| / count, which many surplus objects make negative. Where it is 1,
    a colour adds 1 - |count - objects of that colour| / count, and a relation (once number and colour are
    right) adds 1 if it holds, 0 and 1 if it does not, 0 if its target is not met. Where the number is wrong,
    a colour or a relation adds 0. ``exclude`` is not read.
    """
    terms: list[float] = []
    met: list[Sequence[Detection] | None] = []
    for need in wanted.include:
        found = objects.get(need.name, ())
        terms.append(_share(need, len(found)))
        holds = len(found) == need.count
        if not holds and (need.color is not None or need.relation is not None):
            terms.append(0.0)
        if holds and need.color is not None:
            of_color = sum(colors[each] == need.color for each in found)
            terms.append(_share(need, of_color))
            holds = of_color == need.count
        if holds and need.relation is not None:
            target = met[need.target]
            holds = _is_placed(found, need.relation, target)
            terms += [0.0] if target is None else [1.0] if holds else [0.0, 1.0]
        met.append(found if holds else None)
    return sum(terms) / len(terms)


def _share(need: Requirement, found: int) -> float:
    return 1 - abs(need.count - found) / need.count


def _is_placed(found: Sequence[Detection], relation: str, targets: Sequence[Detection] | None) -> bool:
    if targets is None:
        return False
    return all(relation in relations(each.box, other.box) for each in found for other in targets)


def relations(box: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]]) -> set[str]:
    """Where ``box`` is, seen from ``other``: none, one or two of GenEval's relations."""
    dx, dy = direction(box, other)
    held = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, holds in held.items() if holds}


def direction(box: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]]) -> tuple[float, float]:
    """(dx, dy) of ``box`` seen from ``other``; a relation holds where a component exceeds one half.

    The offset of the centres, reduced by 10 % of both extents, over its original length; (0, 0) if less than
    1e-3 pixels of it are left. Computed in the boxes' precision.
    """
    boxes = np.stack([box, other]).reshape(2, 2, 2)
    centers = boxes.mean(axis=1)
    extents = np.abs(boxes[:, 1] - boxes[:, 0])
    offset = centers[0] - centers[1]
    left = np.abs(offset) - POSITION_THRESHOLD * (extents[0] + extents[1])
    shrunk = np.maximum(left, 0) * np.sign(offset)
    if np.all(np.abs(shrunk) < 1e-3):
        return 0.0, 0.0
    dx, dy = shrunk / np.linalg.norm(offset)
    return float(dx), float(dy)
