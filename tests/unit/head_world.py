"""The head with a real controller and a real ledger, and workers, learner and keeper that answer as told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spotlight.cluster.blobs.blob_store import Kept
from spotlight.cluster.blobs.keeper import Delivered
from spotlight.cluster.drains import Drains
from spotlight.cluster.head import Head, Parts
from spotlight.cluster.loop import Calls, Loop
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.config.load import dump_config, load_config
from spotlight.config.schema import RESUMABLE_KEYS
from spotlight.rollout.serialization import _pack
from spotlight.runtime.attempt import Attempt, RunResult, open_attempt
from spotlight.runtime.build import parts as build
from spotlight.runtime.observer import Silent
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import DropReason, Node, NodeId, NodeKind, PromptId, Rollout, RolloutId
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.run_directory import RunDirectory
from spotlight.training.sharding import Ranks
from spotlight.weights.bundle import Manifest
from spotlight.worker.interfaces import Command

SETTINGS = (
    "device=cpu",
    "data.tags=[]",
    "iterations=3",
    "fleet.driver=ray",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=2",
    "evaluation.prompts=2",
    "evaluation.images_per_prompt=1",
    "evaluation.grid_images=1",
    "evaluation.grid_prompts=1",
    "learner.decay_iterations=null",
    "metrics.tensorboard=false",
    "rewards=[{name: jpeg_size}]",
)
RESERVED = Node(NodeId("r"), NodeKind.RESERVED, 1, "cpu", 0.05, True, False)
SPOT = Node(NodeId("s"), NodeKind.SPOT, 1, "cpu", 0.02, False, True)
BOTH = Node(NodeId("b"), NodeKind.RESERVED, 1, "cpu", 0.05, True, True)
DEADLINE_S = 20.0
PICTURE = Kept(0, _pack("image", "any", {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}))


@dataclass
class Reference:
    answer: Future[Any] = field(default_factory=Future)

    def future(self) -> Future[Any]:
        return self.answer


def answered(value: object) -> Reference:
    reference = Reference()
    reference.answer.set_result(value)
    return reference


def failed(error: Exception) -> Reference:
    reference = Reference()
    reference.answer.set_exception(error)
    return reference


@dataclass
class Method:
    call: Callable[..., Reference]

    def remote(self, *args: Any) -> Reference:
        return self.call(*args)


class FakeKeeper:
    """Answers at once; ``broken`` fails every call of a method."""

    def __init__(self) -> None:
        self.mailbox: list[Delivered] = []
        self.asked: Reference | None = None
        self.broken: dict[str, Exception] = {}
        self.dropped: list[tuple[str, tuple[str, ...]]] = []
        self.swept: list[tuple[str, set[str]]] = []

    def __getattr__(self, name: str) -> Method:
        def call(*args: Any) -> Reference:
            error = self.broken.get(name)
            return failed(error) if error is not None else getattr(self, f"_{name}")(*args)

        return Method(call)

    def deliver_now(self, event: ev.Event, mark: str = "") -> None:
        self.mailbox.append(Delivered(event, mark, SPOT.id))
        if self.asked is not None:
            asked, self.asked = self.asked, None
            taken, self.mailbox = self.mailbox, []
            asked.answer.set_result(taken)

    def fail_take(self, error: Exception) -> None:
        assert self.asked is not None
        self.asked.answer.set_exception(error)

    def _take(self, timeout_s: float) -> Reference:
        if self.mailbox:
            taken, self.mailbox = self.mailbox, []
            return answered(taken)
        self.asked = Reference()
        return self.asked

    def _put(self, *args: Any) -> Reference:
        return answered(True)

    def _drop(self, kind: str, names: Sequence[str]) -> Reference:
        self.dropped.append((kind, tuple(names)))
        return answered(None)

    def _keep_only(self, kind: str, names: Sequence[str]) -> Reference:
        self.swept.append((kind, set(names)))
        return answered(0)

    def _fetch(self, kind: str, names: Sequence[str], mark: str = "") -> Reference:
        return answered([PICTURE] * len(names))


class FakeLearner:
    """Does at once what it is asked; ``deaf`` to the methods named."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.loop, self.directory = loop, directory
        self.version, self.lives = 0, 0
        self.restored: list[Path | None] = []
        self.deaf: set[str] = set()
        self.asked: list[str] = []

    @property
    def life(self) -> int:
        return self.lives

    def digest(self, version: int) -> str:
        return f"weights of version {version}"

    def _soon(self, what: str, then: Callable[..., object], *args: object) -> None:
        self.asked.append(what)
        if what not in self.deaf:
            self.loop.call_soon_threadsafe(then, *args)

    def _manifest(self, lineage: int) -> Manifest:
        return Manifest(self.version, lineage, self.digest(self.version), 1, ("policy",), 1)

    def restore(self, checkpoint: Path | None, lineage: int, on_done: Callable[[Manifest], None]) -> None:
        self.lives += 1
        self.restored.append(checkpoint)
        self.version = int((checkpoint / "version").read_text()) if checkpoint else 0
        self._soon("restore", on_done, self._manifest(lineage))

    def send_conditions(self, prompts: Sequence[PromptId], on_done: Callable[[], None]) -> None:
        self._soon("send_conditions", on_done)

    def prepare(
        self, effect: ef.PrepareBatch, rollouts: object, marks: object, on_done: Callable[[], None]
    ) -> None:
        self._soon("prepare", on_done)

    def accumulate(self, micro_batch: object, on_done: Callable[[], None]) -> None:
        self._soon("accumulate", on_done)

    def step(self, samples: int, on_done: Callable[[float, float], None]) -> None:
        self.version += 1
        self._soon("step", on_done, 0.5, 1.0)

    def finish_batch(self, on_done: Callable[[], None]) -> None:
        self._soon("finish_batch", on_done)

    def publish(self, version: int, lineage: int, on_done: Callable[[Manifest], None]) -> None:
        self._soon("publish", on_done, self._manifest(lineage))

    def take_log(self, on_done: Callable[[dict[str, float]], None]) -> None:
        self._soon("take_log", on_done, {})

    def save(self, directory: Path, on_done: Callable[[], None]) -> None:
        directory.mkdir()
        (directory / "version").write_text(str(self.version))
        self._soon("save", on_done)

    def export(self, on_done: Callable[[Path], None]) -> None:
        self._soon("export", on_done, self.directory)


