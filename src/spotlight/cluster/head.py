"""The Ray driver: the controller's effects carried out by processes that may die at any moment.

    loop ───► event ──► controller.handle ──► effects ──► workers / learner / rewards / keeper / run book
      ▲                        │                                          │
      │                        └─► billing                                │
      └──── answers, deaths, reports of workers, nodes that come and go ◄─┘

It decides nothing, and waits for nobody: every remote call has a deadline, and its answer is one more call of
the loop. Values (states, samples, weights) do not pass through here, but between workers, keeper and learner.

Invariants
    1. Records are written before a checkpoint that counts them: it never knows more than the ledger.
    2. A sample is accepted only if it was made by the weights that were published under its version: their
       digest is compared, not their number alone.
    3. A report of values counts only if the keeper holds the values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spotlight.cluster.accounts import Accounts
from spotlight.cluster.drains import Drains
from spotlight.cluster.incidents import Incidents
from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.loop import Calls, Clock, Loop
from spotlight.cluster.sample_scoring import FETCH_S, Scoring
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.cluster.workers.worker_weights import version_name
from spotlight.rollout.serialization import unpack_image
from spotlight.runtime.build.preview_settings import report_note, report_row
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import LEARNER_FOLDER, RunBook, shown
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import (
    NodeId,
    Phase,
    PolicyVersion,
    PromptId,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.store.checkpoints import Checkpoint
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.store_errors import StoreError
from spotlight.training.batching.feed import IterationLog
from spotlight.weights.bundle import Manifest
from spotlight.worker.interfaces import FollowLease

T = TypeVar("T")

VERSIONS_KEPT = 2
"""Published versions, beside the newest, whose weights the keeper holds."""
TAKE_S = 20.0
"""How long the keeper holds the head's question for new reports; silence for twice as long is its death."""
ACCOUNT_S = 5.0
"""Longest time between two entries of GPU-seconds: what a killed head leaves unaccounted."""

VALUES = ("sample", "image", "progress")
"""Kinds of values that the keeper holds of a rollout."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the head works with.

    Attributes:
        attempt: of the ledger.
        prompts: that the run can meet.
        grid: prompts, and pictures of each, in the image grids.
    """

    controller: Controller
    calls: Calls
    workers: WorkerPool
    learner: LearnerGroup
    scoring: Scoring
    keeper: Any
    book: RunBook
    drains: Drains
    attempt: int
    prompts: tuple[PromptId, ...]
    grid: tuple[int, int]


@dataclass(slots=True)
class _Counters:
    """What the head did with its own time, since the last iteration's row."""

    events: int = 0
    handling_s: float = 0.0


