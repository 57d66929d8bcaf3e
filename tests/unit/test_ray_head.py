"""The head's own rules, with everything remote in the test's hands: what is refused, undone, and final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from head_world import PICTURE, RESERVED, SPOT, World, world

from spotlight.cluster.blobs.blob_server import TRACE
from spotlight.cluster.remote_calls import AbandonedError, RayLostError
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase, Purpose
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport, audit
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import StoreError

LIMITS = AuditLimits(group_size=2)
TRAINED = 3 * 2 * 2
LENIENT = ("reward_policy={on_failure: drop, max_drop_share: 1.0}",)


def committed(root: Path) -> int:
    newest = CheckpointStore(RunPaths(root / "run").checkpoints, keep=9).newest_valid()
    return newest.header.iteration if newest else 0


def clean(root: Path) -> AuditReport:
    report = audit(root / "run", LIMITS)
    assert report.ok, report.violations
    assert not list(root.rglob(".writing-*"))
    with closing(queries.open_readonly(RunPaths(root / "run").ledger)) as connection:
        made = "SELECT COUNT(DISTINCT rollout) FROM samples JOIN leases USING (rollout, worker, epoch)"
        assert connection.execute(made).fetchone() == (report.counts.finished,)
    return report


def run(root: Path, prepare: object = None) -> World:
    with world(root) as it:
        it.join(RESERVED, SPOT)
        if callable(prepare):
            prepare(it)
        it.run()
    assert it.head.error is None
    return it


def test_a_run_goes_to_its_end(tmp_path: Path) -> None:
    it = run(tmp_path)
    report = clean(tmp_path)
    assert report.finished
    assert report.counts.trained == TRAINED
    assert committed(tmp_path) == 3
    assert it.learner.life == 1
    trace = RunPaths(tmp_path / "run").profile / "rollout.json.gz"
    assert trace.read_bytes() == PICTURE.data, "what a worker stored"
    assert it.store.dropped.count((TRACE, ("rollout",))) == 1
    assert it.notes.count(f"trace of rollout steps: {trace}") == 1
    assert it.learner.version == 3
    assert report.gpu_seconds_by_phase[Phase.LOST] < 1
    rows = [row.values for row in read_metrics(tmp_path / "run")]
    speeds = [row for row in rows if "throughput/rollout_mfu" in row]
    assert len(speeds) == 3, rows
    for row in speeds:
        assert row["throughput/rollout_tokens_s"] == 50
        assert row["throughput/rollout_tflop_s"] == pytest.approx(2)
        assert row["throughput/rollout_mfu"] == pytest.approx(0.25)


def test_samples_of_other_weights_are_refused_and_their_maker_ends(tmp_path: Path) -> None:
    def prepare(it: World) -> None:
        it.liars = 1

    it = run(tmp_path, prepare)
    assert clean(tmp_path).counts.trained == TRAINED
    liar, honest = it.workers
    assert liar.killed
    assert honest.order.epoch > liar.order.epoch
    (note,) = [note for note in it.notes if "other weig" in note]
    assert "its samples are refused, its process is restarted" in note
    assert read_history(tmp_path / "run").incidents[Incident.WORKER_CRASHED, True] == 1


def test_whether_anything_rolls_out_is_looked_at_whenever_a_node_comes_or_goes(tmp_path: Path) -> None:
    def prepare(it: World) -> None:
        def lose() -> None:
            it.put_soon(ev.NodeLost(SPOT.id))
            it.join(SPOT)

        it.when("step", lose)

    it = run(tmp_path, prepare)
    assert it.nodes.rolling == [False, True, False, True]
    assert f"{SPOT.id} is gone; nodes left: 1" in it.notes
    assert clean(tmp_path).counts.trained == TRAINED


def test_a_learner_lost_before_the_run_began_is_started_again_from_the_same(tmp_path: Path) -> None:
    it = run(tmp_path, lambda it: it.when("send_conditions", it.lose))
    assert it.learner.restored == [None, None]
    assert clean(tmp_path).counts.trained == TRAINED


@pytest.mark.parametrize("what", ["prepare", "accumulate", "step", "finish_batch", "publish", "take_log"])
def test_a_learner_lost_at_work_goes_back_to_the_last_checkpoint(tmp_path: Path, what: str) -> None:
    it = run(tmp_path, lambda it: it.when(what, it.lose, 2))
    assert it.learner.life == 2
    (_, again) = it.learner.restored
    assert again is not None
    assert "iteration-000001" in str(again)
    report = clean(tmp_path)
    assert report.counts.trained == TRAINED
    assert it.learner.version == 3
    assert read_history(tmp_path / "run").incidents[Incident.LEARNER_LOST, False] == 1


def test_a_checkpoint_whose_learner_is_lost_is_never_committed(tmp_path: Path) -> None:
    seen: list[int] = []

    def prepare(it: World) -> None:
        it.when("save", it.lose)
        it.when("restore", lambda: seen.append(committed(tmp_path)), 2)

    it = run(tmp_path, prepare)
    assert seen == [0]
    assert it.learner.restored == [None, None]
    assert clean(tmp_path).counts.trained == TRAINED
    assert committed(tmp_path) == 3


MOVES = "fleet.learner_placement=spot"
LEARNER = Node(NodeId("l"), NodeKind.SPOT, 1, "cpu", 0.02, False, True)


def test_a_learner_that_moves_is_saved_behind_rollouts_and_a_lost_step_takes_the_same_samples(
    tmp_path: Path,
) -> None:
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)
        it.when("save", lambda: it.lose("killed"), 2)
        it.run()
    assert it.learner.restored[0] is None
    assert "iteration-000001" in str(it.learner.restored[1])
    assert len(it.learner.restored) == 2
    report = clean(tmp_path)
    assert report.counts.trained == TRAINED
    assert committed(tmp_path) == 3
    granted = [each.id for worker in it.workers for grant in worker.granted for each in grant.rollouts]
    second = [name for name in granted if name.startswith("t000001")]
    assert sorted(second) == sorted(set(second)), "its samples were there still"
    trained = [row.iteration for row in read_metrics(tmp_path / "run") if "head/events" in row.values]
    assert trained == [0, 1, 2], "rows of what was undone are gone"


def test_a_notice_moves_the_learner_and_nothing_is_undone(tmp_path: Path) -> None:
    other = replace(LEARNER, id=NodeId("m"))
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)

        def notice() -> None:
            it.join(other)
            it.put_soon(ev.NodeNoticed(LEARNER.id, time.monotonic() + 1000.0))

        it.when("publish", notice, 1)
        it.when("restore", lambda: it.put_soon(ev.NodeLost(LEARNER.id)), 2)
        it.run()
    assert len(it.learner.restored) == 2
    assert it.learner.asked.count("form_second") == 1
    assert it.learner.asked.count("step") == 3, "nothing was trained twice"
    report = clean(tmp_path)
    assert report.counts.trained == TRAINED
    assert Incident.LEARNER_LOST not in {kind for kind, _ in read_history(tmp_path / "run").incidents}


OTHER = replace(LEARNER, id=NodeId("m"))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0)


def test_a_learner_at_work_whose_node_stops_is_ended_and_what_it_did_is_undone(tmp_path: Path) -> None:
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)
        learner = it.controller.learner

        async def before(what: str) -> None:
            if what == "prepare" and not learner.preparations:
                it.inbox.put(ev.NodeJoined(OTHER))
                it.inbox.put(ev.NodeNoticed(LEARNER.id, time.monotonic() + 1000.0))
                await until(lambda: learner.prepared)
            if what == "accumulate" and learner.prepared:
                it.inbox.put(ev.NodeNoticed(LEARNER.id, time.monotonic()))
                await until(lambda: not learner.up)

        it.learner.before = before
        it.when("restore", lambda: it.inbox.put(ev.NodeLost(LEARNER.id)), 2)
        it.run()
    assert it.controller.cluster.recoveries[Recovery.LEARNER_EVICTED] == 1
    assert len(it.learner.restored) == 2
    assert clean(tmp_path).counts.trained == TRAINED


def test_processes_of_a_machine_that_changes_its_role_wait_to_be_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)
        it.nodes.enter(SPOT)
        it.nodes.spares = SimpleNamespace(release=lambda *which: done.append(which))
        monkeypatch.setattr(WorkerPool, "release", lambda _, nodes: ([*nodes, "able"], ["unfit"]))
        monkeypatch.setattr(it.learner, "leave", done.append, raising=False)
        trains = replace(SPOT, id=NodeId("part"), trains=True, rolls_out=False)
        it.head._assign(ef.AssignRoles(SPOT.id, (trains,)))
        assert done == [("ray of s", [SPOT.id, "able"], ["unfit"])]
        it.head._assign(ef.AssignRoles(SPOT.id, (SPOT,)))
        # Whatever waits there to be the learner goes: its slots are for workers again.
        assert done[1:] == [("ray of s", ["part", "able"], ["unfit"]), "ray of s"]


def test_a_notice_before_the_run_began_moves_the_learner_once_it_has(tmp_path: Path) -> None:
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)

        async def before(what: str) -> None:
            if what == "send_conditions":
                it.inbox.put(ev.NodeJoined(OTHER))
                it.inbox.put(ev.NodeNoticed(LEARNER.id, time.monotonic() + 1000.0))
                await until(lambda: OTHER.id in it.controller.cluster.hosts)

        it.learner.before = before
        it.when("restore", lambda: it.inbox.put(ev.NodeLost(LEARNER.id)), 2)
        it.run()
    assert it.learner.asked.count("form_second") == 1
    assert len(it.learner.restored) == 2
    assert clean(tmp_path).counts.trained == TRAINED


def test_a_second_learner_that_does_not_start_is_formed_when_another_node_comes(tmp_path: Path) -> None:
    third = replace(LEARNER, id=NodeId("t"))
    with world(tmp_path, MOVES) as it:
        it.join(LEARNER, SPOT)
        form, failed = it.learner.form_second, []

        async def form_second() -> None:
            if not failed:
                failed.append(1)
                it.join(third)
                raise AbandonedError("form_second")
            await form()

        it.learner.form_second = form_second  # type: ignore[method-assign]

        def notice() -> None:
            it.join(OTHER)
            it.put_soon(ev.NodeNoticed(LEARNER.id, time.monotonic() + 1000.0))

        it.when("publish", notice, 1)
        it.when("restore", lambda: [it.put_soon(ev.NodeLost(node.id)) for node in (LEARNER, OTHER)], 2)
        it.run()
    assert failed
    assert it.learner.asked.count("form_second") == 1
    assert clean(tmp_path).counts.trained == TRAINED


@pytest.mark.parametrize(("moves", "moment"), [(True, "before the end"), (False, "after the end")])
def test_a_learner_lost_in_the_last_evaluation_is_restored_for_the_export(
    tmp_path: Path, moves: bool, moment: str
) -> None:
    with world(tmp_path, *([MOVES] if moves else [])) as it:
        node = LEARNER if moves else RESERVED
        it.join(node, SPOT)
        score, lost = it.score, []

        def lose() -> None:
            lost.append(1)
            it.inbox.put(ev.NodeLost(node.id))
            it.lose()

        def lose_it_first(effect: ef.ScoreSamples) -> None:
            if lost or effect.rollouts[0].iteration < 3:
                score(effect)
            else:
                lose()  # this node and these scores never come back

        def evaluated(iteration: int, row: object) -> None:
            if iteration == 3:
                lose()

        if moment == "before the end":
            it.score = lose_it_first  # type: ignore[method-assign]
        else:
            it.head.observer.evaluated = evaluated  # type: ignore[method-assign]
        assert it.run() == it.learner.directory
    assert len(it.learner.restored) == 2
    assert it.learner.asked.count("export") == 1
    assert clean(tmp_path).counts.trained == TRAINED


def test_a_restore_that_was_ordered_before_a_later_loss_starts_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as it:
        it.join(RESERVED, SPOT)
        it.when("publish", lambda: it.head.learner.restore(0, it.controller.cluster.lineage - 1), 2)
        it.run()
    assert it.learner.life == 1


@pytest.mark.parametrize(("asked", "every", "saved"), [("prepare", 1, 1), ("prepare", 9, 1), ("step", 9, 2)])
def test_a_stop_comes_where_a_resume_is_exact(tmp_path: Path, asked: str, every: int, saved: int) -> None:
    with world(tmp_path, f"checkpoint.every={every}") as it:
        it.join(RESERVED, SPOT)
        it.when(asked, it.head.request_stop, 2)
        it.run()
        assert it.head.stopped
    assert committed(tmp_path) == saved
    report = clean(tmp_path)
    assert [bill.ended for bill in report.attempts] == [Ending.STOPPED]
    assert not report.finished


@pytest.mark.parametrize("every", [1, 9])
def test_a_run_without_a_node_to_roll_out_can_be_stopped(tmp_path: Path, every: int) -> None:
    with world(tmp_path, f"checkpoint.every={every}") as it:
        it.join(RESERVED, SPOT)

        def vanish() -> None:
            it.inbox.put(ev.NodeLost(RESERVED.id))
            it.inbox.put(ev.NodeLost(SPOT.id))
            stop_once_stuck()

        def stop_once_stuck() -> None:
            stuck = it.controller.stage is Stage.ROLLING and not it.controller.cluster.hosts
            it.loop.call_later(0.01, it.head.request_stop if stuck else stop_once_stuck)

        it.when("publish", vanish)
        it.run()
        assert it.head.stopped
    assert committed(tmp_path) == 1
    clean(tmp_path)


def test_a_blob_store_that_is_gone_is_a_clear_end(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(
            RayLostError, match=r"the blob store's process.*is dead.*Run the same command again: it resumes"
        ),
        world(tmp_path) as it,
    ):
        it.join(RESERVED, SPOT)
        it.when("prepare", lambda: it.store.fail_take(ConnectionError("actor died")), 2)
        it.run()
    assert committed(tmp_path) == 1
    assert [bill.ended for bill in clean(tmp_path).attempts] == [Ending.FAILED]


class WrappedError(Exception):
    """As Ray wraps what an actor raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@pytest.mark.parametrize("method", ["take", "drop", "keep_only", "put"])