class FakeWorker:
    """A process that obeys at once. ``lies``: the digest of the weights that it says it used."""

    def __init__(self, order: ef.StartWorker, world: World) -> None:
        self.order, self.world = order, world
        self.mark, self.version, self.lies = "", 0, ""
        self.killed = False
        self.granted: list[ef.GrantLease] = []

    def ready(self) -> Reference:
        return answered(None)

    def watch(self, hang_s: float) -> Reference:
        return Reference()

    def tell(self, command: Command) -> Reference:
        deliver, order = self.world.keeper.deliver_now, self.order
        match command:
            case ef.PullWeights(worker, epoch, version, lineage):
                self.version, self.mark = version, self.world.learner.digest(version)
                deliver(ev.WeightsPulled(worker, epoch, version, lineage))
            case ef.FormGroup(leader, epoch, _):
                deliver(ev.GroupFormed(leader, epoch))
                deliver(ev.GroupPulled(leader, epoch, 8, self._seen))
            case ef.StopGroup(leader, epoch, _):
                deliver(ev.GroupStopped(leader, epoch))
            case ef.GrantLease(lease, rollouts):
                self.granted.append(command)
                names = tuple(rollout.id for rollout in rollouts)
                done = ev.LeaseCompleted(order.worker, lease.id, lease.epoch, names, rollouts[0].version)
                deliver(done, self.lies or self.mark)
                deliver(ev.GroupPulled(order.worker, lease.epoch, 8, self._seen))
        return answered(None)

    @property
    def _seen(self) -> Any:
        return max((grant.lease.id for grant in self.granted), default=0)


@dataclass
class Notes(Silent):
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


