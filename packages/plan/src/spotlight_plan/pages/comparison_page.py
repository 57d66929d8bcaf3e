"""Self-contained HTML pages: no network, no other files (Plotly, extra ``plots``).

Call :func:`require_plotly` before simulating, so that a missing library is reported first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from spotlight.scheduler.types import NodeKind, Phase
from spotlight_plan.compare import ComparedStrategy
from spotlight_plan.pages.comparison_summary import (
    KIND_NAMES,
    PHASE_COLOURS,
    PageNote,
    TableLine,
    notes_of,
    table_of,
)
from spotlight_plan.pages.timeline_chart import TimelineChart, timeline_chart
from spotlight_plan.pages.verdict import comparison_verdict
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.strategy_runs import StrategyRuns
from spotlight_plan.traces.trace_statistics import availability
from spotlight_rewards.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_CLOSE_UP = 3
"""Iterations in the close-up, after the first."""
_STYLE = """
body{font:15px/1.5 ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;color:#22252a;background:#fbfaf7;
max-width:1180px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.2rem .9rem .2rem 0;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
th{border-bottom:1px solid #22252a}.head td{padding-top:.7rem;color:#6b7078}li{color:#444a52}
"""


def require_plotly() -> None:
    """Raise :class:`ConfigError` if Plotly is missing."""
    if importlib.util.find_spec("plotly") is None:
        remedy = "Run: pip install 'spotlight-rl[plots]', or leave --html out."
        raise ConfigError("--html", [Problem("plotly", "no such package", "the extra plots", remedy)])


def comparison_page(
    prepared: Prepared, runs: Sequence[StrategyRuns], compared: Sequence[ComparedStrategy], now: datetime
) -> str:
    """Page with the verdict, the table, GPU-seconds by phase, availability, and GPU timelines per strategy.

    Args:
        compared: each strategy's first start, which the pictures show.
    """
    figures = [_phases_figure(compared), _availability_figure(prepared, compared)]
    for one in compared:
        figures += _gantt_figures(one)
    parts = [
        f"<p><b>{escape(comparison_verdict(runs))}</b></p>",
        table_html(["", *(one.strategy for one in runs)], table_of(runs)),
        *(div_html(figure) for figure in figures),
        notes_html(notes_of(prepared, runs, now)),
    ]
    return page_html(prepared.file.name, parts)


def page_html(title: str, parts: Iterable[str]) -> str:
    """A page with Plotly embedded."""
    from plotly.offline import get_plotlyjs

    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    script = f"<script>{get_plotlyjs()}</script>"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f"<!doctype html><html lang='en'><head>{head}{script}</head><body>{body}</body></html>\n"


def table_html(columns: Sequence[str], lines: Sequence[TableLine]) -> str:
    """A table; lines without cells are headings."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    rows = "".join(
        f"<tr{'' if line.cells else ' class=head'}>"
        + "".join(f"<td>{escape(cell.strip())}</td>" for cell in (line.label, *line.cells))
        + "</tr>"
        for line in lines
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def notes_html(notes: Sequence[PageNote]) -> str:
    """Notes below a table."""
    parts: list[str] = []
    for note in notes:
        items = "".join(f"<li>{escape(line)}</li>" for line in note.lines)
        parts.append(f"<h3>{escape(note.heading)}</h3><ul>{items}</ul>")
    return "".join(parts)


def div_html(figure: Figure) -> str:
    """A figure for a page that embeds Plotly."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=False)
    return text


def new_figure(title: str, x: str, y: str, **layout: object) -> Figure:
    """An empty figure in the common style."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        paper_bgcolor="#fbfaf7",
        plot_bgcolor="#fbfaf7",
        legend={"orientation": "h", "y": -0.2},
        **layout,
    )
    return figure


def _phases_figure(compared: Sequence[ComparedStrategy]) -> Figure:
    """Bars of GPU-hours per iteration, comparable across numbers of simulated iterations."""
    title = (
        f"GPU-hours per iteration by phase ({KIND_NAMES[NodeKind.RESERVED]}, and {KIND_NAMES[NodeKind.SPOT]})"
    )
    figure = new_figure(title, "", "GPU-hours", barmode="stack")
    figure.update_layout(legend={"y": 1, "orientation": "v"})  # below, it would overlap the labels
    rented = [
        (one.outcome, kind)
        for one in compared
        for kind in NodeKind
        if any(one.outcome.gpu_s.get((kind, phase)) for phase in Phase)
    ]
    labels = [[outcome.strategy for outcome, _ in rented], [kind.value for _, kind in rented]]
    for phase in Phase:
        spent = [
            outcome.gpu_s.get((kind, phase), 0.0) / 3600 / max(1, outcome.iterations)
            for outcome, kind in rented
        ]
        if any(spent):
            figure.add_bar(x=labels, y=spent, name=phase.value, marker_color=PHASE_COLOURS[phase])
    return figure


def _availability_figure(prepared: Prepared, compared: Sequence[ComparedStrategy]) -> Figure:
    last_h = max((one.outcome.simulated_h for one in compared), default=0.0)
    parts = [part for part in availability(prepared.trace) if part.start_s / 3600 <= last_h]
    figure = new_figure(f"Spot GPUs to be had: {prepared.trace.source}", "hours", "GPUs")
    hours = [part.start_s / 3600 for part in parts] + [last_h]
    gpus = [part.gpus for part in parts] + [parts[-1].gpus if parts else 0]
    figure.add_scatter(
        x=hours, y=gpus, mode="lines", line={"shape": "hv", "color": "#2563c9"}, fill="tozeroy",
        name="GPUs",
    )  # fmt: skip
    for one in compared:  # named in the legend, because labels of equal ends would overlap
        figure.add_scatter(
            x=[one.outcome.simulated_h] * 2,
            y=[0, max(gpus)],
            mode="lines",
            line_dash="dot",
            name=f"end of {one.outcome.strategy}",
        )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _gantt_figures(compared: ComparedStrategy) -> list[Figure]:
    name, ends = compared.outcome.strategy, compared.iteration_ends_s
    if not compared.gpus:
        return []
    last_s = max(stay.segments[-1].end_s for stay in compared.gpus if stay.segments)
    figures = [_gantt_figure(f"{name}: what every GPU did", timeline_chart(compared.gpus, 0.0, last_s))]
    if len(ends) > _CLOSE_UP + 1:
        close = timeline_chart(compared.gpus, ends[0], ends[_CLOSE_UP])
        figures.append(_gantt_figure(f"{name}: iterations 2 to {_CLOSE_UP + 1}", close))
    return figures


def _gantt_figure(title: str, content: TimelineChart) -> Figure:
    gathered = max(row.gpus for row in content.rows)
    about = f"; up to {gathered} GPUs a line" if gathered > 1 else ""
    cell = f"each cell of {content.cell_s:.3g} s shows its longest phase"
    labels = [row.label for row in content.rows]
    height = 200 + 14 * len(labels)
    figure = new_figure(f"{title}<br><sub>{cell}{about}</sub>", "hours", "", barmode="overlay", height=height)
    for phase in Phase:
        shown = [stretch for stretch in content.stretches if stretch.phase is phase]
        if shown:
            figure.add_bar(
                orientation="h",
                base=[round(stretch.start_s / 3600, 6) for stretch in shown],
                x=[round((stretch.end_s - stretch.start_s) / 3600, 6) for stretch in shown],
                y=[labels[stretch.row] for stretch in shown],
                name=phase.value,
                marker={"color": PHASE_COLOURS[phase], "line": {"width": 0}},
                hovertemplate=f"%{{y}}: {phase.value}, %{{x:.4f}} h<extra></extra>",
            )
    # At the bottom edge, because a share of so low a figure would put it onto the axis title.
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}
    figure.update_layout(bargap=0.1, legend=legend, margin={"b": 90})
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels, type="category")
    return figure
