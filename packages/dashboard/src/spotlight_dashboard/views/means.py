"""Curves of several runs as means over seeds, as ``spotlight compare`` groups them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from spotlight_dashboard.comparison import DRAWN, CurveChange, RunCurve, Seeds, grouped, points
from spotlight_dashboard.figures import Axis, Json


def run_curve(name: str, settings: Mapping[str, object], found: Mapping[str, Any], axis: Axis) -> RunCurve:
    """The curve over ``axis``; ``settings`` as of :class:`RunCurve`, or all there are."""
    known = ((x, y) for x, y in zip(found[axis], found["y"], strict=True) if None not in (x, y))
    pairs = sorted(known, key=itemgetter(0))  # of one x, as they came
    changes = [CurveChange(each["iteration"], each[axis], each["words"]) for each in found["changes"]]
    return RunCurve(name, settings, [x for x, _ in pairs], [y for _, y in pairs], changes)


def means(curves: Sequence[RunCurve]) -> Json:
    """By configuration: its runs, the mean where all of them have come to, and half of its interval."""
    return {"groups": [_group(each) for each in grouped(curves)]}


def _group(seeds: Seeds) -> Json:
    line = list(seeds.line(points([seeds], DRAWN)))
    return {
        "name": seeds.name,
        "runs": [run.run for run in seeds.runs],
        "repeated_seeds": seeds.repeated,
        "x": [x for x, _ in line],
        "y": [found.mean for _, found in line],
        "half": [None if math.isnan(found.half) else found.half for _, found in line],
        "changes": [
            {"run": run.run, "iteration": each.iteration, "x": each.x, "words": each.words}
            for run in seeds.runs
            for each in run.changes
        ],
    }
