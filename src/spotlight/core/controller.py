"""The controller: everything that decides, as one pure state machine. Read this file first.

    effects = controller.handle(event, now)

No torch, no clock, no threads, no global randomness: the same events give the same effects. Drivers
(``runtime/inline`` in one process; others beside it) carry effects out in order and feed back events.

Who waits on whom, in one iteration of the synchronous schedule:

    issue ──► queue ──► WorkPulled / GrantLease ──► RolloutCompleted ──► ScoreSamples ──► SampleRewarded
                                                                                               │ all in
              StepOptimizer* ◄── TrainMicroBatch* ◄── PrepareBatch ◄── ReportEvaluation, if any ◄──┘
                    └──► FinishBatch ──► PublishWeights ──► CommitCheckpoint, when due ──► next iteration

Evaluation rollouts of an iteration go through the same queue, after its train rollouts; training starts
when both are done, because they must be made by the version that the iteration started with.

Invariants: those of the ledger (checked after every event) and of the queue (see ``Controller.check``), and
    - a sample is made by the version its rollout asks for (admission) and trained in the iteration that
      issued it (consumption), so staleness is 0 published versions;
    - a sample enters at most one optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotlight.core import events as ev
from spotlight.core.batches import even_out, micro_batches, split_updates
from spotlight.core.cluster import Cluster
from spotlight.core.effects import (
    CommitCheckpoint,
    DiscardSamples,
    Effect,
    FinishBatch,
    FinishRun,
    GrantLease,
    NoWork,
    PrepareBatch,
    PublishWeights,
    ReportEvaluation,
    RestoreLearner,
    RollBack,
    StepOptimizer,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.core.iteration import LEARNER_IDLES, LOOKS_AHEAD
from spotlight.core.iteration import Stage as Stage
from spotlight.core.ledger import Ledger
from spotlight.core.plan import Explore, require_usable
from spotlight.core.plan import Plan as Plan
from spotlight.core.queue import PullQueue, first_epoch
from spotlight.core.records import StepApplied
from spotlight.core.recovery import Recovery
from spotlight.core.rollouts import Rollouts
from spotlight.core.snapshot import Snapshot
from spotlight.core.types import (
    DropReason,
    Group,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutId,
)


class Controller:
    """See the module's docstring."""

    def __init__(self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], term: int = 0) -> None:
        require_usable(plan, train, test)
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in (*train, *test)}
        self.queue = PullQueue(plan.lease_s, term)
        self.stage = Stage.IDLE
        self.iteration = 0
        self.version = PolicyVersion(0)
        self.cluster = Cluster(plan.cluster, self.queue, first_epoch(term), self.version)
        self.work = Rollouts(plan, train, test, self.queue, self.cluster)
        self._now = 0.0
        self._committed = self._to_commit = self._snapshot()
        self._learner_up, self._restore_due = True, False
        self._undo: list[Effect] = []

    @property
    def ledger(self) -> Ledger:
        """What was counted so far."""
        return self.work.ledger

    # -- the one entry ---------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event at controller time ``now`` (seconds); return the effects, in order."""
        self._now = now
        for lease in self.queue.expire(now):
            self.cluster.suspect(lease)
        self.cluster.ring(now)
        self._dispatch(_after_the_end(event) if self.stage is Stage.OVER else event)
        if self.stage is not Stage.OVER:
            self.cluster.learner_idles(self._learner_up and self.stage in LEARNER_IDLES)
            if self.stage in LOOKS_AHEAD:
                self.work.explore_ahead(self.iteration, now)
            self.cluster.serve(now)
        # Records come first: drivers make them durable before any checkpoint that an effect asks for. What a
        # lost learner undoes is undone before it is recorded anew.
        records = [WriteRecord(*numbered) for numbered in self.ledger.take_records()]
        if records:
            self.ledger.check()
        effects = [*self._undo, *records, *self.work.effects, *self.cluster.effects]
        self._undo, self.work.effects, self.cluster.effects = [], [], []
        return effects

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted():
                self._expect(Stage.IDLE, event)
                self._start_iteration()
            case ev.WorkerJoined(worker):
                self.queue.admit(worker)
            case ev.WorkerLeft(worker):
                self.queue.release(worker)
            case ev.WorkPulled():
                self._grant(event)
            case ev.GroupPulled():
                self.cluster.pulled(event, self._now)
            case ev.ProgressCommitted():
                self.work.commit(event, self._now)
            case ev.LeaseProgressed():
                self.work.progress(event, self._now)
            case ev.RolloutCompleted(worker, lease, epoch, rollout, version):
                self.work.complete(worker, lease, epoch, (rollout,), version, self._now)
                self._advance()
            case ev.LeaseCompleted(worker, lease, epoch, rollouts, version):
                if not self.work.complete(worker, lease, epoch, rollouts, version, self._now):
                    self.cluster.abandon(worker, epoch, lease)
                self._advance()
            case ev.RolloutFailed(_, lease, epoch, rollout, error):
                self.work.fail(lease, epoch, rollout, error)
                self._advance()
            case ev.SampleRewarded(rollout, scores, lineage):
                self.work.reward({rollout: scores}, lineage, self._now)
                self._advance()
            case ev.SamplesRewarded(scores_of, lineage):
                self.work.reward(scores_of, lineage, self._now)
                self._advance()
            case ev.RewardFailed():
                self.work.fail_reward(event)
                self._advance()
            case ev.BatchPrepared() | ev.MicroBatchTrained() | ev.OptimizerStepped() | ev.BatchFinished():
                self._train(event)
            case ev.EvaluationReported(_, lineage):
                if lineage == self.cluster.lineage:
                    self._expect(Stage.REPORTING, event)
                    self._evaluation_reported()
            case ev.WeightsPublished(version):
                self._published(version)
            case ev.CheckpointCommitted():
                self._expect(Stage.COMMITTING, event)
                self._committed = self._to_commit
                self._start_iteration()
            case ev.LearnerLost() | ev.LearnerRestored():
                self._learner_changed(event)
            case ev.GpuTimeSpent(_, phase, seconds):
                self.ledger.spend(phase, seconds)
                self.ledger.check()
            case ev.TimePassed():
                pass
            case _:
                self.cluster.handle(event, self._now)
                self._restore_learner()

    @property
    def wake_s(self) -> float | None:
        """When a :class:`~spotlight.core.events.TimePassed` must come, unless something else happens."""
        times = [at_s for at_s in (self.queue.next_deadline_s, self.cluster.next_s) if at_s is not None]
        return min(times, default=None)

    def check(self) -> None:
        """Assert every invariant, in O(rollouts of the iteration): for tests, and when there is time."""
        self.ledger.check()
        self.queue.check()
        self.cluster.check()
        self.work.check()

    @property
    def rollouts(self) -> Mapping[RolloutId, Rollout]:
        """The rollouts of the current iteration, without previews."""
        return self.work.at.rollouts

    # -- issue -----------------------------------------------------------------------------------------

    def _start_iteration(self) -> None:
        work = self.work
        work.begin()
        last = self.iteration >= self.plan.iterations
        explores = self.plan.exploration
        first = not last and explores is not None and explores.where is Explore.CRITICAL_PATH
        if not last and not first:
            work.issue_training(self.iteration, self.version)
        if last or self.iteration % self.plan.evaluate_every == 0:
            work.issue_evaluation(self.iteration, self.version)
        self.stage = Stage.EXPLORING if first else Stage.ROLLING
        if first:
            work.open_window(self.iteration, self.version, self._now)
        else:
            work.forget_safe()
        self._advance()

    def _grant(self, event: ev.WorkPulled) -> None:
        over = self.stage is Stage.OVER
        granted = None if over else self.queue.pull(event.worker, event.capacity, self._now)
        self.work.effects.append(GrantLease(*granted) if granted else NoWork(event.worker))

    # -- training --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Once every sample of the iteration is scored or dropped: report the evaluation, then train."""
        if self.work.stopping is not None:
            self._stop(self.work.stopping)
            return
        if self.stage is Stage.EXPLORING and not self.work.window.unscored:
            self.work.close_window(self._now)
            self.work.issue_training(self.iteration, self.version)
            self.work.forget_safe()
            self.stage = Stage.ROLLING
        if self.stage is not Stage.ROLLING or self.work.at.unscored:
            return
        if self.work.at.evaluation:
            self.stage = Stage.REPORTING
            self._report_evaluation()
        else:
            self._train_or_finish()

    def _report_evaluation(self) -> None:
        scored = [rollout for rollout in self.work.at.evaluation if rollout in self.work.at.scores]
        if not scored:
            self._stop(f"iteration {self.iteration}: not one evaluation sample was scored, nothing is known")
            return
        for rollout in scored:
            self.ledger.evaluate(rollout)
        rollouts = tuple(self.work.at.rollouts[rollout] for rollout in scored)
        scores = {rollout: self.work.at.scores[rollout] for rollout in scored}
        self.work.effects.append(
            ReportEvaluation(self.iteration, self.version, rollouts, scores, self.cluster.lineage)
        )

    def _evaluation_reported(self) -> None:
        self.work.discard(rollout for rollout in self.work.at.evaluation if rollout in self.work.at.scores)
        self._train_or_finish()

    def _train_or_finish(self) -> None:
        if self.iteration >= self.plan.iterations:
            self._finish()
        elif self._learner_up:
            self._prepare_batch()
        else:
            self.cluster.recoveries[Recovery.LEARNER_AWAITED] += 1
            self.stage = Stage.AWAITING_LEARNER

    def _prepare_batch(self) -> None:
        plan, at, groups = self.plan, self.work.at, []
        self.work.learn_from_groups(self.iteration, self.version)
        for part in split_updates(self._surviving_groups(), plan.updates_per_batch):
            even, surplus = even_out(part, plan.ranks)
            for rollout in surplus:
                self.work.drop_quietly(
                    rollout, DropReason.UNEVEN_BATCH, f"{plan.ranks} ranks share an update"
                )
            if even:
                update = len(at.updates)
                at.updates.append(micro_batches(even, self.iteration, update, plan.micro_batch_size))
                groups += even
        if not groups:
            self._stop(
                f"iteration {self.iteration}: no group kept two scored samples, nothing can be learnt from it"
            )
            return
        kept = [rollout for group in groups for rollout in group.rollouts]
        self.stage = Stage.PREPARING
        scores = {rollout: at.scores[rollout] for rollout in kept}
        order = tuple(micro_batch for update in at.updates for micro_batch in update)
        weights = self.work.weights(kept)
        self.work.effects.append(PrepareBatch(self.iteration, tuple(groups), scores, order, weights))

    def _surviving_groups(self) -> list[Group]:
        groups = []
        for group in self.work.at.scored_groups():
            if len(group.rollouts) >= 2:
                groups.append(group)
                continue
            for rollout in group.rollouts:
                self.work.drop_quietly(
                    rollout, DropReason.GROUP_TOO_SMALL, "the rest of its group was dropped"
                )
        return groups

    def _train(
        self, event: ev.BatchPrepared | ev.MicroBatchTrained | ev.OptimizerStepped | ev.BatchFinished
    ) -> None:
        at = self.work.at
        match event:
            case ev.BatchPrepared():
                self._expect(Stage.PREPARING, event)
                self.stage = Stage.TRAINING
                self._next_micro_batch()
            case ev.MicroBatchTrained(_, update, index):
                self._expect(Stage.TRAINING, event, (update, index) == (at.update, at.micro_batch))
                at.micro_batch += 1
                self._next_micro_batch()
            case ev.OptimizerStepped(_, update, loss, grad_norm):
                self._expect(Stage.TRAINING, event, update == at.update)
                self._stepped(loss, grad_norm)
            case ev.BatchFinished():
                self._expect(Stage.FINISHING, event)
                self.stage = Stage.PUBLISHING
                self.work.effects.append(PublishWeights(self.version))

    def _next_micro_batch(self) -> None:
        at = self.work.at
        pending = at.updates[at.update]
        if at.micro_batch < len(pending):
            self.work.effects.append(TrainMicroBatch(pending[at.micro_batch], at.micro_batch))
        else:
            samples = sum(len(micro_batch.rollouts) for micro_batch in pending)
            self.work.effects.append(StepOptimizer(self.iteration, at.update, samples))

    def _stepped(self, loss: float, grad_norm: float) -> None:
        at = self.work.at
        self.version = PolicyVersion(self.version + 1)
        trained = [rollout for micro_batch in at.updates[at.update] for rollout in micro_batch.rollouts]
        for rollout in trained:
            self.ledger.train(rollout, self.version)
        self.ledger.step(StepApplied(self.version, self.iteration, at.update, len(trained), loss, grad_norm))
        self.work.discard(trained)
        at.update, at.micro_batch = at.update + 1, 0
        if at.update < len(at.updates):
            self._next_micro_batch()
        else:
            self.stage = Stage.FINISHING
            self.work.effects.append(FinishBatch(self.iteration))

    # -- the end of an iteration -----------------------------------------------------------------------

    def _published(self, version: PolicyVersion) -> None:
        if self.stage is not Stage.PUBLISHING or version != self.version:
            return
        self.ledger.publish(version)
        self.work.close_window(self._now)
        self.cluster.publish(version, self._now)
        self.iteration += 1
        if self.iteration % self.plan.checkpoint_every and self.iteration < self.plan.iterations:
            self._start_iteration()
            return
        self.stage = Stage.COMMITTING
        # The records of this very event count as written: the driver writes them before the checkpoint.
        self._to_commit = self._snapshot()
        snapshot = self._to_commit.as_json()
        self.work.effects.append(CommitCheckpoint(self.iteration, self.ledger.position, snapshot))

    # -- a lost learner --------------------------------------------------------------------------------

    def _learner_changed(self, event: ev.LearnerLost | ev.LearnerRestored) -> None:
        match event:
            case ev.LearnerLost():
                self._expect(self.stage, event, self.stage is not Stage.IDLE)
                self._roll_back()
            case ev.LearnerRestored(lineage):
                if lineage == self.cluster.lineage:
                    self._learner_up = True
                if self._learner_up and self.stage is Stage.AWAITING_LEARNER:
                    self._prepare_batch()

    def _roll_back(self) -> None:
        """Return to the last committed checkpoint, as a resumed run does, keeping what is safe and equal."""
        self.cluster.recoveries[Recovery.LEARNER_LOST] += 1
        self.work.effects = []
        self.iteration, self.version = self._committed.iteration, self._committed.version
        self.work.roll_back(self._committed.ledger, self._committed.exploration)
        self._undo.append(RollBack(self.ledger.position))
        self.cluster.roll_back(self.version, self._now)
        self._learner_up, self._restore_due = False, True
        self._restore_learner()
        self._start_iteration()

    def _restore_learner(self) -> None:
        """As soon as there are GPUs enough for all its ranks."""
        if self._restore_due and self.cluster.learner_gpus >= self.plan.ranks:
            self._restore_due = False
            self.work.effects.append(RestoreLearner(self.iteration, self.cluster.lineage))

    def _finish(self) -> None:
        self.stage = Stage.OVER
        self.work.effects.append(FinishRun(None))

    def _stop(self, error: str) -> None:
        self.stage = Stage.OVER
        self.work.effects = [e for e in self.work.effects if isinstance(e, DiscardSamples)]
        self.work.effects.append(FinishRun(error))

    def _expect(self, stage: Stage, event: ev.Event, also: bool = True) -> None:
        if self.stage is not stage or not also:
            raise RuntimeError(
                f"{event} came while the iteration was {self.stage}; drivers answer effects in order"
            )

    # -- checkpoints -----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """JSON-able state between two iterations."""
        return self._snapshot().as_json()

    def _snapshot(self) -> Snapshot:
        ledger = self.ledger.snapshot()
        exploration = self.work.explorer.snapshot() if self.work.explorer else {}
        return Snapshot(self.iteration, self.version, self.queue.leases_granted, ledger, exploration)

    @classmethod
    def restore(
        cls,
        plan: Plan,
        train: Sequence[Prompt],
        test: Sequence[Prompt],
        snapshot: Mapping[str, object],
        term: int = 0,
    ) -> Controller:
        """The controller that made ``snapshot``, ready for :class:`~spotlight.core.events.RunStarted`.

        Args:
            term: of this incarnation. Where workers or their messages outlive the controller, each
                incarnation needs a higher one: nothing sent to an older one counts then.
        """
        controller = cls(plan, train, test, term)
        parsed = Snapshot.parse(snapshot)
        controller.iteration, controller.version = parsed.iteration, parsed.version
        controller.work.load(parsed.ledger, parsed.exploration)
        controller.queue.leases_granted = parsed.leases_granted
        controller.cluster.target = parsed.version
        controller._committed = parsed
        return controller


def _after_the_end(event: ev.Event) -> ev.Event:
    """Late answers change nothing once the run is over; time is still billed, and pulls still answered."""
    return event if isinstance(event, ev.GpuTimeSpent | ev.WorkPulled) else ev.TimePassed()
