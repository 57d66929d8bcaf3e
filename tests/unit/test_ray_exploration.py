"""Idle exploration under a cluster's head: previews beside training choose the next iteration's seeds."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from head_world import RESERVED, SPOT, World, world

from spotlight.scheduler.effects import ScoreSamples
from spotlight.scheduler.policies.selection import SelectionPolicy, select
from spotlight.scheduler.types import DropReason, Purpose
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

IDLE = ("exploration={where: idle, seeds_per_prompt: 5}",)
WHOLE = ("exploration={seeds_per_prompt: 5}",)
"""Previews by current weights, with all of a rollout's steps."""
SEEDS = (
    "SELECT rollouts.purpose, iteration, prompt, seed, value FROM rollouts"
    " JOIN rewards ON rewards.rollout = rollouts.id AND name = 'reward'"
    " JOIN outcomes ON outcomes.rollout = rollouts.id AND kind IN ('explored', 'trained')"
)


def train_slowly(it: World) -> None:
    """The learner's micro-batches take as long as the previews beside them."""

    async def before(what: str) -> None:
        while what == "accumulate" and any(work.unscored for work in it.controller.work.extra):
            await asyncio.sleep(0.005)

    it.learner.before = before


def lose_at_second_step(it: World) -> None:
    it.when("step", it.lose, 2)


@pytest.mark.parametrize("loses_learner", [False, True])
def test_groups_are_what_previews_beside_training_chose(tmp_path: Path, loses_learner: bool) -> None:
    with world(tmp_path, *IDLE) as it:
        it.join(RESERVED, SPOT)
        train_slowly(it)
        if loses_learner:
            lose_at_second_step(it)
        it.run()
    assert it.head.error is None
    report = audit(tmp_path / "run", AuditLimits(group_size=2))
    assert report.ok, report.violations
    assert report.counts.trained == 3 * 2 * 2

    previews: dict[tuple[int, str], dict[int, float]] = {}
    trained: dict[tuple[int, str], set[int]] = {}
    with closing(queries.open_readonly(RunPaths(tmp_path / "run").ledger)) as connection:
        for purpose, iteration, prompt, seed, reward in connection.execute(SEEDS):
            if purpose == "explore":
                previews.setdefault((iteration, prompt), {})[seed] = reward
            else:
                trained.setdefault((iteration, prompt), set()).add(seed)
    assert {iteration for iteration, _ in previews} == {1, 2}  # nothing idles before the first
    assert len(previews) == 4
    for key, rewards in previews.items():
        assert 5 <= len(rewards) <= 16 * 2, "idle workers go on beyond what was planned, with an end"
        assert trained[key] == set(select(rewards, 2, SelectionPolicy.MAX_VARIANCE).seeds)

    rows = {
        row.iteration: row.values for row in read_metrics(tmp_path / "run") if "head/events" in row.values
    }
    assert "exploration/staleness" not in rows[0]
    for iteration in (1, 2):
        assert rows[iteration]["exploration/staleness"] == 1
        assert rows[iteration]["exploration/selection/chosen"] == 2
        assert rows[iteration]["exploration/window/cut_off"] == 0
    dropped = {name for kind, names in it.store.dropped if kind == "image" for name in names}
    assert {name for name in dropped if name.startswith("x")} >= {f"x000001-000-00{n}" for n in range(5)}


def test_previews_that_are_not_scored_in_time_are_dropped_and_seeds_are_random(tmp_path: Path) -> None:
    with world(tmp_path, *IDLE) as it:
        it.join(RESERVED, SPOT)
        inner = it.score

        def late(effect: ScoreSamples) -> None:
            inner(
                replace(
                    effect, rollouts=tuple(r for r in effect.rollouts if r.purpose is not Purpose.EXPLORE)
                )
            )

        it.score = late  # type: ignore[method-assign]
        it.run()
    assert it.head.error is None
    report = audit(tmp_path / "run", AuditLimits(group_size=2))
    assert report.ok, report.violations
    assert report.counts.trained == 3 * 2 * 2
    assert report.counts.explored == 0
    assert set(report.counts.dropped) == {DropReason.EXPLORATION_OVER}
    assert report.counts.dropped[DropReason.EXPLORATION_OVER] >= 2 * 2 * 5


