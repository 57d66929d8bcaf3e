"""Overlap under a cluster's head: rollouts that begin early, and GPUs of the learner that roll out."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from head_world import BOTH, RESERVED, SPOT, World, world
from test_ray_exploration import lose_at_second_step

from spotlight.cluster.sample_scoring import VALUES
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

OVERLAP = (
    "iterations=4",
    "rollout.prompts_per_iteration=4",
    "rollout.group_size=6",
    "learner.micro_batch_size=6",
    "algorithm.advantage.std=group",
)
GAP = "pipeline={axis: generation, slice_size: 3, baseline: slice}"
EARLY = "pipeline.next_share=0.5"
TRAINERS = "pipeline.trainers_generate=true"
MADE = (
    "SELECT worker, rollouts.version < iteration, COUNT(*) FROM rollouts JOIN samples ON rollout = id"
    " WHERE purpose = 'train' GROUP BY 1, 2"
)
"""One optimizer step an iteration: versions are numbers of iterations."""


def finished(it: World, root: Path) -> Counter[tuple[str, bool]]:
    """Train samples by worker, and whether they were made early; the run kept its promises."""
    assert it.head.error is None
    report = audit(root / "run", AuditLimits(group_size=6, staleness_max=1))
    assert report.ok, report.violations
    assert report.counts.trained == 4 * 4 * 6
    with closing(queries.open_readonly(RunPaths(root / "run").ledger)) as connection:
        return Counter({(worker, bool(early)): count for worker, early, count in connection.execute(MADE)})


def hold_training(it: World) -> None:
    """The learner trains until nothing waits that may be made meanwhile."""

    async def before(what: str) -> None:
        while what == "accumulate" and it.controller.queue.waiting:
            await asyncio.sleep(0.005)

    it.learner.before = before


@pytest.mark.parametrize("axis", [(), (GAP,)])
def test_rollouts_of_the_next_iteration_outlive_the_sweep_and_count_in_their_own_row(
    tmp_path: Path, axis: tuple[str, ...]
) -> None:
    with world(tmp_path, *OVERLAP, EARLY, *axis) as it:
        it.join(RESERVED, SPOT)
        hold_training(it)
        it.run()
    made = finished(it, tmp_path)
    assert made["s/0", True] == 3 * 2 * 6  # half of the groups of each iteration but the first
    rows = [row.values for row in read_metrics(tmp_path / "run") if "head/events" in row.values]
    with closing(queries.open_readonly(RunPaths(tmp_path / "run").ledger)) as connection:
        means = connection.execute(
            "SELECT AVG(value) FROM rewards JOIN rollouts ON id = rollout WHERE purpose = 'train' AND name ="
            " 'reward' GROUP BY iteration ORDER BY iteration"
        ).fetchall()
    assert [row["rollout/reward"] for row in rows] == [pytest.approx(mean) for (mean,) in means]
    assert [row["pipeline/early_samples"] for row in rows] == [0, 12, 12, 12]
    # What is being made of the next iteration when a checkpoint is committed stays in the blob store.
    for number, (kind, kept) in enumerate(it.store.swept):
        assert kind in VALUES
        following = number // len(VALUES) + 1
        early = {f"t{following:06d}-{slot:03d}-{member:03d}" for slot in range(2) for member in range(6)}
        assert following == 4 or early <= kept


def test_gpus_of_the_learner_make_what_ends_the_iteration_earlier(tmp_path: Path) -> None:
    with world(tmp_path, *OVERLAP, TRAINERS, GAP) as it:
        it.join(BOTH, SPOT)
        it.run()
    made = finished(it, tmp_path)
    assert made["b/0", False] > 0
    assert not [key for key in made if key[1]]


def test_gpus_of_the_learner_alone_make_and_train_everything(tmp_path: Path) -> None:
    with world(tmp_path, *OVERLAP, TRAINERS, EARLY) as it:
        it.join(BOTH)
        it.run()
    made = finished(it, tmp_path)
    assert set(made) == {("b/0", False)}, "they begin nothing that no optimizer step waits for"


def test_a_learner_that_is_lost_makes_early_rollouts_again(tmp_path: Path) -> None:
    with world(tmp_path, *OVERLAP, EARLY, GAP) as it:
        it.join(RESERVED, SPOT)
        hold_training(it)
        lose_at_second_step(it)
        it.run()
    assert it.learner.life == 2
    assert finished(it, tmp_path)["s/0", True] > 0
