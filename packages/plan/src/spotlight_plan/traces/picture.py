"""Availability as a line of text and as a self-contained HTML page (Plotly, extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence

from spotlight_fleet.traces.trace import Trace, TraceError, TraceEventKind
from spotlight_plan.traces.trace_statistics import Availability, availability

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = ("#2563c9", "#d9622b", "#1a7f4b", "#8a4fbf", "#b3382c", "#5b6470")


def sparkline(trace: Trace, width: int = 72) -> str:
    """Mean number of nodes over time, one character per interval; blank for none."""
    stretches = availability(trace)
    step_s = trace.horizon_s / width
    means = [_mean_nodes(stretches, index * step_s, (index + 1) * step_s) for index in range(width)]
    top = max(means)
    return "".join(_bar(mean, top) for mean in means)


def html(traces: Sequence[Trace]) -> str:
    """Page with GPUs over time, one curve per trace, and a mark per removal.

    Raises:
        TraceError: Plotly is not installed.
    """
    try:
        from plotly import graph_objects
    except ImportError:
        raise TraceError(
            "the page needs Plotly, which is not installed; run: pip install 'spotlight-rl[plots]'"
        ) from None
    figure = graph_objects.Figure()
    for index, trace in enumerate(traces):
        colour = _COLOURS[index % len(_COLOURS)]
        parts = availability(trace)
        hours = [part.start_s / 3600 for part in parts] + [trace.horizon_s / 3600]
        gpus = [part.gpus for part in parts] + [parts[-1].gpus]
        line = {"shape": "hv", "color": colour, "width": 1.5}
        figure.add_scatter(x=hours, y=gpus, mode="lines", name=trace.source, line=line)
        lost = [event.time_s / 3600 for event in trace.events if event.kind is TraceEventKind.REMOVE]
        marker = {"symbol": "line-ns-open", "color": colour, "size": 7}
        name = f"{trace.source}: preemptions"
        figure.add_scatter(x=lost, y=[0] * len(lost), mode="markers", name=name, marker=marker)
    figure.update_layout(
        title="Spot GPUs over time",
        xaxis_title="hours",
        yaxis_title="GPUs present",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_yaxes(rangemode="tozero")
    page: str = figure.to_html(full_html=True, include_plotlyjs=True)
    return page


def _mean_nodes(stretches: Sequence[Availability], start_s: float, end_s: float) -> float:
    shares = (
        max(0.0, min(end_s, part.end_s) - max(start_s, part.start_s)) * part.nodes for part in stretches
    )
    return sum(shares) / (end_s - start_s)


def _bar(mean: float, top: float) -> str:
    if mean <= 0:
        return " "
    return _BARS[min(int(mean / top * len(_BARS)), len(_BARS) - 1)]