@pytest.mark.parametrize("loses_learner", [False, True])
def test_previews_that_are_rollouts_are_trained_where_they_are_stored(
    tmp_path: Path, loses_learner: bool
) -> None:
    with world(tmp_path, *WHOLE) as it:
        it.join(RESERVED, SPOT)
        if loses_learner:
            lose_at_second_step(it)
        it.when("prepare", lambda: require_stored(it), 3)
        it.run()
    assert it.head.error is None
    report = audit(tmp_path / "run", AuditLimits(group_size=2))
    assert report.ok, report.violations
    assert report.counts.kept == report.counts.trained == 3 * 2 * 2
    assert all(address.name.startswith("x") for address in it.learner.stored.values())
    rows = [row.values for row in read_metrics(tmp_path / "run") if "head/events" in row.values]
    assert all("rollout/reward" in row for row in rows), "kept samples count in the means"
    assert loses_learner or [row["exploration/kept"] for row in rows] == [4, 4, 4]
    dropped = {name for kind, names in it.store.dropped if kind == "sample" for name in names}
    assert len({name for name in dropped if name[0] == "x"}) == 3 * 2 * 5, "what was trained is freed, too"
    with closing(queries.open_readonly(RunPaths(tmp_path / "run").ledger)) as connection:
        granted = connection.execute("SELECT DISTINCT rollout FROM leases WHERE rollout LIKE 't%'").fetchall()
    assert granted == [], "none is made again"


def test_the_audit_finds_a_preview_that_stopped_early_and_was_finished(tmp_path: Path) -> None:
    with world(tmp_path, *WHOLE) as it:
        it.join(RESERVED, SPOT)
        it.run()
    with closing(sqlite3.connect(RunPaths(tmp_path / "run").ledger)) as connection, connection:
        connection.execute("DROP TRIGGER outcomes_insert_only")
        (name,) = connection.execute(
            "SELECT rollout FROM outcomes WHERE kind = 'explored' LIMIT 1"
        ).fetchone()
        connection.execute(
            "UPDATE outcomes SET kind = 'dropped', reason = 'stopped_early', detail = '' WHERE rollout = ?",
            (name,),
        )
    violations = audit(tmp_path / "run", AuditLimits(group_size=2)).violations
    assert [violation.ids for violation in violations if violation.check == "stopped-early"] == [(name,)]


def require_stored(it: World) -> None:
    """What the learner is asked to train next has not been dropped."""
    dropped = {name for kind, names in it.store.dropped if kind == "sample" for name in names}
    wanted = {it.samples.address(rollout).name for rollout in it.controller.rollouts if rollout[0] == "t"}
    assert wanted.isdisjoint(dropped)


def test_the_audit_finds_a_sample_that_is_not_its_previews(tmp_path: Path) -> None:
    with world(tmp_path, *WHOLE) as it:
        it.join(RESERVED, SPOT)
        it.run()
    with closing(sqlite3.connect(RunPaths(tmp_path / "run").ledger)) as connection, connection:
        (kept,) = connection.execute("SELECT rollout FROM kept_previews LIMIT 1").fetchone()
        connection.execute(
            "UPDATE kept_previews SET preview = (SELECT id FROM rollouts WHERE purpose = 'explore'"
            " AND id NOT IN (SELECT preview FROM kept_previews) LIMIT 1) WHERE rollout = ?",
            (kept,),
        )
    violations = audit(tmp_path / "run", AuditLimits(group_size=2)).violations
    assert [violation.ids for violation in violations if violation.check == "kept"] == [(kept,)]
