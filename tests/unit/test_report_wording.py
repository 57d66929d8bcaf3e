"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from spotlight.report import wording


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (wording.duration(42.4), "0:42"),
        (wording.duration(3 * 3600 + 245), "3:04:05"),
        (wording.duration(math.nan), "?"),
        (wording.money(12.345), "$12.35"),
        (wording.money(0.05), "$0.05"),
        (wording.money(0.00182), "$0.0018"),
        (wording.money(0.0), "$0"),
        (wording.count(7680), "7,680"),
        (wording.count(2_480_000), "2.48 M"),
        (wording.count(20_430_401_088), "20.43 B"),
        (wording.size(812), "812 B"),
        (wording.size(9.9 * 2**20), "9.9 MiB"),
        (wording.size(3 * 2**40), "3.00 TiB"),
        (wording.score(0.78125, 0.021), "0.781 ± 0.021"),
        (wording.score(0.5, math.inf), "0.500"),
        (wording.score(None), "-"),
        (wording.plural(1, "attempt"), "1 attempt"),
        (wording.plural(1200, "attempt"), "1,200 attempts"),
    ],
)
def test_numbers_read_well(found: str, expected: str) -> None:
    assert found == expected
