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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from spotlight.runtime.assembly.preview_settings import report_note, report_row
from spotlight.runtime.observer import Observer, stop_note, tell_stop
from spotlight.runtime.recorder import RunRecorder, shown, shown_in_step
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import (
    PHASE_OF,
    NodeKind,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.store.ledger.ledger_queries import began_at
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.training.step_metrics import IterationLog
from spotlight.worker.interfaces import FollowLease
from spotlight.worker.reports import RolloutSpeed


@dataclass(slots=True)
class _Effort:
    events: int = 0
    handling_s: float = 0.0
    reward_wait_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Head:
    """Drives one run to its end, or after :meth:`request_stop` to where a resume is exact.

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
    log: IterationLog = field(default_factory=IterationLog)
    error: str | None = None
    stopped: bool = False
    _over: bool = False
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
        self.conversations.start(self._receive_reports())
        self.learner.begin(checkpoint)
        while not self._over:
            await self._turn()
        self.accounts.write(self.recorder)
        await self.traces.finish()
        if self.error is not None or self.stopped:
            return None
        self.workers.close()  # a learner that is formed again may need their slots
        if self.nodes.spares is not None:
            self.nodes.spares.close()
        exported = asyncio.ensure_future(self.learner.export())
        exported.add_done_callback(lambda _: self.inbox.wake())
        try:
            while not exported.done():  # a lost learner is formed again, where the controller says
                await self._turn()
            return exported.result()
        finally:
            exported.cancel()

    async def _turn(self) -> None:
        """Handle the oldest event, or the controller's timer; else wait for one."""
        wake_s, due_s = self.controller.wake_s, self.accounts.write_due(self.recorder)
        now = self.accounts.clock()
        if (entry := self.inbox.take()) is not None:
            self._handle(*entry)
        elif wake_s is not None and wake_s <= now:
            self._handle(ev.TimePassed())
        else:
            await self.inbox.wait((due_s if wake_s is None else min(due_s, wake_s)) - now)
            return
        await asyncio.sleep(0)  # invariant 4

    def request_stop(self) -> None:
        """Stop where a resume is exact."""
        self.inbox.put(ev.StopRequested())

    async def _receive_reports(self) -> None:
        while True:
            for report in await self.samples.store.take():
                if isinstance(event := report.event, RolloutSpeed):
                    work = Compute(event.tokens, event.flops)
                    self.log.worked("rollout", work, event.seconds, event.peak_flop_s)
                else:
                    self.inbox.put(event, report.weights_digest)

    def _handle(self, event: ev.Event, weights_digest: str = "") -> None:
        controller, now = self.controller, self.accounts.clock()
        if isinstance(event, ev.LeaseCompleted) and not self._made_by_published(event, weights_digest):
            return
        if isinstance(event, ev.SamplesRewarded):
            self._log_scores(event.scores)
        self.incidents.observe(event)
        if isinstance(event, ev.NodeJoined):
            self.nodes.enter(event.node)
        effects = controller.handle(event, now)
        self.accounts.observe(event, effects, now, self.recorder)
        match event:
            case ev.StopRequested():
                tell_stop(self.observer, stop_note(controller), at_once=controller.stops_at_once)
            case ev.WeightsPulled(worker):
                self.workers.prove(worker)
            case ev.NodeLost(machine):
                for node in self.nodes.forget(machine):
                    self.workers.lose(node)
            case ev.LeaseProgressed(leader):
                self.workers.worked(leader)
            case ev.LeaseCompleted(leader, rollouts=rollouts):
                self.workers.worked(leader)
                self.samples.accept([one.id for one in ef.accepted(effects, rollouts)], weights_digest)
                self._show_work()
        for effect in effects:
            self._carry_out(effect)
        if not self._over and changed_machines(event, effects):
            self.nodes.report_standstill()
        for node, seconds in self.drains.finished(controller.fleet, now):
            self.log.add("fleet/drain_s", seconds)
            self.incidents.record(Incident.NODE_DRAINED, node, f"{seconds:.2f} s after it was to stop")
            self.observer.note(f"{node} is drained, {seconds:.2f} s after it was to stop")
        if self._waits_since_s is not None:
            self._effort.reward_wait_s += now - self._waits_since_s
        self._waits_since_s = now if controller.waits_for_rewards else None
        self._effort.events += 1
        self._effort.handling_s += self.accounts.clock() - now

    def _made_by_published(self, event: ev.LeaseCompleted, weights_digest: str) -> bool:
        """Whether a report was made with the published weights; kills its worker if not."""
        expected = self.learner.published.digest(event.version, self.controller.cluster.lineage)
        if expected is None or expected == weights_digest:
            return True  # not a published version: the controller rejects it
        self.observer.note(
            f"{event.leader} made samples of version {event.version} with weights {weights_digest[:12]}, not "
            f"with those published ({expected[:12]}): its samples are refused, its process is restarted"
        )
        self.workers.distrust(event.leader)
        return False

    def _log_scores(self, scores: Mapping[RolloutId, Mapping[str, float]]) -> None:
        for rollout, curves in scores.items():
            if (issued := self.controller.work.find(rollout)) is not None:
                self.log.scored(issued, curves)

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        cluster = self.controller.cluster
        match effect:
            case ef.WriteRecord(position, record):
                self.recorder.write(position, record)
            case ef.StartWorker():
                self.workers.start(effect)
            case ef.PullWeights(worker):
                self.workers.tell(worker, effect)
            case ef.FormGroup(leader, epoch, members) | ef.StopGroup(leader, epoch, members):
                self._groups[leader] = epoch, members
                for member in members:
                    self.workers.tell(member, effect)
            case ef.GrantLease():
                self._grant(effect)
            case ef.AbandonLease(leader):
                self.workers.tell(leader, effect)
            case ef.HoldSamples():
                pass
            case ef.ScoreSamples():
                self.scoring.score(effect)
            case ef.KeepPreview(preview, rollout, scores):
                self.samples.keep(preview, rollout.id)
                self.log.scored(rollout, scores)
            case ef.DiscardSamples(rollouts):
                self.samples.forget(rollouts)
                self.conversations.start(self.samples.drop(rollouts, self.samples.store.puts))
            case ef.ReportEvaluation():
                self.conversations.start(self._report_evaluation(effect))
            case ef.ReportExploration(_, report):
                self.log.put(report_row(report))
                if said := report_note(report):
                    self.observer.note(said)
            case ef.ReportPipeline():
                self.recorder.pipeline(effect)
                self.log.put(effect.row())
            case ef.ReportChoice():
                self.log.put(effect.row())
            case ef.StepOptimizer():
                kept = shown_in_step(self.controller, self.training_pictures_every)
                self.conversations.start(self._step(effect, kept))
            case ef.PrepareBatch() | ef.TrainMicroBatch() | ef.FinishBatch():
                self.conversations.start(self._train(effect, *self._to_prepare(effect)))
            case ef.PublishWeights(version):
                self.conversations.start(self._end_iteration(version, cluster.lineage))
            case ef.CommitCheckpoint():
                # Account for the checkpoint's contents before committing it: whenever the head is killed, the
                # next attempt's rollback leaves both or neither.
                self.accounts.write(self.recorder)
                self.conversations.start(self._checkpoint(effect))
            case ef.RollBack(position):
                self._roll_back(position)
            case ef.PrepareLearner(number):
                self.conversations.start(self.learner.prepare_second(number))
            case ef.EndLearner(detail):
                self.learner.learner.end(detail)
            case ef.RestoreLearner(iteration, lineage):
                self.learner.restore(iteration, lineage)
            case ef.AssignRoles():
                self._assign(effect)
            case ef.PlaceLearner(ranks):
                self.nodes.place_learner(ranks)
            case ef.NodesWanted():
                self._provide(effect)
            case ef.ReportFleet(kind, text, row):
                self.log.put(row)
                if text:
                    self.incidents.nodes_wanted(kind, text)
            case ef.FinishRun(error, stopped):
                self.error, self.stopped, self._over = error, stopped, True

    def _assign(self, effect: ef.AssignRoles) -> None:
        """The workers of a machine whose role changes end, or wait to be the learner."""
        before = self.nodes.assign(effect)
        able, unfit = self.workers.release(before)
        if self.nodes.spares is not None:
            ray_id = self.nodes.machines[effect.machine].ray_id
            self.nodes.spares.release(ray_id, able, unfit)
            if not any(part.trains for part in effect.parts):
                self.learner.learner.leave(ray_id)

    def _provide(self, effect: ef.NodesWanted) -> None:
        supply = self.supplies[effect.kind]
        for machine in effect.ending:
            if machine not in supply.ending:
                self.incidents.node_returned(machine, effect.kind)
        supply.want(effect.nodes, effect.ending)

    def _roll_back(self, position: int) -> None:
        controller = self.controller
        undone = self.recorder.undo(position, self.attempt, controller.iteration)
        self.learner.published.continue_in(controller.cluster.lineage, controller.version)
        self.observer.note(f"{undone} ledger records after the checkpoint are undone")

    def _grant(self, effect: ef.GrantLease) -> None:
        lease = effect.lease
        self.recorder.grant(effect)
        self.workers.tell(lease.worker, effect)
        epoch, members = self._groups.get(lease.worker, (-1, ()))
        for member in members if epoch == lease.epoch else ():
            if member != lease.worker:
                self.workers.tell(member, FollowLease(lease.worker, lease.epoch, lease.id))

    def _to_prepare(
        self, effect: ef.TrainEffect
    ) -> tuple[Mapping[RolloutId, Rollout], Mapping[RolloutId, BlobAddress]]:
        """The rollouts of a batch to prepare, and where their samples are now."""
        if not isinstance(effect, ef.PrepareBatch):
            return {}, {}
        names = [name for group in effect.groups for name in group.rollouts]
        rollouts = self.controller.rollouts
        return {name: rollouts[name] for name in names}, {n: self.samples.address(n) for n in names}

    async def _train(
        self,
        effect: ef.PrepareBatch | ef.TrainMicroBatch | ef.FinishBatch,
        rollouts: Mapping[RolloutId, Rollout],
        stored: Mapping[RolloutId, BlobAddress],
    ) -> None:
        if isinstance(effect, ef.TrainMicroBatch):
            training = self.controller.training
            self.observer.work(Phase.TRAINING, training.begun - 1, training.prepared)
        ranks = self.learner.ranks
        self.inbox.put(await ranks.ask(LearnerRank.train, effect, rollouts, stored))

    async def _step(self, effect: ef.StepOptimizer, kept: Mapping[Rollout, Mapping[str, float]]) -> None:
        stored = self.samples.by_digest([*kept])
        # Pictures are fetched beside the step: its answer has their samples discarded.
        answer, pictures = await asyncio.gather(
            self.learner.ranks.ask(LearnerRank.train, effect, {}, {}), self.samples.pictures(stored)
        )
        if kept:
            self.recorder.training(effect.iteration, kept, pictures)
        self.inbox.put(answer)

    async def _report_evaluation(self, effect: ef.ReportEvaluation) -> None:
        controller = self.controller
        grid = shown(effect.issued, *self.grid)
        chosen = [rollout for rollout in grid if rollout.id in effect.scores]
        pictures = await self.samples.pictures(self.samples.by_digest(chosen))
        if effect.lineage != controller.cluster.lineage:
            return
        self.accounts.write(self.recorder)
        found = {rollout: pictures.get(rollout.id) for rollout in grid}
        row = self.recorder.evaluation(effect, controller.ledger.trained, found)
        self.observer.evaluated(effect.iteration, row)
        self.inbox.put(ev.EvaluationReported(effect.iteration, effect.lineage))

    async def _end_iteration(self, version: PolicyVersion, lineage: int) -> None:
        self._write_row(await self.learner.ranks.ask(LearnerRank.take_log))
        await self.traces.collect()
        await self.learner.publish(version, lineage)

    def _write_row(self, trained: Mapping[str, float]) -> None:
        controller = self.controller
        self.accounts.write(self.recorder)
        seconds = self.accounts.take_seconds()
        if NodeKind.SPOT in self.supplies:
            work_s = sum(seconds.get(phase, 0.0) for phase in (Phase.ROLLOUT, Phase.EVALUATION))
            ledger = self.recorder.ledger
            run_s = time.time() - began_at(ledger.connection)
            # At once, since what is forecast belongs into the iteration's row.
            self._handle(ev.IterationBilled(controller.iteration, work_s, ledger.cost_usd(), run_s))
        row = self.log.take(controller.iteration) | dict(trained)
        row |= {f"seconds/{phase.value}": spent for phase, spent in seconds.items()}
        row |= {
            "head/events": float(self._effort.events),
            "head/handling_s": self._effort.handling_s,
            "rewards/wait_s": self._effort.reward_wait_s,
            "fleet/workers": float(len(self.workers.alive)),
            "fleet/nodes": float(len(controller.cluster.hosts)),
        }
        row |= {f"recovery/{name.value}": float(n) for name, n in controller.cluster.recoveries.items()}
        self._effort = _Effort()
        self.recorder.iteration(controller.iteration, controller.ledger.trained, row)
        self.observer.iterated(controller.iteration, row)

    async def _checkpoint(self, effect: ef.CommitCheckpoint) -> None:
        behind = self.controller.plan.cluster.learner_moves
        # Drop values of late reports before new rollouts are issued.
        if behind:
            await self.samples.sweep(self.controller.work.names)
        await self.learner.save(self.recorder.committing(effect))
        self.recorder.committed(effect)
        self.accounts.write(self.recorder)
        if not behind:
            await self.samples.sweep(self.controller.work.names)
        self.inbox.put(ev.CheckpointCommitted(effect.iteration))
        self.learner.settle()

    def _show_work(self) -> None:
        controller, observer = self.controller, self.observer
        for purpose in (Purpose.TRAIN, Purpose.EVAL):
            total = sum(rollout.purpose is purpose for rollout in controller.rollouts.values())
            left = controller.queue.outstanding_for(purpose)
            if left:
                observer.work(PHASE_OF[purpose], total - left, total)
                return
        if controller.stage is Stage.PREPARING:
            total = sum(len(work.rollouts) for work in controller.work.extra)
            done = total - controller.queue.outstanding_for(Purpose.EXPLORE)
            observer.work(Phase.EXPLORATION, done, total)
