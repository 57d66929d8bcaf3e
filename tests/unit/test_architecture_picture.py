"""The picture of the architecture is of the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import draw_architecture

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"  ([\d,]+)(?=</text>)|([\d,]+)(?= lines</text>)")


def test_the_picture_of_the_architecture_is_current() -> None:
    """Same packages, rooms, policies and arrows; code lines may be 500 or a tenth off."""
    drawn, committed = draw_architecture.draw(), draw_architecture.PICTURE.read_text()
    remedy = "run python scripts/draw_architecture.py"
    assert FIGURE.sub("#", drawn) == FIGURE.sub("#", committed), remedy
    for found, shown in zip(figures(drawn), figures(committed), strict=True):
        assert shown == pytest.approx(found, rel=0.1, abs=500), remedy


def figures(picture: str) -> list[int]:
    return [int((one or other).replace(",", "")) for one, other in FIGURE.findall(picture)]
