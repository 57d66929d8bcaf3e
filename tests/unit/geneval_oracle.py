"""GenEval's evaluation written from its published order of operations, and random cases for it.

It works on what the official script works on, arrays of boxes by class index, and shares no code with the
package. Facts: ``evaluation/evaluate_images.py`` of https://github.com/djghosh13/geneval and, for the graded
score, ``reward_server/gen_eval.py`` of https://github.com/yifan123/reward-server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
SIDES = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}


@dataclass(frozen=True)
class Case:
    """Raw detections by class: ``boxes`` [n, 5] float32 (corners, score), ``colors`` [n]; and a prompt."""

    names: tuple[str, ...]
    boxes: tuple[NDArray[np.float32], ...]
    colors: tuple[tuple[str, ...], ...]
    metadata: dict[str, Any]


def survivors(case: Case) -> dict[str, list[tuple[NDArray[np.float32], str]]]:
    """Class by class: sort by score, cut at the threshold, keep sixteen."""
    threshold = 0.9 if case.metadata["tag"] == "counting" else 0.3
    left = {}
    for name, boxes, colors in zip(case.names, case.boxes, case.colors, strict=True):
        falling = np.argsort(boxes[:, 4], kind="stable")[::-1]
        falling = falling[boxes[falling, 4] > threshold][:16]
        left[name] = [(boxes[row, :4], colors[row]) for row in falling]
    return left


def stands(a: NDArray[np.float32], relation: str, b: NDArray[np.float32]) -> bool:
    """Whether box ``a`` is ``relation`` to box ``b``, in float32 from corner to quotient."""
    middle = [np.float32((box[:2] + box[2:]) / np.float32(2)) for box in (a, b)]
    size = [np.abs(box[2:] - box[:2]) for box in (a, b)]
    apart = middle[0] - middle[1]
    beyond = np.maximum(np.abs(apart) - 0.1 * (size[0] + size[1]), 0) * np.sign(apart)
    if (np.abs(beyond) < 1e-3).all():
        return False
    axis, sign = SIDES[relation]
    return bool(sign * (beyond / np.linalg.norm(apart))[axis] > 0.5)


def verdict(case: Case) -> bool:
    found, fulfilled, right = survivors(case), [], True
    for entry in case.metadata["include"]:
        group: list[Any] | None = found[entry["class"]][: entry["count"]]
        same = [color for _, color in group if color == entry.get("color", color)]
        if len(group) < entry["count"] or len(same) < entry["count"]:
            group = None
        elif "position" in entry:
            relation, target = entry["position"]
            others = fulfilled[target]
            if others is None or not all(stands(a, relation, b) for a, _ in group for b, _ in others):
                group = None
        right = right and group is not None
        fulfilled.append(group)
    for entry in case.metadata.get("exclude", []):
        right = right and len(found[entry["class"]]) < entry["count"]
    return right


def graded(case: Case) -> float:
    found, fulfilled, parts = survivors(case), [], []
    for entry in case.metadata["include"]:
        count, group = entry["count"], found[entry["class"]]
        parts.append(1 - abs(count - len(group)) / count)
        good = len(group) == count
        if not good and ("color" in entry or "position" in entry):
            parts.append(0.0)
        if good and "color" in entry:
            same = [color for _, color in group].count(entry["color"])
            parts.append(1 - abs(count - same) / count)
            good = same == count
        if good and "position" in entry:
            relation, target = entry["position"]
            others = fulfilled[target]
            if others is None:
                good = False
                parts.append(0.0)
            else:
                if not all(stands(a, relation, b) for a, _ in group for b, _ in others):
                    good = False
                    parts.append(0.0)
                parts.append(1.0)
        fulfilled.append(group if good else None)
    return sum(parts) / len(parts)


def random_case(rng: np.random.Generator, names: tuple[str, ...], tags: tuple[str, ...]) -> Case:
    """A prompt of any tag and detections that often fulfil it, often almost, sometimes not at all."""
    tag = str(rng.choice(tags))
    metadata = random_metadata(rng, names, tag)
    wanted: dict[str, int] = {}
    for entry in metadata["include"]:
        wanted[entry["class"]] = max(wanted.get(entry["class"], 0), entry["count"])
    favoured = [entry["color"] for entry in metadata["include"] if "color" in entry] or COLORS
    boxes, colors = [], []
    for name in names:
        near = wanted.get(name, 0) + int(rng.choice([0, 0, 0, 0, -1, 1, 2, 20], p=[0.2] * 4 + [0.05] * 4))
        number = max(near, 0) if name in wanted else int(rng.choice([0, 0, 1]))
        boxes.append(random_boxes(rng, number))
        colors.append(
            tuple(str(rng.choice(favoured if rng.random() < 0.85 else COLORS)) for _ in range(len(boxes[-1])))
        )
    return Case(names, tuple(boxes), tuple(colors), metadata)


def random_boxes(rng: np.random.Generator, sure: int) -> NDArray[np.float32]:
    """``sure`` boxes that any threshold lets through, and a few on either side of each threshold."""
    scores = [*rng.uniform(0.9001, 1, sure), *rng.uniform(0, 0.9, int(rng.choice([0, 0, 0, 1, 2])))]
    if rng.random() < 0.1:
        edge = np.float32(rng.choice([0.3, 0.9]))
        scores.append(float(rng.choice([edge, np.nextafter(edge, np.float32(1)), np.float32(0.5)])))
    if len(scores) > 1 and rng.random() < 0.1:
        scores[1] = scores[0]
    corners = rng.integers(0, 496, (len(scores), 2))
    sides = rng.integers(1, 200, (len(scores), 2))
    rows = np.hstack([corners, np.minimum(corners + sides, 512), np.reshape(scores, (-1, 1))])
    return rng.permutation(rows.astype(np.float32))


def random_metadata(rng: np.random.Generator, names: tuple[str, ...], tag: str) -> dict[str, Any]:
    """Mostly as the official prompts are, sometimes harder: repeated classes, several objects a relation."""

    def entry(count: int = 1, color: bool = False) -> dict[str, Any]:
        named = {"class": str(rng.choice(names)), "count": count}
        return named | ({"color": str(rng.choice(COLORS))} if color else {})

    many = 1 if rng.random() < 0.8 else 2
    if tag == "counting":
        count = int(rng.integers(2, 5))
        include = [entry(count, color=bool(rng.random() < 0.1))]
        return {"tag": tag, "include": include, "exclude": [{**include[0], "count": count + 1}]}
    number = {"single_object": 1, "colors": 1}.get(tag, 2) + int(rng.random() < 0.1)
    include = [entry(many, color=tag in ("colors", "color_attr")) for _ in range(number)]
    if tag == "position":
        for index in range(1, number):
            include[index]["position"] = [str(rng.choice(list(SIDES))), int(rng.integers(index))]
    if rng.random() < 0.1:
        return {"tag": tag, "include": include, "exclude": [entry(int(rng.integers(1, 4)))]}
    return {"tag": tag, "include": include}
