"""A head killed at any moment: what the next attempt finds in the ledger adds up.

A kill is a copy of the run directory, taken after a write of the ledger or a commit of a checkpoint: that is
what SIGKILL leaves then. Another attempt takes each copy up.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from head_world import RESERVED, SPOT, World, world

from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Filler, Phase
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport, audit
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunPaths

OVERLAP = (
    "rollout.prompts_per_iteration=4",
    "rollout.group_size=6",
    "learner.micro_batch_size=6",
    "algorithm.advantage.std=group",
    "exploration={where: idle, seeds_per_prompt: 8}",
    "pipeline={axis: generation, slice_size: 3, baseline: slice, next_share: 0.5}",
)
TRAINING_S = 0.1
"""Of a micro-batch: far longer than anything else in this world."""
MICRO_BATCHES = 4
"""Of an iteration."""
LIMITS = AuditLimits(group_size=6, staleness_max=1)


def train_slowly(it: World) -> None:
    """Training takes its time; rollouts are made beside it, and previews beside training and checkpoints."""

    async def before(what: str) -> None:
        if what in ("accumulate", "save"):
            await asyncio.sleep(TRAINING_S)

    it.learner.before = before
    for checkpoint in (1, 2):
        it.when("save", lambda: repeat_last_report(it), checkpoint)


def repeat_last_report(it: World) -> None:
    """A record beside the checkpoint that does not count it: the report of a lease that ended is refused."""
    worker = next(each for each in reversed(it.workers) if each.granted)
    lease, rollouts = worker.granted[-1].lease, worker.granted[-1].rollouts
    names = tuple(rollout.id for rollout in rollouts)
    done = ev.LeaseCompleted(lease.worker, lease.id, lease.epoch, names, rollouts[0].version)
    it.store.deliver_now(done, it.learner.digest(rollouts[0].version))  # it may hold newer ones now


@pytest.fixture
def kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of the run directory, one for each moment of its life."""
    copies: list[Path] = []

    def copied(source: str, target: str) -> None:
        with suppress(FileNotFoundError) if Path(source).name.startswith(".writing-") else nullcontext():
            shutil.copy2(source, target)  # a thread writes pictures meanwhile

    def copy() -> None:
        copies.append(tmp_path / f"killed-{len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1], copy_function=copied)

    def copied_after(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            copy()
            return result

        return call

    @contextmanager
    def writer(store: CheckpointStore, *args: Any) -> Iterator[Path]:
        with commit(store, *args) as directory:
            yield directory
        copy()

    commit = CheckpointStore.writer
    monkeypatch.setattr(CheckpointStore, "writer", writer)
    for name in ("append", "spend", "fill", "rollback"):
        monkeypatch.setattr(SqliteLedger, name, copied_after(getattr(SqliteLedger, name)))
    return copies


def taken_up(run: Path) -> tuple[int, AuditReport]:
    """Iterations that the newest checkpoint holds; the audit once an attempt undid what came after."""
    newest = CheckpointStore(RunPaths(run).checkpoints, keep=9).newest_valid()
    with SqliteLedger(RunPaths(run).ledger) as ledger:
        attempt = ledger.begin_attempt(pid=1, host="here", workers={}, now_s=0.0)
        ledger.rollback(newest.header.ledger_position if newest else 0, attempt)
    return (newest.header.iteration if newest else 0), audit(run, LIMITS)


def test_what_a_kill_leaves_adds_up_whenever_it_comes(
    tmp_path: Path, kills: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, *OVERLAP) as it:
        it.join(RESERVED, SPOT)
        train_slowly(it)
        it.run()
    monkeypatch.undo()
    assert it.head.error is None
    trained_s: dict[int, set[float]] = {}
    for copy in kills:
        iterations, report = taken_up(copy)
        assert report.ok, (copy, report.violations)
        trained_s.setdefault(iterations, set()).add(report.gpu_seconds_by_phase[Phase.TRAINING])
        filled_s = report.filled_s.get(Filler.TRAINING, 0.0)
        assert (filled_s > 0) == (iterations > 0)
    assert list(trained_s) == [0, 1, 2, 3]
    for iterations, found_s in trained_s.items():
        # All training that the checkpoint holds, and no other, whenever the head died.
        assert len(found_s) == 1
        assert min(found_s) >= iterations * MICRO_BATCHES * TRAINING_S


def test_training_that_no_checkpoint_holds_is_lost_also_to_a_head_that_lives(tmp_path: Path) -> None:
    with world(tmp_path, *OVERLAP) as it:
        it.join(RESERVED, SPOT)
        train_slowly(it)
        it.when("save", it.lose)
        it.run()
    assert it.learner.life == 2
    report = audit(tmp_path / "run", LIMITS)
    assert report.ok, report.violations
    with closing(queries.open_readonly(RunPaths(tmp_path / "run").ledger)) as connection:
        spent = dict(
            connection.execute(
                "SELECT phase, SUM(seconds) FROM gpu_seconds"
                " WHERE 'training' IN (phase, was_phase) GROUP BY phase"
            )
        )
    assert spent["lost"] >= MICRO_BATCHES * TRAINING_S
    assert spent["training"] >= 3 * MICRO_BATCHES * TRAINING_S


def test_the_audit_finds_more_filled_than_worked(tmp_path: Path) -> None:
    with world(tmp_path, *OVERLAP) as it:
        it.join(RESERVED, SPOT)
        it.run()
    with closing(sqlite3.connect(RunPaths(tmp_path / "run").ledger)) as connection, connection:
        connection.execute(
            "UPDATE gpu_seconds SET phase = 'lost', was_phase = phase WHERE phase = 'training'"
        )
        connection.execute(
            "UPDATE filled_seconds SET seconds = 9.0 WHERE iteration = 1 AND filler = 'training'"
        )
    (violation, other) = audit(tmp_path / "run", LIMITS).violations
    assert other.check == "same-ledger"
    assert (violation.check, violation.ids) == ("filled", ("1",))
