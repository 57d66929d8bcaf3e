"""The benchmark programs run, compare equal work, and leave all they measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer
from benchmarks import (
    _measure,
    _process_faults,
    cheap_previews,
    commit_overhead,
    kept_previews,
    learning,
    model_fetch,
    new_worker,
    padding,
    publish,
    regroup,
    rollout_loop,
    soak,
    spot_learner,
    training_step,
)
from torch import Tensor
from typer.testing import CliRunner

from spotlight.algorithms.base import TrainBatch
from spotlight.config.load import load_config
from spotlight.training.batching.redistribute import neighbours
from spotlight_fleet.traces.trace import TraceEventKind

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def test_contestants_take_turns_in_changing_order() -> None:
    calls: list[str] = []
    seconds = _measure.take_turns(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        12,
        torch.device("cpu"),
        _measure.Clock.WALL,
    )
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 12, "b": 12, "c": 12}
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 13  # the first does not count
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1
    with pytest.raises(ValueError, match="1 rounds: at least 2"):
        _measure.take_turns({}, 1, torch.device("cpu"), _measure.Clock.WALL)


def test_a_ratio_is_of_neighbours_and_says_its_spread() -> None:
    drift = [1.0, 2.0, 8.0, 3.0, 1.5]  # the machine slows down and recovers: both sides feel it
    steady = _measure.ratio([1.1 * x for x in drift], drift)
    assert steady.median == pytest.approx(1.1)
    assert steady.high - steady.low < 1e-9
    noisy = _measure.ratio([1.0, 2.0, 3.0, 4.0, 5.0], [2.0] * 5)
    assert (noisy.median, noisy.quartiles, noisy.rounds) == (1.5, (1.0, 2.0), 5)
    assert noisy.low < noisy.median < noisy.high


def test_publishing_is_measured_in_every_part_of_every_round(tmp_path: Path) -> None:
    seconds = publish.measure(1e6, 2, tmp_path)
    assert {part: len(taken) for part, taken in seconds.items()} == dict.fromkeys(publish.PARTS, 2)
    assert not list(tmp_path.iterdir())


def test_padding_is_that_of_forwards_counted_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # Two prompts of 3 samples on 3 ranks, 2 at once: in turn, each rank has both prompts; as neighbours, one
    # of three does.
    tokens, deal = [4, 10], {"in turn": padding.in_turn, "neighbours": neighbours}
    found = {
        name: padding.padding(padding.forwards_of(6, 6, 2, 3, way), tokens, 3) for name, way in deal.items()
    }
    assert found["in turn"] == padding.Padding(2.0, 1.0, pytest.approx(1 - 42 / 60))
    assert found["neighbours"] == padding.Padding(
        pytest.approx(4 / 3), pytest.approx(1 / 3), pytest.approx(1 - 42 / 48)
    )
    measured = padding.measure(load_config(Path("examples/qwen-image-geneval-lora.yaml"), []), 8)
    for ways in measured.values():
        assert ways["neighbours"] == padding.Padding(1.0, 0.0, 0.0)
        assert ways["in turn"].masked == 1.0


@pytest.mark.slow  # many rollouts of the testbed
def test_cheaper_previews_are_ranked_against_whole_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made" / "cheap.json"
    cheap_previews.main(["ode"], prompts=2, seeds=6, steps=4, json=path)  # of the testbed: noise has no rank
    assert "Kendall's tau" in capsys.readouterr().out
    rows = {row["setting"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"whole", "2 steps", "4 steps, step_cache 2", "4 steps, bfloat16"} <= rows.keys()
    assert rows["whole"]["tau"] == [1.0, 1.0]  # a rollout ranks like itself: the same seeds were drawn
    assert all(len(row["seconds"]) == len(row["tau"]) == 2 for row in rows.values())
    assert any(tau != 1.0 for tau in rows["2 steps"]["tau"])


@pytest.mark.slow  # six iterations of the testbed
def test_kept_previews_are_compared_with_those_made_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    kept_previews.main(prompts=2, group=2, previews=4, steps=2, iterations=3, rounds=1, json=path)
    found = json.loads(path.read_text())["iterations"]
    assert {name: len(rows) for name, rows in found.items()} == dict.fromkeys(kept_previews.KEEPS, 2)


@pytest.mark.slow  # that both draw the same is test_qwen_image_pipeline.py's
def test_the_rollout_loop_is_compared_with_the_pipeline(
    random_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made" / "rollout.json"
    rollout_loop.main(str(random_pipeline), batch=[17], guidance=[4.0], steps=2, repeats=2, json=path)
    shown = capsys.readouterr().out
    assert float(shown.split("latents differ by ")[1].split()[0]) <= 1e-5
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert [row["case"]["decode"] for row in content["rows"]] == ["no", "yes"]
    for row in content["rows"]:
        assert {name: len(taken) for name, taken in row["seconds"].items()} == {
            "pipeline": 2,
            "ours": 2,
            "ours, LoRA": 2,
        }
        assert set(row["ratios"]) == {"ours / pipeline", "ours, LoRA / pipeline"}


@pytest.mark.parametrize(
    "case",
    [("flow-grpo", "full"), ("diffusion-nft", "lora")],
    ids="-".join,
)
@pytest.mark.slow  # that both train the same is test_families.py's
def test_the_training_step_is_compared_with_a_plain_loop(
    case: tuple[str, str], random_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.json"
    algorithm, mode = case
    training_step.main(
        str(random_pipeline),
        algorithm=[algorithm],
        mode=[mode],
        samples=2,
        micro_batch=1,
        repeats=2,
        json=path,
    )
    norms = [line for line in capsys.readouterr().out.splitlines() if "gradient norms" in line]
    assert len(norms) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"] == {"algorithm": algorithm, "mode": mode, "samples": "2 in 1s"}
    assert row["ratios"]["ours / plain"]["rounds"] == 2


def test_loops_that_do_not_train_the_same_are_not_compared(
    random_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = training_step.draw_as_ours

    def too_noisy(batch: TrainBatch, step: int) -> tuple[Tensor, Tensor]:
        x, t = ours(batch, step)
        return 2 * x, t

    monkeypatch.setattr(training_step, "draw_as_ours", too_noisy)
    with pytest.raises(SystemExit, match="do not train the same"):
        training_step.main(
            str(random_pipeline), algorithm=["diffusion-nft"], mode=["lora"], samples=2, micro_batch=2
        )


@pytest.mark.slow  # every round starts a process
def test_survivors_are_back_sooner_than_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "regroup.json"
    regroup.main(degree=[4], rounds=1, json=path)
    assert "times faster than a restart" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads(path.read_text())["rows"]
    (seconds,) = row["seconds"]
    for remedy, phases in regroup.PHASES.items():
        found = seconds[remedy]
        assert tuple(found) == phases
        assert min(found.values()) > 0
        assert sum(found[phase] for phase in phases[:-1]) == pytest.approx(found["total"])
    assert seconds["regroup"]["total"] < seconds["restart"]["total"]


@pytest.mark.slow  # it starts a Ray
def test_a_commits_cost_is_reported_as_a_share_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "commit.json"
    commit_overhead.main(megabytes=[0.1], batch=[2], rounds=2, json=path)
    assert "20B at 1024x1024 (latents 1.05 MB), states of 0.1 MB:" in " ".join(
        capsys.readouterr().out.split()
    )
    testbed, made = json.loads(path.read_text())["rows"]
    assert (testbed["state"], made["state"]) == ("testbed", "0.1 MB")
    assert 0.1e6 < made["packed_bytes"] < 0.103e6
    for row in (testbed, made):
        assert {part: len(taken) for part, taken in row["seconds"].items()} == {"begin": 2, "deliver": 2}
        begin_ms, deliver_ms = row["begin_ms"]["median"], row["deliver_ms"]["median"]
        assert 0 < begin_ms < row["commit_ms"]["median"]
        step_ms = row["testbed_step_ms"]["median"]
        waits_ms = begin_ms + max(0.0, deliver_ms - step_ms)
        assert row["share_of_testbed_step"] == pytest.approx(waits_ms / step_ms)
        waits_ms = begin_ms + max(0.0, deliver_ms - 2 * 155)
        assert row["share_of_published_step"]["512x512"] == pytest.approx(waits_ms / (2 * 155))


@pytest.mark.slow  # every round starts three processes
def test_new_workers_get_the_same_weights_from_a_peer_and_from_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new_worker.json"
    new_worker.main(megabytes=0, rounds=2, json=path)
    assert "peer / disk, cached" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads(path.read_text())["rows"]
    assert tuple(row["seconds"]) == new_worker.WAYS
    for taken in row["seconds"].values():
        assert len(taken) == 2
        for phases in taken:
            start, model, total = (phases[name] for name in new_worker.PHASES)
            assert start + model == pytest.approx(total)


@pytest.mark.slow  # it starts a Ray of two nodes
def test_a_model_from_another_node_is_timed_against_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model_fetch.json"
    model_fetch.main(megabytes=20, rounds=2, folder=tmp_path, json=path)
    assert "other node, copy" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert saved["bytes"] > 20e6
    assert {way: len(taken) for way, taken in saved["seconds"].items()} == dict.fromkeys(model_fetch.WAYS, 2)


def test_the_larger_model_is_as_large_as_said(tmp_path: Path) -> None:
    new_worker.write_synthetic(tmp_path / "model", 200)
    files = new_worker.weight_files(tmp_path / "model")
    assert sum(path.stat().st_size for path in files) == pytest.approx(200e6, rel=0.25)
    new_worker.read_whole(files)
    assert 0 <= new_worker.drop_from_cache(files) <= 1


def test_the_soaks_trace_is_the_seeds_and_tells_of_some_ends() -> None:
    trace = soak.spot_trace("0/1", 1800.0)
    assert trace == soak.spot_trace("0/1", 1800.0)
    assert trace.events != soak.spot_trace("0/2", 1800.0).events
    kinds = Counter(event.kind for event in trace.events)
    assert 0 < kinds[TraceEventKind.NOTICE] < kinds[TraceEventKind.REMOVE]
    assert {event.gpus for event in trace.events} == {1, 2}


def test_a_node_joins_for_each_that_the_learner_loses() -> None:
    events = spot_learner.joining((60.0, 120.0), 300.0).events
    assert [event.node for event in events] == [f"spot-{number}" for number in range(1, len(events) + 1)]
    assert [event.time_s for event in events[-2:]] == [60.0, 120.0]
    assert len(events) == spot_learner.NODES + 2


def test_the_injector_meets_only_its_own_and_only_while_they_live() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(sleeper, env=os.environ | {_process_faults.MARK: "ours"}) as ours,
        subprocess.Popen(sleeper, env=os.environ | {_process_faults.MARK: "theirs"}) as theirs,
    ):
        try:
            while not (found := _process_faults.processes_of("ours")):
                time.sleep(0.01)
            assert [process.pid for process in found] == [ours.pid]
            assert found[0].send(signal.SIGSTOP)
            assert _process_faults.end(lambda: _process_faults.processes_of("ours")) == []
            assert ours.wait() == -signal.SIGKILL
            assert not found[0].send(signal.SIGKILL)
            assert theirs.poll() is None
        finally:
            theirs.kill()
            ours.kill()


def test_ray_processes_are_known_by_their_titles() -> None:
    def kind(title: str) -> _process_faults.TargetKind | None:
        return _process_faults.Process(1, "1", title, 1).kind

    assert kind("ray::WorkerActor.watch") is _process_faults.TargetKind.WORKER
    assert kind("ray::LearnerRank") is _process_faults.TargetKind.LEARNER
    assert kind("ray::NodeAgent.notices") is _process_faults.TargetKind.AGENT
    assert (
        kind("/bin/python -P -u -c from spotlight_rewards.pool.reward_worker import main")
        is _process_faults.TargetKind.REWARD
    )
    assert kind("ray::BlobServer.take") is None  # it dies with the head's node
    assert _process_faults.Process(1, "1", "/lib/ray/core/src/ray/raylet/raylet --a=/b", 1).is_raylet


def test_ranks_that_were_workers_are_known_by_their_logs(tmp_path: Path) -> None:
    (tmp_path / "learner-001-rank-0.log").write_text("learner rank in process 12 on here\nmore\n")
    (tmp_path / "learner-002-rank-1.log").write_text("learner rank in process 3 on b, which was a worker\n")
    (tmp_path / "learner-003-rank-0.log").write_text("")
    assert _process_faults.learner_processes(tmp_path) == {12, 3}


@pytest.mark.slow  # it starts a cluster, and waits for training on it
@pytest.mark.timeout(900)
def test_a_run_under_fire_keeps_its_promises(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    soak.main(kills=3, minutes=8, seed=0, patience=300, runs_dir=tmp_path / "runs", json_file=path)
    result = json.loads(path.read_text())
    assert result["violations"] == []
    assert result["ledger"]["audit"] == 0
    assert result["killed"] >= 3
    assert result["steps"]["made"] > 1
    killed = [fault for fault in result["faults"] if fault["stopped_s"] is None]
    assert len(killed) == result["killed"]


@pytest.mark.slow
def test_learning_is_compared_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "learning.json"
    sizes = ["--iterations", "2", "--prompts", "2", "--group-size", "4", "--rollout-steps", "3"]
    chosen = ["--task", "counting", "--case", "subset", "--seeds", "1", "--evaluate-every", "1"]
    command = ["--json", str(path), *sizes, *chosen, "--evaluation-images", "1", "--no-tune"]
    learning_app = typer.Typer()
    learning_app.command()(learning.main)
    first = CliRunner().invoke(learning_app, command)
    assert first.exit_code == 0, first.output
    tree = json.loads(path.read_text())
    assert set(tree["runs"]) == {"counting/baseline/0.002/0", "counting/subset/0.002/0"}
    for run in tree["runs"].values():
        assert set(run["strict"]) == {"0", "1", "2"}
        assert len(run["iteration_cpu_s"]) == 2
        assert 0 < sum(run["iteration_cpu_s"]) < run["cpu_s"] * 1.5
    ends = {"the baseline's end", "the baseline's end, graded"}
    assert set(tree["figures"]["counting"]["gains"]) == {"0.75", "0.8", *ends}
    assert "graded" in first.output
    again = CliRunner().invoke(learning_app, command)
    assert again.exit_code == 0, again.output
    assert "runs:" not in again.output
    assert json.loads(path.read_text())["runs"] == tree["runs"]
    other = CliRunner().invoke(learning_app, [*command, "learner.betas=[0.9,0.9]"])
    assert "measured with other settings (overrides)" in str(other.exception) + other.output
