"""Whole machines, each pool in its own place, and what a plan is launched with."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
import yaml
from test_launch_files import schema

from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight_plan import estimates as candidate_estimates
from spotlight_plan.candidates import (
    Candidate,
    Machine,
    grid,
    overrides_of,
    own_machine,
    prepared_for,
    shape_of,
)
from spotlight_plan.launch_files import (
    launch_files,
    launch_settings,
    read_templates,
    require_launch,
    write_launch_files,
)
from spotlight_plan.prices.quotes import PriceError, Quote
from spotlight_plan.prices.sources import PriceQuery
from spotlight_plan.scenarios import pricing
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.search import Goal, SearchResult, search
from spotlight_rewards.base.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "examples/qwen-image-nft.yaml")
SMALL = (
    "workload.prompts=8",
    "workload.group_size=8",
    "workload.evaluation=null",
    "exploration.seeds_per_prompt=10",
    "exploration.steps=4",
    "run.until_h=30",
    "run.starts=1",
    "run.noise=0",
    "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60}",
    "prices.cloud=null",
    "iterations_to_target.spotlight={value: 4, source: 'assumed: for a test'}",
    "iterations_to_target.reserved_only.value=6",
)


def quote(cloud: str, region: str, machine: str, gpus: int, fixed: float | None, spot: float | None) -> Quote:
    return Quote(cloud, region, "", machine, "H100", gpus, fixed, spot, NOW, "test")


QUOTES = (
    quote("aws", "us-east-1", "p5.48xlarge", 8, 55.0, 30.0),
    quote("aws", "us-east-1", "p5.4xlarge", 1, None, 2.5),
    quote("aws", "us-west-2", "p5.48xlarge", 8, 58.0, 14.0),
    quote("azure", "eastus", "ND96", 8, 98.0, 16.0),
    quote("gcp", "us-central1", "a3-highgpu-4g", 4, 44.0, 20.0),
)


def small(*overrides: str) -> ScenarioFile:
    return load_scenario("paper-512", [*SMALL, *overrides])


WISH = (
    "plan={iterations: 3, gpu_types: [H100], reserved_nodes: [1], spot_nodes: [1, 2], parts: [gap], "
    "strategies: [reserved_only, spotlight, all_spot], machine_sizes_max: 3, previews: [[12, 4]]}"
)


@pytest.fixture(autouse=True)
def quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_estimates, "quotes_of", lambda file, gpus, now, unread: QUOTES)


def test_nodes_are_whole_machines() -> None:
    file = load_scenario("paper-512", ["prices.whole_machines=true"])
    with pytest.raises(PriceError) as raised:
        prepare(file, ("reserved_only",), NOW)
    for part in (
        "machine of 4 GPUs",
        "p5.48xlarge (8)",
        "cluster.reserved.gpus_per_node",
        "whole_machines=false",
    ):
        assert part in str(raised.value)
    whole = ("cluster.reserved={nodes: 1, gpus_per_node: 8}", "cluster.spot={nodes: 2, gpus_per_node: 8}")
    found = prepare(load_scenario("paper-512", ["prices.whole_machines=true", *whole]), ("spotlight",), NOW)
    for price in (found.pricing.reserved, found.pricing.spot):
        assert price is not None
        assert " p5.48xlarge: " in price.source
    assert found.pricing.reserved.usd_gpu_h == 55.04 / 8


def test_reserved_machines_are_priced_only_where_some_are_rented() -> None:
    """No cloud rents the reserved machine of four GPUs whole, which a learner on spot nodes lacks."""
    whole = ("prices.whole_machines=true", "cluster.spot={nodes: 2, gpus_per_node: 8}", "learner.gpus=8")
    file = load_scenario("paper-512", whole)
    for name in ("all_spot", "all_spot_then_on_demand", "spot_checkpoints"):
        found = prepare(file, (name,), NOW).pricing
        assert found.reserved is None
        assert found.spot is not None
        assert " p5.48xlarge: " in found.spot.source
    with pytest.raises(PriceError, match=r"no on-demand price of H100 on a machine of 4 GPUs"):
        prepare(file, ("all_spot", "spotlight"), NOW)


def test_machines_that_are_not_rented_do_not_choose_the_cloud() -> None:
    """Forty reserved GPUs would be cheapest at the second cloud, where spot nodes are dearest."""
    offers = (quote("aws", "a", "m", 8, 80.0, 8.0), quote("gcp", "b", "m", 8, 8.0, 80.0))
    whole = ("cluster.reserved={nodes: 5, gpus_per_node: 8}", "cluster.spot={nodes: 1, gpus_per_node: 8}")
    file = small(*whole, "learner.gpus=8", "workload.prompts=32", "prices.whole_machines=true")
    for name, cloud in (("all_spot", "aws"), ("spotlight", "gcp")):
        spot = prepare(file, (name,), NOW, offers).pricing.spot
        assert spot is not None
        assert spot.place is not None
        assert spot.place[0] == cloud


def test_each_pool_may_be_in_a_cloud_of_its_own() -> None:
    whole = ("cluster.reserved={nodes: 1, gpus_per_node: 8}", "cluster.spot={nodes: 2, gpus_per_node: 8}")
    away = ("prices.cloud=aws", "cluster.spot.cloud=azure", "prices.whole_machines=true")
    pricing = prepare(load_scenario("paper-512", [*whole, *away]), ("spotlight",), NOW).pricing
    assert pricing.spot is not None
    assert (pricing.reserved.place, pricing.spot.place) == (("aws", ""), ("azure", ""))
    assert pricing.caveat == ""


def test_the_grid_has_machines_and_places_that_no_other_beats() -> None:
    candidates, _ = grid(small(WISH), QUOTES)
    pairs = {
        (one.reserved.name, one.reserved.region, one.spot.name, one.spot.region)
        for one in candidates
        if one.strategy == "spotlight"
    }
    assert ("p5.48xlarge", "us-east-1", "p5.4xlarge", "us-east-1") in pairs
    assert ("p5.48xlarge", "us-west-2", "p5.48xlarge", "us-west-2") in pairs
    assert ("p5.48xlarge", "us-east-1", "p5.48xlarge", "us-west-2") in pairs  # across regions
    assert ("p5.48xlarge", "us-east-1", "ND96", "eastus") in pairs  # across clouds
    assert not any(reserved == "ND96" and spot == "ND96" for reserved, _, spot, _ in pairs), "dearer in both"
    assert {one.spot.gpus for one in candidates} == {1, 4, 8}
    moving = {(one.reserved, one.spot) for one in candidates if one.strategy == "all_spot"}
    assert all(one == other for one, other in moving)


def test_nodes_on_demand_are_planned_in_the_learners_place() -> None:
    """What crosses is paid of spot nodes only; nodes on demand would cross for nothing."""
    wish = WISH.replace("reserved_only, spotlight, all_spot", "disaggregated, all_on_demand")
    candidates, _ = grid(small(wish), QUOTES)
    assert {one.strategy for one in candidates} == {"disaggregated", "all_on_demand"}
    assert {one.crossing for one in candidates} == {""}
    nowhere = [one for one in QUOTES if one.cloud == "azure"] + [replace(QUOTES[2], gpu="A100-80GB")]
    wish = wish.replace("gpu_types: [H100]", "gpu_types: [A100-80GB], spot_gpu_types: [H100]")
    candidates, left_out = grid(small(wish), nowhere)
    assert not [one for one in candidates if one.reserved.gpu_type != one.spot.gpu_type]
    assert ("A100-80GB, disaggregated", "no place with prices of both") in left_out


def test_a_stated_price_in_another_cloud_pays_for_traffic() -> None:
    away = ("cluster.spot.usd_gpu_h=1", "cluster.spot.cloud=azure")
    for overrides, crosses in ((away, True), (away[:1], False)):
        scenario = prepare(load_scenario("paper-512", overrides), ("spotlight",), NOW)
        found = scenario_of(scenario, strategy_named("spotlight")).egress
        assert (found is not None) == crosses
    file = small(WISH, *away)
    candidates, _ = grid(file, QUOTES)
    ours = [one for one in candidates if one.strategy == "spotlight"]
    assert {one.spot.name for one in ours} == {""}
    assert all(one.crossing == ("" if one.reserved.cloud == "azure" else "cloud") for one in ours)
    assert len({one.crossing for one in ours}) == 2
    for one in ours:
        spot = prepared_for(file, one, 4, NOW, QUOTES).pricing.spot
        assert spot is not None
        assert spot.place == ("azure", "")


def test_a_node_on_demand_for_the_learner_is_of_whole_machines() -> None:
    """A learner of four GPUs pays for the eight of its machine, and the other four roll out."""
    whole = ("cluster.spot={nodes: 2, gpus_per_node: 8}", "cluster.reserved.nodes=1", "learner.gpus=4")
    name = "all_spot_then_on_demand"
    scenario = prepare(load_scenario("paper-512", whole), (name,), NOW)
    offer = scenario_of(scenario, strategy_named(name)).on_demand
    assert offer is not None
    assert offer.gpus == 8
    assert offer.price_usd_h == pytest.approx(55.04)


def test_clouds_that_could_not_be_read_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, question: PriceQuery) -> tuple[Quote, ...]:
        question.unread["vast"] = "vast: no answer in 30 s"
        return QUOTES

    monkeypatch.setattr(pricing, "load_prices", load)
    monkeypatch.setattr(candidate_estimates, "quotes_of", pricing.quotes_of)
    pricing_found = prepare(small(), ("spotlight",), NOW).pricing
    assert (
        pricing_found.caveat == "prices of vast could not be read, and may be lower: vast: no answer in 30 s"
    )
    found = candidate_estimates.Estimates(small(), NOW)
    assert found.reasons() == ("vast: its prices could not be read: vast: no answer in 30 s",)


@cache
def answered() -> tuple[ScenarioFile, SearchResult]:
    file = small(WISH.replace("machine_sizes_max: 3", "machine_sizes_max: 1"), "plan.previews=[]")
    return file, search(file, Goal(deadline_h=1000.0), NOW)


def test_the_closed_form_is_near_what_is_simulated() -> None:
    """Of all that was confirmed: prices of machines and traffic between clouds included."""
    _, found = answered()
    closed = {one.candidate: one.runs for one in found.evaluated}
    assert found.confirmed
    for one in found.confirmed:
        assert closed[one.candidate].target_h.p50 == pytest.approx(one.runs.target_h.p50, rel=0.1)
        assert closed[one.candidate].target_usd.p50 == pytest.approx(one.runs.target_usd.p50, rel=0.1)


def test_the_answer_is_beaten_by_none_that_was_simulated() -> None:
    file, found = answered()
    assert found.answer is not None
    assert found.answer in found.confirmed
    for one in found.confirmed:
        assert found.answer.runs.target_usd.p50 <= one.runs.target_usd.p50
    assert repr(search(file, Goal(deadline_h=1000.0), NOW)) == repr(found)


def test_a_preview_that_was_asked_for_is_tried() -> None:
    found = search(small(WISH, "plan.strategies=[spotlight]"), Goal(deadline_h=1000.0), NOW)
    assert {one.candidate.previews for one in found.evaluated} == {None, (12, 4)}


def test_the_overrides_of_the_answer_simulate_it() -> None:
    file, found = answered()
    assert found.answer is not None
    one = found.answer.candidate
    again = load_scenario("paper-512", [*SMALL, *overrides_of(small(), one), "run.iterations=4"])
    prepared = prepared_for(file, one, 4, NOW, QUOTES)
    assert again.cluster == prepared.file.cluster
    assert again.learner == prepared.file.learner


MACHINES = (
    Machine("H100", 8, "aws", "us-east-1", "p5.48xlarge"),
    Machine("H100", 8, "azure", "eastus", "ND96"),
    Machine("H100", 4, "gcp", "us-central1", "a3-highgpu-4g"),
)
STRATEGIES = ("reserved_only", "spotlight+gap+tsp", "disaggregated", "all_spot")


@pytest.mark.parametrize(
    ("strategy", "fixed", "coming", "nodes"),
    [
        (strategy, *pair, nodes)
        for strategy, pair, nodes in itertools.product(
            STRATEGIES, [(MACHINES[0], MACHINES[0]), (MACHINES[0], MACHINES[1])], (1, 2)
        )
        if strategy != "all_spot" or pair[0] == pair[1]
    ],
)
def test_launch_files_are_what_schedulers_take(
    strategy: str, fixed: Machine, coming: Machine, nodes: int
) -> None:
    file = small(
        "cluster.spot.usd_gpu_h_on_demand=7",
        "workload.prompts=32",
        "workload.group_size=16",
        "exploration.seeds_per_prompt=20",
    )
    others = 0 if strategy == "reserved_only" else 3
    one = Candidate(strategy, fixed, coming if others else fixed, nodes, others)
    settings = launch_settings(file, one, prepared_for(file, one, 2, NOW, QUOTES), CONFIG)
    made = launch_files(one, read_templates(), "examples/qwen-image-nft.yaml", settings)
    tasks = {name: yaml.safe_load(text) for name, text in made.items() if name.startswith("skypilot")}
    for task in tasks.values():
        schema("skypilot_task.json").validate(task)
        for part in ("setup", "run"):
            subprocess.run(["bash", "-n", "-c", task[part]], check=True)
    subprocess.run(["bash", "-n"], input=made["start.sh"], text=True, check=True)
    assert all(f"/{name}" in made["start.sh"] for name in tasks)
    moves = strategy == "all_spot"
    head = tasks["skypilot-reserved.yaml"]["resources"]
    assert ("accelerators" in head) is not moves
    assert ("skypilot-more.yaml" in tasks) is (nodes == 2 and not moves)
    if others:
        spot = tasks["skypilot-spot.yaml"]
        assert spot["resources"]["infra"] == f"{coming.cloud}/{coming.region}"
        assert spot["resources"]["instance_type"] == coming.name
        assert spot["resources"]["use_spot"] is (strategy != "disaggregated")
        assert f"seq 0 {others + (nodes if moves else 0) - 1}" in made["start.sh"]
    (line,) = [
        line for line in tasks["skypilot-reserved.yaml"]["run"].splitlines() if "spotlight train" in line
    ]
    job = next(part for part in yaml.safe_load_all(made["kuberay-rayjob.yaml"]) if part["kind"] == "RayJob")
    schema("kuberay_rayjob_v1.json").validate(job)
    schema("kuberay_rayjob_crd.json").validate(job)
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert groups["trainer"]["replicas"] == (0 if moves else nodes)
    assert groups["spot"]["replicas"] == others + (nodes if moves else 0)
    for text in (line.replace('"$SPOTLIGHT_IP:6379"', "10.0.0.1:6379"), job["spec"]["entrypoint"]):
        words = [word.replace("/opt/spotlight/", f"{ROOT}/") for word in shlex.split(text)[2:]]
        config = load_config(ROOT / words[0], [word for word in words[1:] if not word.startswith("-")])
        assert config.fleet.learner_ranks == 8 * nodes
        assert config.fleet.learner_placement == ("spot" if moves else "reserved")
        assert config.rollout.steps == 20
        assert (config.pipeline.axis == "prompt") is ("gap" in strategy)


@pytest.mark.parametrize("key", ["cluster.reserved.cloud", "cluster.spot.machine", "prices.region"])
def test_a_name_of_a_scenario_adds_no_lines_to_a_task(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: found .*; expected a name on one line"):
        small(f'{key}="aws\\nsetup: touch here"')


@pytest.mark.parametrize("cloud", ["on-prem", "digital ocean"])
def test_a_cloud_of_ones_own_is_named_in_the_task(cloud: str) -> None:
    file = small("cluster.reserved.usd_gpu_h=6", f"cluster.reserved.cloud={cloud}")
    machine = own_machine(file.cluster.reserved)
    made = launch_files(Candidate("reserved_only", machine, machine, 1, 0), read_templates(), CONFIG, "")
    assert yaml.safe_load(made["skypilot-reserved.yaml"])["resources"]["infra"] == cloud


def test_the_run_of_a_launch_may_be_in_a_folder_with_a_space() -> None:
    machine = Machine("H100", 8, "aws", "us-east-1", "p5.48xlarge")
    one = Candidate("reserved_only", machine, machine, 1, 0)
    made = launch_files(one, read_templates(), "my runs/a.yaml", "rollout.steps=20")
    task = yaml.safe_load(made["skypilot-reserved.yaml"])["run"].splitlines()
    train = next(line for line in task if line.strip().startswith("spotlight train"))
    job = next(part for part in yaml.safe_load_all(made["kuberay-rayjob.yaml"]) if part["kind"] == "RayJob")
    words = [shlex.split(text)[2] for text in (train, job["spec"]["entrypoint"])]
    assert words == ["my runs/a.yaml", "/opt/spotlight/my runs/a.yaml"]


def started(strategy: str, *overrides: str, config: str = CONFIG) -> RunConfig:
    """What the launch files of an answer would run."""
    file = small("cluster.spot.usd_gpu_h_on_demand=7", "workload.prompts=32", *overrides)
    one = Candidate(strategy, MACHINES[0], MACHINES[0], 1, 3)
    words = launch_settings(file, one, prepared_for(file, one, 2, NOW, QUOTES), config).split()
    return load_config(Path(config), ["fleet.driver=ray", "fleet.address=auto", *words])


def test_the_workload_that_was_simulated_is_started() -> None:
    run = started(
        "spotlight+tsp",
        "workload.trained_timesteps=3",
        "workload.train_samples=4",
        "workload.updates_per_batch=2",
        "workload.timesteps_per_pass=2",
        "workload.checkpoint_every=7",
        "workload.evaluation={every: 9, prompts: 8, images_per_prompt: 2, steps: 30}",
        "learner.shard=all",
    )
    assert (run.algorithm.train_timesteps, run.algorithm.train_samples) == (3, 4)
    assert (run.learner.updates_per_batch, run.learner.shard, run.learner.timesteps_per_pass) == (2, "all", 2)
    test = run.evaluation
    assert (test.every, test.prompts, test.images_per_prompt, test.steps) == (9, 8, 2, 30)
    assert run.checkpoint.every == 7
    plain = started("spotlight")  # SMALL has none of these, and no evaluation
    assert plain.algorithm.train_samples is None
    assert plain.evaluation.count(plain.iterations) == 0


def test_passes_beside_a_worker_are_as_simulated_where_the_run_leaves_them_no_memory(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    text = Path(CONFIG).read_text(encoding="utf-8")
    assert "recompute: auto" in text
    for strategy, asked, per_pass in (
        ("all_spot+tag", 2, 1),
        ("all_spot+tsp+tag", 2, 2),
        ("all_spot+tsp+tag", "null", 1),
    ):
        learner = started(strategy, f"workload.timesteps_per_pass={asked}").learner
        assert (learner.recompute, learner.timesteps_per_pass) == ("blocks", per_pass)
    own.write_text(
        text.replace("recompute: auto", "recompute: auto\n  pass_memory_gib: 20"), encoding="utf-8"
    )
    learner = started("all_spot+tag", config=str(own)).learner
    assert (learner.recompute, learner.pass_memory_gib) == ("auto", 20)


def test_as_many_pictures_are_evaluated_where_there_are_fewer_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    there = len((ROOT / "examples/prompts/ocr_test.txt").read_text().splitlines())
    test = started(
        "spotlight", f"workload.evaluation={{every: 25, prompts: {4 * there}, steps: 40}}"
    ).evaluation
    assert (test.prompts, test.images_per_prompt) == (there, 4)


def test_commands_that_only_the_user_knows_are_placeholders_that_start_nothing(tmp_path: Path) -> None:
    name = "all_spot_then_on_demand"
    run = started(name, "learner.on_demand={after_s: 70, back_after_s: 80}")
    assert (run.fleet.on_demand.after_s, run.fleet.on_demand.back_after_s) == (70, 80)
    file = small("cluster.spot.usd_gpu_h_on_demand=7", "workload.prompts=32")
    one = Candidate(name, MACHINES[0], MACHINES[0], 1, 3)
    written = write_launch_files(tmp_path, file, one, prepared_for(file, one, 2, NOW, QUOTES), CONFIG)
    assert written.to_replace == (run.fleet.on_demand.start, run.fleet.on_demand.stop)
    result = subprocess.run(["bash", str(tmp_path / "start.sh")], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert str(tmp_path / "skypilot-reserved.yaml") in result.stderr
    assert all(text in result.stderr for text in written.to_replace)
    own = tmp_path / "own.yaml"
    commands = "fleet:\n  on_demand: {start: sky launch, stop: sky down}\n"
    own.write_text(Path(CONFIG).read_text(encoding="utf-8").replace("fleet:\n", commands))
    ours = started(name, config=str(own)).fleet.on_demand
    assert (ours.start, ours.stop) == ("sky launch", "sky down")
    require_launch(tmp_path, file, str(own))  # the commands alone are refused only beside another answer


def test_the_repository_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_templates()
    monkeypatch.setitem(read_templates.__globals__, "__file__", "/opt/spotlight_plan/launch_files.py")
    assert read_templates() == here
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert read_templates() == here


def test_what_no_answer_could_be_launched_with_is_reported_before_the_search(tmp_path: Path) -> None:
    file = small("workload.prompts=32")
    require_launch(tmp_path / "new", file, CONFIG)
    with pytest.raises(
        ConfigError, match=r"--config: found absent\.yaml, .*the root of Spotlight's repository"
    ):
        require_launch(tmp_path, file, "absent.yaml")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(ConfigError, match=r"--launch: found .*; expected a folder"):
            require_launch(folder, file, CONFIG)
    tree, fewer = tmp_path / "grids.yaml", small("workload.evaluation={every: 9, prompts: 8}")
    tree.write_text(
        Path(CONFIG).read_text(encoding="utf-8").replace("evaluation:\n", "evaluation:\n  grid_images: 4\n")
    )
    with pytest.raises(ConfigError, match=r"evaluation\.grid_images"):
        require_launch(tmp_path, fewer, str(tree))


@pytest.mark.parametrize(
    ("example", "keys"),
    [
        ("sd35-medium-ocr", ["model.family", "rollout.true_cfg_scale"]),
        ("qwen-image-ocr-lora", ["rollout.true_cfg_scale"]),
    ],
)
def test_a_run_of_another_model_or_with_guidance_that_was_not_planned_is_refused(
    example: str, keys: list[str], tmp_path: Path
) -> None:
    config = str(ROOT / f"examples/{example}.yaml")
    with pytest.raises(ConfigError, match=r"workload\.guidance=true") as raised:
        require_launch(tmp_path, small("workload.prompts=32"), config)
    assert [problem.key for problem in raised.value.problems] == keys
    with pytest.raises(ConfigError, match=r"true_cfg_scale: found 1; expected above 1"):
        require_launch(tmp_path, small("workload.prompts=32", "workload.guidance=true"), CONFIG)


@pytest.mark.parametrize(("nodes", "gpus", "most"), [(0, 8, 4), (1, 64, 32), (1, None, 2)])
def test_sizes_of_a_learner_on_spot_nodes_are_around_its_own(nodes: int, gpus: int | None, most: int) -> None:
    """Doublings up to four times the GPUs that train, however many are reserved beside it."""
    pools = (f"cluster.reserved.nodes={nodes}", f"learner.gpus={'null' if gpus is None else gpus}")
    wish = "plan={gpu_types: [H100], strategies: [all_spot]}"
    candidates, _ = grid(small("strategies=[all_spot]", *pools, wish, "workload.prompts=64"), QUOTES)
    assert max(one.reserved_nodes for one in candidates if one.reserved.gpus == 8) == most


def test_a_cluster_without_a_gpu_to_train_on_is_refused() -> None:
    file = small("strategies=[all_spot]", "cluster.reserved.nodes=0", "learner.gpus=8")
    none = Candidate("reserved_only", MACHINES[0], MACHINES[0], 0, 0)
    with pytest.raises(ConfigError, match=r"cluster\.reserved\.nodes: found 0; expected 1 or more"):
        prepared_for(file, none, 4, NOW, QUOTES)


def test_the_shape_names_machines_and_clouds() -> None:
    one = Candidate("spotlight", MACHINES[0], MACHINES[1], 1, 2)
    assert shape_of(one) == (
        "8 reserved H100 (1 x p5.48xlarge, aws us-east-1) + 16 spot H100 (2 x ND96, azure eastus), spotlight"
    )