class World:
    """Everything around a head; also its starter of workers and its scorer."""

    def __init__(self, attempt: Attempt, directory: Path, config: Any, head: Head, notes: Notes) -> None:
        self.head, self.attempt, self.notes = head, attempt, notes.notes
        self.keeper = FakeKeeper()
        self.learner = FakeLearner(head.loop, directory)
        self.workers: list[FakeWorker] = []
        self.liars = 0
        self.spoilt: Callable[[Rollout], bool] = lambda _: False
        loaded = build.load_prompts(config)
        self.controller = Controller(build.cluster_plan_of(config), loaded.train, loaded.test, attempt.number)
        calls = Calls(head.loop)
        pool = WorkerPool(
            calls, self, head.tell, notes.note,
            lambda worker, why: head.befall(Incident.WORKER_CRASHED, worker, why), 5.0, 60.0,
        )  # fmt: skip
        self.parts = Parts(
            self.controller, calls, pool, self.learner, self, self.keeper,  # type: ignore[arg-type]
            attempt.book, Drains(head.drained), attempt.number, (), (1, 1),
        )  # fmt: skip

    # -- a starter and a scorer ------------------------------------------------------------------------

    def start(self, order: ef.StartWorker) -> FakeWorker:
        worker = FakeWorker(order, self)
        if self.liars:
            self.liars -= 1
            worker.lies = "other weights"
        self.workers.append(worker)
        return worker

    def kill(self, handle: FakeWorker) -> None:
        handle.killed = True

    def log_tail(self, order: ef.StartWorker, then: Callable[[str], None]) -> None:
        then("")

    def score(self, rollouts: Sequence[Rollout], marks: Mapping[RolloutId, str], lineage: int) -> None:
        assert all(marks[each.id] == self.learner.digest(each.version) for each in rollouts)
        for each in rollouts:
            if self.spoilt(each):
                failure = ev.RewardFailed(each.id, DropReason.REWARD_ERROR, "spoilt", lineage)
                self.head.loop.call_soon_threadsafe(self.head.tell, failure)
        rollouts = [each for each in rollouts if not self.spoilt(each)]
        if not rollouts:
            return
        scores = {
            each.id: {REWARD: (each.seed % 7) / 7, "jpeg_size": (each.seed % 7) / 7} for each in rollouts
        }
        for name, row in scores.items():
            self.head.loop.call_soon_threadsafe(self.head.scored, name, row)
        self.head.loop.call_soon_threadsafe(self.head.tell, ev.SamplesRewarded(scores, lineage))

    # -- what the tests do -----------------------------------------------------------------------------

    def join(self, *nodes: Node) -> None:
        for node in nodes:
            self.head.loop.call_soon_threadsafe(self.head.tell, ev.NodeJoined(node))

    def run(self, checkpoint: Path | None = None) -> None:
        """Until the run is over; a head that waits for nothing is stopped."""
        end_s = time.monotonic() + DEADLINE_S

        def look() -> None:
            if time.monotonic() > end_s:
                raise AssertionError(
                    f"stuck: {self.controller.stage}, {self.learner.asked[-3:]}, {self.notes}"
                )
            self.head.loop.call_later(0.5, look)

        look()
        self.head.run(self.parts, checkpoint)

    def when(self, what: str, then: Callable[[], None], times: int = 1) -> None:
        """Call when the learner is asked for something for the ``times``-th time, before it answers."""
        inner = self.learner._soon

        def soon(asked: str, *args: Any) -> None:
            inner(asked, *args)
            if asked == what and self.learner.asked.count(what) == times:
                then()

        self.learner._soon = soon  # type: ignore[method-assign]


@contextmanager
def world(root: Path, *overrides: str) -> Iterator[World]:
    """A head about to run, within an attempt of its own; its result is what the head says at the end."""
    config = load_config(None, [f"runs_dir={root}", "name=run", *SETTINGS, *overrides])
    prompts = build.load_prompts(config)
    by_id = {prompt.id: prompt for prompt in (*prompts.train, *prompts.test)}
    notes = Notes()
    head = Head(Loop(), notes)
    with (
        RunDirectory.open(root, "run", dump_config(config), RESUMABLE_KEYS) as directory,
        open_attempt(
            config, directory, by_id, Ranks(), workers={}, began_s=time.time(), observer=notes,
            account=head.accounts.finish,
        ) as attempt,
    ):  # fmt: skip
        yield World(attempt, directory.path, config, head, notes)
        attempt.result = RunResult(directory.path, None, head.error, head.stopped)
