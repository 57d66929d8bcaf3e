"""GPU timelines reduced to what a figure can show. Pure.

Stays are packed into lanes of one GPU at a time, since spot nodes return under new names. Beyond
:data:`ROWS_MAX`, neighbouring lanes share a row. A cell shows the phase that took most of its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spotlight.scheduler.types import NodeKind, Phase
from spotlight_plan.simulation.scenario import GpuTimeline

ROWS_MAX = 48
CELLS_MAX = 400


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One row of the chart.

    Attributes:
        gpus: lanes in this row.
    """

    label: str
    kind: NodeKind
    gpus: int


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """One phase of a row over a time span."""

    row: int
    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Contents of the chart; rows from top to bottom."""

    rows: tuple[TimelineRow, ...]
    stretches: tuple[TimelineBar, ...]
    cell_s: float


def timeline_chart(timelines: Sequence[GpuTimeline], start_s: float, end_s: float) -> TimelineChart:
    """Chart the timelines between two times.

    Raises:
        ValueError: the end is not after the start.
    """
    if end_s <= start_s:
        raise ValueError(f"a picture from {start_s} to {end_s} s; expected a stretch of time")
    cell_s = (end_s - start_s) / CELLS_MAX
    laned = [(kind, lane) for kind in NodeKind for lane in _lanes(timelines, kind)]
    share = -(-len(laned) // ROWS_MAX)
    rows: list[TimelineRow] = []
    stretches: list[TimelineBar] = []
    for kind in NodeKind:
        mine = [lane for of, lane in laned if of is kind]
        for first in range(0, len(mine), share):
            gathered = mine[first : first + share]
            last = first + len(gathered) - 1
            label = f"{kind.value} {first}" if len(gathered) == 1 else f"{kind.value} {first}-{last}"
            cells = _cells([stay for lane in gathered for stay in lane], start_s, end_s, cell_s)
            stretches += _runs(len(rows), cells, len(gathered) * cell_s, start_s, cell_s)
            rows.append(TimelineRow(label, kind, len(gathered)))
    return TimelineChart(tuple(rows), tuple(stretches), cell_s)


def _lanes(timelines: Sequence[GpuTimeline], kind: NodeKind) -> list[list[GpuTimeline]]:
    lanes: list[list[GpuTimeline]] = []
    stays = [stay for stay in timelines if stay.kind is kind and stay.segments]
    for stay in sorted(stays, key=lambda stay: (stay.segments[0].start_s, stay.node, stay.gpu)):
        begins_s = stay.segments[0].start_s
        lane = next((lane for lane in lanes if lane[-1].segments[-1].end_s <= begins_s), None)
        if lane is None:
            lanes.append([stay])
        else:
            lane.append(stay)
    return lanes


def _cells(
    stays: Sequence[GpuTimeline], start_s: float, end_s: float, cell_s: float
) -> Mapping[int, Mapping[Phase, float]]:
    cells: dict[int, dict[Phase, float]] = defaultdict(lambda: defaultdict(float))
    for stay in stays:
        for segment in stay.segments:
            at_s, until_s = max(segment.start_s, start_s), min(segment.end_s, end_s)
            while at_s < until_s:
                # The float quotient may fall just below the cell boundary.
                cell = min(int((at_s - start_s) / cell_s + 1e-9), CELLS_MAX - 1)
                stop_s = until_s if cell == CELLS_MAX - 1 else min(until_s, start_s + (cell + 1) * cell_s)
                cells[cell][segment.phase] += stop_s - at_s
                at_s = stop_s
    return cells


def _runs(
    row: int, cells: Mapping[int, Mapping[Phase, float]], full_s: float, start_s: float, cell_s: float
) -> Iterator[TimelineBar]:
    """Merge adjacent cells of one phase; cells whose GPUs are mostly absent stay empty."""
    open_phase: Phase | None = None
    begun = 0
    for cell in range(CELLS_MAX + 1):
        spent = cells.get(cell, {})
        present = sum(spent.values()) >= full_s / 2
        phase = max(spent, key=lambda name: spent[name]) if present else None
        if phase is not open_phase:
            if open_phase is not None:
                yield TimelineBar(row, open_phase, start_s + begun * cell_s, start_s + cell * cell_s)
            open_phase, begun = phase, cell
