"""A profile of what a run took, and the run as the simulator predicts it with that profile."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from spotlight.cli.main import app
from spotlight.config.load import dump_config, load_config
from spotlight.runtime.assembly.controller_plan import cluster_plan_of
from spotlight.scheduler.events import NodeLost
from spotlight.scheduler.types import NodeId
from spotlight.store.ledger.ledger_schema import SCHEMA
from spotlight.store.run_estimate import RunPace
from spotlight_plan.calibration.measured_profile import (
    INCLUDED,
    measured_profile,
    measured_yaml,
    workload_of,
)
from spotlight_plan.calibration.run_prediction import predict_run, replayed
from spotlight_plan.calibration.run_times import read_run_times
from spotlight_plan.commands.estimate.estimate_pace import estimate_pace
from spotlight_plan.scenarios.profile import Profile, figures, load_profile
from spotlight_plan.scenarios.profile_costs import ProfileCosts
from spotlight_rewards.base.errors import ConfigError

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
    kinds = {figure.key: figure.source.split(": run r of 1970-01-12: ")[0] for figure in found.values()}
    bounds = {key for key, kind in kinds.items() if kind == "assumed"}
    derived = {key for key, kind in kinds.items() if kind == "derived"}
    assert set(kinds.values()) == {"measured", "derived", "assumed"}
    memory = {key for key in kinds if key.startswith("memory.")}
    assert bounds == memory | {"pass_share", "gpus.cpu.batch_slope"}
    assert "gpus.cpu.denoise[32x32, batch 1, sp 1].ms" in derived
    contained = {key for key, figure in found.items() if figure.value <= INCLUDED and key not in bounds}
    configured = {"heads", "lease_pixels", "switch_s"}
    assert contained | configured <= derived
    assert all("bytes_s" in key or "batch 1" in key for key in derived - contained - configured)
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


def changed(folder: Path, *statements: str) -> Path:
    """The run with other entries in its ledger."""
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)
    return folder


def value_of(profile: Profile, key: str) -> float:
    return {figure.key: figure.value for figure in figures(profile)}[key]


def test_several_runs_are_weighted_by_their_work(tmp_path: Path) -> None:
    """The second has one measured iteration instead of three, twice as slow."""
    one = read_run_times(write_run(tmp_path / "a"))
    cut = "DELETE FROM samples WHERE rollout LIKE '{}-%'"
    slow = "UPDATE gpu_seconds SET seconds = {} WHERE phase = 'rollout' AND position > 30"
    seconds = 2 * BATCH * STEPS * STEP_S / 3  # in each of three iterations
    other = read_run_times(
        changed(write_run(tmp_path / "b"), cut.format(2), cut.format(3), slow.format(seconds))
    )
    profile = measured_profile([one, other])
    expected = 1000 * BATCH * STEP_S * (3 * 1 + 1 * 2) / 4
    assert value_of(profile, "gpus.cpu.denoise[32x32, batch 4, sp 1].ms") == pytest.approx(expected)
    text = " ".join(measured_yaml([one, other]).split())
    assert "run a of 1970-01-12, run b of 1970-01-12: 10.0 s for 160 steps" in text


def test_all_members_of_a_group_spend_what_its_leader_makes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("    degrees:\n    - 1\n", "    degrees:\n    - 2\n"))
    changed(
        folder,
        "INSERT INTO gpu_seconds (attempt, worker, position, phase, seconds, price_usd_h)"
        " SELECT attempt, replace(worker, '/0', '/1'), position, phase, seconds, price_usd_h"
        " FROM gpu_seconds WHERE worker LIKE 'spot-%'",
    )
    run = read_run_times(folder)
    assert (run.rollouts["cpu"].starts, run.rollouts["cpu"].pulls) == (4, 4 * (ITERATIONS - 1))
    profile = measured_profile([run])
    expected = {
        "gpus.cpu.denoise[32x32, batch 4, sp 2].ms": 1000 * BATCH * STEP_S,
        "infrastructure.process_start_s": START_S,
        "infrastructure.store_bytes_s": 3e6 / ((PUBLISH_S + PULL_S) / 2),
    }
    assert {key: value_of(profile, key) for key in expected} == pytest.approx(expected)


JOINED = (
    "INSERT INTO incidents (attempt, at, kind, subject, spot, detail)"
    f" VALUES (1, {T0} + {{}}, '{{}}', '{{}}', {{}}, '1 x cpu')"
)


def test_a_node_that_comes_back_under_its_name_is_another_stay(tmp_path: Path) -> None:
    folder = changed(
        write_run(tmp_path / "r"),
        "UPDATE gpu_seconds SET worker = 'spot-1/0#2' WHERE worker = 'spot-1/0' AND position > 40",
        f"INSERT INTO attempt_workers VALUES (1, 'spot-1/0#2', 0.1, {T0 + 30}, NULL)",
        JOINED.format(25, "node_lost", "spot-1", 1),
        JOINED.format(30, "node_joined", "spot-1", 1),
    )
    run = read_run_times(folder)
    assert run.nodes[NodeId("spot-1")].usd_h == pytest.approx(0.1)
    assert (run.rollouts["cpu"].starts, run.rollouts["cpu"].pulls) == (3, 2 * ITERATIONS - 3)
    profile = measured_profile([run])
    expected = pytest.approx(1000 * BATCH * STEP_S)
    assert value_of(profile, "gpus.cpu.denoise[32x32, batch 4, sp 1].ms") == expected
    assert predict_run(run, cluster_plan_of(run.config), profile).error is None


def test_a_learners_node_that_comes_back_does_so_in_its_time(tmp_path: Path) -> None:
    folder = changed(
        write_run(tmp_path / "r"),
        JOINED.format(25, "node_lost", "reserved-0", 0),
        JOINED.format(27, "node_joined", "reserved-0", 0),
    )
    run = read_run_times(folder)
    predicted = predict_run(run, cluster_plan_of(run.config), measured_profile([run]))
    assert (predicted.error, predicted.preemptions) == (None, 1)


def test_training_is_counted_up_to_the_last_checkpoint(tmp_path: Path) -> None:
    """A run that was killed has no seconds of training after its last checkpoint."""
    killed = "UPDATE attempts SET ended = 'killed'"
    last = "(SELECT MAX(seq) FROM optimizer_steps)"
    unsaved = f"DELETE FROM gpu_seconds WHERE phase = 'training' AND position >= {last}"
    folder = changed(write_run(tmp_path / "r", "checkpoint.every=3"), killed, unsaved)
    run = read_run_times(folder)
    assert run.learner.checkpoints == 1
    assert value_of(measured_profile([run]), "gpus.cpu.train[32x32].s") == pytest.approx(TRAIN_S)
    changed(folder, "DELETE FROM gpu_seconds WHERE phase = 'training'")
    with pytest.raises(ConfigError, match="checkpoints: found 0 of 4 iterations; expected 3 or more"):
        read_run_times(folder)
    finished = read_run_times(write_run(tmp_path / "f", "checkpoint.every=3"))
    assert finished.learner.checkpoints == 2


def test_time_and_cost_begin_where_the_simulated_run_does(tmp_path: Path) -> None:
    run = read_run_times(write_run(tmp_path / "r"))
    assert run.iteration_ends_s[0] == pytest.approx(20.0 - 3.0)
    spent_s = (ITERATIONS - 1) * (2 * BATCH * STEPS * STEP_S + 2 * PULL_S)
    learner_s = ITERATIONS * (TRAINING_S + PUBLISH_S + SAVE_S)
    assert run.usd == pytest.approx((spent_s + learner_s) * 0.1 / 3600)


def test_what_a_step_is_billed_with_came_before_it(tmp_path: Path) -> None:
    """The head bills when an iteration has ended: as of its last record."""
    plain, warm = read_run_times(write_run(tmp_path / "r")), "(SELECT MIN(seq) FROM optimizer_steps)"
    late = f"UPDATE gpu_seconds SET position = {warm} WHERE phase = 'rollout' AND position < {warm}"
    billed = read_run_times(changed(write_run(tmp_path / "b"), late))
    assert (billed.usd, billed.rollouts) == (plain.usd, plain.rollouts)


def test_the_evaluation_at_the_end_is_in_both_costs(tmp_path: Path) -> None:
    run = replace(read_run_times(write_run(tmp_path / "r")), prompts=(2, 8))
    config = load_config(None, [*SETTINGS[:-1], "evaluation.at_end=true", f"evaluation.steps={STEPS}"])
    usd = [
        predict_run(one, cluster_plan_of(one.config), measured_profile([one])).usd
        for one in (run, replace(run, config=config))
    ]
    evaluation_s = 8 * 32 / 2 * STEPS * STEP_S  # two workers make them, and the learner waits
    assert usd[1] - usd[0] == pytest.approx(evaluation_s * (2 * 0.1 + 0.5) / 3600, rel=0.1)


def test_a_machine_that_trains_and_rolls_out_is_two_nodes(tmp_path: Path) -> None:
    names = {"reserved-0/0": "reserved-0/learner/0", "spot-1/0": "reserved-0/rollout/0"}
    folder = changed(
        write_run(tmp_path / "r"),
        "DROP TRIGGER samples_insert_only",
        "UPDATE incidents SET detail = '2 x cpu' WHERE subject = 'reserved-0'",
        "DELETE FROM incidents WHERE subject = 'spot-1'",
        *(
            f"UPDATE {table} SET worker = '{name}' WHERE worker = '{was}'"
            for table in ("attempt_workers", "gpu_seconds", "samples")
            for was, name in names.items()
        ),
        JOINED.format(90, "node_lost", "reserved-0", 0),
    )
    run = read_run_times(folder)
    assert {name: (node.gpus, node.usd_h, node.trained) for name, node in run.nodes.items()} == {
        "reserved-0/learner": (1, 0.5, True),
        "reserved-0/rollout": (1, 0.1, False),
        "spot-0": (1, 0.1, False),
    }
    assert [one.node for one in run.incidents[-2:]] == ["reserved-0/learner", "reserved-0/rollout"]
    profile = measured_profile([run])
    assert value_of(profile, "gpus.cpu.denoise[32x32, batch 4, sp 1].ms") == pytest.approx(4000 * STEP_S)
    predicted = predict_run(run, cluster_plan_of(run.config), profile)
    assert predicted.error is None
    assert abs(predicted.deviation(run)) < 0.01
    assert "its 2 nodes as they joined" in call("simulate", "--as", str(folder)).output


def test_a_run_is_predicted_with_its_own_settings(tmp_path: Path) -> None:
    """Also with a profile of another origin."""
    recompute = ("algorithm.name=flow-grpo", "algorithm.old_log_probs=recompute", "rollout.sampler=flow-sde")
    config = load_config(
        None,
        [
            *recompute,
            "rollout.batch_size=7",
            "learner.updates_per_batch=2",
            "learner.micro_batch_size=48",
            "learner.timesteps_per_pass=2",
        ],
    )
    own = workload_of(config, "cpu", load_profile("testbed-cpu"))
    assert (own.recomputes_log_probs, own.timesteps_per_pass, own.lease_samples) == (True, 2, 7)
    costs = ProfileCosts(load_profile("testbed-cpu"), own)
    assert costs.lease_size("cpu", 32 * 32, 1) == 7
    assert costs.switch_s() == config.pipeline.switch_s
    without = costs.profile.prepare_s.value
    assert costs.prepare_s(16, 1) > without
    measured = costs.profile.model_copy(update={"train_has_log_probs": True})
    assert ProfileCosts(measured, own).prepare_s(16, 1) == without
    with pytest.raises(ConfigError, match="recomputes_log_probs: found false; expected true"):
        ProfileCosts(measured, replace(own, recomputes_log_probs=False))


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
    # 17 s after the learner's node, as the first iteration; simulated, that takes 10 s
    shifted = replayed(run, cluster_plan_of(run.config), measured_profile([run]), 10.0).nodes
    assert [at_s for at_s, event in shifted if isinstance(event, NodeLost)] == [pytest.approx(19 - 17 + 10)]
    ends_s = predicted.iteration_ends_s
    assert ends_s[-1] - ends_s[-2] == pytest.approx(ITERATION_S + BATCH * STEPS * STEP_S, rel=0.05)


@pytest.mark.parametrize(
    ("more", "message", "kwargs"),
    [
        (("fleet.driver=inline",), "fleet.driver: found 'inline'", {}),
        (("learner.mode=full",), "learner.mode: found 'full'; expected 'lora'", {}),
        ((), "attempts: found 2; expected one", {"attempts": 2}),
        ((), "node reserved-0: found 'H1000'", {"joined": "1 x H1000"}),
        ((), "node reserved-0: found ''", {"joined": "1 x "}),
    ],
)
def test_a_run_that_does_not_tell_is_refused(
    tmp_path: Path, more: tuple[str, ...], message: str, kwargs: dict[str, object]
) -> None:
    folder = write_run(tmp_path / "r", *more, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(message)):
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


def test_a_run_that_gives_no_profile_hides_no_other_figures_from_an_estimate(tmp_path: Path) -> None:
    measured, alone = write_run(tmp_path / "measured"), write_run(tmp_path / "alone")
    changed(alone, "UPDATE gpu_seconds SET worker = 'reserved-0/0'")  # where the learner's slots roll out
    with pytest.raises(ConfigError, match="expected workers that only roll out"):
        measured_profile([read_run_times(alone)])
    write_run(tmp_path / "wider", "rollout.height=64", "rollout.width=64")
    os.utime(measured / "metrics.jsonl", (T0, T0))
    config = load_config(None, [*SETTINGS, f"runs_dir={tmp_path}", "fleet.spot.nodes=3"])
    found = estimate_pace(config, 1)
    assert isinstance(found, RunPace), found
    assert "the figures of the run measured" in found.rests_on
    pairs = load_config(None, [*SETTINGS, f"runs_dir={tmp_path}", "fleet.sequence_parallel.degrees=[1, 2]"])
    never_paired = estimate_pace(pairs, 1)
    assert isinstance(never_paired, RunPace), never_paired
    assert "the figures of the run measured" in never_paired.rests_on
    shutil.rmtree(measured)
    shipped = estimate_pace(config, 1)
    assert isinstance(shipped, RunPace), shipped
    assert "testbed-cpu" in shipped.rests_on


def test_checkpoints_may_be_removed_while_they_are_measured(tmp_path: Path) -> None:
    run, over = write_run(tmp_path / "r"), threading.Event()

    def prune() -> None:
        while not over.is_set():
            for number in range(5):
                folder = run / "checkpoints" / f"old-{number}" / "rank"
                folder.mkdir(parents=True)
                for part in "abcdefgh":
                    (folder / part).write_bytes(b"x")
            for number in range(5):
                shutil.rmtree(run / "checkpoints" / f"old-{number}")

    pruner = threading.Thread(target=prune)
    pruner.start()
    try:
        assert {read_run_times(run).state_bytes for _ in range(60)} == {500_000}
    finally:
        over.set()
        pruner.join()


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


PAPER_ON_CPU = (
    "workload.height=32",
    "workload.width=32",
    "cluster.reserved.gpu_type=cpu",
    "cluster.spot.gpu_type=cpu",
    "cluster.reserved.usd_gpu_h=0.05",
    "cluster.spot.usd_gpu_h=0.02",
)
"""As docs/howto/simulate-and-plan.md has it."""


def test_a_shipped_scenario_takes_the_profile_at_its_size(tmp_path: Path) -> None:
    profile = tmp_path / "ours.yaml"
    assert call("calibrate", str(write_run(tmp_path / "r")), "--out", str(profile)).exit_code == 0
    words = (f"workload.profile={profile}", *PAPER_ON_CPU, "run.iterations=2")
    result = call("simulate", "paper-512", *words, "--strategy", "spot_rollout_only")
    assert result.exit_code == 0, result.output
    assert "would hold, for both" not in result.output
    documented = (Path(__file__).parents[2] / "docs/howto/simulate-and-plan.md").read_text()
    assert all(word in documented for word in PAPER_ON_CPU)


def test_a_free_run_has_no_difference_in_cost(tmp_path: Path) -> None:
    free = [f"UPDATE {table} SET price_usd_h = 0" for table in ("gpu_seconds", "attempt_workers")]
    result = call("simulate", "--as", str(changed(write_run(tmp_path / "r"), *free)))
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("cost"))
    assert line.split()[-3:] == ["0", "0", "-"]


def test_a_prediction_that_fails_is_reported_in_json(tmp_path: Path) -> None:
    run, profile, said = write_run(tmp_path / "r"), tmp_path / "p.yaml", tmp_path / "out.json"
    tree = yaml.safe_load(measured_yaml([read_run_times(run)]))
    for point in tree["gpus"]["cpu"]["denoise"]:
        point["ms"] *= 1000
    profile.write_text(yaml.safe_dump(tree))
    result = call("simulate", "--as", str(run), "--profile", str(profile), "--json", str(said))
    assert result.exit_code == 1, result.output
    written = json.loads(said.read_text(), parse_constant=pytest.fail)
    assert written["deviation"] is None
    assert "then given up" in written["error"]


@pytest.mark.parametrize(
    "words", [("--profile", "x"), ("paper-512", "--as", "r"), ("--as", "r", "--seed", "1")]
)
def test_predicting_takes_the_runs_own_settings(words: tuple[str, ...]) -> None:
    assert call("simulate", *words).exit_code == 2


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))
