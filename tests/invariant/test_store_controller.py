"""The controller's records in the durable ledger: whatever it decides is accepted, audited and resumable."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from controller_world import TEST, TRAIN, World, start
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import Effect, WriteRecord
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.records import Record
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import SqliteLedger

SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None
GROUP_SIZE = 3


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        run_seed=draw(st.integers(0, 99)),
        iterations=draw(st.integers(1, 3)),
        prompts_per_iteration=draw(st.integers(1, 7)),  # more than there are prompts: one comes twice
        group_size=GROUP_SIZE,
        rollout_steps=3,
        evaluation=EvaluationConfig(steps=3, images_per_prompt=1, every=draw(st.integers(1, 2))),
        updates_per_batch=draw(st.integers(1, 2)),
        micro_batch_size=draw(st.integers(1, 4)),
        checkpoint_every=1,
        lease_s=20.0,
        cluster=ClusterPlan(start_s=20.0),
        max_drop_share=0.5,
    )


def appends(effects: Sequence[Effect]) -> list[list[tuple[int, Record]]]:
    """The records as a driver appends them: those of one event, or of a few, together."""
    runs = groupby(effects, key=lambda effect: isinstance(effect, WriteRecord))
    return [
        [(each.position, each.record) for each in run if isinstance(each, WriteRecord)]
        for are_records, run in runs
        if are_records
    ]


@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_stormy_runs_are_accepted_and_pass_the_audit(plan: Plan, seed: int) -> None:
    world = World(start(plan), seed, calm=False, failing=0.1).run()
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        with SqliteLedger(Path(name) / "ledger.sqlite") as ledger:
            ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
            for records in appends(world.effects):
                ledger.append(records)
            ledger.end_attempt(Ending.FINISHED if world.succeeded else Ending.FAILED, 0.0)
        report = audit(Path(name), AuditLimits(GROUP_SIZE, staleness_max=0))
    assert report.violations == ()
    counted, counts = world.controller.ledger, report.counts
    assert report.position == counted.position
    assert (counts.trained, counts.evaluated) == (counted.trained, counted.evaluated)
    assert counts.dropped == counted.dropped
    assert counts.rejected == counted.rejected.total()
    assert sum(counts.in_flight.values()) == counted.in_flight
    assert {purpose: number for purpose, number in counts.issued.items() if number} == counted.issued


@given(plan=plans(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_run_interrupted_anywhere_leaves_the_ledger_of_an_uninterrupted_one(
    plan: Plan, data: st.DataObject
) -> None:
    straight = World(start(plan), 0, calm=True).run()
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        with SqliteLedger(Path(name) / "straight.sqlite") as ledger:
            for records in appends(straight.effects):
                ledger.append(records)
            expected = (
                queries.digest(ledger.connection),
                queries.counts(ledger.connection),
                ledger.position(),
            )
        index, checkpoint = data.draw(st.sampled_from(straight.checkpoints))
        appended = appends(straight.effects)
        death = data.draw(st.integers(len(appends(straight.effects[:index])), len(appended)))
        with SqliteLedger(Path(name) / "ledger.sqlite") as ledger:
            for records in appended[:death]:
                ledger.append(records)
        snapshot = json.loads(json.dumps(checkpoint.snapshot))
        resumed = World(Controller.restore(plan, TRAIN, TEST, snapshot), 1, calm=True).run()
        with SqliteLedger(Path(name) / "ledger.sqlite") as ledger:
            attempt = ledger.begin_attempt(pid=2, host="h", workers={}, now_s=0.0)
            ledger.rollback(checkpoint.position, attempt)
            for records in appends(resumed.effects):
                ledger.append(records)
            assert (
                queries.digest(ledger.connection),
                queries.counts(ledger.connection),
                ledger.position(),
            ) == expected
