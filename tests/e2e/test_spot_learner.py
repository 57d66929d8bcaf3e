"""A learner on spot nodes, on real processes: one of them is killed, another noticed, in a single attempt; or
there is none for a while, and it takes a node on demand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from main_job import Job, clean_audit, lora
from ray_job import PATIENCE_S, Running, running
from test_ray_run import LIMITS, RAY, REWARD_TOLERANCE, SMALL, number_of, scores, trained, validations

from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_audit import AuditReport
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.run_summary import read_summary

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ITERATIONS = 28
ALL_SPOT = (
    *("fleet.learner_placement=spot", f"iterations={ITERATIONS}"),
    # Time enough, on any machine, to form a second learner and to move when the first has nothing unsaved.
    *("fleet.spot.notice_s=600", "fleet.drain_margin_s=2"),
)
TRACE = "# spotlight trace horizon_s=60.0\ntime_s,event,node,gpus\n" + "".join(
    f"{0.1 * number},add,spot-{number},1\n" for number in range(1, 5)
)
PLACED = "SELECT detail FROM incidents WHERE kind = 'learner_placed' ORDER BY id"


def place_of(it: Running, times: int) -> int:
    """Number of the spot node on which the learner is, when it was placed so often."""
    return number_of(str(it.wait_for(PLACED, times)[-1][0]).partition(" ")[0] + "/0")


@pytest.fixture(scope="module")
def moved(job: Job) -> tuple[Path, str]:
    trace = job.root / "all-spot.csv"
    trace.write_text(TRACE)
    run = job.root / "all-spot"
    with running(run, job.arguments("all-spot", *SMALL, *RAY, *ALL_SPOT, f"fleet.spot.trace={trace}")) as it:
        it.wait_for("SELECT 1 FROM optimizer_steps", 2)
        first = place_of(it, 1)
        it.kill(first)
        second = place_of(it, 2)
        assert second != first
        it.wait_for("SELECT 1 FROM optimizer_steps", 4)
        it.notice(second)
        third = place_of(it, 3)
        assert third not in (first, second)
        it.kill(second)
        assert it.end(2 * PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
        return run, it.printed


@pytest.fixture(scope="module")
def report(moved: tuple[Path, str]) -> AuditReport:
    return clean_audit(moved[0], LIMITS)


def test_it_trains_to_the_end_in_one_attempt_without_reserved_slots(
    moved: tuple[Path, str], report: AuditReport
) -> None:
    run, printed = moved
    assert read_summary(run / "summary.json").samples.trained == 8 * ITERATIONS
    assert lora(run)
    assert [bill.ended for bill in report.attempts] == [Ending.FINISHED]
    incidents = read_history(run).incidents
    assert incidents[Incident.LEARNER_PLACED, True] == 3
    assert incidents[Incident.LEARNER_LOST, False] == 1, printed
    assert (Incident.NODE_LOST, False) not in incidents


@pytest.fixture(scope="module")
def inline(job: Job) -> Path:
    job.train("inline-all-spot", *SMALL, f"iterations={ITERATIONS}")
    return job.root / "inline-all-spot"


def require_same(run: Path, other: Path, report: AuditReport) -> None:
    ours, theirs = scores(run), scores(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value == pytest.approx(theirs[key], abs=REWARD_TOLERANCE), key
    assert validations(run) == pytest.approx(validations(other), abs=REWARD_TOLERANCE)
    assert trained(run) == trained(other)
    expected = clean_audit(other, LIMITS).counts
    assert replace(report.counts, rejected=0) == expected, "what is undone is rejected if it comes late"


def test_it_is_formed_of_workers_that_hold_the_model(moved: tuple[Path, str]) -> None:
    logs = sorted((moved[0] / "attempts").glob("learner-*-rank-0.log"))
    first, *later = [log.read_text().splitlines()[0] for log in logs]
    assert "which was a worker" not in first
    assert len(later) == 2
    assert all(line.endswith("which was a worker") for line in later)


def test_where_the_learner_was_changes_rounding_only(
    inline: Path, moved: tuple[Path, str], report: AuditReport
) -> None:
    require_same(moved[0], inline, report)


def test_without_spot_nodes_it_takes_one_on_demand_and_gives_it_back(job: Job, inline: Path) -> None:
    trace = job.root / "gap.csv"
    trace.write_text(
        "# spotlight trace horizon_s=400.0\ntime_s,event,node,gpus\n"
        + "".join(f"0.{number},add,spot-{number},1\n" for number in (1, 2))
        + "".join(f"180.{number},add,spot-{number},1\n" for number in (3, 4))
    )
    run = job.root / "gap"
    settings = (
        *("fleet.learner_placement=spot_then_on_demand", f"iterations={ITERATIONS}"),
        *("fleet.on_demand.after_s=25", "fleet.on_demand.back_after_s=3", f"fleet.spot.trace={trace}"),
        *("fleet.spot.notice_s=0", "fleet.drain_margin_s=2", "fleet.price_usd_h=4"),
    )
    with running(run, job.arguments("gap", *SMALL, *RAY, *settings)) as it:
        it.wait_for("SELECT 1 FROM optimizer_steps", 2)
        for number in (1, 2):
            it.kill(number)
        decided = it.wait_for("SELECT detail FROM incidents WHERE kind = 'on_demand' ORDER BY id", 2)
        assert it.end(2 * PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
    assert [str(row[0]).partition(":")[0] for row in decided] == ["take", "leave"], it.printed
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.FINISHED]
    incidents = read_history(run).incidents
    assert incidents[Incident.LEARNER_LOST, False] == 1, it.printed
    assert incidents[Incident.LEARNER_PLACED, True] == 3, "spot, on demand, spot"
    assert incidents[Incident.NODE_RETURNED, False] == 1
    assert incidents[Incident.NODE_LOST, False] == 1, "the node on demand was stopped"
    require_same(run, inline, report)


def test_it_grows_and_is_formed_again_with_as_many_ranks_as_there_is_room_for(job: Job, inline: Path) -> None:
    trace = job.root / "ranks.csv"
    trace.write_text(TRACE)
    run = job.root / "ranks"
    ranks = ("fleet.learner_ranks=2", "fleet.learner_ranks_min=1", "fleet.learner_grows_after_s=1")
    arguments = job.arguments("ranks", *SMALL, *RAY, *ALL_SPOT, *ranks, f"fleet.spot.trace={trace}")
    with running(run, arguments) as it:
        it.wait_for(PLACED, 2)
        it.kill(place_of(it, 2))  # three nodes are left: two train, one rolls out
        it.kill(place_of(it, 3))  # two are left
        it.wait_for(PLACED, 4)
        assert it.end(2 * PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
        placed = [str(row[0]) for row in it.ask(PLACED)]
    assert [detail.count(" at $") for detail in placed] == [1, 2, 2, 1], it.printed
    assert [detail.endswith("with 1 of 2 ranks") for detail in placed] == [True, False, False, True]
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.FINISHED]
    assert read_history(run).incidents[Incident.LEARNER_LOST, False] == 2, "growing loses nothing"
    require_same(run, inline, report)