@dataclass(slots=True)
class Head:
    """Drives one run to its end, or to the next checkpoint after :meth:`request_stop`."""

    loop: Loop
    observer: Observer
    accounts: Accounts = field(init=False)
    log: IterationLog = field(default_factory=IterationLog)
    error: str | None = None
    stopped: bool = False
    _parts: Parts | None = None
    _events: list[tuple[ev.Event, str]] = field(default_factory=list)
    _groups: dict[WorkerId, tuple[int, tuple[WorkerId, ...]]] = field(default_factory=dict)
    _marks: dict[RolloutId, str] = field(default_factory=dict)
    _published: dict[tuple[PolicyVersion, int], str] = field(default_factory=dict)
    _committing: AbstractContextManager[Path] | None = None
    _sealing: bool = False
    _lost_meanwhile: str | None = None
    _start_from: Path | None = None
    _exporting: bool = False
    _exported: Path | None = None
    _over: bool = False
    _stop_requested: bool = False
    _failure: Exception | None = None
    _incidents: Incidents = field(init=False)
    _own: _Counters = field(default_factory=_Counters)

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.clock, self.observer)
        self._incidents = Incidents(self.clock, self.observer)

    # -- the loop --------------------------------------------------------------------------------------

    def run(self, parts: Parts, checkpoint: Path | None) -> None:
        """Until the controller says it is over.

        Args:
            checkpoint: the learner's state to begin from; None is the start of the run.

        Raises:
            Exception: what made it impossible to go on (the keeper is gone, the disk is full).
        """
        self._parts, self._start_from = parts, checkpoint
        self._listen()
        self._begin()
        while not self._over:
            self._turn()
        self.accounts.write(parts.book)

    def _turn(self) -> None:
        self._handle_events()
        if not self._over:
            self.loop.turn(self._due_s())
            self._be_on_time()

    def _begin(self) -> None:
        """Start the learner; when it stands, and everybody can find what it stands at, the run begins."""
        learner = self.parts.learner

        def stands(manifest: Manifest) -> None:
            life = learner.life

            def begin() -> None:
                if learner.life == life:  # else it was lost meanwhile, and another is on its way here
                    self.tell(ev.RunStarted())

            learner.send_conditions(self.parts.prompts, lambda: self._announce(manifest, begin))

        learner.restore(self._start_from, self.parts.controller.cluster.lineage, stands)

    def export(self) -> Path:
        """Have the learner export the judged weights into the run directory, once the run is over.

        A learner that is lost, or becomes it now, is restored first.
        """
        self._over, self._exporting = False, True
        self._ask_export()
        while self._exported is None:
            self._turn()
        return self._exported

    def _ask_export(self) -> None:
        """A learner that is lost ignores it, and is asked again once it stands."""

        def done(path: Path) -> None:
            self._exported = path

        self.parts.learner.export(done)

    def request_stop(self) -> None:
        """Stop after the next committed checkpoint (from a signal handler: only sets a flag)."""
        self._stop_requested = True

    def tell(self, event: ev.Event, mark: str = "") -> None:
        """An event for the controller; ``mark``: digest of the weights that made what it reports."""
        self._events.append((event, mark))

    def holds(self, rollout: RolloutId) -> bool:
        """Whether a sample was accepted and not discarded."""
        return rollout in self._marks

    def scored(self, rollout: RolloutId, scores: Mapping[str, float]) -> None:
        """A sample has its curves."""
        issued = self.parts.controller.work.find(rollout)
        if issued is not None:
            self.log.scored(issued, scores)

    def drained(self, node: NodeId, seconds: float) -> None:
        """A noticed node holds no work any more; stopping it took so long."""
        self.log.add("fleet/drain_s", seconds)
        self.note(f"{node} is drained, {seconds:.2f} s after it was to stop")

    def note(self, text: str) -> None:
        """Tell people."""
        self.observer.note(text)

    def fail(self, why: str | Exception) -> None:
        """The run cannot go on."""
        self._failure = self._failure or (why if isinstance(why, Exception) else RuntimeError(why))

    @property
    def parts(self) -> Parts:
        """Set by :meth:`run`."""
        assert self._parts is not None
        return self._parts

    @property
    def clock(self) -> Clock:
        """Of the loop, and of the controller."""
        return self.loop.clock

    def _due_s(self) -> float:
        """When the controller must hear of time passing, or seconds be written down."""
        due_s = self.accounts.written_s + ACCOUNT_S
        wake_s = self.parts.controller.wake_s
        return due_s if wake_s is None else min(due_s, wake_s)

    def _be_on_time(self) -> None:
        if self._failure is not None:
            raise self._failure
        now = self.clock()
        wake_s = self.parts.controller.wake_s
        if wake_s is not None and wake_s <= now and not self._events:
            self.tell(ev.TimePassed())
        if now - self.accounts.written_s >= ACCOUNT_S:
            self.accounts.write(self.parts.book)

    def _handle_events(self) -> None:
        while self._events and not self._over:
            batch, self._events = self._events, []
            for event, mark in batch:
                if not self._over:
                    self._feed(event, mark)

    def _feed(self, event: ev.Event, mark: str) -> None:
        if isinstance(event, ev.LeaseCompleted) and not self._made_by_published(event, mark):
            return
        controller, book, now = self.parts.controller, self.parts.book, self.clock()
        self._incidents.tell(event, controller.cluster.hosts, book.ledger)
        effects = controller.handle(event, now)
        self.accounts.observe(event, effects, now, book)
        if isinstance(event, ev.WeightsPulled):
            self.parts.workers.prove(event.worker)
        if isinstance(event, ev.NodeLost):
            self.parts.workers.lose(event.node)
        if isinstance(event, ev.LeaseProgressed | ev.LeaseCompleted):
            self.parts.workers.worked(event.leader)
        if isinstance(event, ev.LeaseCompleted):
            accepted = [r.id for e in effects if isinstance(e, ef.ScoreSamples) for r in e.rollouts]
            self._marks |= dict.fromkeys((name for name in accepted if name in event.rollouts), mark)
            self._show_work()
        for effect in effects:
            self._carry_out(effect)
        self.parts.drains.look(controller.cluster, now)
        self._own.events += 1
        self._own.handling_s += self.clock() - now

    def _made_by_published(self, event: ev.LeaseCompleted, mark: str) -> bool:
        """Whether the weights behind a report are those that were published; if not, their holder ends."""
        expected = self._published.get((event.version, self.parts.controller.cluster.lineage))
        if expected is None or expected == mark:
            return True  # of no published version: the controller rejects it
        self.observer.note(
            f"{event.leader} made samples of version {event.version} with weights {mark[:12]}, not with "
            f"those published ({expected[:12]}): its samples are refused, its process is restarted"
        )
        self.parts.workers.distrust(event.leader)
        return False

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        parts = self.parts
        match effect:
            case ef.WriteRecord(position, record):
                parts.book.write(position, record)
            case ef.StartWorker():
                parts.workers.start(effect)
            case ef.PullWeights(worker):
                parts.workers.tell(worker, effect)
            case ef.FormGroup(leader, epoch, members) | ef.StopGroup(leader, epoch, members):
                self._groups[leader] = epoch, members
                for member in members:
                    parts.workers.tell(member, effect)
            case ef.GrantLease():
                self._grant(effect)
            case ef.AbandonLease(leader):
                parts.workers.tell(leader, effect)
            case ef.ScoreSamples(rollouts, lineage):
                parts.scoring.score(rollouts, self._marks, lineage)
            case ef.DiscardSamples(rollouts):
                self._discard(rollouts)
            case ef.ReportEvaluation():
                self._report(effect)
            case ef.ReportExploration(_, report):
                self.log.put(report_row(report))
                if said := report_note(report):
                    self.note(said)
            case ef.ReportPipeline():
                parts.book.pipeline(effect)
                self.log.put(effect.row())
            case ef.PrepareBatch() | ef.TrainMicroBatch() | ef.StepOptimizer() | ef.FinishBatch():
                self._train(effect)
            case ef.PublishWeights(version):
                parts.learner.take_log(self._iteration_done)
                self._publish(version)
            case ef.CommitCheckpoint():
                self._checkpoint(effect)
            case ef.RollBack(position):
                undone = parts.book.undo(position, parts.attempt)
                self._expect_again(parts.controller.version, parts.controller.cluster.lineage)
                self.note(f"{undone} ledger records after the checkpoint are undone")
            case ef.RestoreLearner():
                self._restore(effect.iteration, effect.lineage)
            case ef.FinishRun(error):
                self.error, self._over = error, True
            case ef.NoWork():
                raise RuntimeError("workers of a cluster are answered once there is work")

    def _grant(self, effect: ef.GrantLease) -> None:
        lease = effect.lease
        self.parts.workers.tell(lease.worker, effect)
        epoch, members = self._groups.get(lease.worker, (-1, ()))
        for member in members if epoch == lease.epoch else ():
            if member != lease.worker:
                self.parts.workers.tell(member, FollowLease(lease.worker, lease.epoch, lease.id))

    def _discard(self, rollouts: Sequence[RolloutId]) -> None:
        for rollout in rollouts:
            self._marks.pop(rollout, None)
        for kind in VALUES:
            self._forget(self.parts.keeper.drop.remote(kind, list(rollouts)), "discarding values")

    def _forget(self, reference: Any, what: str) -> None:
        """A call whose value is of no interest; a keeper that cannot answer is the end of the run."""
        self.parts.calls.send(
            reference, what, FETCH_S, lambda _: None, lambda error: self.fail(_keeper_lost(error))
        )

    # -- reports of workers ----------------------------------------------------------------------------

    def _listen(self) -> None:
        self.parts.calls.send(
            self.parts.keeper.take.remote(TAKE_S),
            "reports of workers",
            2 * TAKE_S,
            self._delivered,
            lambda error: self.fail(_keeper_lost(error)),
        )

    def _delivered(self, reports: Sequence[Any]) -> None:
        for report in reports:
            self.tell(report.event, report.mark)
        self._listen()

    def _show_work(self) -> None:
        controller = self.parts.controller
        for purpose, phase in (
            (Purpose.TRAIN, Phase.ROLLOUT),
            (Purpose.EVAL, Phase.EVALUATION),
        ):
            total = sum(rollout.purpose is purpose for rollout in controller.rollouts.values())
            left = controller.queue.outstanding_for(purpose)
            if left:
                self.observer.work(phase, total - left, total)
                return
        if controller.stage is Stage.EXPLORING:
            total = len(controller.work.window.rollouts)
            done = total - controller.queue.outstanding_for(Purpose.EXPLORE)
            self.observer.work(Phase.EXPLORATION, done, total)

    # -- evaluation ------------------------------------------------------------------------------------

    def _report(self, effect: ef.ReportEvaluation) -> None:
        chosen = shown(effect.rollouts, *self.parts.grid)
        by_mark: dict[str, list[Rollout]] = {}
        for rollout in chosen:
            by_mark.setdefault(self._marks[rollout.id], []).append(rollout)
        pictures: dict[RolloutId, Any] = {}
        waiting = len(by_mark)

        def took(part: Sequence[Rollout], kept: Sequence[Any]) -> None:
            nonlocal waiting
            waiting -= 1
            for rollout, item in zip(part, kept, strict=True):
                if item is not None:
                    pictures[rollout.id] = unpack_image(item.data)
            if not waiting:
                self._reported(effect, {r: pictures[r.id] for r in chosen if r.id in pictures})

        if not by_mark:  # what a grid would show was not scored
            self._reported(effect, {})
        for mark, part in by_mark.items():
            self.parts.calls.send(
                self.parts.keeper.fetch.remote("image", [rollout.id for rollout in part], mark),
                "pictures of the evaluation",
                FETCH_S,
                lambda kept, part=part: took(part, kept),  # type: ignore[misc]
                lambda error: self.fail(_keeper_lost(error)),
            )

    def _reported(self, effect: ef.ReportEvaluation, pictures: Mapping[Rollout, Any]) -> None:
        controller = self.parts.controller
        if effect.lineage != controller.cluster.lineage:
            return
        self.accounts.write(self.parts.book)
        row = self.parts.book.evaluation(effect, controller.ledger.trained, pictures)
        self.observer.evaluated(effect.iteration, row)
        self.tell(ev.EvaluationReported(effect.iteration, effect.lineage))

    # -- the learner -----------------------------------------------------------------------------------

    def _train(
        self, effect: ef.PrepareBatch | ef.TrainMicroBatch | ef.StepOptimizer | ef.FinishBatch
    ) -> None:
        learner, controller, tell = self.parts.learner, self.parts.controller, self.tell
        match effect:
            case ef.PrepareBatch(iteration, groups):
                names = [name for group in groups for name in group.rollouts]
                marks = {name: self._marks[name] for name in names}
                learner.prepare(effect, controller.rollouts, marks, lambda: tell(ev.BatchPrepared(iteration)))
            case ef.TrainMicroBatch(batch, index):
                training = controller.training
                self.observer.work(Phase.TRAINING, training.begun - 1, training.prepared)
                trained = ev.MicroBatchTrained(batch.iteration, batch.update, index)
                learner.accumulate(batch, lambda: tell(trained))
            case ef.StepOptimizer(iteration, update, samples):
                learner.step(
                    samples, lambda loss, norm: tell(ev.OptimizerStepped(iteration, update, loss, norm))
                )
            case ef.FinishBatch(iteration):
                learner.finish_batch(lambda: tell(ev.BatchFinished(iteration)))

    def _publish(self, version: PolicyVersion) -> None:
        lineage = self.parts.controller.cluster.lineage

        def published(manifest: Manifest) -> None:
            self._announce(manifest, lambda: self.tell(ev.WeightsPublished(version)))

        self.parts.learner.publish(version, lineage, published)

    def _announce(self, manifest: Manifest, then: Callable[[], None]) -> None:
        """Let workers find a version: the weights are with the keeper already, under their digest."""
        older = sorted(key for key in self._published if key[0] < manifest.version)[:-VERSIONS_KEPT]
        dropped = {self._published.pop(key) for key in older} - {*self._published.values(), manifest.digest}
        self._published[PolicyVersion(manifest.version), manifest.lineage] = manifest.digest
        if dropped:
            self._forget(self.parts.keeper.drop.remote("weights", list(dropped)), "dropping old weights")
        name = version_name(manifest.version, manifest.lineage)
        self.parts.calls.send(
            self.parts.keeper.put.remote("manifest", name, manifest.to_json().encode()),
            f"announcing version {manifest.version}",
            FETCH_S,
            lambda _: then(),
            lambda error: self.fail(_keeper_lost(error)),
        )

    def _expect_again(self, version: PolicyVersion, lineage: int) -> None:
        """After a roll-back: leases of this version go on, with the weights that it had before."""
        known = max((key for key in self._published if key[0] == version), default=None)
        if known is not None:
            self._published[version, lineage] = self._published[known]

    def lost(self, detail: str) -> None:
        """The learner is gone: told once for each of its lives; see ``learner.group.Listener``."""
        self.observer.note(f"the learner is lost and goes back to the last checkpoint: {detail}")
        if self._sealing:
            self._lost_meanwhile = detail  # what it saved counts, and is about to be told
            return
        committing, self._committing = self._committing, None
        if committing is not None:  # what was being written is never committed
            with suppress(_AbandonedError):
                committing.__exit__(_AbandonedError, _AbandonedError(), None)
        if self.parts.controller.stage is Stage.IDLE:
            self._begin()  # nothing was trained yet
        elif self._exporting:
            self._restore(None, self.parts.controller.cluster.lineage)
        else:
            self.tell(ev.LearnerLost(detail))

    def failed(self, error: Exception) -> None:
        """The learner cannot go on, and a restart would not help; see ``learner.group.Listener``."""
        self.fail(error)

    def trouble(self, detail: str) -> None:
        """The learner does not start yet; see ``learner.group.Listener``."""
        self.note(f"the learner does not start: {detail}")

    def _restore(self, iteration: int | None, lineage: int) -> None:
        """Start the learner from the newest checkpoint, which must be of ``iteration`` (None: whichever)."""

        def restored(manifest: Manifest) -> None:
            self._announce(manifest, lambda: self.tell(ev.LearnerRestored(lineage)))
            if self._exporting:
                self._ask_export()

        def found(newest: Checkpoint | None) -> None:
            at = newest.header.iteration if newest else 0
            if iteration is not None and at != iteration:
                self.fail(
                    f"the newest whole checkpoint is of iteration {at}, but {iteration} was committed: "
                    "the run directory has changed behind this run's back"
                )
                return
            directory = newest.directory / LEARNER_FOLDER if newest else None
            self.parts.learner.restore(directory, lineage, restored)

        self._beside(self.parts.book.checkpoints.newest_valid, found)

    def _beside(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do what takes long, such as reading a checkpoint, beside the loop."""

        def run() -> None:
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - it ends the run, in the loop's thread
                self.loop.call_soon_threadsafe(self.fail, error)
            else:
                self.loop.call_soon_threadsafe(then, value)

        threading.Thread(target=run, name="beside the head", daemon=True).start()

    # -- the end of an iteration -----------------------------------------------------------------------

    def _iteration_done(self, trained: Mapping[str, float]) -> None:
        controller, book, own = self.parts.controller, self.parts.book, self._own
        self.accounts.write(book)
        row = self.log.take(controller.iteration) | dict(trained)
        row |= {f"seconds/{phase.value}": spent for phase, spent in self.accounts.take_seconds().items()}
        row |= {
            "head/events": float(own.events),
            "head/handling_s": own.handling_s,
            "fleet/workers": float(len(self.parts.workers.alive)),
            "fleet/nodes": float(len(controller.cluster.hosts)),
        }
        row |= {f"recovery/{name.value}": float(n) for name, n in controller.cluster.recoveries.items()}
        self._own = _Counters()
        book.iteration(controller.iteration, controller.ledger.trained, row)
        self.observer.iterated(controller.iteration, row)

    def _checkpoint(self, effect: ef.CommitCheckpoint) -> None:
        # What the checkpoint holds is accounted for at its position, before it is committed: a kill at any
        # moment leaves either both or neither, once the next attempt has rolled back.
        self.accounts.write(self.parts.book)
        committing = self._committing = self.parts.book.committing(effect)
        directory = committing.__enter__()

        def saved() -> None:
            if self._committing is not committing:
                return  # the learner was lost meanwhile
            self._committing, self._sealing = None, True
            self._beside(lambda: committing.__exit__(None, None, None), lambda _: sealed())

        def sealed() -> None:
            self.accounts.write(self.parts.book)
            self.stopped = self._over = self._stop_requested
            if not self._over:
                self._sweep(committed)

        def committed() -> None:
            self._sealing = False
            self.tell(ev.CheckpointCommitted(effect.iteration))
            if self._lost_meanwhile is not None:
                self.tell(ev.LearnerLost(self._lost_meanwhile))
                self._lost_meanwhile = None

        self.parts.learner.save(directory / LEARNER_FOLDER, saved)

    def _sweep(self, then: Callable[[], None]) -> None:
        """Have the keeper drop what late reports left behind, before new rollouts are issued; then go on."""
        known = {*self.parts.controller.work.names, *self._marks}
        waiting = set(VALUES)

        def swept(kind: str) -> None:
            waiting.discard(kind)
            if not waiting:
                then()

        for kind in VALUES:
            self.parts.calls.send(
                self.parts.keeper.keep_only.remote(kind, known),
                "sweeping values",
                FETCH_S,
                lambda _, kind=kind: swept(kind),  # type: ignore[misc]
                lambda error: self.fail(_keeper_lost(error)),
            )

    def befall(self, kind: Incident, subject: str, detail: str) -> None:
        """Write down what befell a node, a worker or the learner."""
        parts = self.parts
        self._incidents.write(kind, subject, detail, parts.controller.cluster.hosts, parts.book.ledger)


class _AbandonedError(Exception):
    """A checkpoint will not be committed."""


def _keeper_lost(error: Exception) -> Exception:
    cause = getattr(error, "cause", None)  # Ray wraps what an actor raised
    if isinstance(cause, StoreError):
        return cause
    return RuntimeError(
        f"the keeper of states and samples does not answer ({type(error).__name__}: {error}): it runs on the "
        "node of this process; see its log there. The same command resumes from the last checkpoint."
    )
