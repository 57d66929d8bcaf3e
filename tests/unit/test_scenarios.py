"""Scenario files: shipped ones load, others build on them, and everything wrong is named before any work."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import pytest

from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.policies.exploration.explorer import arms_of
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.traces.trace import TraceError
from spotlight_plan.pages.comparison_summary import prices_of
from spotlight_plan.prices.quotes import PriceError, Quote
from spotlight_plan.scenarios import pricing
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.pricing import Pricing
from spotlight_plan.scenarios.profile import load_profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario, scenario_names
from spotlight_plan.scenarios.scenario_sections import AlwaysOn, GeneratedTrace, PublicTraceSection
from spotlight_plan.scenarios.side_costs import egress_between
from spotlight_plan.scenarios.strategies import STRATEGIES, SpotPlaces, strategy_named
from spotlight_plan.scenarios.strategy_scenario import degrees, scenario_of
from spotlight_plan.traces.public_traces import PUBLIC_TRACES
from spotlight_rewards.base.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)
ALL = tuple(STRATEGIES)


SKYPILOT = '{"metadata": {"gap_seconds": 600}, "data": [4, 4, 3]}'


def refusal(*overrides: str, name: str = "paper-512") -> str:
    """What is said of a scenario that cannot be simulated, when it is read or prepared."""
    with pytest.raises((ConfigError, PriceError, TraceError)) as raised:
        read(name, overrides)
    return str(raised.value)


def read(name: str, overrides: Sequence[str]) -> None:
    file = load_scenario(name, overrides)
    prepare(file, file.strategies, NOW)


@pytest.mark.parametrize("name", scenario_names())
def test_shipped_scenarios_can_be_simulated_with_all_they_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = load_scenario(name)
    if isinstance(file.trace, PublicTraceSection):
        made = tmp_path / PUBLIC_TRACES[file.trace.name].file
        made.write_text("0,add,a\n3600000,remove,a\n" if made.suffix == ".csv" else SKYPILOT)
        monkeypatch.setenv("SPOTLIGHT_TRACES", str(tmp_path))
    names = tuple(dict.fromkeys((*file.strategies, *file.iterations_to_target)))
    prepared = prepare(file, names, NOW)
    for strategy in map(strategy_named, names):
        assert file.target_of(strategy) is not None
        plan = scenario_of(prepared, strategy).plan
        assert plan.prompts_per_iteration * plan.group_size % plan.ranks <= 0.02 * file.samples
        assert (plan.exploration.where if plan.exploration else None) == strategy.explore


@pytest.mark.parametrize(
    ("cloud", "reserved", "spot"), [("aws", 6.88, 1.78), ("gcp", 11.06, 4.98), ("azure", 12.29, 2.27)]
)
@pytest.mark.parametrize("name", ["paper-512", "paper-1280"])
def test_the_papers_cluster_has_the_papers_prices(
    name: str, cloud: str, reserved: float, spot: float
) -> None:
    file = load_scenario(name, [f"prices.cloud={cloud}"])
    pools = file.cluster.reserved, file.cluster.spot
    assert [pool.nodes * pool.gpus_per_node for pool in pools] == [4, 8]
    assert (pools[1].nodes, pools[1].gpu_type) == (4, "H100")
    found = prepare(file, ALL, NOW).pricing
    assert found.spot is not None
    assert found.reserved.usd_gpu_h == pytest.approx(reserved, abs=0.01)
    assert found.spot.usd_gpu_h == pytest.approx(spot, abs=0.01)
    assert found.reserved.as_of is not None
    assert "arXiv 2606.19004" in found.spot.source


def test_a_scenario_of_a_thousand_gpus_is_shipped() -> None:
    cluster = load_scenario("video-1000").cluster
    assert sum(pool.nodes * pool.gpus_per_node for pool in (cluster.reserved, cluster.spot)) == 1000


def test_files_build_on_others_and_paths_are_beside_them(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "t.csv").write_text("0,add,a\n3600000,remove,a\n")
    (tmp_path / "one.yaml").write_text(
        "base: paper-512\nname: one\ntrace: {kind: file, path: traces/t.csv}\n"
    )
    (tmp_path / "two.yaml").write_text("base: one.yaml\nworkload: {prompts: 8}\n")
    file = load_scenario(str(tmp_path / "two.yaml"), ["run.iterations=3"], seed=5)
    assert (file.name, file.workload.prompts, file.workload.group_size) == ("one", 8, 16)
    assert (file.run.iterations, file.run.seed) == (3, 5)
    prepared = prepare(file, file.strategies, NOW)
    assert prepared.trace.events[1].time_s == 3600


def test_a_base_without_a_trace_takes_the_files(tmp_path: Path) -> None:
    """A base may leave out what has a default; what it leaves out cannot be of another kind."""
    for name in ("video-1000", "paper-512"):
        shipped = files("spotlight_plan.scenarios").joinpath(f"shipped/{name}.yaml").read_text()
        bare = "".join(line for line in shipped.splitlines(keepends=True) if not line.startswith("trace:"))
        (tmp_path / "bare.yaml").write_text(bare)
        assert load_scenario(str(tmp_path / "bare.yaml")).trace == AlwaysOn()
        (tmp_path / "one.yaml").write_text("base: bare.yaml\ntrace: {kind: generated}\n")
        assert load_scenario(str(tmp_path / "one.yaml")).trace == GeneratedTrace()


@pytest.mark.parametrize("kind", ["[a]", "{a: b}", "null", "1"])
def test_a_kind_of_trace_that_is_no_name_is_reported(kind: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(f"base: paper-512\ntrace: {{kind: {kind}}}\n")
    with pytest.raises(ConfigError, match=r"trace\.kind"):
        load_scenario(str(tmp_path / "one.yaml"))
    assert "trace.kind" in refusal(f"trace={{kind: {kind}}}")


def test_a_public_trace_that_is_not_there_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_TRACES", str(tmp_path))
    message = refusal(name="skypilot-v100")
    assert f"curl -fL --create-dirs -o '{tmp_path}/skypilot-16-us-west-2a-v100.json' https://" in message
    assert "Did you mean 'bamboo-p3'?" in refusal("trace.name=bambo-p3", name="bamboo-p3")


def test_a_trace_of_the_command_line_keeps_the_scenarios_notices(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,add,a\n3600000,remove,a\n")
    section = load_scenario("paper-512", trace=path).trace
    assert section.model_dump() == load_scenario(
        "paper-512", ["trace.kind=file", f"trace.path={path}", "trace.notice_lead_s=30.0"]
    ).trace.model_dump()  # fmt: skip


@pytest.mark.parametrize("override", ["trace={kind: always_on}", "trace.kind=always_on"])
def test_a_trace_of_another_kind_replaces_the_scenarios(override: str) -> None:
    assert load_scenario("paper-512", [override]).trace.model_dump() == {"kind": "always_on"}


def test_a_trace_of_the_same_kind_keeps_the_other_keys() -> None:
    was = load_scenario("paper-512").trace.model_dump()
    for override in ("trace={kind: generated, mean_uptime_h: 7}", "trace={mean_uptime_h: 7}"):
        assert load_scenario("paper-512", [override]).trace.model_dump() == was | {"mean_uptime_h": 7}


def test_the_schema_and_the_strategies_stay_open() -> None:
    assert {"reserved_only", "all_on_demand", "spot_rollout_only", "critical_path", "spotlight"} <= set(ALL)
    assert STRATEGIES["spotlight"].explore == "idle"
    assert STRATEGIES["spot_rollout_only"].explore is None
    assert "literal" not in str(ScenarioFile.model_json_schema()["properties"]["strategies"]).lower()


# -- what a strategy makes of the cluster ------------------------------------------------------------------


def nodes(strategy: str, *overrides: str) -> dict[NodeKind, tuple[int, int, float]]:
    """By kind: GPUs that train, GPUs that roll out, $/h in all, of the nodes of an always-on trace."""
    file = load_scenario("paper-512", ["trace.kind=always_on", *overrides])
    events = scenario_of(prepare(file, (strategy,), NOW), STRATEGIES[strategy]).nodes
    found: dict[NodeKind, tuple[int, int, float]] = {}
    for _, event in events:
        node = event.node
        trains, rolls, usd = found.get(node.kind, (0, 0, 0.0))
        found[node.kind] = (
            trains + node.gpus * node.trains,
            rolls + node.gpus * node.rolls_out,
            usd + node.price_usd_h,
        )
    return found


def test_strategies_rent_what_they_say() -> None:
    reserved, spot = (4, 4, pytest.approx(4 * 6.88)), (0, 8, pytest.approx(8 * 1.78))
    assert nodes("reserved_only") == {NodeKind.RESERVED: reserved}
    assert nodes("all_on_demand") == {NodeKind.RESERVED: (12, 12, pytest.approx(12 * 6.88))}
    assert nodes("disaggregated") == {NodeKind.RESERVED: (4, 8, pytest.approx(12 * 6.88))}
    for name, strategy in STRATEGIES.items():
        if strategy.baseline is not None:
            expected = {NodeKind.RESERVED: (12, 12, pytest.approx(12 * 1.78))}
            assert nodes(name) == expected, "undisturbed, before the trace is applied"
        elif strategy.learner_moves:
            assert nodes(name) == {NodeKind.SPOT: (0, 12, pytest.approx(12 * 1.78))}, "as many GPUs, all spot"
        elif strategy.places is SpotPlaces.SPOT:
            assert nodes(name) == {NodeKind.RESERVED: reserved, NodeKind.SPOT: spot}


def test_where_the_learner_may_be_on_spot_nodes() -> None:
    file = load_scenario("paper-512", ["learner.gpus=3", "learner.on_demand.after_s=5"])
    prepared = prepare(file, ("all_spot", "all_spot_then_on_demand"), NOW)
    waits, takes = (
        scenario_of(prepared, STRATEGIES[name]) for name in ("all_spot", "all_spot_then_on_demand")
    )
    for scenario in (waits, takes):
        plan = scenario.plan
        assert (plan.ranks, plan.checkpoint_every, plan.cluster.learner_moves) == (3, 1, True)
        assert len({event.node.id for _, event in scenario.nodes if isinstance(event, NodeJoined)}) >= 6
        assert scenario.standing_usd_h == {"head": 0.4}
    assert waits.on_demand is None
    node, when = takes.on_demand, takes.plan.fleet.on_demand
    assert node is not None
    assert when is not None
    assert (node.kind, node.gpus, when.after_s) == (NodeKind.ON_DEMAND, 4, 5), "machines of two"
    assert node.price_usd_h == pytest.approx(4 * 6.88)


def test_no_reserved_node_is_needed_where_the_learner_is_on_spot_nodes() -> None:
    none = ("cluster.reserved.nodes=0", "strategies=[all_spot]")
    assert "or learner.gpus" in refusal(*none)
    read("paper-512", [*none, "learner.gpus=4"])
    assert "1 or more for spotlight" in refusal(
        "cluster.reserved.nodes=0", "learner.gpus=4", "strategies=[spotlight]"
    )


def test_scorers_and_bytes_between_regions_cost_money() -> None:
    priced = ("rewards={scorers: 3, usd_h: 2}",)
    between = "egress={to_spot_usd_gb: 0.02, from_spot_usd_gb: 0.01, bytes_s: 1e9, source: 'assumed: x'}"
    file = load_scenario("paper-512", [*priced, between])
    prepared = prepare(file, ("spotlight", "all_spot", "reserved_only"), NOW)
    scenarios = {
        name: scenario_of(prepared, STRATEGIES[name]) for name in ("spotlight", "all_spot", "reserved_only")
    }
    assert {name: one.standing_usd_h for name, one in scenarios.items()} == {
        "spotlight": {"rewards": 6}, "reserved_only": {"rewards": 6}, "all_spot": {"rewards": 6, "head": 0.4}
    }  # fmt: skip
    assert [name for name, one in scenarios.items() if one.egress] == ["spotlight"], (
        "others are in one region"
    )
    egress = scenarios["spotlight"].egress
    assert egress is not None
    # A picture; before and after each of two timesteps, and after every fifth step of 20, a latent.
    assert egress.sample_bytes == 512 * 512 * (3 + 4 + 4)
    assert "egress.source: found 'x'" in refusal(
        "egress={to_spot_usd_gb: 0, from_spot_usd_gb: 0, bytes_s: 1, source: x}"
    )


@pytest.mark.parametrize(
    ("learner", "spot", "expected"),
    [
        (("aws", "us-east-1"), ("aws", "us-east-1"), None),
        (("aws", ""), ("aws", "us-east-1"), None),
        (None, ("aws", "us-east-1"), None),
        (("aws", "us-east-1"), ("aws", "us-west-2"), (0.02, 0.02)),
        (("aws", "us-east-1"), ("gcp", "us-central1"), (0.09, 0.12)),
        (("gcp", ""), ("lambda", ""), (0.12, 0.12)),
    ],
)
def test_prices_of_bytes_follow_from_the_places(
    learner: tuple[str, str] | None, spot: tuple[str, str] | None, expected: tuple[float, float] | None
) -> None:
    found = egress_between(learner, spot)
    assert (None if found is None else (found.to_spot_usd_gb, found.from_spot_usd_gb)) == expected


def test_reserved_gpus_may_only_train_but_not_when_they_are_alone() -> None:
    keep = "cluster.reserved.rolls_out=false"
    assert nodes("spotlight", keep)[NodeKind.RESERVED][:2] == (4, 0)
    assert nodes("reserved_only", keep)[NodeKind.RESERVED][:2] == (4, 4)


def test_stated_prices_are_taken() -> None:
    found = nodes("spotlight", "cluster.reserved.usd_gpu_h=3", "cluster.spot.usd_gpu_h=0.5")
    assert found[NodeKind.RESERVED][2] == pytest.approx(12)
    assert found[NodeKind.SPOT][2] == pytest.approx(4)


def test_a_committed_rate_is_not_the_price_on_demand() -> None:
    rate = "cluster.reserved.usd_gpu_h=2"
    assert nodes("all_on_demand", rate)[NodeKind.RESERVED][2] == pytest.approx(4 * 2 + 8 * 6.88)
    stated = nodes("all_on_demand", rate, "cluster.spot.usd_gpu_h_on_demand=5")
    assert stated[NodeKind.RESERVED][2] == pytest.approx(4 * 2 + 8 * 5)
    file = load_scenario("paper-512", [rate])
    assert prices_of(prepare(file, ALL, NOW))["on demand"].usd_gpu_h == pytest.approx(6.88)


def test_the_price_on_demand_is_always_reported() -> None:
    prices = prices_of(prepare(load_scenario("paper-512"), ALL, NOW))
    assert prices["on demand"] == prices["reserved"]
    assert "on demand" not in prices_of(prepare(load_scenario("paper-512"), ("spotlight",), NOW))


def test_prices_on_demand_that_are_missing_can_be_stated() -> None:
    other = ["cluster.spot.gpu_type=H20", "cluster.spot.usd_gpu_h=1", "strategies=[all_on_demand]"]
    message = refusal(*other)
    assert "no on-demand price of H20" in message
    assert "State it as cluster.spot.usd_gpu_h_on_demand" in message
    read("paper-512", [*other, "cluster.spot.usd_gpu_h_on_demand=1.5"])


def priced_by(rows: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Pricing:
    """The pricing by quotes of one H100: cloud, region, on demand, spot."""
    quotes = [
        Quote(
            cloud, region, "", "m", "H100", 1,
            float(fixed) if fixed else None, float(spot) if spot else None, NOW, "test",
        )
        for cloud, region, fixed, spot in (row.split(",") for row in rows.split())
    ]  # fmt: skip
    monkeypatch.setattr(pricing, "load_prices", lambda source, question: tuple(quotes))
    file = load_scenario("paper-512", ["prices.cloud=null", *overrides])
    return prepare(file, ALL, NOW).pricing


def test_all_prices_are_of_the_place_that_is_cheapest_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = priced_by("a,x,2,9 a,y,5,2 a,z,9,1 b,y,4.5,2.5", monkeypatch)  # 4 reserved, 8 more, 8 spot
    assert {tag.place for tag in (found.reserved, found.on_demand, found.spot) if tag} == {("b", "y")}
    assert (found.reserved.usd_gpu_h, found.caveat) == (4.5, "")
    assert found.spot is not None
    assert found.spot.usd_gpu_h == 2.5


def test_a_price_without_region_is_of_every_region_of_its_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    found = priced_by("a,,3,  a,x,,2 b,x,,1", monkeypatch)
    assert found.spot is not None
    assert (found.reserved.usd_gpu_h, found.spot.usd_gpu_h, found.caveat) == (3, 2, "")


def test_prices_of_different_clouds_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = priced_by("a,x,3, b,y,,1", monkeypatch)
    assert "reserved in a x, on demand in a x, spot in b y" in found.caveat
    assert not priced_by("a,x,3, b,y,,1", monkeypatch, "cluster.spot.usd_gpu_h=1").caveat


def test_only_degrees_with_figures_are_ever_formed() -> None:
    profile = load_profile("qwen-image-20b")
    for widest, expected in ((1, (1,)), (2, (1, 2)), (3, (1, 2)), (8, (1, 2, 4))):
        assert degrees(profile, ("H100",), 1280 * 1280, widest) == expected


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("cluster.reserved.nodes=0", ("cluster.reserved.nodes", "found 0", "1 or more", "rent at least one")),
        ("cluster.spot.nodes=0", ("cluster.spot.nodes", "spotlight", "reserved_only alone")),
        ("cluster.spot.gpu_type=H1000", ("cluster.spot.gpu_type", "'H1000'", "Did you mean 'H100'")),
        ("plan.gpu_types=[H1000]", ("plan.gpu_types", "'H1000'")),
        ("cluster.spot.usd_gpu_h=-3", ("cluster.spot.usd_gpu_h", "-3", "greater than 0")),
        ("cluster.reserved.usd_gpu_h=0", ("cluster.reserved.usd_gpu_h", "greater than 0")),
        ("cluster.spot.gpus=2", ("cluster.spot.gpus", "unknown key", "gpus_per_node")),
        ("strategies=[spotligth]", ("strategies", "'spotligth'", "Did you mean 'spotlight'")),
        ("strategies=[spotlight,spotlight]", ("strategies", "every strategy once")),
        ("strategies=[magic]", ("strategies", "'magic'", "one of reserved_only, all_on_demand,")),
        ("strategies=[]", ("strategies", "one or more of reserved_only, all_on_demand,")),
        ("plan.strategies=[]", ("plan.strategies", "one or more of reserved_only, all_on_demand,")),
        ("exploration=null", ("exploration", "critical_path, spotlight")),
        ("exploration.seeds_per_prompt=8", ("exploration.seeds_per_prompt", "8", "workload.group_size = 16")),
        ("exploration.steps=30", ("exploration.steps", "30", "workload.steps = 20")),
        ("iterations_to_target.spotlight.source=x", ("iterations_to_target.spotlight.source", "assumed:")),
        ("iterations_to_target.spotlight.value=0", ("to_target.spotlight.value", "greater than 0")),
        ("trace.kind=magic", ("trace.kind", "'magic'", "'always_on'")),
        ("trace.kind=file", ("trace.path", "found nothing")),
        ("trace.leed_s=3", ("trace.leed_s", "unknown key")),
        ("workload.prompts=0", ("workload.prompts", "greater than 0")),
        ("workload.profile=gone", ("profile", "gone", "qwen-image-20b")),
        ("workload.height=513", ("workload.height", "found 513", "a multiple of 16", "For example 512")),
        ("workload.width=700", ("workload.width", "found 700", "a multiple of 16", "For example 704")),
        ("workload.height=64", ("gpus.H100.denoise", "pixels")),
        ("workload.updates_per_batch=33", ("workload.updates_per_batch", "33", "workload.prompts = 32")),
        ("prices.source=gone", ("gone", "builtin")),
        ("prices.cloud=lambda", ("no on-demand price of H100", "cloud=lambda", "cluster.reserved.usd_gpu_h")),
        ("prices.instance_type=p5.4xlarge", ("no on-demand price", "instance_type=p5.4xlarge")),
        ("run.noise=-0.1", ("run.noise", "-0.1")),
        ("run.seed=-1", ("run.seed", "-1")),
    ],
)  # fmt: skip
def test_bad_values_are_named_before_any_work(override: str, parts: tuple[str, ...]) -> None:
    message = refusal(override)
    for part in parts:
        assert part in message


def test_models_larger_than_memory_are_refused() -> None:
    small = ["cluster.reserved.gpu_type=H20", "cluster.spot.gpu_type=L4", "cluster.spot.usd_gpu_h=1"]
    assert "L4 with 24 GiB" in refusal(*small, "cluster.reserved.usd_gpu_h=1", "strategies=[spotlight]")


def test_gpus_without_figures_are_refused() -> None:
    prices = ["cluster.reserved.usd_gpu_h=1", "cluster.spot.usd_gpu_h=1"]
    message = refusal(*prices, "cluster.spot.gpu_type=H200", "strategies=[spotlight]")
    assert "gpus.H200" in message
    assert "only for H20, H100, A100-80GB" in message


def test_more_learner_gpus_than_samples_are_refused() -> None:
    message = refusal("cluster.reserved.nodes=200")
    assert "512 samples" in message
    assert "800 learner GPUs" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("0,add,a\n5000,add,b\n1000,remove,a\n", "unsorted"),
        ("0,add\n", "2 fields"),
        ("0,remove,a\n", "which is not there"),
        ("time_s,event,node,gpus\n0,add,a,8\n60,remove,a,8\n", "cluster.spot.gpus_per_node"),
    ],
)
def test_bad_traces_are_refused(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    assert part in refusal("trace.kind=file", f"trace.path={path}")


def test_prices_by_the_trace_need_prices_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,add,a\n3600000,remove,a\n")
    assert "trace.use_prices" in refusal("trace.kind=file", f"trace.path={path}", "trace.use_prices=true")


def test_profiles_with_missing_figures_are_refused(tmp_path: Path) -> None:
    text = files("spotlight_plan.scenarios").joinpath("profiles/qwen-image-20b.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("prepare_s:", "prepare_secs:"))
    message = refusal(f"workload.profile={path}")
    assert "prepare_s: found nothing" in message


def test_scenarios_that_are_not_there(tmp_path: Path) -> None:
    assert "Did you mean 'paper-512'?" in refusal(name="paper-51")
    (tmp_path / "loop.yaml").write_text("base: loop.yaml\n")
    assert "at most 8 deep" in refusal(name=str(tmp_path / "loop.yaml"))


def test_a_planner_of_a_scenario_knows_what_previews_cost() -> None:
    arms = "exploration.planner={seed_counts: [16, 20, 28], step_counts: [8, 12, 16], alpha: 0}"
    file = load_scenario("paper-512", [arms, "exploration.rewards={exponent: 0.82}"])
    prepared = prepare(file, ("spotlight", "critical_path", "reserved_only"), NOW)
    scenario = scenario_of(prepared, STRATEGIES["spotlight"])
    plan = scenario.plan.exploration
    assert plan is not None
    assert plan.planner is not None
    assert (len(arms_of(scenario.plan)), plan.planner.alpha) == (9, 0)
    assert scenario.rewards.exponent == 0.82
    costs = plan.planner.costs
    size = scenario.costs.lease_size("H100", file.pixels, 1)
    assert costs.step_s * size == scenario.costs.denoise_step_s("H100", file.pixels, size, 1)
    assert costs.window_s is not None
    assert 0 < costs.fixed_s < costs.step_s * 8 < costs.window_s
    assert scenario_of(prepared, STRATEGIES["reserved_only"]).plan.exploration is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "exploration.planner={seed_counts: [8, 24], step_counts: [8]}",
            ("exploration.planner.seed_counts", "8", "workload.group_size = 16"),
        ),
        (
            "exploration.planner={seed_counts: [24], step_counts: [8, 30]}",
            ("exploration.planner.step_counts", "30", "workload.steps = 20"),
        ),
        ("exploration.planner={seed_counts: [], step_counts: [8]}", ("exploration.planner.seed_counts",)),
        ("exploration.drawn_seeds=17", ("exploration.drawn_seeds", "17", "workload.group_size = 16")),
        (
            "exploration={sampled_prompts: 1, drawn_seeds: 1}",
            ("exploration.sampled_prompts", "1", "0 with exploration.drawn_seeds=1"),
        ),
        ("exploration.policy=best", ("exploration.policy", "max_variance")),
    ],
)
def test_an_exploration_that_cannot_be_is_refused(override: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_scenario("paper-512", [override])
    for words in parts:
        assert words in str(raised.value)
