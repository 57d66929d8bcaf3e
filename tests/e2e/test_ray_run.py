"""``spotlight train fleet.driver=ray``: nodes come, are announced, are killed; so are head and learner.

Where work is done, and how often it had to be done again, must show in the account and in nothing else.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kept_pictures import training_pictures
from main_job import Job, clean_audit, lora
from ray_job import LOOK_S, PATIENCE_S, running
from reward_functions import GATE

from spotlight.scheduler.types import Filler, Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary

pytestmark = pytest.mark.timeout(600)

SMALL = (
    "algorithm.name=diffusion-nft",
    "algorithm.train_timesteps=2",
    "algorithm.advantage.std=group",
    "iterations=4",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "rollout.batch_size=4",
    "learner.micro_batch_size=4",
    "evaluation.prompts=4",
    "evaluation.grid_prompts=4",
    "evaluation.images_per_prompt=1",
    "evaluation.grid_images=1",
    "learner.learning_rate=0.001",
    "rewards=[{name: 'reward_functions:moody'}]",
)
RAY = ("fleet.driver=ray", "fleet.drain_margin_s=1000", "fleet.spot.notice_s=null")
PATIENT = "rewards=[{name: 'reward_functions:moody', deadline_s: 600}]"
OVERLAP = "pipeline.axis=prompt"
"""Groups are trained as they are complete."""
TRACE = """# spotlight trace horizon_s=60.0
time_s,event,node,gpus
0.0,add,spot-1,1
"""
THREE_NODES = f"{TRACE}0.1,add,spot-2,1\n0.2,add,spot-3,1\n"
LIMITS = AuditLimits(group_size=4)
REWARD_TOLERANCE = 1e-4
"""Of 1 + brightness, between two placements; a grey level of one pixel of 16 x 16 is 5e-6."""
WORKS = "SELECT DISTINCT worker FROM samples"


def number_of(worker: str) -> int:
    return int(worker.partition("/")[0].removeprefix("spot-"))


@dataclass(frozen=True)
class Finished:
    """A run that ended by itself."""

    run: Path
    status: int
    printed: str
    left: set[int]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def survivor(job: Job, patch: pytest.MonkeyPatch) -> Finished:
    """A run that lost two of its three spot nodes at work, one of them with notice, then its head.

    The second head has one node, and loses its learner.
    """
    trace = job.root / "spot.csv"
    trace.write_text(THREE_NODES)
    run, all_are_there = job.root / "preempted", job.root / "all-are-there"
    arguments = job.arguments("preempted", *SMALL, PATIENT, *RAY, OVERLAP, f"fleet.spot.trace={trace}")
    # Two nodes would be at the end before a third has started.
    patch.setenv(GATE, str(all_are_there))
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot", 3)
        all_are_there.touch()
        first = number_of(str(it.wait_for(WORKS)[0][0]))
        it.notice(first)
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_noticed'")
        it.kill(first)
        others = f"{WORKS} WHERE worker <> 'spot-{first}/0'"
        it.kill(number_of(str(it.wait_for(others)[0][0])))
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_lost'", 2)
        it.wait_for(
            "SELECT 1 FROM samples JOIN rollouts ON id = rollout WHERE purpose = 'train' AND iteration >= 2"
        )
        it.kill_head()
    assert not (run / "summary.json").exists()
    trace.write_text(TRACE)
    with running(run, ["--profile", "1", *arguments]) as it:
        # Not the last iteration's: on a busy machine it may end before we look again.
        it.wait_for(
            "SELECT 1 FROM samples JOIN leases USING (rollout, worker, epoch) JOIN rollouts ON id = rollout"
            " WHERE attempt = 2 AND purpose = 'train' AND iteration >= 2"
        )
        it.kill_learner()
        status = it.end(2 * PATIENCE_S)
        return Finished(run, status, it.printed, it.left)


@pytest.fixture(scope="module")
def report(survivor: Finished) -> AuditReport:
    assert survivor.status == 0, survivor.printed
    return clean_audit(survivor.run, LIMITS)


def test_it_finishes_and_nothing_is_left(survivor: Finished) -> None:
    assert survivor.status == 0, survivor.printed
    assert "resuming after iteration" in survivor.printed
    assert not survivor.left
    assert read_summary(survivor.run / "summary.json").samples.trained == 32
    assert lora(survivor.run)
    assert not list(Path("/dev/shm").glob("spotlight-*-preempted-*"))
    assert not list(survivor.run.rglob(".writing-*"))
    assert (survivor.run / "images" / "before-after.png").is_file()
    assert [(at, len(files)) for at, files in training_pictures(survivor.run).items()] == [(0, 4), (3, 4)]
    survived = "Survived 2 preemptions (1 with notice), 1 loss of the learner, 1 interruption in 2 attempts"
    assert survived in " ".join(survivor.printed.split())


def test_rollouts_and_training_have_speeds(survivor: Finished) -> None:
    rows = [row.values for row in read_metrics(survivor.run) if "train/loss" in row.values]
    assert len(rows) == 4
    assert all(row["throughput/train_tokens_s"] > 0 for row in rows)
    assert sum(row.get("throughput/rollout_tokens_s", 0) > 0 for row in rows) >= 3, "some may be made early"
    assert "Rollouts: " in survivor.printed
    assert "tokens/s on each device" in survivor.printed


@pytest.mark.parametrize("kind", ["rollout", "training"])
def test_a_worker_and_the_learner_wrote_traces(survivor: Finished, kind: str) -> None:
    path = RunPaths(survivor.run).profile / f"{kind}.json.gz"
    with gzip.open(path, "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count(f"{kind} step") == 1
    assert "aten::scaled_dot_product_attention" in names
    assert f"trace of {kind} steps: " in survivor.printed


def test_the_ledger_counts_what_befell_it(survivor: Finished, report: AuditReport) -> None:
    history = read_history(survivor.run)
    assert (history.preemptions, history.noticed, history.interruptions) == (2, 1, 1)
    assert history.incidents[Incident.NODE_JOINED, True] == 3 + 1
    assert history.incidents[Incident.NODE_JOINED, False] == 1 + 1
    assert history.incidents[Incident.NODE_NOTICED, True] == 1
    assert (Incident.NODE_LOST, False) not in history.incidents
    assert sum(count for (kind, _), count in history.incidents.items() if kind is Incident.LEARNER_LOST) == 1


def test_groups_were_trained_while_others_were_made(survivor: Finished, report: AuditReport) -> None:
    rows = [row.values for row in read_metrics(survivor.run)]
    assert sum(row.get("pipeline/overlapped_samples", 0) for row in rows) > 0
    assert report.filled_s[Filler.TRAINING] > 0


def test_every_billed_second_has_its_phase(survivor: Finished, report: AuditReport) -> None:
    phases = report.gpu_seconds_by_phase
    for phase in (Phase.SETUP, Phase.ROLLOUT, Phase.TRAINING, Phase.CHECKPOINT, Phase.LOST):
        assert phases[phase] > 0, phase
    assert [bill.ended for bill in report.attempts] == [Ending.KILLED, Ending.FINISHED]
    assert sum(phases.values()) == pytest.approx(sum(bill.billed_s for bill in report.attempts), abs=0.5)


def test_where_it_ran_changes_rounding_only(job: Job, survivor: Finished, report: AuditReport) -> None:
    job.train("inline", *SMALL)
    ours, theirs = scores(survivor.run), scores(job.root / "inline")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value == pytest.approx(theirs[key], abs=REWARD_TOLERANCE), key
    assert validations(survivor.run) == pytest.approx(validations(job.root / "inline"), abs=REWARD_TOLERANCE)
    assert trained(survivor.run) == trained(job.root / "inline")
    accepted = replace(report.counts, rejected=0)  # what was made under a lease that the learner's loss ended
    assert accepted == clean_audit(job.root / "inline", LIMITS).counts


LOCAL = ("fleet.spot.nodes=0", "fleet.local.rollout_slots=1")


@pytest.mark.slow
def test_the_head_is_told_to_stop_and_the_same_command_finishes(job: Job) -> None:
    run = job.root / "stopped"
    arguments = job.arguments("stopped", *SMALL, *RAY, *LOCAL)
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM samples JOIN rollouts ON id = rollout WHERE iteration >= 1")
        it.process.send_signal(signal.SIGTERM)
        assert it.end() == 130, it.printed
        assert "SIGTERM: stopping where the same command can resume exactly" in it.printed
        it.require_nothing_left()
    assert not (run / "summary.json").exists()
    with running(run, arguments) as it:
        assert it.end() == 0, it.printed
        assert "resuming after iteration" in it.printed
        it.require_nothing_left()
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.STOPPED, Ending.FINISHED]
    assert read_summary(run / "summary.json").samples.trained == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "number"),
    [("gcs_server", signal.SIGKILL), ("gcs_server", signal.SIGSTOP), ("raylet", signal.SIGKILL)],
)
def test_a_dead_ray_ends_the_run_with_one_line_and_the_same_command_resumes(
    job: Job, monkeypatch: pytest.MonkeyPatch, daemon: str, number: signal.Signals
) -> None:
    run, gate = job.root / f"{number.name}-{daemon}", job.root / f"scores-{number.name}-{daemon}"
    arguments = job.arguments(run.name, *SMALL, *RAY, *LOCAL, PATIENT)
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM samples JOIN rollouts ON id = rollout WHERE iteration >= 1")
        gate.unlink()  # it would be at its end before a frozen Ray shows
        it.signal_daemon(daemon, number)
        assert it.end() == 1, it.printed
        assert ("Ray does not answer" in it.printed) == (number is signal.SIGSTOP)
        assert daemon == "raylet" or "ending the run: Ray is dead" in it.printed
        assert "Run the same command again: it resumes from the last checkpoint." in it.printed
        assert "Traceback" not in it.printed
        assert "will be taken" not in it.printed, "nobody takes a node: its Ray ends"
        it.require_nothing_left()
    gate.touch()
    with running(run, arguments) as it:
        assert it.end() == 0, it.printed
        assert "resuming after iteration" in it.printed
    assert read_summary(run / "summary.json").samples.trained == 32


@pytest.mark.slow
def test_a_head_that_waits_for_a_frozen_ray_ends_with_one_line(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.root / "frozen"
    monkeypatch.setenv(GATE, str(job.root / "scores-never"))
    with running(run, job.arguments(run.name, *SMALL, *RAY, *LOCAL, PATIENT)) as it:
        it.wait_for("SELECT 1 FROM samples")
        it.signal_daemon("gcs_server", signal.SIGSTOP)
        (worker,) = [pid for pid in it.left if title(pid).startswith("ray::WorkerActor")]
        os.kill(worker, signal.SIGKILL)  # to start another one is a call to Ray, which does not return
        assert it.end() == 1, it.printed
        assert "A call to Ray does not return: this process ends without it." in it.printed
        it.require_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_gone_is_replaced_so_a_killed_head_leaves_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = job.root / f"unguarded-{number.name}"
    monkeypatch.setenv(GATE, str(job.root / "scores-never"))
    with running(run, job.arguments(run.name, *SMALL, *RAY, *LOCAL, PATIENT)) as it:
        it.wait_for("SELECT 1 FROM samples")
        first = it.guard_pid()
        os.kill(first, number)
        end_s = time.monotonic() + PATIENCE_S
        while it.guard_pid() in (None, first):
            assert time.monotonic() < end_s
            time.sleep(LOOK_S)
        it.kill_head()


def title(pid: int) -> str:
    """Of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")


def read(run: Path, query: str) -> list[tuple[object, ...]]:
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return list(connection.execute(query))


def scores(run: Path) -> dict[tuple[object, object], float]:
    return {
        (rollout, name): value
        for rollout, name, value in read(run, "SELECT rollout, name, value FROM rewards")
    }


def trained(run: Path) -> set[tuple[object, ...]]:
    return set(read(run, "SELECT rollout, optimizer_step FROM outcomes WHERE kind = 'trained'"))


def validations(run: Path) -> list[float]:
    return [row.values["validation/graded"] for row in read_metrics(run) if "validation/graded" in row.values]
