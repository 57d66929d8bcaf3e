"""Sweeps of real runs: killed and resumed, side by side, and searched by Optuna."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from main_job import Job
from typer.testing import CliRunner

import spotlight
from spotlight.cli.main import app
from spotlight.report.record import read_run
from spotlight.store.run_directory import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WIDE = {"COLUMNS": "200"}


def write_sweep(job: Job, folder: Path, **keys: Any) -> tuple[Path, Path]:
    """The file, and where its runs will be."""
    runs = folder / "runs"
    given = [each for each in job.arguments("x", "checkpoint.every=1") if not each.startswith("name=")]
    settings = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in given)}
    search = keys.get("search", {})
    for varied in (*keys.get("grid", ()), *search.get("space", ())):
        settings.pop(varied, None)
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump({"set": settings | {"runs_dir": str(runs)}, **keys}), encoding="utf-8")
    return path, runs


def begin(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spotlight.cli", "sweep", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | WIDE,
    )


def sweep(*arguments: str) -> tuple[int, str]:
    process = begin(*arguments)
    output, _ = process.communicate()
    return process.returncode, output


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"no {pattern!r} in:\n{said}")


def states(output: str, names: Sequence[str]) -> dict[str, str]:
    """By the first line of each, which is the sweep's own."""
    lines = output.splitlines()
    return {name: next(line for line in lines if line.startswith(f"{name} ")).split()[-1] for name in names}


GRID = {"learner.learning_rate": [0.01, 0.03], "run_seed": [0, 1]}
NAMES = [f"rates-learning_rate-{rate}-run_seed-{seed}" for rate in (0.01, 0.03) for seed in (0, 1)]


def test_a_killed_sweep_goes_on_where_it_was(job: Job, tmp_path: Path) -> None:
    seeds, names = {"run_seed": [0, 1]}, [f"rates-run_seed-{seed}" for seed in (0, 1)]
    path, runs = write_sweep(job, tmp_path, grid=seeds)
    first = begin(str(path))
    read_until(first, rf"{names[1]}: .*iteration 2/4")
    first.kill()  # its run is sent a SIGTERM, and keeps what it did
    first.wait()
    planned = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"], env=WIDE)
    assert planned.exit_code == 0, planned.output
    assert f"what {names[0]} took for a forward" in planned.output
    code, output = sweep(str(path))
    assert code == 0, output
    assert states(output, names) == dict.fromkeys(names, "finished")
    assert f"{names[0]}: [" not in output  # finished before
    assert re.search(rf"{names[1]}: .*(resum|goes on|iteration 2)", output), output
    for name in names:
        record = read_run(runs / name)
        assert (record.history.state, record.history.iterations) == ("finished", 4)
        assert spotlight.open(runs / name).audit().ok
    assert len(read_run(runs / names[1]).history.attempts) > 1
    assert "90 % intervals over seeds" in output
    assert re.search(rf"{names[0]} \+1 ", output), output
    again = CliRunner().invoke(app, ["sweep", str(path)], env=WIDE)
    assert (again.exit_code, states(again.output, names)) == (0, dict.fromkeys(names, "finished"))
    assert "iteration 4/4" not in again.output  # nothing is left to do
    # Another setting of all runs is another sweep, which is said before any of them is started.
    path.write_text(path.read_text().replace("learner.learning_rate: 0.03", "learner.learning_rate: 0.02"))
    changed = CliRunner().invoke(app, ["sweep", str(path)], env=WIDE)
    assert (changed.exit_code, f"{names[0]}: [" in changed.output) == (2, False), changed.output
    assert "learner.learning_rate: 0.03 in the run, 0.02 now" in changed.output


def test_ctrl_c_stops_runs_side_by_side_where_they_can_go_on(job: Job, tmp_path: Path) -> None:
    path, runs = write_sweep(job, tmp_path, grid=GRID | {"learner.learning_rate": [0.01]}, together=2)
    process = begin(str(path))
    said = read_until(process, r"iteration 1/4")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate()
    assert process.returncode == 130, said + rest
    assert states(rest, NAMES[:2]) == dict.fromkeys(NAMES[:2], "stopped"), rest
    code, output = sweep(str(path))
    assert code == 0, output
    assert all(spotlight.open(runs / name).audit().ok for name in NAMES[:2])


def test_two_sweeps_share_the_runs(job: Job, tmp_path: Path) -> None:
    path, runs = write_sweep(job, tmp_path, grid=GRID | {"learner.learning_rate": [0.01]})
    one, other = begin(str(path)), begin(str(path))
    outputs = [process.communicate()[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], outputs
    for output in outputs:
        assert states(output, NAMES[:2]) == dict.fromkeys(NAMES[:2], "finished"), output
    assert [len(read_run(runs / name).history.attempts) for name in NAMES[:2]] == [1, 1]


def test_a_failed_run_stops_no_other(job: Job, tmp_path: Path) -> None:
    bad = [{"name": "reward_functions:raises"}]
    (tmp_path / "reward_functions.py").write_text(
        "def raises(images, prompts, metadata):\n    raise OSError\n"
    )
    path, _ = write_sweep(job, tmp_path, grid={"rewards": [bad, [{"name": "jpeg_size"}]]})
    process = subprocess.run(
        [sys.executable, "-m", "spotlight.cli", "sweep", str(path)],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | WIDE, check=False,
    )  # fmt: skip
    assert process.returncode == 1
    found = [
        line.split()[-1] for line in process.stdout.splitlines() if re.match(r"rates-rewards-[^\s:]+ ", line)
    ]
    assert found in (["refused", "finished"], ["failed", "finished"]), process.stdout


def test_optuna_goes_on_with_what_it_has_asked_for(job: Job, tmp_path: Path) -> None:
    space = {"learner.learning_rate": {"low": 1e-3, "high": 3e-2, "log": True}, "rollout.group_size": [2, 3]}
    path, runs = write_sweep(job, tmp_path, search={"trials": 2, "space": space})
    first = begin(str(path))
    read_until(first, r"iteration 1/4")
    first.kill()
    first.wait()
    code, output = sweep(str(path))
    assert code == 0, output
    text = path.read_text()
    path.write_text(text.replace("trials: 2", "trials: 3"))
    assert sweep(str(path), "--dry-run")[0] == 0
    code, output = sweep(str(path))
    assert code == 0, output
    known = sorted(each.parent.name for each in runs.glob("*/config.yaml"))
    assert states(output, known) == dict.fromkeys(known, "finished")  # those of earlier days, too
    path.write_text(text.replace("search:\n", "search:\n  goal: minimize\n"))
    code, output = sweep(str(path))
    assert (code, "expected maximize, as it was begun with" in " ".join(output.split())) == (2, True), output
    with sqlite3.connect(runs / "rates.optuna.sqlite") as study:
        found = study.execute("SELECT number, state FROM trials").fetchall()
        values = study.execute("SELECT value FROM trial_values").fetchall()
    assert found == [(number, "COMPLETE") for number in range(3)]
    names = sorted(each.parent.name for each in runs.glob("*/config.yaml"))
    assert len(names) == 3
    scores = [read_run(runs / name).validations[-1].scores["graded"].mean for name in names]
    assert sorted(each for (each,) in values) == pytest.approx(sorted(scores))
    assert all(RunPaths(runs / name).summary.is_file() for name in names)