def test_a_full_disk_at_the_blob_store_ends_the_run_with_that_error(tmp_path: Path, method: str) -> None:
    full = StoreError("no space left on the disk of the blob store")
    with pytest.raises(StoreError, match="no space left"), world(tmp_path) as it:  # noqa: PT012
        it.join(RESERVED, SPOT)

        def fill() -> None:
            it.store.broken[method] = WrappedError(full)
            if method == "take":
                it.store.fail_take(WrappedError(full))

        it.when("prepare", fill, 2)
        it.run()
    assert [bill.ended for bill in clean(tmp_path).attempts] == [Ending.FAILED]


def test_an_evaluation_whose_pictures_for_the_grid_were_not_scored_is_reported(tmp_path: Path) -> None:
    with world(tmp_path, "evaluation.images_per_prompt=2", *LENIENT) as it:
        it.join(RESERVED, SPOT)
        it.spoilt = lambda rollout: rollout.purpose is Purpose.EVAL and rollout.member == 0
        it.run()
    assert it.head.error is None
    assert clean(tmp_path).finished


def test_a_node_that_comes_back_is_paid_as_another_worker(tmp_path: Path) -> None:
    def prepare(it: World) -> None:
        def replace() -> None:
            it.inbox.put(ev.NodeLost(SPOT.id))
            it.inbox.put(ev.NodeJoined(SPOT))

        it.when("prepare", replace, 2)

    run(tmp_path, prepare)
    report = clean(tmp_path)
    history = read_history(tmp_path / "run")
    assert (history.preemptions, history.noticed) == (1, 0)
    assert history.incidents[Incident.NODE_JOINED, True] == 2
    assert history.incidents[Incident.NODE_JOINED, False] == 1
    assert report.attempts[0].workers == 3


