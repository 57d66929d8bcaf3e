"""The Ray driver: carries out the controller's effects on processes that may die at any moment.

    inbox ──► event ──► controller.handle ──► effects ──► workers / learner / rewards / blob store / recorder
      ▲                        │                                          │
      │                        └─► billing                                │
      └──── answers, deaths, worker reports, node changes ◄───────────────┘

It makes no decisions. :meth:`Head.run` waits only for the next event: whatever takes time is a
*conversation*, a task whose remote calls have deadlines and whose outcome is an event. Large values (states,
samples, weights) travel between workers, blob store and learner directly.

Invariants
    1. Records are written before the checkpoint that counts them.
    2. A sample is accepted only if its weights digest, not just its number, matches the published version.
    3. A report of values counts only if the blob store holds them.
    4. A conversation takes its first step before the next event is handled, so it sees the controller as the
       effect left it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotlight.cluster.billing import ClusterAccounts, changed_machines
from spotlight.cluster.blobs.blob_store import BlobAddress
from spotlight.cluster.cluster_nodes import ClusterNodes
from spotlight.cluster.incidents import Drains, IncidentRecorder
from spotlight.cluster.learner.learner_rank import LearnerRank
from spotlight.cluster.learner_driver import LearnerDriver
from spotlight.cluster.remote_calls import Conversations, Inbox
from spotlight.cluster.sample_scoring import AcceptedSamples, SampleScoring
from spotlight.cluster.scaling.node_supply import NodeSupply
from spotlight.cluster.trace_collector import TraceCollector
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.models.shared.flop_count import Compute
from spotlight.rollout.serialization import unpack_image
from spotlight.runtime.assembly.preview_settings import report_note, report_row
from spotlight.runtime.observer import Observer, stop_note, tell_stop
from spotlight.runtime.recorder import Picture, RunRecorder, shown, shown_in_step
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import (
    NodeId,
    NodeKind,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.training.step_metrics import IterationLog
from spotlight.worker.interfaces import FollowLease
from spotlight.worker.reports import RolloutSpeed


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What the head works with.

    Attributes:
        attempt: the ledger's attempt number.
        grid: prompts of the image grids, and images per prompt.
        training_pictures_every: iterations; 0: none.
        traces: of the profiler.
        nodes: what the controller's machines are here.
        supplies: of the kinds of nodes that come and go as the run wants.
    """

    controller: Controller
    inbox: Inbox
    conversations: Conversations
    workers: WorkerPool
    learner: LearnerDriver
    samples: AcceptedSamples
    scoring: SampleScoring
    accounts: ClusterAccounts
    recorder: RunRecorder
    incidents: IncidentRecorder
    drains: Drains
    observer: Observer
    attempt: int
    grid: tuple[int, int]
    training_pictures_every: int
    traces: TraceCollector
    nodes: ClusterNodes
    supplies: Mapping[NodeKind, NodeSupply] = field(default_factory=dict)


@dataclass(slots=True)
class _Effort:
    events: int = 0
    handling_s: float = 0.0
    reward_wait_s: float = 0.0


