"""The head with a real controller and a real ledger; workers, learner and blob store do as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fake_learner import name_of
from tests.controller_answers import learner_answer

from spotlight.cluster.billing import ClusterAccounts
from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_server import Delivered
from spotlight.cluster.blobs.blob_store import BlobAddress, StoredBlob
from spotlight.cluster.head import Head
from spotlight.cluster.incidents import Drains, IncidentRecorder
from spotlight.cluster.learner_driver import LearnerDriver, PublishedVersions
from spotlight.cluster.remote_calls import AbandonedError, Conversations, Inbox
from spotlight.cluster.sample_scoring import AcceptedSamples
from spotlight.cluster.trace_collector import TraceCollector
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.config.load import dump_config, load_config
from spotlight.rollout.serialization import pack_tensors
from spotlight.runtime.assembly import components as build
from spotlight.runtime.attempt import Attempt, RunResult, open_attempt
from spotlight.runtime.observer import Observer
from spotlight.runtime.resuming.course import Resuming
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import DropReason, Node, NodeId, NodeKind, Rollout, RolloutId
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.run_directory import RunDirectory, RunPaths
from spotlight.training.sharding import Ranks
from spotlight.worker.interfaces import Command
from spotlight.worker.reports import RolloutSpeed
from spotlight_weights.bundle import WeightsManifest

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
DEADLINE_S = 120.0
PICTURE = StoredBlob(0, pack_tensors("image", "any", {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}))


def pending() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def answered(value: object) -> asyncio.Future[Any]:
    reference = pending()
    reference.set_result(value)
    return reference


def failed(error: Exception) -> asyncio.Future[Any]:
    reference = pending()
    reference.set_exception(error)
    return reference


@dataclass
class Method:
    call: Callable[..., asyncio.Future[Any]]

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return self.call(*args)


class FakeBlobStore:
    """The store's actor. Answers at once; ``broken`` fails every call of a method."""

    def __init__(self) -> None:
        self.mailbox: list[Delivered] = []
        self.asked: asyncio.Future[Any] | None = None
        self.broken: dict[str, Exception] = {}
        self.dropped: list[tuple[str, tuple[str, ...]]] = []
        self.swept: list[tuple[str, set[str]]] = []

    def __getattr__(self, name: str) -> Method:
        def call(*args: Any) -> asyncio.Future[Any]:
            error = self.broken.get(name)
            return failed(error) if error is not None else getattr(self, f"_{name}")(*args)

        return Method(call)

    def deliver_now(self, event: ev.Event | RolloutSpeed, mark: str = "") -> None:
        self.mailbox.append(Delivered(event, mark, 0))
        if self.asked is not None:
            asked, self.asked = self.asked, None
            taken, self.mailbox = self.mailbox, []
            asked.set_result(taken)

    def fail_take(self, error: Exception) -> None:
        assert self.asked is not None
        self.asked.set_exception(error)

    def _take(self, timeout_s: float) -> asyncio.Future[Any]:
        if self.mailbox:
            taken, self.mailbox = self.mailbox, []
            return answered(taken)
        self.asked = pending()
        return self.asked

    def _put(self, *args: Any) -> asyncio.Future[Any]:
        return answered(True)

    def _drop(self, kind: str, names: Sequence[str], last_put: int | None) -> asyncio.Future[Any]:
        self.dropped.append((kind, tuple(names)))
        return answered(None)

    def _keep_only(self, kind: str, names: Sequence[str], last_put: int) -> asyncio.Future[Any]:
        self.swept.append((kind, set(names)))
        return answered(0)

    def _fetch(self, kind: str, names: Sequence[str], mark: str = "") -> asyncio.Future[Any]:
        return answered([PICTURE] * len(names))


async def at_once(what: str) -> None:
    """Let the learner answer."""


