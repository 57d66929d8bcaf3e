"""What a sweep's file says: which runs, their names, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_calibration import write_run
from typer.testing import CliRunner

from spotlight.cli.config_command import split_arguments
from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.config.schema import RUN_NAME
from spotlight_plan.commands.sweep import sweep_command
from spotlight_plan.commands.sweep.sweep_processes import Ended, SideBySide
from spotlight_plan.sweep_file import SweepRun, corners, grid_runs, read_sweep
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_STARTED


def written(folder: Path, text: str) -> Path:
    path = folder / "rates.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def runs(folder: Path, text: str) -> list[SweepRun]:
    return grid_runs(read_sweep(written(folder, text)))


def test_every_combination_is_a_run_named_by_its_settings(tmp_path: Path) -> None:
    grid = "set: {iterations: 7}\ngrid: {learner.learning_rate: [1e-4, 3e-4], run_seed: [0, 1]}"
    found = runs(tmp_path, grid)
    assert [run.name for run in found] == [
        "rates-learning_rate-0.0001-run_seed-0",
        "rates-learning_rate-0.0001-run_seed-1",
        "rates-learning_rate-0.0003-run_seed-0",
        "rates-learning_rate-0.0003-run_seed-1",
    ]
    config = load_config(*split_arguments(found[2].arguments))
    assert (config.iterations, config.learner.learning_rate, config.run_seed) == (7, 3e-4, 0)
    more = runs(tmp_path, grid.replace("[1e-4, 3e-4]", "[1e-5, 1e-4, 3e-4]"))
    assert {run.name for run in found} < {run.name for run in more}


def test_cases_change_together(tmp_path: Path) -> None:
    text = (
        "cases:\n"
        "- {learner.learning_rate: 2e-3, algorithm.name: dgpo}\n"
        "- {learner.learning_rate: 1e-3, algorithm.name: awm}\n"
        "grid: {run_seed: [0, 1]}"
    )
    found = [load_config(*split_arguments(run.arguments)) for run in runs(tmp_path, text)]
    assert [(each.algorithm.name, each.learner.learning_rate, each.run_seed) for each in found] == [
        ("dgpo", 2e-3, 0), ("dgpo", 2e-3, 1), ("awm", 1e-3, 0), ("awm", 1e-3, 1),
    ]  # fmt: skip


def test_the_runs_of_a_stage_are_called_what_training_calls_them(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text("stages: {one: {iterations: 3}, two: {iterations: 3}}\n")
    (run,) = runs(
        tmp_path, f"config: {tmp_path / 'chain.yaml'}\nset: {{stage: two}}\ngrid: {{run_seed: [0]}}"
    )
    assert run.name == load_config(*split_arguments(run.arguments)).name == "rates-run_seed-0-two"
    varied = runs(tmp_path, f"config: {tmp_path / 'chain.yaml'}\ngrid: {{stage: [one, two]}}")
    assert [run.name for run in varied] == ["rates-one", "rates-two"]
    assert [load_config(*split_arguments(run.arguments)).name for run in varied] == ["rates-one", "rates-two"]


def test_names_stay_apart_whatever_the_settings_are(tmp_path: Path) -> None:
    text = "grid: {rewards: [[{name: blue}], [{name: red}]], data.tags: [[a b], [a_b]], name_: ['%s']}"
    found = [run.name for run in runs(tmp_path, text % ("x" * 300))]
    assert len(set(found)) == 4
    assert all(RUN_NAME.match(name) and len(name) < 100 for name in found)


def test_a_search_is_checked_at_the_ends_of_its_ranges(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "search:\n  trials: 3\n  space:\n    learner.learning_rate: {low: 1e-5, high: 1e-3, log: true}\n"
        "    rollout.group_size: {low: 4, high: 8, whole: true}\n    rollout.sampler: [ode, cps]",
    )
    low, high = corners(read_sweep(path))
    assert low.settings == {"learner.learning_rate": 1e-5, "rollout.group_size": 4, "rollout.sampler": "ode"}
    assert high.settings == {"learner.learning_rate": 1e-3, "rollout.group_size": 8, "rollout.sampler": "cps"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grids: {a: [1]}", r"grids: found an unknown key; expected one of .*Did you mean 'grid'\?"),
        ("grid: {run_seed: 3}", r"grid.run_seed: found 3; expected a list"),
        ("set: {run_seed: 3}", "neither grid or cases, and search"),
        ("grid: {run_seed: [1]}\nsearch: {trials: 1, space: {a: [1]}}", "both grid or cases"),
        ("grid: {run_seed: [1, 1]}", "rates-run_seed-1 twice; expected every combination once"),
        ("set: {run_seed: 1}\ngrid: {run_seed: [1, 2]}", "run_seed: found a key that varies"),
        ("grid: {name: [a, b]}", "name: found a key that varies"),
        ("name: my rates\ngrid: {run_seed: [1]}", "name: found 'my rates'; expected letters.*name: NAME"),
        ("set: {name: x}\ngrid: {run_seed: [1]}", "set.name: found 'x'; expected nothing: runs are named by"),
        ("cases: [{run_seed: 1}]\ngrid: {run_seed: [2]}", "run_seed: found a key of both cases and grid"),
        ("cases: [{a.x: 1}, {b.x: 1}]", "grid: found rates-x-1 for several; expected another name"),
        ("search: {trials: 1, space: {a: {low: 1, high: .inf}}}", r"search.space.a.*high: found inf"),
        ("search: {trials: 1, space: {a: {low: 1.5, high: 4, whole: true}}}", "whole numbers, with whole"),
        ("search: {trials: 1, space: {a: {low: 2, high: 1}}}", r"search.space.a: found 2 to 1; expected low"),
        ("search: {trial: 1, space: {a: [1]}}", r"search.trial: found an unknown key.*'trials'"),
        ("search: {trials: 0, space: {a: [1]}}", r"search.trials: found 0; expected greater than 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        runs(tmp_path, text)


def test_a_wrong_setting_is_refused_before_any_run(tmp_path: Path) -> None:
    text = f"set: {{runs_dir: {tmp_path}}}\ngrid: {{learner.learning_rat: [1e-4]}}"
    result = CliRunner().invoke(app, ["sweep", str(written(tmp_path, text))])
    assert result.exit_code == 2
    assert "Did you mean 'learning_rate'?" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["rates.yaml"]


def test_a_dry_run_lists_runs_and_does_nothing(tmp_path: Path) -> None:
    text = f"set: {{runs_dir: {tmp_path}/runs}}\ngrid: {{rollout.steps: [4, 8], run_seed: [0]}}"
    result = CliRunner().invoke(
        app, ["sweep", str(written(tmp_path, text)), "--dry-run"], env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0, result.output
    assert [line.split()[1:3] for line in result.output.splitlines()[1:3]] == [["4", "0"], ["8", "0"]]
    assert "--measured RUN" in result.output
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_rests_on_the_run_that_is_named_or_says_why_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "demo")
    text = f"set: {{runs_dir: {tmp_path}/runs}}\ngrid: {{run_seed: [0]}}"
    command = ["sweep", str(written(tmp_path, text)), "--dry-run", "--measured", str(run)]
    assert "estimated from what demo took" in CliRunner().invoke(app, command).output
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:2]))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == EXIT_NOT_STARTED
    assert "expected a run of which three iterations or more" in " ".join(result.output.split())


def test_runs_together_on_one_cluster_are_refused(tmp_path: Path) -> None:
    text = "set: {fleet.driver: ray, fleet.address: 'localhost:1'}\ngrid: {run_seed: [0, 1]}"
    result = CliRunner().invoke(app, ["sweep", str(written(tmp_path, text)), "--together", "2"])
    assert result.exit_code == 2
    assert "a run takes all nodes of its cluster" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("{runs_dir: 's3://bucket/runs'}", [], "runs_dir: found s3://bucket/runs; expected a folder"),
        ("{fleet.driver: ray}", ["--ranks", "2"], "--ranks: found 2; expected none with fleet.driver=ray"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(
    tmp_path: Path, text: str, arguments: list[str], said: str
) -> None:
    path = written(tmp_path, f"set: {text}\ngrid: {{run_seed: [0, 1]}}")
    result = CliRunner().invoke(app, ["sweep", str(path), *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_dry_run_of_a_search_makes_nothing(tmp_path: Path) -> None:
    text = f"set: {{runs_dir: {tmp_path}/runs}}\nsearch: {{trials: 2, space: {{rollout.steps: [4, 8]}}}}"
    result = CliRunner().invoke(app, ["sweep", str(written(tmp_path, text)), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "runs").exists()


def test_a_signal_while_a_run_is_chosen_ends_that_run_too(tmp_path: Path) -> None:
    def chosen() -> Iterator[SweepRun]:
        for run in runs(tmp_path, f"set: {{runs_dir: {tmp_path}}}\ngrid: {{run_seed: [0, 1]}}"):
            os.kill(os.getpid(), signal.SIGINT)
            yield run

    ends = list(SideBySide(tmp_path, [{}], print).ended(chosen()))
    assert [(end.run.settings, end.code) for end in ends] == [({"run_seed": 0}, EXIT_INTERRUPTED)]


@pytest.mark.parametrize(
    ("code", "begun", "told"),
    [
        (1, True, 1),
        (-9, True, -9),
        (-15, True, 130),
        (-2, False, 130),
        (1, False, 130),
        (0, True, 0),
    ],
)
def test_what_failed_while_a_sweep_stops_has_failed(
    tmp_path: Path, code: int, begun: bool, told: int
) -> None:
    run, ended = SweepRun("a", {}, None, ()), subprocess.Popen([sys.executable, "-c", ""], encoding="utf-8")
    ended.wait()
    ended.returncode = code
    if begun:
        (tmp_path / "a").mkdir()
    side_by_side = SideBySide(tmp_path, [{}], print, stopped=True)
    side_by_side._at_work[0] = ended
    side_by_side._ends.put((0, run))
    assert list(side_by_side._next([])) == [Ended(run, told)]


@pytest.mark.parametrize(
    ("states", "stopped", "status"),
    [
        (["finished", "finished"], False, 0),
        (["finished", "stopped"], False, 130),
        (["failed", "stopped"], False, 1),
        (["finished", "refused"], False, 1),
        (["finished", "ended by SIGKILL"], False, 1),
        (["failed"], True, 130),
        (["finished"], True, 130),
    ],
)
def test_only_what_has_finished_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[str], stopped: bool, status: int
) -> None:
    names = ["rates-run_seed-0", "rates-run_seed-1"]
    monkeypatch.setattr(sweep_command, "_run", lambda *_: (dict(zip(names, states, strict=False)), stopped))
    path = written(tmp_path, f"set: {{runs_dir: {tmp_path}}}\ngrid: {{run_seed: [0, 1]}}")
    result = CliRunner().invoke(app, ["sweep", str(path)])
    assert result.exit_code == status, result.output


def test_a_refusal_is_believed_where_the_run_is_free_the_second_time(tmp_path: Path) -> None:
    # Another process may have held the run's lock, and have let go of it before the sweep looks.
    refused = subprocess.Popen(
        [sys.executable, "-c", f"raise SystemExit({EXIT_NOT_STARTED})"], encoding="utf-8"
    )
    refused.wait()
    side_by_side, run = SideBySide(tmp_path, [{}], print), SweepRun("a", {}, None, ())
    waiting: list[SweepRun] = []
    for expected in ([], [Ended(run, EXIT_NOT_STARTED)]):
        side_by_side._at_work[0] = refused
        side_by_side._ends.put((0, run))
        assert list(side_by_side._next(waiting)) == expected
    assert waiting == [run]
