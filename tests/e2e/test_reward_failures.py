"""Rewards that fail end in a clear error or in recorded drops, never in a zero."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from main_job import GRPO, NFT, Job, clean_audit

from spotlight.scheduler.types import DropReason
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.run_summary import read_summary

MOODS = {
    "raise": (DropReason.REWARD_ERROR, "cannot bear this picture"),
    "hang": (DropReason.REWARD_TIMEOUT, "within 1 s"),
    "nan": (DropReason.REWARD_NOT_FINITE, "returned nan"),
}
EACH = ["nan", *(pytest.param(mood, marks=pytest.mark.slow) for mood in MOODS if mood != "nan")]
"""How each failure gets its reason is test_rewards_failures.py's; what a run does with one is tested here."""


def prompts_file(job: Job, name: str, *moods: str) -> Path:
    """GenEval metadata, a prompt a mood; the empty mood is a good one."""
    path = job.root / f"{name}.jsonl"
    lines = [{"prompt": f"{name} {number}", "mood": mood} for number, mood in enumerate(moods)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(job: Job, *moods: str, policy: str = "drop", most: float = 1.0) -> list[str]:
    train = prompts_file(job, "-".join(("train", *moods)).replace(" ", "-"), *moods)
    return [
        f"data.train={train}",
        f"data.test={prompts_file(job, 'calm', '')}",
        "rewards=[{name: 'reward_functions:moody', deadline_s: 1, retries: 0, isolation_s: 60}]",
        f"reward_policy={{on_failure: {policy}, max_drop_share: {most}}}",
        "rollout.group_size=2",
        "iterations=1",
        "evaluation.prompts=null",
    ]


def audited(job: Job, name: str, group_size: int = 2) -> AuditReport:
    return clean_audit(job.root / name, AuditLimits(group_size=group_size))


def row(run: Path, query: str) -> tuple[object, ...]:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        found: tuple[object, ...] = connection.execute(query).fetchone()
        return found


@pytest.mark.parametrize("mood", EACH)
def test_with_stop_the_first_failure_ends_the_run(job: Job, mood: str) -> None:
    reason, message = MOODS[mood]
    name = f"stop-{mood}"
    recorded = job.train(name, *NFT, *arguments(job, "", mood, policy="stop"))
    assert recorded.result is not None
    assert not recorded.result.finished
    assert not recorded.result.stopped
    assert recorded.error.startswith("t000000-00")
    assert reason.value in recorded.error
    assert message in recorded.error
    assert "reward_policy.on_failure=drop" in recorded.error
    report = audited(job, name)
    assert [bill.ended for bill in report.attempts] == [Ending.FAILED]
    assert report.counts.trained == report.counts.optimizer_steps == 0
    assert report.counts.dropped == {reason: 1}


@pytest.mark.parametrize("mood", EACH)
def test_with_drop_a_failure_is_recorded_with_its_reason_and_never_a_zero(job: Job, mood: str) -> None:
    reason, _ = MOODS[mood]
    name = f"drop-{mood}"
    recorded = job.train(name, *NFT, *arguments(job, "", mood))
    assert recorded.result is not None
    assert recorded.result.finished
    report = audited(job, name)
    assert report.counts.train_dropped == {reason: 2}
    assert report.counts.trained == 2
    (said,) = (note for note in recorded.notes if reason.value in note)
    assert " and 1 more are not scored: " in said
    run = job.root / name
    assert row(run, "SELECT COUNT(*) FROM rewards WHERE value < 1") == (0,)
    assert row(run, "SELECT COUNT(DISTINCT rollout) FROM rewards") == (2 + 2 * 2,)
    assert read_summary(run / "summary.json").samples.dropped == {reason: 2}


def test_a_group_that_becomes_too_small_is_left_out(job: Job) -> None:
    overrides = [*arguments(job, "", "nan but first"), "rollout.group_size=4"]
    job.train("small", *NFT, *overrides)
    report = audited(job, "small", group_size=4)
    assert report.counts.train_dropped == {DropReason.REWARD_NOT_FINITE: 3, DropReason.GROUP_TOO_SMALL: 1}
    assert report.counts.trained == 4


def test_groups_of_different_sizes_are_trained(job: Job) -> None:
    """A group loses a sample, so the micro-batches of both updates are of other sizes than planned."""
    overrides = [*arguments(job, "", "nan but first", ""), "rollout.prompts_per_iteration=3"]
    sizes = ["rollout.group_size=3", "learner.updates_per_batch=3", "learner.micro_batch_size=3"]
    job.train("uneven", *GRPO, *overrides, *sizes)
    report = audited(job, "uneven", group_size=3)
    assert report.counts.train_dropped == {DropReason.REWARD_NOT_FINITE: 2, DropReason.GROUP_TOO_SMALL: 1}
    assert (report.counts.trained, report.counts.optimizer_steps) == (6, 2)


def test_more_drops_than_allowed_stop_the_run(job: Job) -> None:
    recorded = job.train("too-many", *GRPO, *arguments(job, "", "nan", most=0.2))
    assert "2 of 6 samples were dropped, more than reward_policy.max_drop_share = 0.2" in recorded.error
    assert "reward_not_finite" in recorded.error
    assert audited(job, "too-many").counts.trained == 0


def test_when_no_group_is_left_the_run_says_so(job: Job) -> None:
    recorded = job.train("nothing-left", *NFT, *arguments(job, "nan", "nan but first"))
    assert "no group kept two scored samples" in recorded.error


def test_when_nothing_can_be_judged_the_run_says_so(job: Job) -> None:
    test = f"data.test={prompts_file(job, 'unjudged', 'nan')}"
    recorded = job.train("unjudged", *NFT, *arguments(job, "", ""), test)
    assert "not one evaluation sample was scored" in recorded.error
