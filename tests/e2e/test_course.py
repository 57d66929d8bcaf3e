"""A run goes on with another course, and forks begin with its checkpoints: recorded, exact, audited."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from main_job import (
    NFT,
    At,
    Job,
    RecordedRun,
    largest_difference,
    outcome,
    run_process,
    run_ranks,
)
from ray_job import PATIENCE_S, running
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.cli.runs.audit import audit_run
from spotlight.cli.runs.train import configuration_of, driver_of
from spotlight.config.load import load_run
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
    compared = CliRunner().invoke(
        app, ["compare", str(run), "--curve", "rollout/reward"], env={"COLUMNS": "200"}
    )
    assert f"{run.name} {WORDS}" in compared.output
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
        fork(begun, load_run(begun, ["name=fork", "learner.lora.rank=8"], forks=True), None)
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
    same = fork(begun, load_run(begun, ["name=same"], forks=True), 1)
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
        fork(begun, load_run(begun, ["name=late"], forks=True), 7)
    with pytest.raises(StoreError, match="is no fork of begun at iteration 2"):
        fork(begun, load_run(begun, ["name=other"], forks=True), 2)
    with pytest.raises(ConfigError):
        configuration_of([str(begun), "learner.learnin=1"])


def test_a_fork_from_before_a_change_of_its_parents_course_tells_that_it_has_it_earlier(begun: Path) -> None:
    parent = copied(begun, "changed")
    go_on(str(parent), "iterations=3", "learner.learning_rate=0.01")
    early = fork(parent, load_run(parent, ["name=early"], forks=True), 1)
    twice = fork(early, load_run(early, ["name=twice"], forks=True), 1)
    changed = "from iteration 1 on: iterations 2 to 3; learner.learning_rate 0.03 to 0.01; forked from"
    assert [audit_run(each).course for each in (early, twice)] == [
        (f"{changed} begun",),
        (f"{changed} early",),
    ]


def test_a_named_run_is_that_run(job: Job, begun: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"name: found 'other'; expected 'begun', .*--fork {begun} --name"):
        configuration_of([str(begun), "name=other"])
    moved = ("train", str(begun), f"runs_dir={tmp_path}", "iterations=9", "--dry-run")
    result = CliRunner().invoke(app, moved)
    assert result.exit_code == 2
    assert f"runs_dir is {tmp_path}, which has no run 'begun'" in " ".join(result.output.split())
    assert (
        "as configured except for"
        in CliRunner().invoke(app, ["train", str(begun), "--smoke", "--dry-run"]).output
    )


def test_a_fork_that_is_there_goes_on_without_its_parents_checkpoint(begun: Path) -> None:
    parent = copied(begun, "forgetful")
    made = [fork(parent, load_run(parent, ["name=kept"], forks=True), 1) for _ in range(2)]
    shutil.rmtree(next(parent.glob("checkpoints/*-iteration-000001")))
    made += [fork(parent, load_run(parent, ["name=kept"], forks=True), at) for at in (1, None)]
    assert set(made) == {parent.parent / "kept"}
    placed = load_run(parent, ["name=elsewhere", f"runs_dir={parent.parent / 'there'}"], forks=True)
    assert fork(parent, placed, None) == parent.parent / "there" / "elsewhere"
    assert audit_run(parent.parent / "there" / "elsewhere").ok


TWO = ("rollout.group_size=4", "iterations=2", "checkpoint.keep=9")


def two_ranks(*arguments: str, at: At | None = None, answer: Path) -> list[int | None]:
    """Exit statuses; ranks that are not killed must find no error."""
    ended = run_ranks(2, [*arguments], *([at] if at else []), answer=answer)
    assert at or [each.error for each in ended] == [None] * 2
    return [each.exit_code for each in ended]


@pytest.fixture(scope="module")
def by_ranks(job: Job) -> Path:
    run = job.root / "ranks" / "run"
    arguments = job.arguments(run.name, *NFT, *TWO, f"runs_dir={run.parent}")
    two_ranks(*arguments, answer=job.root / "ranks.json")
    return run


@pytest.mark.timeout(600)
def test_ranks_that_were_killed_at_a_change_equal_those_that_were_not(job: Job, by_ranks: Path) -> None:
    changes, answer = ("iterations=3", "learner.learning_rate=0.01"), job.root / "ranks.json"
    whole, killed = copied(by_ranks, "whole"), copied(by_ranks, "killed")
    two_ranks(str(whole), *changes, answer=answer)
    assert -signal.SIGKILL in two_ranks(str(killed), *changes, at=At("os.rename /config.yaml"), answer=answer)
    assert -signal.SIGKILL in two_ranks(str(killed), *changes, at=At("work training", 1), answer=answer)
    two_ranks(str(killed), answer=answer)
    for place in (whole, killed):
        report = audit_run(place)
        assert report.ok, report.violations
        assert report.course == (
            "from iteration 2 on: iterations 2 to 3; learner.learning_rate 0.03 to 0.01",
        )
    assert equal(killed, whole)


@pytest.mark.timeout(600)
def test_a_fork_that_two_ranks_make_at_once_goes_on_as_its_parent(job: Job, by_ranks: Path) -> None:
    config = load_run(by_ranks, ["name=same"], forks=True)
    with ThreadPoolExecutor(2) as ranks:
        made = set(ranks.map(lambda _: fork(by_ranks, config, 1), range(2)))
    (same,) = made
    assert not list(same.parent.glob(".fork-*"))
    two_ranks(str(same), answer=job.root / "ranks.json")
    assert audit_run(same).course == ("from iteration 1 on: forked from run",)
    assert equal(same, by_ranks)


def equal(one: Path, other: Path) -> bool:
    """To the bit; a sharded checkpoint's files have times in them."""
    found, expected = outcome(one), outcome(other)
    same = (found.ledger, found.metrics) == (expected.ledger, expected.metrics)
    return same and largest_difference(one, other) == 0


RAY = ("fleet.driver=ray", "fleet.spot.notice_s=null", "fleet.spot.nodes=1")
ROUNDING = 1e-3
"""Of a LoRA weight, between a run in one process and one on Ray, whose batches are others."""


@pytest.mark.timeout(900)
def test_on_ray_a_change_whose_head_was_killed_and_a_fork_are_as_in_one_process(
    job: Job, tmp_path: Path
) -> None:
    job.train("process", *NFT, *TWO, "learner.learning_rate=0.001")
    begun = job.root / "process"
    whole, on_ray = copied(begun, "whole"), copied(begun, "on-ray")
    changes = ("iterations=3", "learner.learning_rate=0.0005")
    go_on(str(whole), *changes)
    arguments = [str(on_ray), *changes, *RAY]
    with running(on_ray, arguments) as it:
        it.wait_for("SELECT 1 FROM samples JOIN rollouts ON id = rollout WHERE iteration = 2")
        it.kill_head()
    with running(on_ray, arguments) as it:
        assert it.end(2 * PATIENCE_S) == 0, it.printed
    words = "from iteration 2 on: iterations 2 to 3; learner.learning_rate 0.001 to 0.0005"
    same = begun.parent / "same-on-ray"
    with running(same, ["--fork", str(begun), "--iteration", "1", "--name", same.name, *RAY]) as it:
        assert it.end(2 * PATIENCE_S) == 0, it.printed
    for run, expected, course in (
        (on_ray, whole, words),
        (same, begun, "from iteration 1 on: forked from process"),
    ):
        report = audit_run(run)
        assert report.ok, report.violations
        assert report.course == (course,)
        assert report.counts == audit_run(expected).counts
        assert largest_difference(run, expected) <= ROUNDING
