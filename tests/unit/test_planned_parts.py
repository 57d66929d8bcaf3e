"""What planning promises: parts tried on every cluster, and no iterations that seeds do not justify."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from spotlight_plan import estimates as candidate_estimates
from spotlight_plan import search as planning_search
from spotlight_plan.candidates import grid, prepared_for
from spotlight_plan.closed_form import ClosedForm
from spotlight_plan.compare import ComparedStrategy, SimulationOutcome, SimulationTask, run_task
from spotlight_plan.explanation.sensitivity import sensitivity_of
from spotlight_plan.learning_speed import PREVIEWS_WANTED, honest_target
from spotlight_plan.pages.comparison_summary import notes_of, table_of
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.scenario_sections import SUBSET_SPEED, Target
from spotlight_plan.scenarios.strategies import PipelinePart, UnknownStrategyError, strategy_named, variants
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.search import Goal, corrected, search
from spotlight_plan.strategy_runs import StrategyRuns
from spotlight_rewards.base.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)
TINY = ("workload.prompts=2", "run.iterations=4", "run.until_h=1000", "run.noise=0", "run.starts=1")
"""48 videos: a simulation takes some hundredths of a second."""
EXPLORES = "exploration={seeds_per_prompt: 30, steps: 4}"
TARGET = (
    "iterations_to_target={disaggregated: {value: 200, source: 'assumed: for a test'}, "
    "disaggregated+exploration: {value: 109, source: 'assumed: for a test'}}"
)


def prepared(strategy: str, *overrides: str, name: str = "pipeline-wan") -> Prepared:
    return prepare(load_scenario(name, overrides), (strategy,), NOW)


@cache
def outcome(strategy: str, *overrides: str) -> SimulationOutcome:
    prep = prepared(strategy, *TINY, EXPLORES, TARGET, *overrides)
    return run_task(SimulationTask(prep, strategy)).outcome


def few_clusters(*overrides: str) -> ScenarioFile:
    where = "gpu_types: [H100], reserved_nodes: [2, 3], spot_nodes: [2]"
    ways = "parts: [gap, tag, tcss], next_shares: []"
    wish = f"plan={{iterations: 3, strategies: [disaggregated], {where}, {ways}}}"
    target = "iterations_to_target.disaggregated.value=30"
    prices = [f"cluster.{key}" for key in ("reserved.usd_gpu_h=6.88", "spot.usd_gpu_h=1.78")]
    prices.append("cluster.spot.usd_gpu_h_on_demand=6.88")
    steps = "workload.trained_timesteps=2"
    return load_scenario("pipeline-wan", [*TINY, *prices, wish, target, steps, *overrides])


@pytest.mark.slow  # some sixteen simulations
def test_no_parts_named_by_hand_beat_the_answer() -> None:
    """As near as the closed form ranks them, of the same clusters simulated one by one."""
    file = few_clusters()
    by_hand = []
    for cluster in grid(file, ())[0]:
        for name in variants("disaggregated", file.plan.parts):
            one = dataclasses.replace(cluster, strategy=name)
            task = SimulationTask(prepared_for(file, one, 4, NOW), name)
            by_hand.append(run_task(task).outcome)
    found = search(file, Goal(deadline_h=1000), NOW)
    assert found.answer is not None
    assert found.answer.runs.target_usd.p50 <= 1.06 * min(one.target_usd for one in by_hand)


def test_the_best_of_those_simulated_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where simulated runs cost the more the less the closed form promised."""

    def reversed_costs(tasks: Sequence[SimulationTask], *others: object) -> list[ComparedStrategy]:
        found = [run_task(task) for task in tasks]
        return [
            dataclasses.replace(
                one,
                outcome=dataclasses.replace(
                    one.outcome, iteration_usd=1e3 - one.outcome.iteration_usd, first_usd=0.0
                ),
            )
            for one in found
        ]

    monkeypatch.setattr(planning_search, "run_tasks", reversed_costs)
    found = search(few_clusters("plan.parts=[gap]"), Goal(deadline_h=1000), NOW)
    assert found.answer is not None
    assert found.answer.runs.target_usd.p50 == min(one.runs.target_usd.p50 for one in found.confirmed)


def test_a_simulation_is_taken_to_its_target_as_the_closed_form_says() -> None:
    """Where the rest of the run is as the part that was simulated, by its own mean alone."""
    exact = outcome("disaggregated")
    same = corrected(exact, exact, exact)
    assert same.target_h == pytest.approx(exact.target_h)
    assert same.target == exact.target
    slower = dataclasses.replace(exact, iteration_s=2 * exact.iteration_s)
    found = corrected(exact, exact, slower)
    assert found.iteration_s == pytest.approx(2 * exact.iteration_s)
    assert found.target_h > 1.9 * exact.target_h
    lost = dataclasses.replace(exact, target=None, target_h=math.nan)
    assert corrected(lost, exact, exact) is lost


