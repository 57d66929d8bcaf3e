"""A profile of what a run took, and the run as the simulator predicts it with that profile."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotlight.cli.main import app
from spotlight.config.errors import ConfigError
from spotlight.config.load import dump_config, load_config
from spotlight.planning.calibration.measured_profile import INCLUDED, measured_profile, measured_yaml
from spotlight.planning.calibration.run_prediction import predict_run
from spotlight.planning.calibration.run_times import read_run_times
from spotlight.planning.scenarios.profile import figures
from spotlight.runtime.build.controller_plan import cluster_plan_of
from spotlight.store.ledger.ledger_schema import SCHEMA

ITERATIONS, SAMPLES, STEPS, BATCH = 4, 8, 5, 4
STEP_S, TRAIN_S = 0.05, 0.25
"""Of a sample: a denoising step, and a timestep trained; two are trained."""
PULL_S, PUBLISH_S, REWARD_S, SAVE_S, START_S = 0.2, 0.1, 0.3, 0.05, 7.0
TRAINING_S = SAMPLES * 2 * TRAIN_S
ITERATION_S = BATCH * STEPS * STEP_S + REWARD_S + TRAINING_S + PUBLISH_S + PULL_S + SAVE_S
"""Two workers make one batch each."""
SETTINGS = (
    "fleet.driver=ray",
    f"iterations={ITERATIONS}",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    f"rollout.batch_size={BATCH}",
    f"rollout.steps={STEPS}",
    "algorithm.train_timesteps=2",
    "learner.micro_batch_size=8",
    "learner.warmup_steps=0",
    "learner.decay_iterations=null",
    "evaluation.every=100",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)
T0 = 1_000_000.0


def write_run(folder: Path, *more: str, joined: str = "1 x cpu", attempts: int = 1) -> Path:
    """A run as the Ray driver leaves it, in which everything took the seconds above."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config(None, [*SETTINGS, *more])))
    for name, size in (("lora/a.safetensors", 3_000_000), ("checkpoints/3/state", 500_000)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(bytes(size))
    rows = [
        {
            "iteration": done,
            "samples_trained": SAMPLES * (done + 1),
            "wall_s": 20.0 + ITERATION_S * done,
            "train/step_s": TRAINING_S,
            "train/prepare_s": 0.001,
            "rewards/wait_s": REWARD_S,
        }
        for done in range(ITERATIONS)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as connection:
        connection.executescript(SCHEMA)
        connection.execute("BEGIN")
        _write_ledger(connection, joined, attempts)
        connection.execute("COMMIT")
    return folder


def _write_ledger(connection: sqlite3.Connection, joined: str, attempts: int) -> None:
    for number in range(1, attempts + 1):
        connection.execute(
            "INSERT INTO attempts VALUES (?, 1, 'here', ?, ?, ?, 'finished')", (number, T0, T0 + 99, T0 + 99)
        )
    for at, node, price in ((3.0, "reserved-0", 0.5), (4.0, "spot-0", 0.1), (4.0, "spot-1", 0.1)):
        connection.execute(
            "INSERT INTO attempt_workers VALUES (1, ?, ?, ?, NULL)", (f"{node}/0", price, T0 + at)
        )
        connection.execute(
            "INSERT INTO incidents (attempt, at, kind, subject, spot, detail)"
            " VALUES (1, ?, 'node_joined', ?, ?, ?)",
            (T0 + at, node, node != "reserved-0", joined),
        )
    seq = 0

    def insert(table: str, *values: object) -> None:
        nonlocal seq
        seq += 1
        marks = ", ".join("?" * (len(values) + 1))
        connection.execute(f"INSERT INTO {table} VALUES ({marks})", (seq, *values))

    def spend(worker: str, phases: Mapping[str, float]) -> None:
        for phase, seconds in phases.items():
            connection.execute(
                "INSERT INTO gpu_seconds (attempt, worker, position, phase, seconds, price_usd_h)"
                " VALUES (1, ?, ?, ?, ?, 0.1)",
                (worker, seq, phase, seconds),
            )

    for prompt in ("a", "b"):
        insert("prompts", prompt, prompt, "{}")
    spend("spot-0/0", {"setup": START_S - 1})
    spend("spot-1/0", {"setup": START_S + 1})
    for iteration in range(ITERATIONS):
        for member in range(SAMPLES):
            rollout, worker = f"{iteration}-{member}", f"spot-{member // BATCH}/0"
            insert(
                "rollouts", rollout, "train", iteration, "ab"[member // 4], member % 4, 1, STEPS, iteration
            )
            insert("samples", rollout, iteration, worker, 1)
        slow = 3 if iteration == 0 else 1  # warming up must not count
        for worker in ("spot-0/0", "spot-1/0"):
            work = {"rollout": slow * BATCH * STEPS * STEP_S}
            spend(worker, work | ({"weight_sync": PULL_S} if iteration else {}))
        insert("optimizer_steps", iteration + 1, iteration, 0, SAMPLES, None, None)
        insert("versions", iteration + 1)
        learner = {"training": TRAINING_S, "weight_sync": PUBLISH_S, "checkpoint": SAVE_S}
        spend("reserved-0/0", learner)


def test_every_figure_is_measured_and_names_its_run(tmp_path: Path) -> None:
    found = {
        figure.key: figure
        for figure in figures(measured_profile([read_run_times(write_run(tmp_path / "r"))]))
    }
    assert all(figure.source.startswith("measured: run r of 1970-01-12: ") for figure in found.values())
    expected = {
        "gpus.cpu.denoise[32x32, batch 4, sp 1].ms": 1000 * BATCH * STEP_S,
        "gpus.cpu.denoise[32x32, batch 1, sp 1].ms": 1000 * STEP_S,
        "gpus.cpu.train[32x32].s": TRAIN_S,
        "infrastructure.process_start_s": START_S,
        "rewards.latency_s": REWARD_S,
        "weights.adapter_bytes": 3e6,
        "weights.learner_state_bytes": 5e5,
        "infrastructure.store_bytes_s": 3e6 / ((PUBLISH_S + PULL_S) / 2),
        "infrastructure.disk_bytes_s": 5e5 / SAVE_S,
        "lease_pixels": BATCH * 32 * 32,
        "heads": 1,
    }
    assert {key: found[key].value for key in expected} == pytest.approx(expected)
    assert found["optimizer_step_s"].value == INCLUDED


def test_the_simulator_predicts_the_run_that_was_measured(tmp_path: Path) -> None:
    run = read_run_times(write_run(tmp_path / "r"))
    predicted = predict_run(run, cluster_plan_of(run.config), measured_profile([run]))
    assert predicted.error is None
    assert len(predicted.iteration_ends_s) == ITERATIONS
    assert abs(predicted.deviation(run)) < 0.01


def test_several_runs_are_weighted_by_their_work(tmp_path: Path) -> None:
    one, other = (read_run_times(write_run(tmp_path / name)) for name in ("a", "b"))
    assert figures(measured_profile([one, other]))[-1].value == figures(measured_profile([one]))[-1].value
    assert "run a of 1970-01-12, run b of 1970-01-12: 12.0 s for 240 steps" in " ".join(
        measured_yaml([one, other]).split()
    )


def test_nodes_come_are_noticed_and_leave_as_they_did(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as connection:
        for at, kind, detail in ((17.0, "node_noticed", "5.0 s before"), (22.0, "node_lost", "")):
            connection.execute(
                "INSERT INTO incidents (attempt, at, kind, subject, spot, detail) VALUES (1, ?, ?, ?, 1, ?)",
                (T0 + at, kind, "spot-1", detail),
            )
    run = read_run_times(folder)
    predicted = predict_run(run, cluster_plan_of(run.config), measured_profile([run]))
    assert predicted.preemptions == 1
    ends_s = predicted.iteration_ends_s
    assert ends_s[-1] - ends_s[-2] == pytest.approx(ITERATION_S + BATCH * STEPS * STEP_S, rel=0.05)


@pytest.mark.parametrize(
    ("more", "told", "kwargs"),
    [
        (("fleet.driver=inline",), "fleet.driver: found 'inline'", {}),
        ((), "attempts: found 2; expected one", {"attempts": 2}),
        ((), "node reserved-0: found 'H1000'", {"joined": "1 x H1000"}),
        ((), "node reserved-0: found ''", {"joined": "1 x "}),
    ],
)
def test_a_run_that_does_not_tell_is_refused(
    tmp_path: Path, more: tuple[str, ...], told: str, kwargs: dict[str, object]
) -> None:
    folder = write_run(tmp_path / "r", *more, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_run_times(folder)


def test_a_run_of_several_degrees_is_refused(tmp_path: Path) -> None:
    config = write_run(tmp_path / "r") / "config.yaml"
    text, one = config.read_text(), "    degrees:\n    - 1\n"
    assert one in text
    config.write_text(text.replace(one, f"{one}    - 2\n"))
    with pytest.raises(ConfigError, match=r"degrees: found \[1, 2\]; expected one degree"):
        read_run_times(config.parent)


def test_runs_of_different_models_are_not_mixed(tmp_path: Path) -> None:
    one = read_run_times(write_run(tmp_path / "a"))
    other = read_run_times(write_run(tmp_path / "b", "model.path=mine"))
    with pytest.raises(ConfigError, match=r"model.path: found run a .*: testbed, run b .*: mine"):
        measured_profile([one, other])


def test_the_commands_write_a_profile_and_predict_with_it(tmp_path: Path) -> None:
    run, profile, said = write_run(tmp_path / "r"), tmp_path / "made" / "p.yaml", tmp_path / "out.json"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = call("calibrate", str(run), "--out", str(profile))
    assert result.exit_code == 0, result.output
    assert "12.0 s for 48 timesteps of samples" in " ".join(result.output.split())
    result = call("simulate", "--as", str(run), "--profile", str(profile), "--json", str(said))
    assert result.exit_code == 0, result.output
    assert abs(json.loads(said.read_text())["deviation"]) < 0.01
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert call("calibrate", str(run)).output == profile.read_text()


@pytest.mark.parametrize(
    "words", [("--profile", "x"), ("paper-512", "--as", "r"), ("--as", "r", "--seed", "1")]
)
def test_predicting_takes_the_runs_own_settings(words: tuple[str, ...]) -> None:
    assert call("simulate", *words).exit_code == 2


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))
