"""What a run takes: its own rows, other runs, operations; and a file that nothing else rests on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spotlight.config.load import build_config, dump_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.data.media_size import media_size
from spotlight.dry_run import estimating
from spotlight.dry_run.estimating import NO_ESTIMATE, estimate_run
from spotlight.dry_run.model_plan import ModelSizes, read_sizes
from spotlight.dry_run.run_plan import count_passes
from spotlight.registry import Registry
from spotlight.scheduler.records import PromptSeen, Record, RolloutIssued, StepApplied, VersionPublished
from spotlight.scheduler.types import Phase, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.run_directory import RunDirectory
from spotlight.store.run_estimate import (
    RunPace,
    SpentSoFar,
    changes_pace,
    estimated,
    measured_pace,
    read_estimate,
    write_estimate,
)
from spotlight_plan.commands.estimate.counted_pace import MFU, MFU_LEAST, MFU_MOST, forward_flop, pace_of
from spotlight_plan.commands.estimate.estimate_pace import estimate_pace
from spotlight_rewards.base.prompts import Prompt, PromptId

H100_FLOP_S = 989e12
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
USD_H = 3.6
PROMPT = Prompt(PromptId("p"), "a red circle", {})
EVALUATED = Rollout(RolloutId("eval"), Purpose.EVAL, 0, PROMPT.id, 0, 0, 10, PolicyVersion(0))


def rows(*seconds: tuple[str, float]) -> list[MetricsRow]:
    """Of work that took so long, one after another: ``e`` evaluates, ``i`` trains an iteration."""
    found, at_s, iteration = [], 0.0, 0
    for kind, took_s in seconds:
        at_s += took_s
        values = {"validation/graded": 0.5} if kind == "e" else {"train/loss": 0.1}
        found.append(MetricsRow(iteration, 0, at_s, values))
        iteration += kind == "i"
    return found


BEGUN = (("e", 100.0), ("i", 30.0), ("i", 10.0), ("i", 12.0))
"""Starts for 60 s, evaluates for 40, warms up in its first iteration."""
SPLIT = {Phase.SETUP: 60.0, Phase.EVALUATION: 40.0, Phase.ROLLOUT: 52.0}


def spent_of(*seconds: tuple[str, float]) -> SpentSoFar:
    kinds, work_s = [kind for kind, _ in seconds], sum(took_s for _, took_s in seconds)
    return SpentSoFar(kinds.count("i"), kinds.count("e"), work_s, work_s * USD_H / 3600)


def pace_after(*seconds: tuple[str, float], since: int = 0, split: Any = SPLIT) -> RunPace | None:
    return measured_pace(rows(*seconds), since, spent_of(*seconds), split)


def test_from_the_third_iteration_on_a_run_tells_its_own_pace() -> None:
    assert pace_after(*BEGUN[:3]) is None
    pace = pace_after(*BEGUN)
    assert pace is not None
    assert (pace.iteration_s, pace.evaluation_s, pace.start_s) == (11.0, 40.0, 60.0)
    assert pace.usd_s * 3600 == pytest.approx(USD_H)
    assert pace.least < 1 < pace.most
    assert "iterations 2 to 3 of this run took 11 s each" in pace.rests_on


def test_evaluations_are_apart_from_iterations() -> None:
    pace = pace_after(*BEGUN, ("e", 36.0), ("i", 11.0), ("e", 38.0), ("i", 11.0))
    assert pace is not None
    assert (pace.iteration_s, pace.evaluation_s) == (11.0, 37.0)


def test_the_estimate_is_what_is_spent_and_what_is_left() -> None:
    pace, spent = pace_after(*BEGUN), spent_of(*BEGUN)
    assert pace is not None
    said = estimated(pace, spent, iterations=10, evaluations=3)
    assert said.work_s.likely == pytest.approx(152 + 7 * 11 + 2 * 40)
    assert said.usd.likely == pytest.approx(said.work_s.likely * USD_H / 3600)
    assert said.work_s.least < said.work_s.likely < said.work_s.most
    assert said.after == 3
    finished = estimated(pace, spent, iterations=3, evaluations=1).work_s
    assert finished.least == finished.likely == finished.most == 152
    assert estimated(pace, SpentSoFar(), 2, 1, starts=True).work_s.likely == pytest.approx(60 + 2 * 11 + 40)
    resumed = estimated(pace, spent, 10, 3, starts=True)  # starts once more
    assert resumed.work_s.likely == pytest.approx(said.work_s.likely + 60)


@pytest.mark.parametrize(
    "seconds",
    [
        (("i", 0.0), ("i", 0.0), ("i", 0.0)),
        (("i", 1.0), ("i", math.nan), ("i", 1.0), ("i", 1.0)),
        (("e", 0.0), ("i", 5.0), ("i", 0.0), ("i", 0.0)),
    ],
)
def test_rows_that_say_nothing_break_nothing(seconds: Sequence[tuple[str, float]]) -> None:
    pace = measured_pace(rows(*seconds), 0, SpentSoFar(3, 0, 5.0, 0.0), {})
    if pace is not None:
        said = estimated(pace, SpentSoFar(3, 0, 5.0, 0.0), 9, 2)
        assert 5 <= said.work_s.least <= said.work_s.likely <= said.work_s.most < math.inf
        assert said.usd.most == 0


def test_after_another_course_only_what_follows_counts() -> None:
    longer = (*BEGUN, ("i", 99.0), ("i", 50.0))
    assert pace_after(*longer, since=3) is None
    pace = pace_after(*longer, ("i", 52.0), since=3)
    assert pace is not None
    assert pace.iteration_s == 51.0  # without the first, which contains the start


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("rollout.group_size", True),
        ("algorithm.reference_weight", True),
        ("evaluation.steps", True),
        ("learner.learning_rate", False),
        ("evaluation.every", False),
        ("iterations", False),
        ("name", False),
    ],
)
def test_which_keys_change_the_pace(key: str, changes: bool) -> None:
    assert changes_pace([key]) is changes


def test_the_file_comes_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    pace, path = pace_after(*BEGUN), tmp_path / "estimate.json"
    assert pace is not None
    assert read_estimate(path) is None
    said = estimated(pace, SpentSoFar(), 10, 3)
    write_estimate(path, said)
    assert read_estimate(path) == said
    whole = json.loads(path.read_text())
    for damage in ("", "[]", "{}", json.dumps(whole | {"usd": 3}), json.dumps(whole | {"after": None})):
        path.write_text(damage)
        assert read_estimate(path) is None
    path.write_text(json.dumps(whole | {"usd": {"least": 0, "likely": math.inf, "most": 1}}))
    assert read_estimate(path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_estimate(path) is None


# -- other runs, and operations ------------------------------------------------------------------------------


def written(root: Path, name: str, *seconds: tuple[str, float], **sections: object) -> RunConfig:
    """A run of ``seconds`` on one worker."""
    config = config_of(root, name, **sections)
    worker, spent = WorkerId("rank-0"), spent_of(*seconds)
    with RunDirectory.open(root, name, dump_config(config)) as directory:
        with SqliteLedger(directory.ledger) as ledger:
            ledger.begin_attempt(pid=1, host="there", workers={worker: USD_H}, now_s=0.0)
            steps: list[Record] = [
                VersionPublished(PolicyVersion(0)),
                PromptSeen(PROMPT),
                RolloutIssued(EVALUATED),
            ]
            for turn in range(spent.iterations):
                version = PolicyVersion(turn + 1)
                steps += [StepApplied(version, turn, 0, 1, 0.1, 0.2), VersionPublished(version)]
            ledger.append(list(enumerate(steps, 1)))
            split = {Phase.SETUP: 60.0, Phase.EVALUATION: 40.0, Phase.TRAINING: spent.work_s - 100}
            ledger.spend([GpuSpend(worker, phase, s, USD_H) for phase, s in split.items()], spent.work_s)
            ledger.end_attempt(Ending.STOPPED, spent.work_s)
        with MetricsWriter(directory, resume_at=0) as metrics:
            for row in rows(*seconds):
                metrics.write(row)
    return config


def config_of(root: Path, name: str, **sections: object) -> RunConfig:
    tree = {"name": name, "runs_dir": str(root), "iterations": 10, "fleet": {"price_usd_h": USD_H}}
    testbed = {"model": {"path": "testbed"}, "data": {"train": "testbed", "test": "testbed"}}
    return build_config({**tree, **testbed, "evaluation": {"every": 0}, **sections}, "the test")


def test_a_run_is_estimated_by_one_like_it_in_proportion_to_its_forwards(tmp_path: Path) -> None:
    before = written(tmp_path, "before", *BEGUN)
    same = estimate_pace(config_of(tmp_path, "same"), 1)
    twice = estimate_pace(config_of(tmp_path, "twice", rollout={"group_size": 32}), 1)
    assert isinstance(same, RunPace)
    assert isinstance(twice, RunPace)
    assert same.iteration_s == 11.0
    held_out = len(load_prompts(before).test)  # before had one
    assert same.evaluation_s == pytest.approx(40.0 * held_out)
    assert twice.iteration_s == pytest.approx(22.0)
    assert twice.most - twice.least > same.most - same.least
    passes = count_passes(before, 0)
    assert f"for {passes.forwards + 2 * passes.backward:,} forwards" in same.rests_on
    assert same.rests_on.startswith("calibration: the run before of 20")


@pytest.mark.parametrize(
    ("sections", "ranks"),
    [({"rollout": {"height": 64, "width": 64}}, 1), ({"learner": {"mode": "full"}}, 1), ({}, 2)],
)
def test_another_model_size_or_number_of_ranks_is_not_like_it(
    tmp_path: Path, sections: dict[str, object], ranks: int
) -> None:
    written(tmp_path, "before", *BEGUN)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text("{")
    (tmp_path / "damaged" / "ledger.sqlite").write_text("no ledger")
    found = estimate_pace(config_of(tmp_path, "now", **sections), ranks)
    assert not (isinstance(found, RunPace) and found.rests_on.startswith("calibration"))


def test_a_run_goes_on_by_its_own_rows_unless_its_course_changes_them(tmp_path: Path) -> None:
    run = written(tmp_path, "run", *BEGUN)
    said = estimate_run(run, 1)
    assert not isinstance(said, str)
    assert said.rests_on.startswith("measured rows")
    longer = estimate_run(run.model_copy(update={"iterations": 20}), 1)
    assert not isinstance(longer, str)
    assert longer.work_s.likely - said.work_s.likely == pytest.approx(10 * 11)
    wider = estimate_run(config_of(tmp_path, "run", rollout={"group_size": 32}), 1)
    assert not isinstance(wider, str)
    assert wider.rests_on.startswith("calibration: the run run of")
    assert wider.after == 3
    assert wider.work_s.likely > said.work_s.likely


def test_without_the_package_a_run_says_what_an_estimate_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: Registry[Any] = Registry("an estimate", "spotlight.no-such-group", {})
    monkeypatch.setattr(estimating, "PACES", none)
    assert estimate_run(config_of(tmp_path, "new"), 1) == NO_ESTIMATE
    assert not isinstance(estimate_run(written(tmp_path, "run", *BEGUN), 1), str)


def test_nodes_that_are_not_known_before_are_not_guessed(tmp_path: Path) -> None:
    fleet = {"driver": "ray", "price_usd_h": USD_H}
    found = estimate_pace(config_of(tmp_path, "there", fleet={**fleet, "address": "10.0.0.5:6379"}), 1)
    assert "which nodes join 10.0.0.5:6379 is not known before" in str(found)
    held = {**fleet, "target": {"deadline_h": 1}}
    assert "fleet.target" in str(estimate_pace(config_of(tmp_path, "held", fleet=held), 1))


def test_an_emulated_fleet_is_simulated(tmp_path: Path) -> None:
    fleet = {"driver": "ray", "price_usd_h": USD_H, "spot": {"nodes": 2, "price_usd_h": 1.0}}
    two = estimate_pace(config_of(tmp_path, "two", fleet=fleet), 1)
    eight = estimate_pace(
        config_of(tmp_path, "eight", fleet={**fleet, "spot": {"nodes": 8, "price_usd_h": 1.0}}), 1
    )
    assert isinstance(two, RunPace)
    assert isinstance(eight, RunPace)
    assert two.rests_on.startswith("formulas: the cost profile testbed-cpu")
    assert eight.iteration_s < two.iteration_s
    assert eight.evaluation_s < two.evaluation_s
    assert two.usd_s * 3600 == pytest.approx(USD_H + 2)


@pytest.mark.slow  # reads the shapes of 20 billion parameters
def test_operations_of_qwen_image_are_those_of_the_documentation() -> None:
    """docs/howto/run-on-gpus.md: 325 and 195 s of an iteration on one H100 at an MFU of .50."""
    config = load_config(EXAMPLES / "qwen-image-ocr-lora.yaml")
    sizes, passes = read_sizes(config), count_passes(config, 0)
    assert isinstance(sizes, ModelSizes)
    flop_s = forward_flop(sizes, config, 64) / (0.5 * H100_FLOP_S)
    assert passes.rollout * flop_s == pytest.approx(325, rel=0.01)
    training = passes.forwards - passes.rollout + passes.backward
    assert training * flop_s == pytest.approx(195, rel=0.01)
    pace = pace_of(config, 1, 10, sizes, 64, H100_FLOP_S, "NVIDIA H100 80GB HBM3")
    assert pace.iteration_s == pytest.approx(520 * 0.5 / MFU, rel=0.01)
    assert pace.least == pytest.approx(MFU / MFU_MOST)
    assert pace.most == pytest.approx(MFU / MFU_LEAST)
    eight = pace_of(config, 8, 10, sizes, 64, H100_FLOP_S, "NVIDIA H100 80GB HBM3")
    assert eight.iteration_s == pytest.approx(pace.iteration_s / 8)
    assert sizes.tokens(media_size(config.rollout)) == 1024
