"""Pipelines simulated: who trains and who rolls out, what a turn between both costs, passes, GPU types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache

import pytest
from tests.simulation.constant_costs import ConstantCosts

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Filler, Node, NodeId, NodeKind, Phase
from spotlight_plan.candidates import grid
from spotlight_plan.compare import SimulationOutcome, SimulationTask, run_task
from spotlight_plan.pages.comparison_summary import notes_of, outcome_record, table_of
from spotlight_plan.prices.quotes import Quote
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.profile import learner_bytes, load_profile, require_memory, timesteps_that_fit
from spotlight_plan.scenarios.profile_costs import ProfileCosts, ProfiledWorkload
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import PipelinePart, UnknownStrategyError, strategy_named
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.search import Goal, SearchResult, search
from spotlight_plan.simulation.scenario import Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import simulate
from spotlight_plan.strategy_runs import StrategyRuns
from spotlight_rewards.base.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)
MODELS = ("qwen-image-20b", "flux1-12b", "hunyuanvideo-13b", "wan21-14b")
QWEN = load_profile("qwen-image-20b")


def prepared(strategy: str, *overrides: str, name: str = "pipeline-qwen-image") -> Prepared:
    return prepare(load_scenario(name, overrides), (strategy,), NOW)


def nodes(scenario: Scenario) -> list[Node]:
    return [event.node for _, event in scenario.nodes if isinstance(event, NodeJoined)]


def gpus(found: Iterable[Node]) -> int:
    return sum(node.gpus for node in found)


# -- strategies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "training", "rolling"),
    [
        ("all_on_demand", 16, 16),
        ("all_on_demand+tsp", 16, 16),
        ("disaggregated", 12, 4),
        ("disaggregated+gap+tsp+tcss", 12, 4),
        ("disaggregated+tag", 12, 16),
        ("disaggregated+gap+steal", 12, 16),
        ("disaggregated+exploration", 12, 4),
    ],
)
def test_who_trains_and_who_rolls_out(strategy: str, training: int, rolling: int) -> None:
    scenario = scenario_of(prepared(strategy), strategy_named(strategy))
    found = nodes(scenario)
    assert gpus(node for node in found if node.trains) == training == scenario.plan.ranks
    assert gpus(node for node in found if node.rolls_out) == rolling
    assert {node.kind for node in found} == {NodeKind.RESERVED}


@pytest.mark.parametrize(
    ("strategy", "reserved_roll_out"),
    [
        ("spot_rollout_only", True),
        ("spot_rollout_only+tsp", True),
        ("spotlight+gap", False),
        ("spotlight+tcss", False),
        ("spotlight+gap+tag", True),
    ],
)
def test_trainers_help_in_a_pipeline_only_where_a_part_says_so(
    strategy: str, reserved_roll_out: bool
) -> None:
    prep = prepared(strategy, "workload.recomputes_log_probs=false", name="paper-512")
    scenario = scenario_of(prep, strategy_named(strategy))
    trains = [node for node in nodes(scenario) if node.trains]
    assert {node.rolls_out for node in trains} == {reserved_roll_out}


def test_parts_of_a_name_are_parts_of_the_plan() -> None:
    everything = "disaggregated+slices+tsp+tag+tcss+exploration"
    plan = scenario_of(prepared(everything), strategy_named(everything)).plan
    expected = PipelineConfig(axis="generation", baseline="slice", switch_s=17.5, next_share=0.5)
    assert plan.bounded
    assert plan.pipeline == expected
    assert plan.exploration is not None
    assert plan.exploration.where == "idle"
    stolen = "disaggregated+gap+steal"
    overrides = ("pipeline.next_share=0.25", "workload.resident=true")
    plan = scenario_of(prepared(stolen, *overrides), strategy_named(stolen)).plan
    assert plan.pipeline == PipelineConfig(axis="prompt")
    assert plan.exploration is None
    plain = scenario_of(prepared("disaggregated"), strategy_named("disaggregated")).plan
    assert plain.pipeline == PipelineConfig(switch_s=17.5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("disagregated+gap", "Did you mean 'disaggregated'?"),
        ("disaggregated+gop", "+gap, +slices, +tsp"),
        ("disaggregated+gap+gap", "each part once"),
        ("disaggregated+gap+slices", "one of gap and slices"),
        ("disaggregated+tag+steal", "one of steal and tag"),
        ("all_on_demand+gap", "GPUs that only roll out"),
        ("reserved_only+tsp+tag", "GPUs that only roll out, with tag"),
        ("spotlight+exploration", "exploration once"),
    ],
)
def test_names_that_make_no_strategy(name: str, said: str) -> None:
    with pytest.raises(UnknownStrategyError) as raised:
        strategy_named(name)
    assert said in str(raised.value.problem("strategies"))
    with pytest.raises(ConfigError, match="strategies: found"):
        load_scenario("pipeline-qwen-image", [f"strategies=[{name}]"])


def test_targets_are_of_what_changes_seeds() -> None:
    file = load_scenario("pipeline-qwen-image", ["iterations_to_target.disaggregated+tcss={value: 7, "
                         "source: 'assumed: more'}"])  # fmt: skip
    targets = {name: file.target_of(strategy_named(name)) for name in file.strategies}
    values = {name: target.iterations for name, target in targets.items() if target is not None}
    assert set(values) == set(file.strategies)
    assert set(values.values()) == {200}
    unstated = [name for name in file.strategies if file.stated_target(strategy_named(name)) is None]
    assert unstated == [file.strategies[-1]], (
        "with exploration, they are derived from those with random seeds"
    )
    own = file.target_of(strategy_named("disaggregated+tcss"))
    assert own is not None
    assert own.value == 7


# -- turns -------------------------------------------------------------------------------------------------

BOTH = Node(NodeId("r"), NodeKind.RESERVED, 2, "H100", 20.0, True, True)
ONLY = Node(NodeId("s"), NodeKind.RESERVED, 2, "H100", 20.0, False, True)
PLAN = Plan(
    run_seed=0, iterations=4, prompts_per_iteration=2, group_size=4, rollout_steps=5,
    evaluation=EvaluationConfig(steps=5, images_per_prompt=1, every=9),
    updates_per_batch=1, micro_batch_size=4, checkpoint_every=9,
    lease_s=600.0, max_drop_share=None, ranks=2,
)  # fmt: skip


def turning(switch_s: float, *others: Node) -> SimulationResult:
    joined = tuple((0.0, NodeJoined(node)) for node in (BOTH, *others))
    return simulate(
        Scenario(PLAN, ConstantCosts(turning_s=switch_s), joined, train_prompts=2, test_prompts=0)
    )


def test_an_iteration_on_shared_gpus_pays_two_turns() -> None:
    free, paid = turning(0.0), turning(3.0)
    assert paid.end_s == pytest.approx(free.end_s + PLAN.iterations * 2 * 3.0)
    reconfigured = sum(s for (_, phase), s in paid.phase_s.items() if phase is Phase.RECONFIGURATION)
    idle = sum(s for (_, phase), s in free.phase_s.items() if phase is Phase.RECONFIGURATION)
    assert reconfigured - idle == pytest.approx(PLAN.iterations * 2 * 3.0 * BOTH.gpus)


def test_gpus_that_only_roll_out_do_not_turn() -> None:
    only = dataclasses.replace(BOTH, rolls_out=False)
    joined = ((0.0, NodeJoined(only)), (0.0, NodeJoined(ONLY)))
    ends = {
        simulate(Scenario(PLAN, ConstantCosts(turning_s=s), joined, train_prompts=2, test_prompts=0)).end_s
        for s in (0.0, 3.0)
    }
    assert len(ends) == 1


def test_what_is_resident_turns_at_no_cost() -> None:
    work = ProfiledWorkload(512 * 512, 8, "H100", resident=False)
    assert ProfileCosts(QWEN, work).switch_s() == QWEN.switch_s.value
    assert ProfileCosts(QWEN, dataclasses.replace(work, resident=True)).switch_s() == 0


# -- several timesteps a pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_several_timesteps_gain_what_was_published(name: str) -> None:
    profile = load_profile(name)
    size = next(point for point in profile.gpus["H100"].train)
    pixels = size.height * size.width

    def train_s(per_pass: int) -> float:
        costs = ProfileCosts(profile, ProfiledWorkload(pixels, 12, "H100", timesteps_per_pass=per_pass))
        return costs.train_s("H100", pixels, 8, 4)

    gains = [train_s(1) / train_s(k) for k in (2, 3, 4, 6, 12)]
    assert gains == sorted(gains)
    assert all(1.04 <= gain <= 1.11 for gain in gains)
    assert train_s(5) == pytest.approx(train_s(4)), "both take three passes"
    assert train_s(1) == pytest.approx(2 * 12 * size.s)


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_pass_that_fits(name: str) -> None:
    profile, vram = load_profile(name), 80 * 2**30
    fits = timesteps_that_fit(profile, "H100", 8, 100, 0.0)
    assert learner_bytes(profile, 8, fits) <= vram < learner_bytes(profile, 8, fits + 1)
    assert fits > 1
    assert timesteps_that_fit(profile, "H100", 8, 2, 0.0) == 2
    assert timesteps_that_fit(profile, "H100", 8, 100, float(vram)) == 1, "one is never given up"
    assert learner_bytes(profile, 8, 1) + (fits - 1) * profile.memory.pass_bytes.value == pytest.approx(
        learner_bytes(profile, 8, fits)
    )


def test_too_many_timesteps_are_refused() -> None:
    require_memory(QWEN, rollout_gpus=[], learner_gpu="H100", ranks=8, timesteps_per_pass=7)
    with pytest.raises(ConfigError, match=r"Lower workload\.timesteps_per_pass, which is 9"):
        require_memory(QWEN, rollout_gpus=[], learner_gpu="H100", ranks=8, timesteps_per_pass=9)


@pytest.mark.parametrize(
    ("strategy", "overrides", "per_pass"),
    [
        ("disaggregated", (), 1),
        ("disaggregated+tsp", (), 7),
        ("disaggregated+tsp", ("workload.trained_timesteps=4",), 4),
        ("disaggregated+tsp", ("workload.timesteps_per_pass=3",), 3),
        ("disaggregated+tsp+tag", ("workload.resident=true",), 1),
    ],
)
def test_passes_of_a_strategy(strategy: str, overrides: tuple[str, ...], per_pass: int) -> None:
    costs = scenario_of(prepared(strategy, *overrides), strategy_named(strategy)).costs
    assert isinstance(costs, ProfileCosts)
    assert costs.workload.timesteps_per_pass == per_pass
    assert (PipelinePart.TSP in strategy_named(strategy).parts) or per_pass == 1


# -- GPUs of several types ---------------------------------------------------------------------------------


def test_leases_are_sized_for_the_gpu_that_asks() -> None:
    flux = ProfileCosts(load_profile("flux1-12b"), ProfiledWorkload(512 * 512, 2, "H100"))
    assert [flux.lease_size(gpu, 512 * 512, 1) for gpu in ("H100", "A100-80GB", "L40S")] == [4, 4, 2]


@pytest.mark.parametrize("name", MODELS)
def test_a_slower_gpu_takes_longer_for_everything(name: str) -> None:
    profile = load_profile(name)
    costs = ProfileCosts(profile, ProfiledWorkload(480 * 832, 2, "H100"))
    size = profile.gpus["H100"].train[0]
    pixels = size.height * size.width
    for ask in (
        lambda gpu: costs.denoise_step_s(gpu, pixels, 1, 1),
        lambda gpu: costs.train_s(gpu, pixels, 4, 1),
        lambda gpu: costs.decode_s(gpu, pixels, 1),
    ):
        assert ask("A100-80GB") / ask("H100") == pytest.approx(989 / 312, rel=0.01)


def test_fast_and_slow_gpus_share_the_rollouts_by_pulling() -> None:
    """Each does as much as it is fast: four H100 and eight L40S, none idle for more than a lease."""
    file = load_scenario("mixed-512", ["trace={kind: always_on}", "run.iterations=2", "run.noise=0"])
    prepared = prepare(file, ("spot_rollout_only",), NOW)
    scenario = scenario_of(prepared, strategy_named("spot_rollout_only"), timelines=True)
    types = {node.id: node.gpu_type for node in nodes(scenario)}
    result = simulate(scenario)
    second = result.iterations[1]
    worked = {"H100": 0.0, "L40S": 0.0}
    ends = {"H100": 0.0, "L40S": 0.0}
    for gpu in result.gpus:
        for part in gpu.segments:
            if part.phase is Phase.ROLLOUT and part.start_s >= second.start_s:
                kind = types[gpu.node]
                worked[kind] += part.end_s - part.start_s
                ends[kind] = max(ends[kind], part.end_s)
    costs = ProfileCosts(load_profile("flux1-12b"), ProfiledWorkload(512 * 512, 4, "H100"))
    lease_s = {
        gpu: 20 * costs.denoise_step_s(gpu, 512 * 512, size, 1) for gpu, size in (("H100", 4), ("L40S", 2))
    }
    made = {gpu: worked[gpu] / lease_s[gpu] * (4 if gpu == "H100" else 2) for gpu in worked}
    assert sum(made.values()) == pytest.approx(512, rel=0.03)
    per_gpu = made["H100"] / 4 / (made["L40S"] / 8)
    speed = (4 / lease_s["H100"]) / (2 / lease_s["L40S"])
    assert per_gpu == pytest.approx(speed, rel=0.1)
    assert abs(ends["H100"] - ends["L40S"]) <= max(lease_s.values()) + 1


# -- what overlaps -----------------------------------------------------------------------------------------

TINY = ("workload.prompts=2", "run.iterations=4", "run.until_h=1000", "run.noise=0")
"""48 videos: a simulation takes some hundredths of a second."""


@cache
def outcome(strategy: str, *overrides: str) -> SimulationOutcome:
    prep = prepared(strategy, *TINY, *overrides, name="pipeline-wan")
    return run_task(SimulationTask(prep, strategy)).outcome


def test_every_part_shortens_an_iteration_that_waits_for_rollouts() -> None:
    names = ["", "+gap", "+gap+tag", "+gap+tag+tcss"]
    seconds = [outcome(f"disaggregated{name}").iteration_s for name in names]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.6 * seconds[0]


@pytest.mark.parametrize(
    ("name", "strategy", "crowded"),
    [
        ("pipeline-qwen-image", "disaggregated+gap+tag", True),
        ("pipeline-qwen-image", "disaggregated+gap+tsp", False),
        ("pipeline-flux", "disaggregated+gap+tsp+tag", False),
        ("paper-512", "reserved_only", True),
        ("pipeline-wan", "disaggregated+gap+tag", True),
        ("pipeline-wan", "disaggregated+gap+tcss", False),
        ("pipeline-wan", "all_on_demand", True),
    ],
)
def test_gpus_that_cannot_hold_both_of_their_tasks_are_reported(
    name: str, strategy: str, crowded: bool
) -> None:
    one = dataclasses.replace(outcome("disaggregated"), strategy=strategy)
    notes = notes_of(prepared(strategy, name=name), [StrategyRuns((one,))], NOW)
    lines = [line for note in notes if note.heading == "Mind" for line in note.lines if strategy in line]
    assert any("would hold, for both" in line for line in lines) is crowded


def test_memory_is_that_of_the_gpus_that_train() -> None:
    """Of a learner on spot nodes these are spot GPUs, whatever is reserved for other strategies."""
    pools = ("cluster.reserved.gpu_type=H20", "cluster.spot.gpu_type=H100", "learner.gpus=2")
    one = dataclasses.replace(outcome("disaggregated"), strategy="all_spot")
    notes = notes_of(prepared("all_spot", *pools, name="paper-512"), [StrategyRuns((one,))], NOW)
    (found,) = [line for note in notes for line in note.lines if "would hold, for both" in line]
    assert "; H100 has 80." in found


def test_the_table_says_what_filled_idle_time() -> None:
    names = ("", "+gap+tag", "+tcss", "+exploration", "+gap")
    found = [outcome(f"disaggregated{name}") for name in names]
    runs = [StrategyRuns((one,)) for one in found]
    cells = {line.label.strip(): line.cells for line in table_of(runs)}
    filled = [
        [cell != "-" for cell in cells[label]]
        for label in ("rollouts by trainers", "next iteration's rollouts", "previews")
    ]
    assert filled == [[i == n for i in range(5)] for n in (1, 2, 3)]
    assert cells["training beside rollouts"][4] != "-"
    assert cells["trained before all were there"][1] != "0 %"
    assert cells["begun an iteration early"][2] != "0 %"
    plain = {line.label.strip() for line in table_of(runs[:1])}
    assert plain.isdisjoint({"GPU-hours that would have been idle", "trained before all were there"})
    record = outcome_record(found[1])
    assert record["filled_s"] == {"trainers": found[1].filled_s[Filler.TRAINERS]}
    assert 0 < found[4].filled_s[Filler.TRAINING] < found[4].seconds([Phase.TRAINING])


def test_bounded_help_of_trainers_never_loses_to_none_where_turns_are_free() -> None:
    free = "workload.resident=true"
    alone, bounded = (outcome(f"disaggregated+gap{more}", free).iteration_s for more in ("", "+tag"))
    assert bounded < alone


def test_help_without_bound_is_slower_where_turns_cost_much() -> None:
    """What an independent implementation of DigenRL saw, too: 0.68 of the throughput without any help."""
    name, few = "pipeline-qwen-image", ("workload.prompts=6", "run.iterations=4")
    seconds = {}
    for more in ("", "+tag", "+steal"):
        strategy = f"disaggregated+gap{more}"
        task = SimulationTask(prepared(strategy, *few, name=name), strategy)
        seconds[more] = run_task(task).outcome.iteration_s
    assert seconds["+steal"] > 1.1 * seconds[""]
    assert seconds["+steal"] > 1.05 * seconds["+tag"]


# -- planning ----------------------------------------------------------------------------------------------


def planned(*overrides: str) -> SearchResult:
    where = "gpu_types: [H100], reserved_nodes: [3], spot_nodes: [1]"
    wish = f"plan={{iterations: 4, strategies: [disaggregated], {where}}}"
    short = "iterations_to_target.disaggregated.value=4"
    file = load_scenario("pipeline-wan", [*TINY, wish, short, *overrides])
    return search(file, Goal(budget_usd=1e6), NOW)


def test_a_plan_has_the_parts_that_pay_and_no_other() -> None:
    found = planned("workload.trained_timesteps=1")  # with one timestep there is nothing for TSP to join
    assert found.answer is not None
    kept = found.answer.candidate.strategy
    parts = strategy_named(kept).parts
    assert PipelinePart.TAG in parts, "generation takes most of the time"
    assert PipelinePart.TSP not in parts
    times = {one.candidate.strategy: one.outcome.iteration_s for one in found.evaluated}
    assert all(times[kept] <= seconds for seconds in times.values())


def test_parts_may_be_ruled_out() -> None:
    found = planned("plan.parts=[]")
    assert [one.candidate.strategy for one in found.evaluated] == ["disaggregated"]


def test_pairs_of_types_are_tried_where_asked_for() -> None:
    file = load_scenario(
        "mixed-512", ["plan={gpu_types: [H100], spot_gpu_types: [L40S, A100-80GB], strategies: [spotlight]}"]
    )
    listed = Quote(
        "aws",
        "us-east-1",
        "",
        "p4de",
        "A100-80GB",
        8,
        None,
        12.0,
        datetime(2026, 11, 1, tzinfo=UTC),
        "a test",
    )
    candidates, _ = grid(file, [listed])
    pairs = {(one.reserved.gpu_type, one.spot.gpu_type) for one in candidates}
    assert pairs == {("H100", "L40S"), ("H100", "A100-80GB")}
    with pytest.raises(ConfigError, match=r"plan\.spot_gpu_types: found 'L41S'"):
        load_scenario("mixed-512", ["plan.spot_gpu_types=[L41S]"])