@dataclass(slots=True)
class Head:
    """Drives one run to its end, or after :meth:`request_stop` to where a resume is exact."""

    parts: HeadParts
    log: IterationLog = field(default_factory=IterationLog)
    error: str | None = None
    stopped: bool = False
    _over: bool = False
    _ending: dict[NodeKind, tuple[NodeId, ...]] = field(default_factory=dict)
    _groups: dict[WorkerId, tuple[int, tuple[WorkerId, ...]]] = field(default_factory=dict)
    _effort: _Effort = field(default_factory=_Effort)
    _waits_since_s: float | None = None

    # -- the loop --------------------------------------------------------------------------------------

    async def run(self, checkpoint: Path | None) -> Path | None:
        """Handle events until the controller finishes, then export the judged weights.

        Run it with :meth:`Conversations.supervise`, which raises unrecoverable errors.

        Args:
            checkpoint: learner state to begin from; None: a fresh run.

        Returns:
            The exported weights; None when the run failed or was stopped.
        """
        self.parts.conversations.start(self._receive_reports())
        self.parts.learner.begin(checkpoint)
        while not self._over:
            if (entry := await self._next_event()) is not None:
                self._handle(*entry)
                await asyncio.sleep(0)  # invariant 4
        self.parts.accounts.write(self.parts.recorder)
        await self.parts.traces.finish()
        if self.error is not None or self.stopped:
            return None
        self.parts.workers.close()  # a learner that is formed again may need their slots
        if self.parts.nodes.spares is not None:
            self.parts.nodes.spares.close()
        exported = asyncio.ensure_future(self.parts.learner.export())
        exported.add_done_callback(lambda _: self.parts.inbox.wake())
        try:
            while not exported.done():  # a lost learner is formed again, where the controller says
                if (entry := await self._next_event()) is not None:
                    self._handle(*entry)
                    await asyncio.sleep(0)
            return exported.result()
        finally:
            exported.cancel()

    async def _next_event(self) -> tuple[ev.Event, str] | None:
        """The oldest event, or the controller's timer; None: look again."""
        accounts, inbox, wake_s = self.parts.accounts, self.parts.inbox, self.parts.controller.wake_s
        due_s = accounts.write_due(self.parts.recorder)
        now = accounts.clock()
        if (entry := inbox.take()) is not None:
            return entry
        if wake_s is not None and wake_s <= now:
            return ev.TimePassed(), ""
        await inbox.wait((due_s if wake_s is None else min(due_s, wake_s)) - now)
        return None

    def request_stop(self) -> None:
        """Stop where a resume is exact."""
        self.parts.inbox.put(ev.StopRequested())

    async def _receive_reports(self) -> None:
        while True:
            for report in await self.parts.samples.store.take():
                if isinstance(event := report.event, RolloutSpeed):
                    work = Compute(event.tokens, event.flops)
                    self.log.worked("rollout", work, event.seconds, event.peak_flop_s)
                else:
                    self.parts.inbox.put(event, report.weights_digest)

    def _handle(self, event: ev.Event, weights_digest: str) -> None:
        parts, controller, now = self.parts, self.parts.controller, self.parts.accounts.clock()
        if isinstance(event, ev.LeaseCompleted) and not self._made_by_published(event, weights_digest):
            return
        if isinstance(event, ev.SamplesRewarded):
            self._log_scores(event.scores)
        parts.incidents.observe(event)
        if isinstance(event, ev.NodeJoined):
            parts.nodes.enter(event.node)
        effects = controller.handle(event, now)
        parts.accounts.observe(event, effects, now, parts.recorder)
        match event:
            case ev.StopRequested():
                tell_stop(parts.observer, stop_note(controller), at_once=controller.stops_at_once)
            case ev.WeightsPulled(worker):
                parts.workers.prove(worker)
            case ev.NodeLost(machine):
                for node in parts.nodes.forget(machine):
                    parts.workers.lose(node)
            case ev.LeaseProgressed(leader):
                parts.workers.worked(leader)
            case ev.LeaseCompleted(leader, rollouts=rollouts):
                parts.workers.worked(leader)
                parts.samples.accept([one.id for one in ef.accepted(effects, rollouts)], weights_digest)
                self._show_work()
        for effect in effects:
            self._carry_out(effect)
        if not self._over and changed_machines(event, effects):
            parts.nodes.report_standstill()
        for node, seconds in parts.drains.finished(controller.fleet, now):
            self.log.add("fleet/drain_s", seconds)
            parts.incidents.record(Incident.NODE_DRAINED, node, f"{seconds:.2f} s after it was to stop")
            parts.observer.note(f"{node} is drained, {seconds:.2f} s after it was to stop")
        if self._waits_since_s is not None:
            self._effort.reward_wait_s += now - self._waits_since_s
        self._waits_since_s = now if controller.waits_for_rewards else None
        self._effort.events += 1
        self._effort.handling_s += parts.accounts.clock() - now

    def _made_by_published(self, event: ev.LeaseCompleted, weights_digest: str) -> bool:
        """Whether a report was made with the published weights; kills its worker if not."""
        expected = self.parts.learner.published.digest(event.version, self.parts.controller.cluster.lineage)
        if expected is None or expected == weights_digest:
            return True  # not a published version: the controller rejects it
        self.parts.observer.note(
            f"{event.leader} made samples of version {event.version} with weights {weights_digest[:12]}, not "
            f"with those published ({expected[:12]}): its samples are refused, its process is restarted"
        )
        self.parts.workers.distrust(event.leader)
        return False

    def _log_scores(self, scores: Mapping[RolloutId, Mapping[str, float]]) -> None:
        for rollout, curves in scores.items():
            if (issued := self.parts.controller.work.find(rollout)) is not None:
                self.log.scored(issued, curves)

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        parts, cluster = self.parts, self.parts.controller.cluster
        match effect:
            case ef.WriteRecord(position, record):
                parts.recorder.write(position, record)
            case ef.StartWorker():
                parts.workers.start(effect)
            case ef.PullWeights(worker):
                parts.workers.tell(worker, effect)
            case ef.FormGroup() | ef.StopGroup():
                self._tell_group(effect)
            case ef.GrantLease():
                self._grant(effect)
            case ef.AbandonLease(leader):
                parts.workers.tell(leader, effect)
            case ef.HoldSamples():
                pass
            case ef.ScoreSamples():
                parts.scoring.score(effect)
            case ef.KeepPreview(preview, rollout, scores):
                parts.samples.keep(preview, rollout.id)
                self.log.scored(rollout, scores)
            case ef.DiscardSamples(rollouts):
                parts.samples.forget(rollouts)
                parts.conversations.start(parts.samples.drop(rollouts, parts.samples.store.puts))
            case ef.ReportEvaluation():
                parts.conversations.start(self._report_evaluation(effect))
            case ef.ReportExploration(_, report):
                self._report_exploration(report)
            case ef.ReportPipeline():
                parts.recorder.pipeline(effect)
                self.log.put(effect.row())
            case ef.ReportChoice():
                self.log.put(effect.row())
            case ef.StepOptimizer():
                kept = shown_in_step(parts.controller, parts.training_pictures_every)
                parts.conversations.start(self._step(effect, kept))
            case ef.PrepareBatch() | ef.TrainMicroBatch() | ef.FinishBatch():
                parts.conversations.start(self._train(effect, *self._to_prepare(effect)))
            case ef.PublishWeights(version):
                parts.conversations.start(self._end_iteration(version, cluster.lineage))
            case ef.CommitCheckpoint():
                # Account for the checkpoint's contents before committing it: whenever the head is killed, the
                # next attempt's rollback leaves both or neither.
                parts.accounts.write(parts.recorder)
                parts.conversations.start(self._checkpoint(effect))
            case ef.RollBack(position):
                self._roll_back(position)
            case ef.PrepareLearner(number):
                parts.conversations.start(parts.learner.prepare_second(number))
            case ef.EndLearner(detail):
                parts.learner.learner.end(detail)
            case ef.RestoreLearner(iteration, lineage):
                parts.learner.restore(iteration, lineage)
            case ef.AssignRoles():
                self._assign(effect)
            case ef.PlaceLearner(ranks):
                parts.nodes.place_learner(ranks)
            case ef.NodesWanted():
                self._provide(effect)
            case ef.ReportFleet(kind, text, row):
                self.log.put(row)
                if text:
                    parts.incidents.nodes_wanted(kind, text)
            case ef.FinishRun(error, stopped):
                self.error, self.stopped, self._over = error, stopped, True

    def _tell_group(self, effect: ef.FormGroup | ef.StopGroup) -> None:
        self._groups[effect.leader] = effect.epoch, effect.members
        for member in effect.members:
            self.parts.workers.tell(member, effect)

    def _assign(self, effect: ef.AssignRoles) -> None:
        """The workers of a machine whose role changes end, or wait to be the learner."""
        parts = self.parts
        before = parts.nodes.assign(effect)
        able, unfit = parts.workers.release(before)
        if parts.nodes.spares is not None:
            ray_id = parts.nodes.machines[effect.machine].ray_id
            parts.nodes.spares.release(ray_id, able, unfit)
            if not any(part.trains for part in effect.parts):
                parts.learner.leave(ray_id)

    def _provide(self, effect: ef.NodesWanted) -> None:
        before, self._ending[effect.kind] = self._ending.get(effect.kind, ()), effect.ending
        for machine in effect.ending:
            if machine not in before:
                self.parts.incidents.node_returned(machine, effect.kind)
        self.parts.supplies[effect.kind].want(effect.nodes, effect.ending)

    def _report_exploration(self, report: Mapping[str, Any]) -> None:
        self.log.put(report_row(report))
        if said := report_note(report):
            self.parts.observer.note(said)

    def _roll_back(self, position: int) -> None:
        parts, controller = self.parts, self.parts.controller
        undone = parts.recorder.undo(position, parts.attempt, controller.iteration)
        parts.learner.published.continue_in(controller.cluster.lineage, controller.version)
        parts.observer.note(f"{undone} ledger records after the checkpoint are undone")

    def _grant(self, effect: ef.GrantLease) -> None:
        lease = effect.lease
        self.parts.recorder.grant(effect)
        self.parts.workers.tell(lease.worker, effect)
        epoch, members = self._groups.get(lease.worker, (-1, ()))
        for member in members if epoch == lease.epoch else ():
            if member != lease.worker:
                self.parts.workers.tell(member, FollowLease(lease.worker, lease.epoch, lease.id))

    def _to_prepare(
        self, effect: ef.TrainEffect
    ) -> tuple[Mapping[RolloutId, Rollout], Mapping[RolloutId, BlobAddress]]:
        """The rollouts of a batch to prepare, and where their samples are now."""
        if not isinstance(effect, ef.PrepareBatch):
            return {}, {}
        names = [name for group in effect.groups for name in group.rollouts]
        rollouts = self.parts.controller.rollouts
        return {name: rollouts[name] for name in names}, {n: self.parts.samples.address(n) for n in names}

    async def _train(
        self,
        effect: ef.PrepareBatch | ef.TrainMicroBatch | ef.FinishBatch,
        rollouts: Mapping[RolloutId, Rollout],
        stored: Mapping[RolloutId, BlobAddress],
    ) -> None:
        if isinstance(effect, ef.TrainMicroBatch):
            training = self.parts.controller.training
            self.parts.observer.work(Phase.TRAINING, training.begun - 1, training.prepared)
        ranks = self.parts.learner.ranks
        self.parts.inbox.put(await ranks.ask(LearnerRank.train, effect, rollouts, stored))

    async def _step(self, effect: ef.StepOptimizer, kept: Mapping[Rollout, Mapping[str, float]]) -> None:
        parts = self.parts
        stored = parts.samples.by_digest([*kept])
        # Pictures are fetched beside the step: its answer has their samples discarded.
        answer, pictures = await asyncio.gather(
            parts.learner.ranks.ask(LearnerRank.train, effect, {}, {}), self._fetched(stored)
        )
        if kept:
            parts.recorder.training(effect.iteration, kept, pictures)
        parts.inbox.put(answer)

    async def _fetched(self, made_with: Mapping[str, Sequence[Rollout]]) -> dict[RolloutId, Picture]:
        pictures: dict[RolloutId, Picture] = {}
        for digest, part in made_with.items():
            stored = await self.parts.samples.images(part, digest)
            pictures |= {name: unpack_image(blob.data) for name, blob in stored.items()}
        return pictures

    async def _report_evaluation(self, effect: ef.ReportEvaluation) -> None:
        parts, controller = self.parts, self.parts.controller
        grid = shown(effect.issued, *parts.grid)
        chosen = [rollout for rollout in grid if rollout.id in effect.scores]
        pictures = await self._fetched(parts.samples.by_digest(chosen))
        if effect.lineage != controller.cluster.lineage:
            return
        parts.accounts.write(parts.recorder)
        found = {rollout: pictures.get(rollout.id) for rollout in grid}
        row = parts.recorder.evaluation(effect, controller.ledger.trained, found)
        parts.observer.evaluated(effect.iteration, row)
        parts.inbox.put(ev.EvaluationReported(effect.iteration, effect.lineage))

    async def _end_iteration(self, version: PolicyVersion, lineage: int) -> None:
        self._write_row(await self.parts.learner.ranks.ask(LearnerRank.take_log))
        await self.parts.traces.collect()
        await self.parts.learner.publish(version, lineage)

    def _write_row(self, trained: Mapping[str, float]) -> None:
        parts, controller = self.parts, self.parts.controller
        parts.accounts.write(parts.recorder)
        seconds = parts.accounts.take_seconds()
        if NodeKind.SPOT in parts.supplies:
            work_s = sum(seconds.get(phase, 0.0) for phase in (Phase.ROLLOUT, Phase.EVALUATION))
            ledger = parts.recorder.ledger
            run_s = time.time() - ledger.began_at()
            # At once, since what is forecast belongs into the iteration's row.
            self._handle(ev.IterationBilled(controller.iteration, work_s, ledger.cost_usd(), run_s), "")
        row = self.log.take(controller.iteration) | dict(trained)
        row |= {f"seconds/{phase.value}": spent for phase, spent in seconds.items()}
        row |= {
            "head/events": float(self._effort.events),
            "head/handling_s": self._effort.handling_s,
            "rewards/wait_s": self._effort.reward_wait_s,
            "fleet/workers": float(len(parts.workers.alive)),
            "fleet/nodes": float(len(controller.cluster.hosts)),
        }
        row |= {f"recovery/{name.value}": float(n) for name, n in controller.cluster.recoveries.items()}
        self._effort = _Effort()
        parts.recorder.iteration(controller.iteration, controller.ledger.trained, row)
        parts.observer.iterated(controller.iteration, row)

    async def _checkpoint(self, effect: ef.CommitCheckpoint) -> None:
        parts = self.parts
        behind = parts.controller.plan.cluster.learner_moves
        # Drop values of late reports before new rollouts are issued.
        if behind:
            await parts.samples.sweep(parts.controller.work.names)
        await parts.learner.save(parts.recorder.committing(effect))
        parts.recorder.committed(effect)
        parts.accounts.write(parts.recorder)
        if not behind:
            await parts.samples.sweep(parts.controller.work.names)
        parts.inbox.put(ev.CheckpointCommitted(effect.iteration))
        parts.learner.settle()

    def _show_work(self) -> None:
        controller, observer = self.parts.controller, self.parts.observer
        for purpose, phase in (
            (Purpose.TRAIN, Phase.ROLLOUT),
            (Purpose.EVAL, Phase.EVALUATION),
        ):
            total = sum(rollout.purpose is purpose for rollout in controller.rollouts.values())
            left = controller.queue.outstanding_for(purpose)
            if left:
                observer.work(phase, total - left, total)
                return
        if controller.stage is Stage.PREPARING:
            total = sum(len(work.rollouts) for work in controller.work.extra)
            done = total - controller.queue.outstanding_for(Purpose.EXPLORE)
            observer.work(Phase.EXPLORATION, done, total)