class FakeLearner:
    """Does at once what it is asked, unless it has to wait (``before``) or is lost (:meth:`lose`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.version = self.life = self.working_life = 0
        self.restored: list[Path | None] = []
        self.asked: list[str] = []
        self.stored: dict[RolloutId, BlobAddress] = {}
        self.before: Callable[[str], Awaitable[None]] = at_once
        self.hooks: list[Callable[[str], None]] = []
        self.over: asyncio.Future[str] | None = None

    @property
    def is_up(self) -> bool:
        return self.over is not None and not self.over.done()

    def digest(self, version: int) -> str:
        return f"weights of version {version}"

    def lose(self, detail: str) -> None:
        """Nothing that was asked of this life is answered."""
        assert self.over is not None
        if not self.over.done():
            self.over.set_result(detail)

    def end(self, detail: str) -> None:
        self.lose(detail)

    async def lost(self) -> str:
        assert self.over is not None
        return await asyncio.shield(self.over)

    async def _ask(self, what: str) -> None:
        over = self.over
        assert over is not None
        if not over.done():
            await self.before(what)
        if over.done():
            raise AbandonedError(what)
        self.asked.append(what)
        for hook in self.hooks:
            hook(what)
        await asyncio.sleep(0)
        if over.done():
            raise AbandonedError(what)

    def _manifest(self, lineage: int) -> WeightsManifest:
        return WeightsManifest(self.version, lineage, self.digest(self.version), 1, ("policy",), 1)

    async def restore(self, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        if self.over is not None and not self.over.done():
            self.over.set_exception(AbandonedError("stopped"))
            self.over.exception()
        self.life += 1
        self.working_life = self.life
        self.over = pending()
        self.restored.append(checkpoint)
        self.version = int((checkpoint / "version").read_text()) if checkpoint else 0
        await self._ask("restore")
        return self._manifest(lineage)

    async def form_second(self) -> None:
        self.life += 1
        self.asked.append("form_second")

    @property
    def ranks(self) -> FakeLearner:
        return self

    async def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        name = name_of(method, args)
        match args:
            case [ef.PrepareBatch(), _, stored]:
                self.stored.update(stored)
            case [ef.StepOptimizer(), *_]:
                self.version += 1
        answer = learner_answer(args[0]) if args else None
        answer = answer or {"take_log": {}, "export": self.directory}.get(name)
        await self._ask(name)
        return answer

    async def publish(self, version: int, lineage: int) -> WeightsManifest:
        await self._ask("publish")
        return self._manifest(lineage)

    async def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "version").write_text(str(self.version))
        await self._ask("save")


class FakeWorker:
    """A process that obeys at once. ``lies``: the digest of the weights that it says it used."""

    def __init__(self, order: ef.StartWorker, world: World) -> None:
        self.order, self.world = order, world
        self.mark, self.version, self.lies = "", 0, ""
        self.killed = False
        self.granted: list[ef.GrantLease] = []

    def ready(self) -> asyncio.Future[Any]:
        return answered(None)

    def watch(self, hang_s: float) -> Awaitable[Any]:
        return asyncio.sleep(hang_s)

    def tell(self, command: Command) -> asyncio.Future[Any]:
        deliver, order = self.world.store.deliver_now, self.order
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
                deliver(RolloutSpeed(100.0 * len(names), 4e12 * len(names), 2.0 * len(names), 8e12))
                deliver(ev.GroupPulled(order.worker, lease.epoch, 8, self._seen))
        return answered(None)

    @property
    def _seen(self) -> Any:
        return max((grant.lease.id for grant in self.granted), default=0)


class FakeMachine(NamedTuple):
    ray_id: str


class FakeNodes:
    """Machines that exist in events only; also where a learner that moves is."""

    def __init__(self) -> None:
        self.machines: dict[NodeId, FakeMachine] = {}
        self.parts: dict[NodeId, tuple[Node, ...]] = {}
        self.placed: Mapping[NodeId, int] = {}
        self.rolling: list[bool] = []
        """Whether anything rolls out, each time that a standstill was looked for."""
        self.spares: Any = None

    def enter(self, machine: Node) -> None:
        self.machines[machine.id] = FakeMachine(f"ray of {machine.id}")
        self.parts[machine.id] = (machine,)

    def assign(self, effect: ef.AssignRoles) -> list[NodeId]:
        before = self.parts.get(effect.machine, ())
        self.parts[effect.machine] = effect.parts
        return [part.id for part in before]

    def forget(self, machine: NodeId) -> list[NodeId]:
        self.machines.pop(machine, None)
        return [part.id for part in self.parts.pop(machine, ())]

    def place_learner(self, ranks: Mapping[NodeId, int]) -> None:
        self.placed = ranks

    def report_standstill(self) -> None:
        self.rolling.append(any(part.rolls_out for parts in self.parts.values() for part in parts))

    def started(self) -> Mapping[NodeId, int]:
        return self.placed


@dataclass
class Notes(Observer):
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


class World:
    """Everything around a head; also its starter of workers and its scorer."""

    def __init__(self, attempt: Attempt, directory: Path, config: Any, accounts: ClusterAccounts) -> None:
        self.loop = asyncio.new_event_loop()
        self.attempt = attempt
        self.store = FakeBlobStore()
        self.learner = FakeLearner(directory)
        self.workers: list[FakeWorker] = []
        self.liars = 0
        self.spoilt: Callable[[Rollout], bool] = lambda _: False
        loaded = build.load_prompts(config)
        self.controller = Controller(build.cluster_plan_of(config), loaded.train, loaded.test, attempt.number)
        self.loop.run_until_complete(self._assemble(accounts, RunPaths(directory).profile))

    async def _assemble(self, accounts: ClusterAccounts, profile: Path) -> None:
        self.conversations, self.inbox = Conversations(), Inbox()
        notes, recorder = accounts.observer, self.attempt.recorder
        assert isinstance(notes, Notes)
        self.notes = notes.notes
        client = BlobClient(self.store)
        self.samples = AcceptedSamples(client)
        incidents = IncidentRecorder(accounts.clock, notes.note, recorder.ledger, self.controller.fleet)
        self.nodes = nodes = FakeNodes()
        pool = WorkerPool(
            self.conversations,
            self,
            self.inbox.put,
            notes.note,
            partial(incidents.record, Incident.WORKER_CRASHED),
            5.0,
            60.0,
        )
        driver = LearnerDriver(
            self.controller, self.learner, PublishedVersions(client), self.conversations,  # type: ignore[arg-type]
            recorder.checkpoints, (), self.inbox.put, notes.note,
            nodes.started if self.controller.plan.cluster.learner_moves else None,
        )  # fmt: skip
        self.head = Head(
            controller=self.controller,
            inbox=self.inbox,
            conversations=self.conversations,
            workers=pool,
            learner=driver,
            samples=self.samples,
            scoring=self,  # type: ignore[arg-type]
            accounts=accounts,
            recorder=recorder,
            incidents=incidents,
            drains=Drains(lambda _: None),
            observer=notes,  # type: ignore[arg-type]
            attempt=self.attempt.number,
            grid=(1, 1),
            training_pictures_every=1,
            traces=TraceCollector(client, profile, notes.note, 1),
            nodes=nodes,  # type: ignore[arg-type]
        )

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

    async def log_tail(self, order: ef.StartWorker) -> str:
        return ""

    def score(self, effect: ef.ScoreSamples) -> None:
        rollouts, lineage = effect.rollouts, effect.lineage
        digests = self.samples.digests
        assert all(digests[each.id] == self.learner.digest(each.version) for each in rollouts)
        for each in rollouts:
            if self.spoilt(each):
                self.put_soon(ev.RewardFailed(each.id, DropReason.REWARD_ERROR, "spoilt", lineage))
        rollouts = [each for each in rollouts if not self.spoilt(each)]
        if rollouts:
            values = {each.id: (each.seed % 7) / 7 for each in rollouts}
            scores = {name: {REWARD: value, "jpeg_size": value} for name, value in values.items()}
            self.put_soon(ev.SamplesRewarded(scores, lineage))

    # -- what the tests do -----------------------------------------------------------------------------

    def put_soon(self, event: ev.Event) -> None:
        self.loop.call_soon(self.inbox.put, event)

    def join(self, *nodes: Node) -> None:
        for node in nodes:
            self.put_soon(ev.NodeJoined(node))

    def lose(self, detail: str = "its node is gone") -> None:
        """The learner is lost, now."""
        self.learner.lose(detail)

    def lose_soon(self, detail: str = "its node is gone") -> None:
        """The learner is lost after it has answered what it was asked last."""
        self.loop.call_soon(self.loop.call_soon, self.learner.lose, detail)

    def run(self, checkpoint: Path | None = None) -> Path | None:
        """Until the run is over; a head that waits for nothing is stopped."""

        async def run() -> Path | None:
            async with asyncio.timeout(DEADLINE_S):
                return await self.conversations.supervise(self.head.run(checkpoint))

        try:
            return self.loop.run_until_complete(run())
        except TimeoutError:
            raise AssertionError(
                f"stuck: {self.controller.stage}, {self.learner.asked[-3:]}, {self.notes}"
            ) from None

    def when(self, what: str, then: Callable[[], object], times: int = 1) -> None:
        """Call when the learner is asked for something for the ``times``-th time, before it answers."""

        def hook(asked: str) -> None:
            if asked == what and self.learner.asked.count(what) == times:
                then()

        self.learner.hooks.append(hook)


@contextmanager
def world(root: Path, *overrides: str) -> Iterator[World]:
    """A head about to run, within an attempt of its own; its result is what the head says at the end."""
    config = load_config(None, [f"runs_dir={root}", "name=run", *SETTINGS, *overrides])
    prompts = build.load_prompts(config)
    notes = Notes()
    accounts = ClusterAccounts(time.monotonic, notes)
    with (
        RunDirectory.open(root, "run", dump_config(config), Resuming(config)) as directory,
        open_attempt(
            config, directory, prompts, Ranks(), workers={}, began_s=time.time(), scored_by={},
            observer=notes, account=accounts.finish,
        ) as attempt,
    ):  # fmt: skip
        it = World(attempt, directory.path, config, accounts)
        try:
            yield it
        finally:
            it.loop.close()
        attempt.result = RunResult(directory.path, it.head.error, it.head.stopped)
