"""Search results as text and as a page with the trade-off curve (Plotly, extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from spotlight_plan.candidates import order_of, shape_of
from spotlight_plan.estimates import GAIN_MIN
from spotlight_plan.explanation.plan_explanation import PlanExplanation
from spotlight_plan.pages.comparison_page import div_html, new_figure, notes_html, page_html, table_html
from spotlight_plan.pages.comparison_summary import (
    PageNote,
    TableLine,
    between,
    hours,
    notes_of,
    percent,
    runs_record,
    usd,
)
from spotlight_plan.pages.explanation_charts import explanation_html, explanation_notes, explanation_record
from spotlight_plan.pages.verdict import verdict_text
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.search import CONFIRMED, EvaluatedCandidate, Goal, SearchResult
from spotlight_plan.strategy_runs import StrategyRuns, known_or_inf

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = ("", "cluster", "time", "range", "cost", "range", "iteration", "previews used")


def goal_text(goal: Goal) -> str:
    """``a deadline of 5 h``."""
    if goal.deadline_h is not None:
        return f"a deadline of {hours(goal.deadline_h)}"
    assert goal.budget_usd is not None
    return f"a budget of {usd(goal.budget_usd)}"


def answer_text(found: SearchResult) -> str:
    """The recommendation, or why there is none, in one or two sentences."""
    one = found.answer
    if one is not None:
        iterations = one.outcome.target.iterations if one.outcome.target else 0
        starts = len(one.runs.outcomes)
        kind = "cheapest" if found.goal.deadline_h is not None else "fastest"
        return (
            f"Rent {shape_of(one.candidate)}: {iterations} iterations in "
            f"{_p50_p90(one.runs)}, simulated{f' from {starts} starts' if starts > 1 else ''}; the "
            f"{kind} of {len(found.evaluated)} candidates within {goal_text(found.goal)}."
        )
    near = found.nearest
    misses = ", which simulated misses it" if near.simulated else ""
    return (
        f"Nothing meets {goal_text(found.goal)}. Nearest of {len(found.evaluated)} candidates: "
        f"{shape_of(near.candidate)} with {_p50_p90(near.runs)}{misses}. "
        "Relax the goal, or widen the search: plan.reserved_nodes, plan.spot_nodes, plan.gpu_types, "
        "plan.strategies."
    )


def _p50_p90(runs: StrategyRuns) -> str:
    """``2.03 h for $109 (p90: 2.10 h, $112)``."""
    time, cost = runs.target_h, runs.target_usd
    worse = f" (p90: {hours(time.p90)}, {usd(cost.p90)})" if len(runs.outcomes) > 1 else ""
    return f"{hours(time.p50)} for {usd(cost.p50)}{worse}"


def _previews(runs: StrategyRuns) -> str:
    share = runs.figure(lambda one: one.preview_share)
    return between(percent, share.least, share.most)


def lines_of(found: SearchResult, *, every: bool) -> tuple[TableLine, ...]:
    """The table, fastest first: the front and the answer, or every candidate."""
    front = {one.candidate for one in found.front}
    best = found.answer.candidate if found.answer else None
    shown = [one for one in found.evaluated if every or one.candidate in front or one.candidate == best]
    shown.sort(key=lambda one: (known_or_inf(one.runs.target_h.p50), order_of(one.candidate)))
    return tuple(
        TableLine(
            ">" if one.candidate == best else "*" if one.candidate in front else " ",
            (shape_of(one.candidate), *_numbers(one.runs)),
        )
        for one in shown
    )


def _numbers(runs: StrategyRuns) -> tuple[str, ...]:
    """p50 of time and cost to target, each with its range over starts and the iterations' interval."""
    iteration_s = runs.figure(lambda one: one.iteration_s).p50
    return (
        hours(runs.target_h.p50),
        between(hours, *runs.ends_h),
        usd(runs.target_usd.p50),
        between(usd, *runs.ends_usd),
        f"{iteration_s:,.0f} s",
        percent(runs.first.preview_share),
    )


def plan_notes(
    file: ScenarioFile, found: SearchResult, prepared: Prepared, now: datetime
) -> tuple[PageNote, ...]:
    """Assumptions behind the answer; ``prepared`` is the answer's, or the nearest's."""
    one, starts = found.answer or found.nearest, file.run.starts
    searched = [
        f"{len(found.evaluated)} candidates, each taken to its target along the trace by the closed form; "
        f"the best {CONFIRMED} that meet the goal are simulated for {file.plan.iterations} iterations from "
        f"{starts} start{'s' * (starts > 1)}, which corrects it; of those that then meet it at p90, the best "
        f"at p50 is taken; parts that shorten a run by less than {GAIN_MIN:.0%} are left off",
        "work that preemptions undo after the simulated iterations is not counted: the command below, with a "
        "higher run.iterations, shows it",
        *(
            f"{shape_of(missed.candidate)} seemed to meet the goal; simulated it takes "
            f"{_p50_p90(missed.runs)}, with {_previews(missed.runs)} of its previews"
            for missed in found.rejected
        ),
    ]
    notes = [PageNote("Searched", tuple(searched))]
    if found.left_out:
        notes.append(PageNote("Left out", found.left_out))
    return (*notes, *notes_of(prepared, [one.runs], now))


