"""A run goes on with another course, and forks begin with its checkpoints: recorded, exact, audited."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from main_job import NFT, At, Job, RecordedRun, outcome, run_process
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.cli.runs.audit import audit_run
from spotlight.cli.runs.train import configuration_of, driver_of
from spotlight.report.model_card import card_text
from spotlight.report.record import read_run
from spotlight.runtime.resuming.course import fork
from spotlight.store.ledger.history import read_history
from spotlight.store.store_errors import OtherConfigurationError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError

pytestmark = pytest.mark.slow

BEFORE = (*NFT, "iterations=2", "checkpoint.keep=9")
CHANGES = (
    "iterations=4",
    "learner.learning_rate=0.01",
    "learner.max_grad_norm=0.5",
    "rollout.group_size=4",
    "algorithm.reference_weight=0.1",
    "evaluation.every=3",
)
WORDS = (
    "from iteration 2 on: algorithm.reference_weight 0.0001 to 0.1; evaluation.every 2 to 3; "
    "iterations 2 to 4; learner.learning_rate 0.03 to 0.01; learner.max_grad_norm 1.0 to 0.5; "
    "rollout.group_size 3 to 4"
)


def go_on(*arguments: str) -> RecordedRun:
    """As ``spotlight train ARGUMENTS``."""
    recorded, config = RecordedRun(), configuration_of(list(arguments))
    recorded.result = driver_of(config)(config, recorded, 0.0)
    return recorded


@pytest.fixture(scope="module")
def begun(job: Job) -> Path:
    job.train("begun", *BEFORE)
    return job.root / "begun"


def copied(begun: Path, name: str) -> Path:
    """The same run under another name, which no copy has: it is that of the folder."""
    place = begun.parent / name / begun.name
    shutil.copytree(begun, place)
    return place


def test_a_changed_run_that_was_killed_equals_one_that_was_not(job: Job, begun: Path) -> None:
    run, killed = copied(begun, "whole"), copied(begun, "killed")
    dry = CliRunner().invoke(app, ["train", str(run), *CHANGES, "--dry-run"], env={"COLUMNS": "200"})
    assert dry.exit_code == 0, dry.output
    assert f"Changes {WORDS}" in dry.output
    assert audit_run(run).course == ()

    assert WORDS in go_on(str(run), *CHANGES).notes
    answer = job.root / "killed.json"
    arguments = [str(killed), *CHANGES]
    for moment in (
        At("os.rename /config.yaml"),
        At("work training", 1),
        At("os.rename /checkpoints/latest", 2),
    ):
        ended = run_process(arguments, moment, answer=answer)
        assert ended.exit_code == -signal.SIGKILL, ended
        arguments = [str(killed), *CHANGES] if moment.label.startswith("os.rename /config") else [str(killed)]
    assert run_process(arguments, answer=answer).finished

    assert outcome(killed) == outcome(run)
    for each in (run, killed):
        report = audit_run(each)
        assert report.ok, report.violations
        assert report.course == (WORDS,)
        assert report.counts.trained == 2 * 6 + 2 * 8
    assert WORDS in card_text(read_run(run), [], [])
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE course_changes SET now = '5' WHERE key = 'rollout.group_size'")
    assert {each.check for each in audit_run(run).violations} == {"course"}


def test_what_a_command_may_change_depends_on_whom_it_names(job: Job, begun: Path) -> None:
    def refusal(*arguments: str) -> str:
        with pytest.raises(OtherConfigurationError) as caught:
            go_on(*arguments)
        return str(caught.value)

    whole = job.arguments("begun", *BEFORE)
    assert f"spotlight train {begun} learner.learning_rate=0.01" in refusal(
        *whole, "learner.learning_rate=0.01"
    )
    said = refusal(str(begun), "rollout.height=64")
    assert f"--fork {begun} --name NEW rollout.height=64" in said
    assert "learning_rate" not in said
    said = refusal(str(begun), "learner.lora.rank=8", "learner.ema=null")
    assert f"spotlight export {begun}" in said
    assert "model.lora=DIR" in said
    with pytest.raises(OtherConfigurationError, match=r"no fork of it can have learner\.lora\.rank=8"):
        fork(begun, configuration_of([str(begun), "name=fork", "learner.lora.rank=8"]), None)
    assert go_on(str(begun)).notes == ["finished before: 2 iterations are trained"]
    unused = (str(begun), "learner.learning_rate=0.01")
    said = (
        "finished before: 2 iterations are trained; nothing is changed (from iteration 2 on: "
        "learner.learning_rate 0.03 to 0.01), since no iteration is left. To go on with it: "
        "iterations=N, above 2"
    )
    assert go_on(*unused).notes == [said]
    dry = CliRunner().invoke(app, ["train", *unused, "--dry-run"], env={"COLUMNS": "200"})
    assert f"This run {said}" in dry.output
    assert "Changes" not in dry.output
    assert audit_run(begun).course == ()


def test_a_fork_goes_on_from_any_checkpoint_with_the_state_of_its_parent(job: Job, begun: Path) -> None:
    before = outcome(begun)
    # Unchanged, it makes what its parent made from there on.
    same = fork(begun, configuration_of([str(begun), "name=same"]), 1)
    assert go_on(str(same)).notes
    assert outcome(same) == before

    arguments = ["train", "--fork", str(begun), "--iteration", "1", "--name", "other", "--plain"]
    changes = ["rollout.height=32", "run_seed=7", "iterations=3", "learner.updates_per_batch=2"]
    dry = CliRunner().invoke(app, [*arguments, *changes, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert not (begun.parent / "other").exists()
    for _ in range(2):  # the same command goes on
        made = CliRunner().invoke(app, [*arguments, *changes])
        assert made.exit_code == 0, made.output
    other = begun.parent / "other"
    report = audit_run(other)
    assert report.ok, report.violations
    assert report.course == (
        "from iteration 1 on: iterations 2 to 3; learner.updates_per_batch 1 to 2; forked from begun; "
        "rollout.height 16 to 32; run_seed 0 to 7",
    )
    assert report.counts.optimizer_steps == 1 + 2 + 2
    assert read_history(other).lost_s == 0
    assert outcome(begun) == before
    assert audit_run(begun).course == ()

    with pytest.raises(StoreError, match=r"no checkpoint of .* after iteration 7; expected one of 1, 2"):
        fork(begun, configuration_of([str(begun), "name=late"]), 7)
    with pytest.raises(StoreError, match="is no fork of begun at iteration 2"):
        fork(begun, configuration_of([str(begun), "name=other"]), 2)
    with pytest.raises(ConfigError):
        configuration_of([str(begun), "learner.learnin=1"])
