"""Why a plan's answer is what it is: levers add up, assumptions move one by one, verdicts come first."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache

import pytest
from tests.unit.test_strategy_runs import NOW, SMALL, of, three_starts

from spotlight_plan.candidates import Candidate, Machine, prepared_for
from spotlight_plan.explanation.levers import ALONE, Lever, lever_steps
from spotlight_plan.explanation.plan_explanation import PlanExplanation, explain
from spotlight_plan.explanation.sensitivity import FACTOR, Swing, _to_target, assumptions_varied
from spotlight_plan.pages.explanation_charts import explanation_notes, tornado, waterfall
from spotlight_plan.pages.plan_page import plan_page, plan_record, plan_verdict
from spotlight_plan.pages.verdict import comparison_verdict, ratios, verdict_text
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.profile import figures
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.search import Goal, SearchResult, search
from spotlight_plan.strategy_runs import StrategyRuns

ANSWERS = (
    "reserved_only",
    "spotlight",
    "spotlight+gap+tsp",
    "critical_path+tsp",
    "disaggregated+gap+exploration",
)


@cache
def planned() -> tuple[ScenarioFile, SearchResult, PlanExplanation]:
    wish = "plan={iterations: 2, gpu_types: [H100], reserved_nodes: [1], spot_nodes: [3], parts: [tsp]}"
    targets = (
        "iterations_to_target.spotlight={value: [2, 3, 5], source: 'assumed: for a test'}",
        "iterations_to_target.reserved_only.value=4",
    )
    calm = "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60}"
    prices = ("cluster.reserved.usd_gpu_h=6.88", "cluster.spot.usd_gpu_h=1.78")
    some = (
        *prices,
        "strategies=[spotlight]",
        "plan.strategies=[spotlight]",
        "run.starts=1",
        "run.iterations=2",
    )
    file = load_scenario("paper-512", [*SMALL, wish, *targets, calm, *some])
    found = search(file, Goal(deadline_h=1000), NOW)
    assert found.answer is not None
    return file, found, explain(file, found.answer, NOW)


def swings() -> dict[str, Swing]:
    return {one.name: one for one in planned()[2].sensitivity.swings}


@pytest.mark.parametrize("strategy", ANSWERS)
@pytest.mark.parametrize("spot_nodes", [4, 7])
def test_levers_lead_one_by_one_from_reserved_gpus_to_the_answer(strategy: str, spot_nodes: int) -> None:
    file = load_scenario("paper-512")
    alone = strategy == ALONE
    here, there = Machine("H100", 4), Machine("H100", 4 if alone else 2)
    answer = Candidate(strategy, here, there, 1 if spot_nodes == 4 else 2, 0 if alone else spot_nodes)
    steps = lever_steps(file, answer)
    assert steps[0][1].strategy == ALONE
    assert steps[-1][1] == answer
    assert len({candidate for _, candidate in steps}) == len(steps)
    assert (steps[-1][0] == "search") == (spot_nodes == 7)
    own = [candidate for _, candidate in steps if candidate.strategy != ALONE][: len(steps) - 2]
    assert {(one.reserved_nodes, one.spot_nodes) for one in own} <= {(1, 4)}
    pulled = [name for name, _ in steps]
    assert [name[1:] for name in pulled if name[0] == "+"] == [
        part for part in strategy.split("+")[1:] if part != "exploration"
    ]
    assert ("exploration" in pulled) == (strategy_named(strategy).explore is not None)


def test_the_waterfall_ends_at_the_recommendation() -> None:
    _, found, explained = planned()
    (bars,) = waterfall(explained.levers, 1).data
    assert sum(bars.y[:-1]) == pytest.approx(bars.y[-1])
    assert found.answer is not None
    assert bars.y[-1] == found.answer.runs.target_usd.p50
    assert [one.name for one in explained.levers][:3] == ["reserved GPUs alone", "spot GPUs", "exploration"]


def test_a_lever_without_a_figure_is_in_the_next_one() -> None:
    _, _, explained = planned()
    first, *rest = explained.levers
    gone = [Lever(first.name, first.candidate, first.runs), *rest]
    gone[1] = Lever(gone[1].name, gone[1].candidate, None, "no memory")
    (bars,) = waterfall(gone, 1).data
    assert len(bars.y) == len(explained.levers)  # one fewer, and the total
    assert sum(bars.y[:-1]) == pytest.approx(bars.y[-1])
    notes = explanation_notes(PlanExplanation(tuple(gone), explained.sensitivity))
    assert any(line.endswith("its part is in the next one: no memory") for line in notes[0].lines)


def test_prices_move_dollars_alone_and_slower_steps_move_time() -> None:
    base_h, base_usd = planned()[2].sensitivity.base
    for name in ("spot price", "price of reserved GPUs"):
        assert swings()[name].low[0] == swings()[name].high[0] == base_h
        assert swings()[name].low[1] < base_usd < swings()[name].high[1]
    for name in ("denoising step", "training step", "reward time", "start of a worker"):
        assert swings()[name].low[0] < base_h < swings()[name].high[0]
    both = [swings()[name].high[1] - base_usd for name in ("spot price", "price of reserved GPUs")]
    assert sum(both) == pytest.approx((FACTOR - 1) * base_usd)  # all dollars are these two prices'
    assert (swings()["iterations to target"].low_label, swings()["iterations to target"].high_label) == (
        "2",
        "5",
    )
    assert swings()["iterations to target"].low[0] < base_h < swings()["iterations to target"].high[0]


def test_one_assumption_changes_at_a_time() -> None:
    file, found, _ = planned()
    assert found.answer is not None
    prepared = prepared_for(file, found.answer.candidate, 2, NOW)
    for one in assumptions_varied(prepared, "spotlight"):
        for end in filter(None, (one.low, one.high)):
            changed = end[1](prepared)
            before, after = figures(prepared.profile), figures(changed.profile)
            other = {now.value / was.value for was, now in zip(before, after, strict=True)} - {1.0}
            assert all(
                factor == pytest.approx(FACTOR) or factor == pytest.approx(1 / FACTOR) for factor in other
            )
            differs = (bool(other), changed.pricing != prepared.pricing, changed.file != prepared.file)
            assert sum(differs) == 1, one.name


def test_what_moves_most_is_on_top_and_no_target_is_the_farthest() -> None:
    _, _, explained = planned()
    ranked = explained.sensitivity.ranked(1)
    base = explained.sensitivity.base[1]
    widths = [max(one.low[1], one.high[1], base) - min(one.low[1], one.high[1], base) for one in ranked]
    known = [width for width in widths if not math.isnan(width)]
    assert known == sorted(known, reverse=True)
    assert widths[-len(known) :] == known
    figure = tornado(explained.sensitivity, 1)
    assert len(figure.data) == 2
    assert [name.split(" (")[0] for name in figure.data[0].y] == [one.name for one in ranked]


def test_the_page_begins_with_the_verdict() -> None:
    file, found, explained = planned()
    assert found.answer is not None
    said = plan_verdict(found, explained)
    assert re.fullmatch(
        r"The planner's cluster, .*, reaches the target in [\d.-]+ h for \$[\d.-]+: [\d.-]+ times as fast as "
        r"the scenario's 4 reserved H100, reserved_only \([\d.-]+ h\), and costs [\d-]+ % of its \$[\d.-]+\.",
        said,
    )
    prepared = prepared_for(file, found.answer.candidate, 2, NOW)
    html = plan_page(file, found, explained, prepared, NOW)
    body = html[html.index("</h1>") :]
    assert body.index("The planner&#x27;s cluster") < body.index("Rent ") < body.index("Plotly.newPlot")
    for part in ("From the reserved GPUs alone", "Which assumption moves it most", "spot GPUs", "x 1.5"):
        assert part in body
    record = json.loads(json.dumps(plan_record(file, found, explained), allow_nan=False))
    assert record["verdict"] == said
    assert len(record["levers"]) == len(explained.levers)


def test_ratios_are_of_the_same_start_and_span_the_intervals() -> None:
    base, one = three_starts()
    least, most = ratios(base, one, type(one.first).hours_after)
    points = [a.target_h / b.target_h for a, b in zip(base.outcomes, one.outcomes, strict=True)]
    assert 0 < least < min(points) < max(points) < most
    assert ratios(one, one, lambda outcome, iterations: iterations) == (71 / 160, 160 / 71)


def test_a_start_without_a_target_makes_a_verdict_worse() -> None:
    base, one = three_starts()
    lost = StrategyRuns((*one.outcomes[:2], replace(one.first, target=None, target_h=math.nan)))
    said = verdict_text("spotlight", lost, ALONE, base)
    first, other = (StrategyRuns(runs.outcomes[:2]) for runs in (base, one))
    _, most = ratios(first, other, type(one.first).hours_after)
    assert f": up to {most:.1f} times as fast as reserved_only" in said
    assert re.search(r"costs \d+ % or more of its \$", said)
    of_base = StrategyRuns((*base.outcomes[:2], replace(base.first, target=None, target_h=math.nan)))
    said = verdict_text("spotlight", one, ALONE, of_base)
    assert re.search(r": [\d.]+ or more times as fast as reserved_only", said)
    assert re.search(r"costs up to \d+ % of its \$", said)


def test_a_start_without_a_target_is_in_each_end_of_its_iterations() -> None:
    (one,) = (runs.first for runs in three_starts()[:1])
    assert one.target is not None
    lost = replace(one, target=None, target_h=math.nan, target_usd=math.nan)
    for others, known in (([one, one, lost], True), ([one, lost, lost], False)):
        swing = _to_target(StrategyRuns(tuple(others)))
        assert math.isfinite(swing.low[0]) is math.isfinite(swing.high[1]) is known


def test_how_long_a_machine_boots_is_an_assumption_where_machines_come_later() -> None:
    def varied(*overrides: str) -> set[str]:
        scenario = prepare(load_scenario("paper-512", overrides), ("spotlight",), NOW)
        return {one.name for one in assumptions_varied(scenario, "spotlight")}

    assert "boot of a machine" in varied()
    assert "boot of a machine" not in varied("cluster.boot_s=60") | varied("trace.kind=always_on")


def test_a_comparison_is_judged_by_its_cheapest_against_reserved_gpus() -> None:
    base, one = three_starts()
    assert comparison_verdict([one, base]) == verdict_text("spotlight", one, ALONE, base)
    assert comparison_verdict([base]).startswith("reserved_only reaches the target in ")
    assert comparison_verdict([of([math.nan], base.first)]).startswith("No strategy has a time to target")
    unknown = of([math.nan] * 3, base.first)
    assert "no time to target to compare with" in verdict_text("spotlight", one, ALONE, unknown)