def plan_record(
    file: ScenarioFile, found: SearchResult, explained: PlanExplanation | None
) -> dict[str, object]:
    """The ``--json`` output; explained: why the answer is what it is, if there is one."""
    front = {one.candidate for one in found.front}
    return {
        "scenario": file.model_dump(mode="json"),
        "goal": {"deadline_h": found.goal.deadline_h, "budget_usd": found.goal.budget_usd},
        "answer": _record(found.answer) if found.answer else None,
        "text": answer_text(found),
        "verdict": plan_verdict(found, explained),
        "candidates": [_record(one) | {"pareto": one.candidate in front} for one in found.evaluated],
        "rejected": [_record(one) for one in found.rejected],
        "left_out": list(found.left_out),
    } | (explanation_record(explained) if explained else {})


def _record(one: EvaluatedCandidate) -> dict[str, object]:
    candidate = one.candidate
    return {
        "strategy": candidate.strategy,
        "reserved": asdict(candidate.reserved),
        "spot": asdict(candidate.spot),
        "reserved_nodes": candidate.reserved_nodes,
        "spot_nodes": candidate.spot_nodes,
        "cluster": shape_of(candidate),
        "next_share": candidate.next_share,
        "previews": candidate.previews,
        "simulated": one.simulated,
        "outcome": runs_record(one.runs),
    }


def plan_verdict(found: SearchResult, explained: PlanExplanation | None) -> str:
    """The answer against the scenario's reserved GPUs alone, in one sentence; without an answer, why not."""
    if found.answer is None or explained is None:
        return answer_text(found)
    base = explained.levers[0]
    name = f"The planner's cluster, {shape_of(found.answer.candidate)},"
    return verdict_text(name, found.answer.runs, f"the scenario's {shape_of(base.candidate)}", base.runs)


def plan_page(
    file: ScenarioFile,
    found: SearchResult,
    explained: PlanExplanation | None,
    prepared: Prepared,
    now: datetime,
) -> str:
    """Page with the verdict, trade-off curve, levers, sensitivity, all candidates, and assumptions."""
    notes = plan_notes(file, found, prepared, now)
    parts = [
        f"<p><b>{escape(plan_verdict(found, explained))}</b></p>",
        div_html(_curve(found)),
        table_html(COLUMNS, lines_of(found, every=True)),
        notes_html(notes),
    ]
    if explained is not None:
        parts.insert(1, f"<p>{escape(answer_text(found))}</p>")
        parts[3:3] = explanation_html(explained, by_time=found.goal.deadline_h is None)
        parts.insert(-1, notes_html(explanation_notes(explained)))
    return page_html(f"{file.name}: {goal_text(found.goal)}", parts)


def _curve(found: SearchResult) -> Figure:
    figure = new_figure("Time and cost to target", "hours to target", "$ to target")
    front = {one.candidate for one in found.front}

    def add(shown: Sequence[EvaluatedCandidate], name: str, mode: str, **marker: object) -> None:
        figure.add_scatter(
            x=[one.runs.target_h.p50 for one in shown],
            y=[one.runs.target_usd.p50 for one in shown],
            text=[shape_of(one.candidate) for one in shown],
            name=name,
            mode=mode,
            marker=marker,
            hovertemplate="%{text}<br>%{x:.2f} h, $%{y:,.2f}<extra></extra>",
        )

    add([one for one in found.evaluated if one.candidate not in front], "beaten", "markers", color="#b9bdc4")
    add(found.front, "Pareto front", "lines+markers", color="#2563c9", size=9)
    if found.rejected:
        add(found.rejected, "missed when simulated", "markers", color="#b3182c", symbol="x", size=10)
    if found.answer is not None:
        add([found.answer], "answer, simulated", "markers", color="#d9622b", symbol="star", size=16)
    if found.goal.deadline_h is not None:
        figure.add_vline(x=found.goal.deadline_h, line_dash="dot", annotation_text="deadline")
    else:
        figure.add_hline(y=found.goal.budget_usd, line_dash="dot", annotation_text="budget")
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(rangemode="tozero")
    return figure