def test_parts_of_a_machine_that_change_their_sizes_are_billed_each(tmp_path: Path) -> None:
    machine = replace(SPOT, id=NodeId("m"), gpus=3)

    def prepare(it: World) -> None:
        fleet = it.controller.fleet

        def change(ranks: int) -> None:
            fleet.assign(fleet.machines[machine.id], ranks, ranks_roll_out=True)

        it.when("prepare", lambda: change(1), 2)
        it.when("publish", lambda: change(2), 2)
        it.join(machine)

    run(tmp_path, prepare)
    assert clean(tmp_path).attempts[0].workers == 2 + 3 * 3


def test_a_learner_lost_while_it_exports_is_restored_and_asked_again(tmp_path: Path) -> None:
    with world(tmp_path) as it:
        it.join(RESERVED, SPOT)
        it.when("export", it.lose)
        assert it.run() == it.learner.directory
        assert it.learner.asked.count("export") == 2
        assert it.learner.restored[-1] is not None


@pytest.mark.parametrize("when", ["saved", "swept"])
def test_a_learner_lost_right_after_its_checkpoint_goes_back_to_that_one(tmp_path: Path, when: str) -> None:
    with world(tmp_path) as it:
        it.join(RESERVED, SPOT)
        lost: list[int] = []

        def lose() -> None:
            if not lost:
                lost.append(committed(tmp_path))
                it.lose("killed after its checkpoint")

        if when == "saved":
            it.when("save", it.lose_soon)
            it.when("restore", lambda: lost.append(committed(tmp_path)), 2)
        else:
            inner = it.store._keep_only

            def keep_only(kind: str, names: Sequence[str], last_put: int) -> asyncio.Future[Any]:
                lose()
                return inner(kind, names, last_put)

            it.store._keep_only = keep_only  # type: ignore[method-assign]
        it.run()
        assert lost == [1]
        assert it.learner.restored[-1] is not None
        assert it.head.error is None
    assert [bill.ended for bill in clean(tmp_path).attempts] == [Ending.FINISHED]


def test_a_second_begin_does_not_start_the_run_twice(tmp_path: Path) -> None:
    with world(tmp_path) as it:
        it.join(RESERVED, SPOT)
        # Its conditions are sent and its version is being announced: then it dies.
        it.when("send_conditions", it.lose_soon)
        it.run()
        assert it.head.error is None
        assert it.learner.life == 2
