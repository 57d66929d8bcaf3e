"""A reward that compares a group gets each group once and whole, though leases cut across groups."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from main_job import NFT, Job, clean_audit, run_ranks

from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight_rewards.base.errors import ConfigError

RANKS = "rewards=[{name: 'reward_functions:brightest'}]"
SIZES = ("iterations=2", "rollout.group_size=4", "rollout.batch_size=3", "evaluation.every=1")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_groups_are_scored_whole_and_the_ledger_says_of_how_many(job: Job, ranks: int) -> None:
    run = job.root / f"groups-{ranks}"
    if ranks == 1:
        recorded = job.train(run.name, *NFT, *SIZES, RANKS)
        assert recorded.result is not None
        assert recorded.result.finished
    else:  # leases cut across groups, and ranks across leases
        ended = run_ranks(ranks, job.arguments(run.name, *NFT, *SIZES, RANKS), answer=run)
        assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * ranks
    report = clean_audit(run, AuditLimits(group_size=4))
    assert report.counts.trained == 2 * 2 * 4
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT rollout, name, value FROM rewards").fetchall()
    values: dict[str, dict[str, dict[str, float]]] = {}
    for rollout, name, value in rows:
        values.setdefault(rollout.rpartition("-")[0], {}).setdefault(name, {})[rollout] = value
    for group, curves in values.items():
        size = 4 if group.startswith("t") else 2
        assert set(curves["brightest/members"].values()) == {float(size)}, group
        assert set(curves["brightest/missing"].values()) == {0.0}
        assert max(curves["brightest"].values()) <= size - 1


def test_previews_which_are_scored_as_they_come_are_refused(job: Job) -> None:
    exploration = "exploration={seeds_per_prompt: 8}"
    with pytest.raises(ConfigError, match=r"'brightest', which compares the samples of a group, with explor"):
        job.train("explored-groups", *NFT, RANKS, exploration)
