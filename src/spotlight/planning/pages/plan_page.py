"""Search results as text and as a page with the trade-off curve (Plotly, extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from spotlight.planning.compare import SimulationOutcome
from spotlight.planning.pages.comparison_page import div_html, new_figure, notes_html, page_html, table_html
from spotlight.planning.pages.comparison_summary import (
    PageNote,
    TableLine,
    hours,
    notes_of,
    outcome_record,
    percent,
    usd,
)
from spotlight.planning.scenarios.prepare import Prepared
from spotlight.planning.scenarios.scenario_file import ScenarioFile
from spotlight.planning.search import CONFIRMED, GAIN_MIN, EvaluatedCandidate, Goal, SearchResult, shape_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = ("", "cluster", "time to target", "cost to target", "iteration", "spot idle", "previews used")


def goal_text(goal: Goal) -> str:
    """``a deadline of 5 h``."""
    if goal.deadline_h is not None:
        return f"a deadline of {hours(goal.deadline_h)}"
    assert goal.budget_usd is not None
    return f"a budget of {usd(goal.budget_usd)}"


def answer_text(file: ScenarioFile, found: SearchResult) -> str:
    """The recommendation, or why there is none, in one or two sentences."""
    one = found.answer
    if one is not None:
        iterations = one.outcome.target.value if one.outcome.target else 0
        kind = "cheapest" if found.goal.deadline_h is not None else "fastest"
        return (
            f"Rent {shape_of(file, one.candidate)}: {iterations} iterations in "
            f"{hours(one.outcome.target_h)} for {usd(one.outcome.target_usd)}, simulated whole; "
            f"the {kind} of {len(found.evaluated)} candidates within {goal_text(found.goal)}."
        )
    near = found.rejected[0] if found.rejected else found.nearest
    whole = ", which simulated whole misses it" if near.whole else ""
    return (
        f"Nothing meets {goal_text(found.goal)}. Nearest of {len(found.evaluated)} candidates: "
        f"{shape_of(file, near.candidate)} with {hours(near.outcome.target_h)} and "
        f"{usd(near.outcome.target_usd)}{whole}. Relax the goal, or widen the search: plan.reserved_nodes, "
        "plan.spot_nodes, plan.gpu_types, plan.strategies."
    )


def lines_of(file: ScenarioFile, found: SearchResult, *, every: bool) -> tuple[TableLine, ...]:
    """The table, fastest first: the front and the answer, or every candidate."""
    front = {one.candidate for one in found.front}
    best = found.answer.candidate if found.answer else None
    shown = [one for one in found.evaluated if every or one.candidate in front or one.candidate == best]
    shown.sort(key=lambda one: (one.outcome.target_h, one.candidate))
    return tuple(
        TableLine(
            ">" if one.candidate == best else "*" if one.candidate in front else " ",
            (shape_of(file, one.candidate), *_numbers(one.outcome)),
        )
        for one in shown
    )


def _numbers(one: SimulationOutcome) -> tuple[str, ...]:
    idle, previews = percent(one.spot_idle_share), percent(one.preview_share)
    return hours(one.target_h), usd(one.target_usd), f"{one.iteration_s:,.0f} s", idle, previews


def plan_notes(
    file: ScenarioFile, found: SearchResult, prepared: Prepared, now: datetime
) -> tuple[PageNote, ...]:
    """Assumptions behind the answer; ``prepared`` is the answer's, or the nearest's."""
    one = found.answer or found.nearest
    searched = [
        f"{len(found.evaluated)} candidates, {file.plan.iterations} iterations each, extrapolated; "
        f"the best {CONFIRMED} that met the goal are simulated whole, and the best of these is recommended",
        *(
            f"{shape_of(file, missed.candidate)} seemed to meet the goal; simulated whole it took "
            f"{hours(missed.outcome.target_h)} and {usd(missed.outcome.target_usd)}, with "
            f"{percent(missed.outcome.preview_share)} of its previews"
            for missed in found.rejected
        ),
    ]
    notes = [PageNote("Searched", tuple(searched))]
    if found.parts:
        gain = f"parts that shorten iterations by less than {GAIN_MIN:.0%} or two errors are left off"
        notes.append(PageNote("Parts of the pipeline", (*found.parts, gain)))
    if found.left_out:
        notes.append(PageNote("Left out", found.left_out))
    return (*notes, *notes_of(prepared, [one.outcome], now))


def plan_record(file: ScenarioFile, found: SearchResult) -> dict[str, object]:
    """The ``--json`` output."""
    front = {one.candidate for one in found.front}
    return {
        "scenario": file.model_dump(mode="json"),
        "goal": {"deadline_h": found.goal.deadline_h, "budget_usd": found.goal.budget_usd},
        "answer": _record(file, found.answer) if found.answer else None,
        "text": answer_text(file, found),
        "candidates": [_record(file, one) | {"pareto": one.candidate in front} for one in found.evaluated],
        "rejected": [_record(file, one) for one in found.rejected],
        "parts": list(found.parts),
        "left_out": list(found.left_out),
    }


def _record(file: ScenarioFile, one: EvaluatedCandidate) -> dict[str, object]:
    candidate = one.candidate
    return {
        "strategy": candidate.strategy,
        "gpu_type": candidate.gpu_type,
        "spot_gpu_type": candidate.spot_gpu_type,
        "reserved_nodes": candidate.reserved_nodes,
        "spot_nodes": candidate.spot_nodes,
        "cluster": shape_of(file, candidate),
        "simulated_whole": one.whole,
        "outcome": outcome_record(one.outcome),
    }


def plan_page(file: ScenarioFile, found: SearchResult, prepared: Prepared, now: datetime) -> str:
    """Page with the answer, trade-off curve, all candidates, and assumptions."""
    parts = [
        f"<p><b>{escape(answer_text(file, found))}</b></p>",
        div_html(_curve(file, found)),
        table_html(COLUMNS, lines_of(file, found, every=True)),
        notes_html(plan_notes(file, found, prepared, now)),
    ]
    return page_html(f"{file.name}: {goal_text(found.goal)}", parts)


def _curve(file: ScenarioFile, found: SearchResult) -> Figure:
    figure = new_figure("Time and cost to target", "hours to target", "$ to target")
    front = {one.candidate for one in found.front}

    def add(shown: Sequence[EvaluatedCandidate], name: str, mode: str, **marker: object) -> None:
        figure.add_scatter(
            x=[one.outcome.target_h for one in shown],
            y=[one.outcome.target_usd for one in shown],
            text=[shape_of(file, one.candidate) for one in shown],
            name=name,
            mode=mode,
            marker=marker,
            hovertemplate="%{text}<br>%{x:.2f} h, $%{y:,.2f}<extra></extra>",
        )

    add([one for one in found.evaluated if one.candidate not in front], "beaten", "markers", color="#b9bdc4")
    add(found.front, "Pareto front", "lines+markers", color="#2563c9", size=9)
    if found.rejected:
        add(found.rejected, "missed when simulated whole", "markers", color="#b3182c", symbol="x", size=10)
    if found.answer is not None:
        add([found.answer], "answer, simulated whole", "markers", color="#d9622b", symbol="star", size=16)
    if found.goal.deadline_h is not None:
        figure.add_vline(x=found.goal.deadline_h, line_dash="dot", annotation_text="deadline")
    else:
        figure.add_hline(y=found.goal.budget_usd, line_dash="dot", annotation_text="budget")
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(rangemode="tozero")
    return figure
