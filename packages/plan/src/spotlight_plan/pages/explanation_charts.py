"""Why a plan costs what it does: its levers as a waterfall, what moves it most (Plotly, extra ``plots``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from spotlight_plan.candidates import shape_of
from spotlight_plan.explanation.levers import Lever
from spotlight_plan.explanation.plan_explanation import PlanExplanation
from spotlight_plan.explanation.sensitivity import Sensitivity, Swing
from spotlight_plan.pages.comparison_page import div_html, new_figure, table_html
from spotlight_plan.pages.comparison_summary import PageNote, TableLine, finite, hours, usd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_LOW, _HIGH, _DOWN, _UP, _TOTAL = "#6f9ae0", "#d9622b", "#1a9d8f", "#b3182c", "#2563c9"
_HOURS, _DOLLARS = 0, 1
_ROW_PX = 30


def explanation_html(explained: PlanExplanation, *, by_time: bool) -> Iterator[str]:
    """Figures and tables; ``by_time``: the plan is for time, else for dollars."""
    axis, levers, sensitivity = _HOURS if by_time else _DOLLARS, explained.levers, explained.sensitivity
    yield div_html(waterfall(levers, axis))
    yield table_html(
        ("lever", "to", "hours to target, p50", "dollars", "change"), tuple(_lever_lines(levers))
    )
    yield div_html(tornado(sensitivity, axis))
    yield table_html(("assumption", "low", "", "", "high", "", ""), tuple(_swing_lines(sensitivity, axis)))


def waterfall(levers: Sequence[Lever], axis: int) -> Figure:
    """From the first lever's figure to the last's; those without one are left out."""
    from plotly import graph_objects

    known = [(one.name, _figures(one)[axis]) for one in levers if one.runs is not None]
    show = (hours, usd)[axis]
    steps = [after - before for (_, before), (_, after) in pairwise(known)]
    names = [*(name for name, _ in known), "recommended"]
    figure = new_figure(
        "From the reserved GPUs alone to the recommendation", "", ("hours", "$")[axis] + " to target, p50"
    )
    figure.add_trace(
        graph_objects.Waterfall(
            x=[str(place) for place in range(len(names))],
            y=[known[0][1], *steps, known[-1][1]],
            measure=["absolute", *("relative" for _ in steps), "total"],
            text=[show(known[0][1]), *(_signed(show, step) for step in steps), show(known[-1][1])],
            textposition="outside",
            cliponaxis=False,
            decreasing={"marker": {"color": _DOWN}},
            increasing={"marker": {"color": _UP}},
            totals={"marker": {"color": _TOTAL}},
            showlegend=False,
        )
    )
    # By place, because two levers may have one name; words below each other, so that labels stay apart.
    labels = [name.replace(" ", "<br>") for name in names]
    figure.update_xaxes(
        type="category",
        tickmode="array",
        tickvals=[str(place) for place in range(len(names))],
        ticktext=labels,
    )
    figure.update_yaxes(rangemode="tozero", automargin=True)
    return figure


def tornado(sensitivity: Sensitivity, axis: int) -> Figure:
    """A bar per assumption, the one that moves most on top; an end without a target has no bar."""
    shown, base = sensitivity.ranked(axis), sensitivity.base[axis]
    figure = new_figure(
        "Which assumption moves it most: one at a time",
        ("hours", "$")[axis] + " to target, p50",
        "",
        barmode="overlay",
        height=170 + _ROW_PX * len(shown),
    )
    names = [_name(one, axis) for one in shown]
    for label, colour, ends in (
        ("low value", _LOW, [one.low[axis] for one in shown]),
        ("high value", _HIGH, [one.high[axis] for one in shown]),
    ):
        figure.add_bar(
            orientation="h",
            y=names,
            x=[None if math.isnan(end) else end - base for end in ends],
            base=base,
            name=label,
            marker_color=colour,
            customdata=ends,
            hovertemplate=f"%{{y}}: {label}, %{{customdata:,.2f}}<extra></extra>",
        )
    figure.add_vline(x=base, line_color="#22252a")
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}, margin={"t": 100})
    return figure


def _name(one: Swing, axis: int) -> str:
    ends = ((one.low_label, one.low[axis]), (one.high_label, one.high[axis]))
    labels = [f"{label}: no target" if math.isnan(value) else label for label, value in ends]
    return f"{one.name} ({', '.join(labels)})"


def explanation_notes(explained: PlanExplanation) -> tuple[PageNote, ...]:
    """How both were simulated, and what could not be."""
    levers, sensitivity = explained.levers, explained.sensitivity
    said = [
        "levers are pulled in this order, on the scenario's own cluster up to the search; in another order "
        "each has another part. The recommendation is simulated, the others are by the closed form",
        *(
            f"{one.name}: no figure of its own, its part is in the next one: {one.problem}"
            for one in levers
            if one.problem
        ),
        "each assumption alone at its low and high value, by the closed form, which unchanged comes to "
        f"{hours(sensitivity.base[_HOURS])} and {usd(sensitivity.base[_DOLLARS])}; it does not see work lost",
    ]
    return (PageNote("Levers and assumptions", tuple(said)),)


def explanation_record(explained: PlanExplanation) -> dict[str, object]:
    """For the ``--json`` output."""
    return {
        "levers": [
            {"name": one.name, "strategy": one.candidate.strategy, "problem": one.problem or None}
            | finite(dict(zip(("target_h", "target_usd"), _figures(one), strict=True)))
            for one in explained.levers
        ],
        "sensitivity": [
            {"assumption": one.name, "low": one.low_label, "high": one.high_label}
            | finite(
                {"low_h": one.low[0], "low_usd": one.low[1], "high_h": one.high[0], "high_usd": one.high[1]}
            )
            for one in explained.sensitivity.ranked(_DOLLARS)
        ],
    }


def _lever_lines(levers: Sequence[Lever]) -> Iterator[TableLine]:
    before = math.nan
    for one in levers:
        time, cost = _figures(one)
        change = "-" if math.isnan(cost - before) else _signed(usd, cost - before)
        yield TableLine(one.name, (shape_of(one.candidate), hours(time), usd(cost), change))
        before = before if math.isnan(cost) else cost


def _swing_lines(sensitivity: Sensitivity, axis: int) -> Iterator[TableLine]:
    for one in sensitivity.ranked(axis):
        low, high = ((hours(end[_HOURS]), usd(end[_DOLLARS])) for end in (one.low, one.high))
        yield TableLine(one.name, (one.low_label, *low, one.high_label, *high))


def _figures(lever: Lever) -> tuple[float, float]:
    if lever.runs is None:
        return math.nan, math.nan
    return lever.runs.target_h.p50, lever.runs.target_usd.p50


def _signed(show: Callable[[float], str], value: float) -> str:
    return f"{'-' if value < 0 else '+'}{show(abs(value))}"
