"""Charts: sound XML, round ticks that cover the data, gaps where there is no number."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight_rewards.base.charts import Mark, Series, line_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(-1e6, 1e6, allow_nan=False)


def drawn(*series: Series, title: str = "a chart") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(series, title=title, x_label="iteration", y_label="score"))


def points(shape: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in shape.attrib["points"].split())]


@given(low=finite, span=st.floats(0, 1e6), whole=st.booleans())
def test_ticks_cover_the_data_in_few_equal_round_steps(low: float, span: float, whole: bool) -> None:
    found = ticks(low, low + span, whole=whole)
    step = found[1] - found[0]
    slack = 1e-6 * max(step, abs(low))
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack
    assert 2 <= len(found) <= 10
    assert all(b - a == pytest.approx(step, rel=1e-6, abs=1e-9) for a, b in pairwise(found))
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    rounding = 1e-6 + 10 * math.ulp(abs(low) + span) / step
    assert whole or any(abs(mantissa / nice - 1) < rounding for nice in (1, 2, 2.5, 5, 10))
    assert not whole or step == round(step)


@pytest.mark.parametrize("flushed", [False, True])
def test_values_too_small_to_draw_are_drawn_as_equal(flushed: bool) -> None:
    torch.set_flush_denormal(flushed)
    try:
        found = [ticks(low, high) for low in (0.0, 5e-324, 1e-308) for high in (low, 1.2e-308, 1e-300)]
        assert {(each[0], each[-1]) for each in found} == {(-1.0, 1.0)}
        assert ticks(0.0, 1e-280)[-1] == pytest.approx(1e-280)
    finally:
        torch.set_flush_denormal(False)


@given(st.lists(st.tuples(finite, st.floats(0, 1e5)), min_size=1, max_size=60))
def test_curve_and_band_stay_within_the_frame(values: list[tuple[float, float]]) -> None:
    series = Series("score", range(len(values)), [y for y, _ in values], [e for _, e in values])
    for shape in drawn(series).iter():
        if "points" in shape.attrib:
            assert all(0 <= x <= 680 and 0 <= y <= 340 for x, y in points(shape))


def test_higher_values_are_drawn_higher_and_later_ones_to_the_right() -> None:
    (line,) = drawn(Series("score", [0, 5, 10], [0.1, 0.5, 0.9])).iter(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = points(line)
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_a_missing_value_is_a_gap() -> None:
    lines = list(drawn(Series("score", range(5), [1.0, 2.0, math.nan, 1.0, 2.0])).iter(f"{SVG}polyline"))
    assert [len(points(line)) for line in lines] == [2, 2]


def test_the_band_is_as_wide_as_the_standard_errors() -> None:
    image = drawn(Series("score", [0, 1], [0.5, 0.5], [0.1, 0.1]), Series("flat", [0, 1], [0.0, 1.0]))
    (band,) = image.iter(f"{SVG}polygon")
    scale = next(points(line) for line in list(image.iter(f"{SVG}polyline"))[1:])
    pixels_per_unit = scale[0][1] - scale[1][1]
    heights = [y for _, y in points(band)]
    assert max(heights) - min(heights) == pytest.approx(0.2 * pixels_per_unit, abs=0.3)


def test_any_name_is_text_and_never_markup() -> None:
    image = drawn(Series("a<b> & 'c'", [0, 1], [0, 1]), title='it\'s <b>bold</b> & "more"')
    assert image.attrib["aria-label"] == 'it\'s <b>bold</b> & "more"'
    assert "a<b> & 'c'" in [text.text for text in image.iter(f"{SVG}text")]


def test_the_same_numbers_give_the_same_bytes() -> None:
    series = [Series("score", [0, 1, 2], [0.1, 0.2, 0.3])]
    first, second = (line_chart(series, title="t", x_label="x", y_label="y") for _ in range(2))
    assert first == second


def test_nothing_to_draw_and_uneven_lengths_are_errors() -> None:
    with pytest.raises(ValueError, match="no finite value"):
        drawn(Series("score", [0, 1], [math.nan, math.inf]))
    with pytest.raises(ValueError, match="lengths"):
        Series("score", [0, 1], [0.5])


def test_a_mark_is_a_line_with_what_changed_and_none_is_drawn_beside_the_curves() -> None:
    text = "learner.learning_rate 0.0003 to 0.0001; <b>'&\x1b[2J " + "x" * 50
    marks = [Mark(5, text), Mark(10, "last"), Mark(11, "not made yet")]
    chart = line_chart([Series("a", [0, 10], [0, 1])], title="t", x_label="x", y_label="y", marks=marks)
    root = ElementTree.fromstring(chart)
    lines = [each for each in root.iter(f"{SVG}line") if each.find(f"{SVG}title") is not None]
    assert [each.findtext(f"{SVG}title") for each in lines] == [text.replace("\x1b", "\\x1b"), "last"]
    assert [float(each.attrib["x1"]) for each in lines] == [(74 + 660) / 2, 660]
    beside = [each.text for each in root.iter(f"{SVG}text") if "rotate" in each.get("transform", "")]
    assert beside == ["y", "learner.learning_rate 0.0003 to 0.0001; <b>…", "last"]
