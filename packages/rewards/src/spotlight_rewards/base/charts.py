"""Line charts as SVG text, with standard-error bands, without a plotting library.

Pure and deterministic: the same input gives the same bytes. Non-finite values leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from spotlight_rewards.base.terminal import printable

COLOURS = ("#2563c9", "#d9622b", "#1a7f4b", "#8a4fbf", "#b3382c", "#5b6470")
_PAPER, _INK, _FAINT, _GRID = "#fbfaf7", "#22252a", "#6b7078", "#e4e1d9"
_WIDTH, _HEIGHT = 680, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 20, 68, 50
_FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
_POINTS_MAX = 40  # longer curves are drawn without markers
_MARK_LETTERS = 44
_LEAST = 1e-290  # what is less counts as 0: torch may make the processor flush what is below 2e-308


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Attributes:
        x: ascending.
        stderr: half widths of the band; None draws no band.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    stderr: Sequence[float] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), *([len(self.stderr)] if self.stderr is not None else [])}
        if len(lengths) != 1:
            raise ValueError(f"curve {self.name!r} has x, y and stderr of the lengths {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Mark:
    """Where on the x axis something changed, and what: any text, shown beside its line as far as it fits."""

    x: float
    words: str


@dataclass(frozen=True, slots=True)
class _Frame:
    x: tuple[float, ...]
    y: tuple[float, ...]

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.down(y):.1f}"

    def across(self, x: float) -> float:
        return _LEFT + (x - self.x[0]) / (self.x[-1] - self.x[0]) * (_WIDTH - _LEFT - _RIGHT)

    def down(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - self.y[0]) / (self.y[-1] - self.y[0]) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, marks: Sequence[Mark] = ()
) -> str:
    """Draw curves into one frame: an SVG document, 680 x 340, legible on light and dark pages.

    Marks where there is no curve are left out.

    Raises:
        ValueError: no finite value.
    """
    points = [
        (x, y, error if math.isfinite(error) else 0.0)
        for one in series
        for x, y, error in _points(one)
        if math.isfinite(y)
    ]
    if not points:
        raise ValueError(f"chart {title!r}: there is no finite value to draw")
    frame = _Frame(
        x=ticks(min(x for x, _, _ in points), max(x for x, _, _ in points), whole=True),
        y=ticks(min(y - e for _, y, e in points), max(y + e for _, y, e in points)),
    )
    body = [
        *_axes(frame, title, x_label, y_label),
        *(part for mark in marks if frame.x[0] <= mark.x <= frame.x[-1] for part in _mark(frame, mark)),
        *(part for one, colour in _coloured(series) for part in _band(frame, one, colour)),
        *(part for one, colour in _coloured(series) for part in _curve(frame, one, colour)),
        *_legend(series),
    ]
    label = escape(title, {"'": "&#39;"})
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{label}' {_FONT}>\n"
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' rx='6' fill='{_PAPER}'/>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def ticks(low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """Round numbers covering ``low`` to ``high`` in about five steps; at least two.

    Args:
        whole: use integer steps (iterations).
    """
    size = max(abs(low), abs(high))
    if high - low < max(1e-12 * size, _LEAST):
        pad = size * 0.1 if size > _LEAST else 1.0
        low, high = (low, low + 1) if whole else (low - pad, high + pad)
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, max(last, first + 1) + 1))


def _points(one: Series) -> Iterator[tuple[float, float, float]]:
    yield from zip(one.x, one.y, one.stderr if one.stderr is not None else [0.0] * len(one.x), strict=True)


def _coloured(series: Sequence[Series]) -> Iterator[tuple[Series, str]]:
    for index, one in enumerate(series):
        yield one, COLOURS[index % len(COLOURS)]


def _stretches(one: Series) -> Iterator[list[tuple[float, float, float]]]:
    for finite, stretch in groupby(_points(one), key=lambda point: math.isfinite(point[1])):
        if finite:
            yield list(stretch)


def _band(frame: _Frame, one: Series, colour: str) -> Iterator[str]:
    if one.stderr is None:
        return
    for stretch in _stretches(one):
        banded = [(x, y, error) for x, y, error in stretch if math.isfinite(error)]
        if len(banded) > 1:
            upper = [frame.at(x, y + error) for x, y, error in banded]
            lower = [frame.at(x, y - error) for x, y, error in reversed(banded)]
            yield f"<polygon points='{' '.join(upper + lower)}' fill='{colour}' fill-opacity='0.16'/>"


def _curve(frame: _Frame, one: Series, colour: str) -> Iterator[str]:
    for stretch in _stretches(one):
        line = " ".join(frame.at(x, y) for x, y, _ in stretch)
        yield (
            f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2' "
            "stroke-linejoin='round' stroke-linecap='round'/>"
        )
        if len(one.x) <= _POINTS_MAX:
            for x, y, _ in stretch:
                yield (
                    f"<circle cx='{frame.across(x):.1f}' cy='{frame.down(y):.1f}' r='3.2' fill='{colour}' "
                    f"stroke='{_PAPER}' stroke-width='1.2'>"
                    f"<title>{escape(one.name)}: {y:.4g} at {x:g}</title></circle>"
                )


def _axes(frame: _Frame, title: str, x_label: str, y_label: str) -> Iterator[str]:
    yield _text(_LEFT, 26, title, size=15, colour=_INK, weight="600")
    for tick in frame.y:
        down = frame.down(tick)
        yield f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{down:.1f}' y2='{down:.1f}' stroke='{_GRID}'/>"
        yield _text(_LEFT - 8, down + 4, _number(tick, frame.y), anchor="end")
    for tick in frame.x:
        yield _text(frame.across(tick), _HEIGHT - _BOTTOM + 18, _number(tick, frame.x), anchor="middle")
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_label, anchor="middle")
    yield _text(0, 0, y_label, anchor="middle", extra=f" transform='translate(16 {middle:.1f}) rotate(-90)'")


def _mark(frame: _Frame, mark: Mark) -> Iterator[str]:
    across, words = frame.across(mark.x), printable(mark.words)
    yield (
        f"<line x1='{across:.1f}' x2='{across:.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}' stroke='{_FAINT}' "
        f"stroke-dasharray='3 3'><title>{escape(words)}</title></line>"
    )
    shown = words if len(words) <= _MARK_LETTERS else f"{words[: _MARK_LETTERS - 1]}…"
    beside = f" transform='translate({across - 4:.1f} {_HEIGHT - _BOTTOM - 4}) rotate(-90)'"
    yield _text(0, 0, shown, size=10, extra=beside)


def _legend(series: Sequence[Series]) -> Iterator[str]:
    left = float(_LEFT)
    for one, colour in _coloured(series):
        yield f"<rect x='{left:.0f}' y='40' width='14' height='4' rx='2' fill='{colour}'/>"
        yield _text(left + 20, 46, one.name)
        left += 20 + 6.7 * len(one.name) + 22


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    colour: str = _FAINT,
    anchor: str = "start",
    weight: str = "400",
    extra: str = "",
) -> str:
    place = "" if extra else f" x='{x:.1f}' y='{y:.1f}'"
    look = f"font-size='{size}' fill='{colour}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text{place} {look}{extra}>{escape(text)}</text>"


def _number(value: float, among: Sequence[float]) -> str:
    step = among[1] - among[0]
    if max(abs(among[0]), abs(among[-1])) >= 1e5 or step < 1e-4:
        return f"{value:.3g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if _is_quarter(step) else 0)}f}"


def _is_quarter(step: float) -> bool:
    return round(step / 10.0 ** math.floor(math.log10(step) + 1e-9), 6) == 2.5
