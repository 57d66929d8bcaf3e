"""A run that is interrupted, whenever and however, ends as if it had not been."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from kept_pictures import training_pictures
from main_job import (
    ALGORITHMS,
    GRPO,
    NFT,
    At,
    Job,
    Straight,
    clean_audit,
    newest_checkpoint,
    outcome,
    run_process,
)

from spotlight.cli.runs.train import driver_of
from spotlight.scheduler.types import Phase
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.metrics import read_metrics
from spotlight.store.run_summary import read_summary

SEED = 20
"""Of the random moments below; any must do."""


STAGES = (
    At("work evaluation", 2),  # before the first checkpoint
    At("os.mkdir /checkpoints/.writing"),  # nothing of the checkpoint is there
    At("os.rename /checkpoints/0"),  # written whole, but not in its place
    At("os.rename /checkpoints/latest"),  # in its place, but not named
    At("os.rmdir /checkpoints/.writing"),  # committed, while the oldest one is being removed
)
FEW = (STAGES[0], STAGES[3])
"""Enough to tell that ledger, learner and curves agree: test_store_kill.py kills at every file operation."""


def kills(stages: tuple[At, ...], moments: tuple[str, ...]) -> list[At]:
    """One kill an attempt: at these stages of a checkpoint, and at random moments."""
    labels = random.Random(SEED).sample(sorted(set(moments)), len(stages) // 2)
    return [*stages, *map(At, labels)]


@pytest.mark.parametrize(
    ("algorithm", "stages"),
    [
        ("diffusion-nft with EMA", FEW),
        pytest.param("diffusion-nft with EMA", STAGES, marks=pytest.mark.slow),
        pytest.param("flow-grpo, 2 updates", FEW, marks=pytest.mark.slow),
    ],
    ids=["few", "every-stage", "flow-grpo"],
)
def test_killed_at_any_moment_a_resumed_run_equals_the_uninterrupted_one(
    job: Job, straight: Straight, algorithm: str, stages: tuple[At, ...]
) -> None:
    whole, expected, uninterrupted = straight(algorithm)
    name = f"killed-{list(ALGORITHMS).index(algorithm)}-{len(stages)}"
    run, arguments = job.root / name, job.arguments(name, *ALGORITHMS[algorithm])
    killed = 0
    planned = kills(stages, uninterrupted.moments)
    for kill in planned:
        ended = run_process(arguments, kill, answer=job.root / f"{name}.json")
        assert ended.exit_code == -signal.SIGKILL or ended.finished, ended
        killed += ended.exit_code == -signal.SIGKILL
    assert killed >= len(stages)  # a label drawn at random may not come up any more
    ended = run_process(arguments, answer=job.root / f"{name}.json")
    assert ended.finished, ended

    assert outcome(run) == expected
    rows = [(row.iteration, "validation/graded" in row.values) for row in read_metrics(run)]
    assert len(rows) == len(set(rows))
    report = clean_audit(run)
    assert [bill.ended for bill in report.attempts] == [Ending.KILLED] * killed + [Ending.FINISHED]
    assert report.gpu_seconds_by_phase[Phase.LOST] > 0
    assert read_summary(run / "summary.json").samples.trained == 24
    assert not list(run.rglob(".writing-*"))
    made, kept = training_pictures(whole), training_pictures(run)
    assert [(iteration, len(files)) for iteration, files in made.items()] == [(0, 4), (3, 4)]
    # A kill may lose those that were being written; what is there is right.
    assert kept[3] == made[3]
    assert all(made[at].items() >= files.items() for at, files in kept.items())
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        made = "SELECT COUNT(DISTINCT rollout) FROM samples JOIN leases USING (rollout, worker, epoch)"
        assert ledger.execute(made).fetchone() == (report.counts.finished,)
        attempts = ledger.execute("SELECT DISTINCT attempt FROM leases WHERE attempt <= ?", (killed,))
        assert attempts.fetchall(), "what a killed attempt did is recorded"


@pytest.mark.parametrize(
    ("moment", "every", "then"),
    [
        (At("work rollout", 5, signal.SIGTERM), 9, "the checkpoint that iteration 2 begins with is written"),
        (At("work training", 2, signal.SIGTERM), 9, "the checkpoint that iteration 2 begins with is written"),
        (At("work training", 2, signal.SIGTERM), 1, "a resumed run begins iteration 2 again"),
    ],
    ids=["rollout", "training", "nothing-to-save"],
)
def test_sigterm_stops_before_the_first_update_and_the_same_command_goes_on(
    job: Job, straight: Straight, moment: At, every: int, then: str
) -> None:
    name = f"terminated-{moment.label[5:]}-{every}"
    arguments = job.arguments(name, *NFT, f"checkpoint.every={every}")
    run, answer = job.root / name, job.root / f"{name}.json"
    ended = run_process(arguments, moment, answer=answer)
    assert ended.exit_code == 0
    assert ended.stopped
    assert ended.iterations == (0,)
    said = [note for note in ended.notes if "SIGTERM" in note]
    assert len(said) == 1
    assert "a second SIGTERM stops at once" in said[0]
    assert any(then in note for note in ended.notes), ended.notes
    assert newest_checkpoint(run).name.endswith("iteration-000001")
    assert not (run / "summary.json").exists()
    clean_audit(run)

    ended = run_process(arguments, answer=answer)
    assert ended.iterations == (1, 2, 3)
    assert any("resuming after iteration 1" in note for note in ended.notes)
    assert outcome(run) == straight("diffusion-nft with EMA")[1]
    assert [bill.ended for bill in clean_audit(run).attempts] == [Ending.STOPPED, Ending.FINISHED]


def test_a_stop_leaves_a_lease_between_its_steps(job: Job) -> None:
    arguments = job.arguments("between-steps", *NFT, "rollout.batch_size=6", "evaluation.every=1")
    answer = job.root / "between-steps.json"
    before = run_process(arguments, At("work evaluation", 2, signal.SIGINT), answer=answer)
    assert before.stopped
    assert [moment for moment in before.moments if "evaluation" in moment] == ["work evaluation"] * 2
    assert any("a second SIGINT (Ctrl-C) stops at once" in note for note in before.notes)
    clean_audit(job.root / "between-steps")
    assert run_process(arguments, answer=answer).iterations == (0, 1, 2, 3)


@pytest.mark.slow
def test_sigterm_after_an_update_trains_the_iteration_to_its_end(job: Job, straight: Straight) -> None:
    arguments = job.arguments("updated", *GRPO, "checkpoint.every=9")
    run, answer = job.root / "updated", job.root / "updated.json"
    second_update = At("work training", 4, signal.SIGTERM)
    ended = run_process(arguments, second_update, answer=answer)
    assert ended.stopped
    assert ended.iterations == (0, 1)
    assert newest_checkpoint(run).name.endswith("iteration-000002")
    assert clean_audit(run).gpu_seconds_by_phase[Phase.LOST] == 0
    assert run_process(arguments, answer=answer).iterations == (2, 3)
    assert outcome(run) == straight("flow-grpo, 2 updates")[1]
    assert clean_audit(run).gpu_seconds_by_phase[Phase.LOST] == 0


def test_a_second_sigint_stops_at_once_and_loses_nothing_committed(job: Job, straight: Straight) -> None:
    arguments = job.arguments("interrupted", *NFT)
    run, answer = job.root / "interrupted", job.root / "interrupted.json"
    signals = (At("work rollout", 5, signal.SIGINT), At("work roll", 5, signal.SIGINT))  # in one moment
    ended = run_process(arguments, *signals, answer=answer)
    assert ended.exit_code == 1  # KeyboardInterrupt
    assert ended.notes == ()
    assert newest_checkpoint(run).name.endswith("iteration-000001")
    assert [bill.ended for bill in clean_audit(run).attempts] == [Ending.STOPPED]
    assert run_process(arguments, answer=answer).finished
    assert outcome(run) == straight("diffusion-nft with EMA")[1]
    assert clean_audit(run).gpu_seconds_by_phase[Phase.LOST] > 0


@pytest.mark.slow  # test_attempts.py, test_judging.py and test_trained_run.py go on with finished runs too
def test_raising_the_iterations_of_a_finished_run_continues_it(job: Job, straight: Straight) -> None:
    # Its own last validation, after 3 iterations, is none of the longer run's.
    assert job.train("extended", *NFT, "iterations=3").iterations == [0, 1, 2]
    run = job.root / "extended"
    assert [row[0] for row in outcome(run).validation] == [0, 2, 3]
    assert job.train("extended", *NFT).iterations == [3]
    assert outcome(run) == straight("diffusion-nft with EMA")[1]
    assert [point.iteration for point in read_summary(run / "summary.json").validation] == [0, 2, 4]
    clean_audit(run)


def test_a_finished_run_shows_its_outcome_at_once_and_stays_as_it_is(job: Job, straight: Straight) -> None:
    run, expected, _ = straight("diffusion-nft with EMA")
    before = contents(run)
    driver_of(job.config(run.name))  # imports what a run needs
    started = time.process_time()  # CPU-seconds: the machine may be busy
    for iterations in (4, 2):
        recorded = job.train(run.name, *NFT, f"iterations={iterations}", "evaluation.every=1")
        assert recorded.result is not None
        assert recorded.result.finished
        assert recorded.iterations == []
        (note,) = recorded.notes
        assert note.startswith(
            "finished before: 4 iterations are trained; nothing is changed (from iteration 4 on: "
        )
    assert time.process_time() - started < 1
    assert contents(run) == before
    assert outcome(run) == expected


@pytest.mark.slow  # test_store_checkpoints.py finds every damage and takes the checkpoint before
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(job: Job, straight: Straight) -> None:
    arguments = job.arguments("damaged", *NFT)
    run, answer = job.root / "damaged", job.root / "damaged.json"
    assert run_process(arguments, At("work rollout", 10), answer=answer).exit_code == -signal.SIGKILL
    newest = newest_checkpoint(run)
    assert newest.name == "000003-iteration-000003"
    weights = newest / "learner" / "learner.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)

    ended = run_process(arguments, answer=answer)
    assert any(f"{newest.name}/learner/learner.safetensors" in note for note in ended.notes)
    assert any("resuming after iteration 2" in note for note in ended.notes)
    assert ended.iterations == (2, 3)
    assert outcome(run) == straight("diffusion-nft with EMA")[1]
    clean_audit(run)


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


def test_the_summary_counts_what_the_ledger_holds(straight: Straight) -> None:
    run, _, _ = straight("diffusion-nft with EMA")
    summary = json.loads((run / "summary.json").read_text())
    report = clean_audit(run)
    assert summary["samples"] == {"issued": 24, "trained": 24, "dropped": {}}
    assert report.counts.optimizer_steps == 4
    assert summary["cost_usd"] == pytest.approx(report.cost_usd, rel=0.02)
    assert sum(summary["gpu_seconds_by_phase"].values()) == pytest.approx(summary["wall_s"], rel=1e-6)