def test_a_key_of_the_former_search_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"candidates_max: found 3; .*no such key.*are ranked without"):
        load_scenario("paper-512", ["plan.candidates_max=3"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("exploration.rungs=[3]", "fewer exploration.steps"),
        ("exploration.fidelity_min=.1", "more exploration.steps"),
        ("exploration.policy=proportional", "exploration.policy=max_variance"),
    ],
)
def test_what_explorations_no_longer_have_names_the_way_out_in_scenarios_too(
    override: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_scenario("paper-512", [override])
    (problem,) = caught.value.problems
    assert (problem.key, remedy in problem.remedy) == (override.partition("=")[0], True)
    load_scenario("paper-512", ["exploration.rungs=null"])


def test_parts_that_exclude_each_other_are_tried_apart() -> None:
    names = variants("disaggregated", (PipelinePart.GAP, PipelinePart.SLICES, PipelinePart.TSP))
    assert {len(strategy_named(name).parts & {PipelinePart.GAP, PipelinePart.SLICES}) for name in names} == {
        0,
        1,
    }
    assert len(names) == 6


def test_a_subset_learns_as_measured_and_replaces_previews() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "train-on-a-subset.md"
    row = re.search(r"32, 8 \| [\d.]+: ([\d.]+) \(([\d.]+) to ([\d.]+)\)", page.read_text(encoding="utf-8"))
    assert row is not None
    assert (SUBSET_SPEED[1], SUBSET_SPEED[0], SUBSET_SPEED[2]) == tuple(map(float, row.groups()))
    strategy = strategy_named("all_spot+subset")
    given = prepared("all_spot+subset", name="paper-512")
    target = given.file.target_of(strategy)
    assert (strategy.explore, target and target.value) == (None, (106, 116, 130))
    plan = scenario_of(given, strategy).plan
    assert (plan.group_size, plan.choice.samples, plan.exploration) == (32, 8, None)
    forms = {name: ClosedForm(given, strategy_named(name), 336) for name in ("all_spot+subset", "all_spot")}
    subset, whole = (form.outcome(given) for form in forms.values())
    assert subset.target_usd < whole.target_usd
    with pytest.raises(ConfigError, match=r"train_samples: found 8; expected null with all_spot\+subset"):
        load_scenario("paper-512", ["workload.train_samples=8", "strategies=[all_spot+subset]"])
    assert "subset" not in load_scenario("paper-512", ["workload.train_samples=8"]).usable_parts
    with pytest.raises(ConfigError, match=r"group_size: found 3; expected 4 or more with all_spot\+subset"):
        load_scenario("paper-512", ["workload.group_size=3", "strategies=[all_spot+subset]"])
    assert "subset" not in load_scenario("paper-512", ["workload.group_size=3"]).usable_parts
    for name, expected in (
        ("spot_checkpoints+subset", "runs here"),
        ("disaggregated+slices+subset", "one of"),
    ):
        with pytest.raises(UnknownStrategyError) as caught:
            strategy_named(name)
        assert expected in caught.value.expected


def test_a_scenario_may_hold_a_deadline_with_the_nodes_it_asks_for() -> None:
    nodes = "cluster.spot={nodes: 6, gpus_per_node: 2, gpu_type: H100, usd_gpu_h: 2}"
    held = ("run.iterations=9", "target={deadline_h: 1, nodes_first: 1}", nodes)
    free, asking = (outcome("spot_rollout_only", *given) for given in ((*held[:1], nodes), held))
    assert (free.decisions, free.problem, asking.problem) == ((), None, None)
    assert re.search(r"2 spot nodes instead of 1: .*out of reach", asking.decisions[1][1])
    prep = prepared("spot_rollout_only", *TINY, TARGET, *held)
    assert any(
        "What spot_rollout_only decided" in one.heading
        for one in notes_of(prep, [StrategyRuns((asking,))], NOW)
    )
    assert outcome("disaggregated", *held).decisions == ()


def test_what_the_learner_refuses_is_refused() -> None:
    fresh = "workload.recomputes_log_probs=false"
    for overrides, message in (
        ((), "recomputes_log_probs: found true; expected false with +tcss"),
        ((fresh, "pipeline.next_share=1"), "next_share: found 1; expected less than 1 with exploration"),
        ((fresh, "pipeline.next_share=0.01"), "next_share: found 0.01; expected one of 32 groups or more"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            prepared("spotlight+tcss", *overrides, name="paper-512")
    file = load_scenario("paper-512")
    assert set(file.plan.parts) - set(file.usable_parts) == {PipelinePart.TCSS}
    assert load_scenario("paper-512", [fresh]).usable_parts == file.plan.parts


def stated(value: int) -> Target:
    return Target(value=value, source="assumed: for a test")


@pytest.mark.parametrize(
    ("random", "previews", "early", "value"),
    [
        (stated(200), 1.0, 0.0, 109),
        (stated(200), 0.8, 0.0, 109),
        (stated(200), 0.79, 0.0, None),
        (stated(200), 1.0, 0.5, 142),  # 1 / (0.5 / 200 + 0.5 / 109) = 141.1
        (stated(200), math.nan, 0.5, 109),
        (None, 1.0, 0.5, None),
        (None, 1.0, 0.0, 109),
    ],
)
def test_targets_of_explored_seeds_hold_only_for_groups_that_have_them(
    random: Target | None, previews: float, early: float, value: int | None
) -> None:
    target, why = honest_target(stated(109), random, previews, early)
    assert (target.iterations if target else None) == value
    assert bool(why) is (target is None)
    assert target is None or target.source.startswith("derived: 50% of" if value == 142 else "assumed: ")


def test_half_of_the_groups_begin_with_random_seeds() -> None:
    small = ("workload.prompts=8", "workload.group_size=8", "exploration={seeds_per_prompt: 10, steps: 4}")
    fresh = ("workload.recomputes_log_probs=false", "run.iterations=5", "trace={kind: always_on}")
    prep = prepared("spotlight+tcss", *small, *fresh, "workload.evaluation=null", name="paper-512")
    found = run_task(SimulationTask(prep, "spotlight+tcss")).outcome
    assert found.target is not None, found.no_target
    assert 0 < found.early_share <= 0.5
    assert 109 < found.target.iterations < 200


@pytest.mark.parametrize(
    ("now", "ages"), [(NOW, "reserved 173 d, spot 173 d"), (datetime(2026, 7, 1, tzinfo=UTC), "")]
)
def test_prices_older_than_ninety_days_are_warned_of(now: datetime, ages: str) -> None:
    prep = prepare(load_scenario("paper-512"), ("spot_rollout_only",), now)
    found = [line for note in notes_of(prep, [], now) if note.heading == "Mind" for line in note.lines]
    assert ([ages in line for line in found if "older than 90 days" in line] == [True]) is bool(ages)


def test_an_old_source_is_not_its_own_remedy_and_no_price_is_of_the_future() -> None:
    prep = prepare(load_scenario("paper-512"), ("spot_rollout_only",), NOW)
    same = dataclasses.replace(prep, file=load_scenario("paper-512", ["prices.source=skypilot"]))
    texts = [[line for note in notes_of(one, [], NOW) for line in note.lines] for one in (prep, same)]
    assert [any("prices.source=skypilot" in line for line in lines) for lines in texts] == [True, False]
    before = datetime(2026, 1, 1, tzinfo=UTC)
    assert any(", 0 d old" in line for note in notes_of(prep, [], before) for line in note.lines)


def test_a_rate_of_preemptions_is_reported_only_where_spot_nodes_come() -> None:
    texts = []
    for nodes in (4, 0):
        prep = prepare(load_scenario("paper-512", [f"cluster.spot.nodes={nodes}"]), ("reserved_only",), NOW)
        texts.append(" ".join(line for note in notes_of(prep, [], NOW) for line in note.lines))
    assert ["preemptions per node-hour" in text for text in texts] == [True, False]


def test_nothing_is_promised_where_too_few_previews_were_made() -> None:
    many = ("exploration.seeds_per_prompt=400", "exploration.steps=20")
    found = outcome("disaggregated+exploration", *many)
    assert found.preview_share < PREVIEWS_WANTED
    assert math.isnan(found.target_h)
    cells = {line.label: line.cells for line in table_of([StrategyRuns((found,))])}
    assert [cells[f"{what} to target"] for what in ("iterations", "time", "cost")] == [("-",)] * 3
    notes = notes_of(
        prepared("disaggregated+exploration", "exploration={seeds_per_prompt: 30, steps: 4}"),
        [StrategyRuns((found,))],
        NOW,
    )
    assert any("nothing is promised for its target" in line for note in notes for line in note.lines)


def test_a_subset_that_the_learner_s_gpus_do_not_divide_is_left_out() -> None:
    """512 samples are shared by 512 GPUs, the 256 that a subset trains are not."""
    wish = "plan={strategies: [all_spot], parts: [subset], reserved_nodes: [64], spot_nodes: [64]}"
    file = load_scenario("paper-512", [wish, "run.starts=1"])
    estimates = candidate_estimates.Estimates(file, NOW)
    found = [one.strategy for one, _ in estimates.worth_it(grid(file, estimates.quotes)[0][0])]
    assert found == ["all_spot"]
    assert any("256 samples, which 512 learner GPUs do not divide" in reason for reason in estimates.left_out)


def test_ways_that_cannot_pay_are_not_followed_along_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is found is the same as if they were."""
    wish = (
        "plan={strategies: [spotlight, all_spot], gpu_types: [H100], reserved_nodes: [1], spot_nodes: [1, 4]}"
    )
    file, followed = load_scenario("paper-512", [wish, "run.starts=1"]), list[ClosedForm]()
    follow = ClosedForm.outcome

    def counted(form: ClosedForm, start: Prepared, seen: int | None = None) -> SimulationOutcome:
        followed.append(form)
        return follow(form, start, seen)

    def found() -> list[str]:
        estimates = candidate_estimates.Estimates(file, NOW)
        clusters, _ = grid(file, estimates.quotes)
        return [repr(way) for cluster in clusters for way in estimates.worth_it(cluster)]

    monkeypatch.setattr(ClosedForm, "outcome", counted)
    quick, some = found(), len(followed)
    monkeypatch.setattr(candidate_estimates, "_hopeless", lambda form, limit_h: None)
    monkeypatch.setattr(ClosedForm, "steady_s", lambda form, nodes: math.nan)
    assert found() == quick
    assert some < (len(followed) - some) / 2


@pytest.mark.parametrize("parts", ["[gap, tag]", "[gap, tag, tcss]"])
def test_a_way_is_not_left_out_against_one_whose_target_is_unknown(
    monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    """With few nodes the simpler way makes too few previews for any target."""
    where = "gpu_types: [L40S], machine_sizes_max: 1, reserved_nodes: [1], spot_nodes: [3]"
    wish = f"plan={{strategies: [all_spot_then_on_demand], {where}, parts: {parts}}}"
    losing = ("run.starts=2", "trace.mean_uptime_h=1", "workload.recomputes_log_probs=false")
    file = load_scenario("mixed-512", [*losing, wish])

    def quickest_h() -> float:
        estimates = candidate_estimates.Estimates(file, NOW)
        clusters, _ = grid(file, estimates.quotes)
        found = [runs for cluster in clusters for _, runs in estimates.worth_it(cluster)]
        return min(runs.target_h.p50 for runs in found)

    pruned_h = quickest_h()
    monkeypatch.setattr(candidate_estimates, "_hopeless", lambda form, limit_h: None)
    monkeypatch.setattr(ClosedForm, "steady_s", lambda form, nodes: math.nan)
    assert quickest_h() == pruned_h


def test_a_simulation_equal_to_the_closed_form_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the learner loses nodes, and each of several starts has losses of its own."""
    where = "gpu_types: [H100], machine_sizes_max: 1, reserved_nodes: [2], spot_nodes: [16]"
    wish = f"plan={{strategies: [all_spot], {where}, parts: [gap], iterations: 3}}"
    losing = (
        "cluster.reserved.nodes=2",
        "cluster.spot.nodes=16",
        "trace.bursts_per_h=0",
        "trace.mean_uptime_h=2.5",
        "run.starts=3",
    )
    file = load_scenario("video-1000", ["workload.prompts=12", "rewards.scorers=12", *losing, wish])
    estimates = candidate_estimates.Estimates(file, NOW)
    (cluster,) = grid(file, estimates.quotes)[0]
    ranked = planning_search.EvaluatedCandidate(*next(estimates.worth_it(cluster)))
    shown = ranked.runs.target_h.p50, ranked.runs.target_usd.p50
    assert sensitivity_of(estimates, ranked.candidate).base == pytest.approx(shown, rel=1e-3)
    _, form = next(estimates._forms(cluster, [ranked.candidate]))
    assert isinstance(form, ClosedForm)

    def simulated(*others: object) -> list[ComparedStrategy]:
        outcomes = [form.outcome(start, seen=3) for start in form.starts]
        return [ComparedStrategy(one, (), ()) for one in outcomes]

    monkeypatch.setattr(planning_search, "run_tasks", simulated)
    (found,) = planning_search.confirm(estimates, [ranked], 1)
    for one, whole in zip(found.runs.outcomes, ranked.runs.outcomes, strict=True):
        assert one.target_h == pytest.approx(whole.target_h, rel=1e-3)
        assert one.target_usd == pytest.approx(whole.target_usd, rel=1e-3)


@pytest.mark.slow  # two processes start
def test_clusters_ranked_in_several_processes_are_those_ranked_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = few_clusters("plan.reserved_nodes=[2, 3, 500]")  # of which the last can train no batch
    alone = search(file, Goal(deadline_h=1000), NOW)
    monkeypatch.setattr(planning_search, "SHARED", 1)
    monkeypatch.setattr(planning_search, "PART", 2)
    shared = search(file, Goal(deadline_h=1000), NOW, jobs=2)
    assert repr(shared) == repr(alone)  # NaN equals itself only there
    assert alone.left_out
