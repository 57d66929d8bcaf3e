"""The controller: all decisions, as one pure state machine. Read this file first.

    effects = controller.handle(event, now)

No torch, clock, threads or global randomness: the same events give the same effects. Drivers carry out
effects in order and feed back events. Four loops, each advanced by the events of its own:

    loop       consumes                     waits for                          is unblocked by
    rollouts   groups of workers that ask   rollouts in the queue, and the     the start of an iteration,
               for work (GroupPulled)       published version on all members   WeightsPulled
    rewards    finished samples             a reward for each sample           SamplesRewarded,
               (LeaseCompleted)                                                RewardFailed
    learner    scored groups                all samples of the iteration       BatchPrepared,
                                                                               MicroBatchTrained, ...
    iteration  the stages of ``stages.py``  the end of the loops above         WeightsPublished,
                                                                               CheckpointCommitted

One iteration, each line a stage:

    starting    draw prompts and seeds (hashes of the run seed), queue the rollouts
    rolling     a group pulls ► GrantLease ► it completes ► ScoreSamples ► rewards, until all have arrived
    reporting   ReportEvaluation, when one was due; its rollouts follow the others through the same queue
    learning    PrepareBatch ► TrainMicroBatch* ► StepOptimizer, once per update ► FinishBatch
    publishing  PublishWeights ► workers pull the new version before they are granted work again
    committing  CommitCheckpoint, when due, of learner, this state and the ledger position; then starting

Workers wait for the published version. The learner waits for all scores of its iteration: optimizer steps use
samples of the version the iteration started with. Nothing else waits. What a run does otherwise is a policy's
(``policy.py``): exploration, parts trained as they arrive, the next iteration begun early, and so on.

Invariants: those of the ledger (checked after every event) and of the queue (see ``Controller.check``), and
    - every change of stage is one of ``stages.TRANSITIONS``;
    - a sample is made by the version its rollout names (admission) and trained in the iteration it was made
      for (consumption): its staleness is 0 published versions, or 1 if it was begun early;
    - a sample enters at most one optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.cluster.queue import PullQueue, WorkClass, first_epoch
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import (
    CommitCheckpoint,
    DiscardSamples,
    Effect,
    FinishRun,
    PublishWeights,
    ReportPipeline,
    RollBack,
    StepOptimizer,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.scheduler.fleet.make_fleet import make_fleet
from spotlight.scheduler.iteration import Snapshot
from spotlight.scheduler.learner.learner_life import LearnerLife
from spotlight.scheduler.learner.trainer_rollouts import TrainerRollouts
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import Plan as Plan
from spotlight.scheduler.plan import require_usable
from spotlight.scheduler.policy import Policy, overriding
from spotlight.scheduler.records import StepApplied
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.stages import (
    GENERATING,
    LEARNER_IDLES,
    LOOKS_AHEAD,
    Stage,
    StageMachine,
    Trigger,
)
from spotlight.scheduler.training_tasks import Answer, TrainingTasks
from spotlight.scheduler.types import Filler, PolicyVersion, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt


class Controller:
    """See the module's docstring."""

    def __init__(self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], term: int = 0) -> None:
        require_usable(plan, train, test)
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in (*train, *test)}
        self.queue = PullQueue(plan.lease_s, term)
        self._stages = StageMachine()
        self.iteration = 0
        self.version = PolicyVersion(0)
        self.cluster = Cluster(plan.cluster, self.queue, first_epoch(term), self.version)
        self.dispatcher = Dispatcher(self.cluster)
        self.cluster.serving.switch_s = plan.pipeline.switch_s
        self.work = Rollouts(plan, train, test, self.dispatcher)
        self.policies = tuple(self.work.policies.values())
        # Asked at every event, so only those that have an answer.
        self._watching = overriding(self.policies, Policy.after_event)
        self._filling = overriding(self.policies, Policy.fill)
        self._timed = overriding(self.policies, Policy.wake_s)
        self.training = TrainingTasks(plan, self.work, 0)
        self._trainers = TrainerRollouts(self.policies, self.dispatcher)
        self._now = self._task_s = 0.0
        self._task_overlaps = False
        self.fleet = make_fleet(plan, self.cluster)
        self.learner = LearnerLife(plan.ranks, self.fleet, self.snapshot(), plan.ranks_min)
        self._undo: list[Effect] = []
        self._stopping = False
        self._begun = self.learner.committed, 0

    @property
    def waits_for_rewards(self) -> bool:
        """Whether scores are all that is missing: nothing is left to generate or, meanwhile, to train."""
        if self.stage is Stage.ROLLING:
            at_rewards = bool(self.work.current.unscored)
        else:
            at_rewards = self.stage is Stage.PREPARING and not self._is_decided
        return at_rewards and not self.queue.outstanding and self.training.task is None

    @property
    def stage(self) -> Stage:
        """Of the current iteration."""
        return self._stages.stage

    @property
    def ledger(self) -> Ledger:
        """Counts so far."""
        return self.work.ledger

    # -- the one entry ---------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Process one event at controller time ``now`` (seconds). Returns the effects, in order.

        Raises:
            RuntimeError: the event is illegal in this stage: drivers must answer effects in order.
        """
        self._now = self.cluster.now = self.fleet.now = now
        for lease in self.queue.expire(now):
            self.dispatcher.suspect(lease)
        self.cluster.ring(now)
        if self._commits_behind:
            self._stages.move(Trigger.CHECKPOINT_BEGUN)
            self._start_iteration()
        self._after_event()  # leases may have expired
        if self.stage is Stage.OVER:
            self._after_the_end(event)
        else:
            self._dispatch(event)
            self._place_machines()
        if self.stage is not Stage.OVER:
            self._after_event()
            self._place_learner()
            self._learn()
        if self.stage is not Stage.OVER:
            untasked = self.learner.works and self.training.task is None
            self._trainers.set_budget(self.training, self.stage, untasked=untasked)
            if self.stage in LOOKS_AHEAD:
                for policy in self._filling:
                    policy.fill(self.iteration, now)
            self.dispatcher.serve()
            self._trainers.budget_left(self.cluster.serving.trainer_budget)
        # Records come first: drivers make them durable before a checkpoint that an effect asks for.
        # A rollback precedes them, because it truncates the ledger they are appended to.
        records = [WriteRecord(*numbered) for numbered in self.ledger.take_records()]
        if records:
            self.ledger.check()
        effects = [*self._undo, *records, *self.fleet.effects, *self.work.effects, *self.cluster.effects]
        self._undo, self.fleet.effects, self.work.effects, self.cluster.effects = [], [], [], []
        return effects

    def _after_event(self) -> None:
        for policy in self._watching:
            policy.after_event()

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted():
                self.learner.observe(event)
                self._stages.move(Trigger.RUN_STARTED)
                self._start_iteration()
            case ev.GroupPulled():
                self.dispatcher.pulled(event)
            case ev.LeaseProgressed():
                self.work.progress(event, self._now)
            case ev.LeaseCompleted(worker, lease, epoch):
                if not self.work.complete(event, self._now):
                    self.dispatcher.abandon(worker, epoch, lease)
                else:
                    self.dispatcher.finished(worker, lease)
                self._advance()
            case ev.RolloutFailed(_, lease, epoch, rollout, error):
                self.work.fail(lease, epoch, rollout, error)
                self.dispatcher.failed(lease)
                self._advance()
            case ev.SamplesRewarded(scores_of, lineage):
                self.work.reward(scores_of, lineage, self._now)
                self._advance()
            case ev.RewardFailed():
                self.work.fail_reward(event)
                self._advance()
            case ev.BatchPrepared() | ev.MicroBatchTrained() | ev.OptimizerStepped() | ev.BatchFinished():
                self._trained(event)
            case ev.EvaluationReported(_, lineage):
                # A state that is saved early no longer waits for the report.
                if lineage == self.cluster.lineage and self.stage is not Stage.COMMITTING:
                    self._stages.move(Trigger.EVALUATION_REPORTED)
                    self.work.evaluation_reported()
                    self._all_arrived()
            case ev.WeightsPublished(version):
                self._published(version)
            case ev.CheckpointCommitted():
                self._checkpoint_committed()
            case ev.StopRequested():
                self._stopping = True
                self._stop_where_exact()
            case ev.LearnerLost() if self._stopping:
                self._stop(self.work.stopping)  # what is committed is all that is left
            case ev.LearnerLost():
                if self.stage is not Stage.IDLE:
                    self._roll_back()
                self.fleet.observe(event)
            case ev.LearnerPrepared(number):
                self.learner.observe(event)
                if number == self.learner.preparations:  # else the places are another one's
                    self.fleet.observe(event)
            case ev.LearnerRestored():
                self.learner.observe(event)
            case ev.LearnerStarted() | ev.NodesProvided() | ev.IterationBilled():
                self.fleet.observe(event)
            case ev.GpuTimeSpent(_, phase, seconds):
                self.ledger.spend(phase, seconds)
                self.ledger.check()
            case ev.TimePassed():
                pass
            case _ if isinstance(event, ev.MachineEvent):
                self.learner.observe(event)
                self.fleet.observe(event)
            case _:
                self.cluster.handle(event)
                self.fleet.observe(event)

    def _after_the_end(self, event: ev.Event) -> None:
        """Machines still come and go: a lost learner is formed again to export the weights."""
        if isinstance(event, ev.GpuTimeSpent):
            self._dispatch(event)
        elif isinstance(event, ev.MachineEvent | ev.LearnerStarted | ev.LearnerLost):
            self.fleet.observe(event)
        self._place_machines()
        self.cluster.effects.clear()  # nothing rolls out any more

    def _place_machines(self) -> None:
        self.fleet.place()
        if self.fleet.effects:
            self.learner.nodes_changed()

    def _checkpoint_committed(self) -> None:
        behind = self.learner.saving is not None and self.stage is not Stage.COMMITTING
        self.learner.saved()
        self.work.discard(self.work.unsaved.take())
        if self._stopping:
            self._stop_where_exact()
        elif not behind:
            self._stages.move(Trigger.CHECKPOINT_COMMITTED)
            self._start_iteration()

    @property
    def wake_s(self) -> float | None:
        """When a :class:`~spotlight.scheduler.events.TimePassed` is due at the latest; None if never."""
        begins_s = self._now if self._commits_behind else None
        due_s = (policy.wake_s(self._now) for policy in self._timed)
        alarms = (self.queue.next_deadline_s, self.cluster.next_s, self.fleet.next_s, begins_s, *due_s)
        return min((at_s for at_s in alarms if at_s is not None), default=None)

    def check(self) -> None:
        """Assert every invariant, in O(rollouts of the iteration)."""
        self.ledger.check()
        self.queue.check()
        self.cluster.check()
        self.fleet.check()
        self.work.check()
        for policy in self.policies:
            policy.check()

    @property
    def rollouts(self) -> Mapping[RolloutId, Rollout]:
        """The current iteration's."""
        return self.work.current.rollouts

    # -- issue -----------------------------------------------------------------------------------------

    def _start_iteration(self) -> None:
        work, last = self.work, self.iteration >= self.plan.iterations
        work.begin(self._now)
        self.training = TrainingTasks(self.plan, work, self.iteration)
        held_back = not last and any(policy.holds_back for policy in self.policies)
        if not last and not held_back:
            work.issue_training(self.iteration, self.version)
        if self.plan.evaluation.is_due(self.iteration, self.plan.iterations):
            work.issue_evaluation(self.iteration, self.version)
        for policy in self.policies:
            policy.begin(self.iteration, self.version, self._now)
        self._stages.move(Trigger.ROLLOUTS_HELD_BACK if held_back else Trigger.ROLLOUTS_ISSUED)
        if not held_back:
            work.forget_survived()
        self._advance()

    @property
    def _is_decided(self) -> bool:
        """Whether the rollouts that were held back can be issued."""
        return all(policy.decided for policy in self.policies if policy.holds_back)

    # -- stages ----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.work.stopping is not None:
            self._stopping = True
            if self.stops_at_once:
                self._stop_where_exact()
            else:
                self._stop(self.work.stopping)
            return
        if self.stage is Stage.PREPARING and self._is_decided:
            self._close()
            self.work.issue_training(self.iteration, self.version)
            self.work.forget_survived()
            self._stages.move(Trigger.GROUPS_DECIDED)
        if self.stage is not Stage.ROLLING or self.work.current.unscored:
            return
        if self.work.current.evaluation:
            self._stages.move(Trigger.EVALUATION_SCORED)
            if not self.work.report_evaluation(self.iteration, self.version):
                why = "not one evaluation sample was scored, nothing is known"
                self._stop(f"iteration {self.iteration + 1}: {why}")
        else:
            self._stages.move(Trigger.SAMPLES_SCORED)
            self._all_arrived()

    def _close(self) -> None:
        for policy in self.policies:
            policy.close(self._now)

    def _all_arrived(self) -> None:
        if self.iteration >= self.plan.iterations:
            self._stages.move(Trigger.ITERATIONS_DONE)
            if self.cluster.pace.filled_s:
                self._report_pipeline()
            self.work.effects.append(FinishRun(None))
            return
        if not self.learner.up:
            self.cluster.recoveries[Recovery.LEARNER_AWAITED] += 1
        for policy in self.policies:
            policy.arrived(self.iteration, self.version)

    # -- training --------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Give an idle learner a task, unless its GPUs should roll out first."""
        complete, generating = self.stage is Stage.LEARNING, self.stage in GENERATING
        training = self.training
        if training.task or not self.learner.works or not (complete or generating):
            self._trainers.budget_left(0)
            return
        if self.dispatcher.trainers_work:
            return
        if generating and self._trainers.comes_first(training, self._now):
            return
        task = training.next(complete)
        if task is not None:
            # Switching from rollouts to training is not part of the training pace.
            self._task_s = self._now + self.cluster.serving.learner_turns()
            needed = (WorkClass.TRAIN, WorkClass.EVAL)
            leased = self.queue.outstanding_of(*needed) - self.queue.waiting_of(*needed)
            self._task_overlaps = not complete and leased > 0
            self.work.effects.append(task)
        elif complete:
            why = "no group kept two scored samples, nothing can be learnt from it"
            self._stop(f"iteration {self.iteration + 1}: {why}")

    def _trained(self, event: Answer) -> None:
        task = self.training.task
        self.training.answered(event)
        match event:
            case ev.MicroBatchTrained():
                assert isinstance(task, TrainMicroBatch)
                spent_s = max(0.0, self._now - self._task_s)
                self.cluster.pace.trained(len(task.micro_batch.rollouts), spent_s)
                if self._task_overlaps:
                    self.cluster.pace.fill(Filler.TRAINING, spent_s * self.plan.ranks)
            case ev.OptimizerStepped(_, update, loss, grad_norm):
                self._stepped(update, loss, grad_norm)
            case ev.BatchFinished():
                self._stages.move(Trigger.BATCH_FINISHED)
                self._report_pipeline()
                for policy in self.policies:
                    self.work.effects += policy.reports(self.training)
                self.work.effects.append(PublishWeights(self.version))

    def _stepped(self, update: int, loss: float, grad_norm: float) -> None:
        self.version = PolicyVersion(self.version + 1)
        trained = self.training.stepped()
        for rollout in trained:
            self.ledger.train(rollout, self.version)
        self.ledger.step(StepApplied(self.version, self.iteration, update, len(trained), loss, grad_norm))
        self.work.keep_until_saved(trained, self.work.unsaved.trained)

    # -- the end of an iteration -----------------------------------------------------------------------

    def _published(self, version: PolicyVersion) -> None:
        if self.stage is not Stage.PUBLISHING or version != self.version:
            return
        self.ledger.publish(version)
        self._close()
        before = self.cluster.target
        self.cluster.publish(version)
        self.work.published(before)
        self.iteration += 1
        # Includes the records of this event: the driver writes them before the checkpoint.
        self._begun = self.snapshot(), self.ledger.position
        due = self._stopping or self.iteration % self.plan.checkpoint_every == 0
        if due or self.iteration >= self.plan.iterations:
            self._commit(Trigger.CHECKPOINT_DUE)
        else:
            self._stages.move(Trigger.WEIGHTS_PUBLISHED)
            self._start_iteration()

    def _commit(self, why: Trigger) -> None:
        """Save the state that the iteration began with."""
        self._stages.move(why)
        self.learner.saving, position = self._begun
        self.work.effects.append(CommitCheckpoint(self.iteration, position, self.learner.saving.to_dict()))

    @property
    def _commits_behind(self) -> bool:
        """Whether a checkpoint has been ordered that the next iteration does not wait for."""
        behind = self.stage is Stage.COMMITTING and self.plan.cluster.learner_moves
        return behind and not self._stopping and self.iteration < self.plan.iterations

    def _report_pipeline(self) -> None:
        filled, samples = self.cluster.pace.filled_s, dict[str, int]()
        for policy in self.policies:
            samples |= policy.figures(self.training)
        if filled or samples:
            self.work.effects.append(ReportPipeline(self.iteration, dict(sorted(filled.items())), samples))
        filled.clear()

    # -- the learner's life ----------------------------------------------------------------------------

    def _roll_back(self) -> None:
        """Return to the last committed checkpoint like a resumed run, but reuse surviving work."""
        self._stages.move(Trigger.LEARNER_LOST)
        self.cluster.count(Recovery.LEARNER_LOST)
        committed = self.learner.committed
        self.work.effects = []
        self.iteration, self.version = committed.iteration, committed.version
        self.work.roll_back(committed.ledger, committed.policies)
        self._undo.append(RollBack(self.ledger.position))
        self.cluster.roll_back(self.version)
        self.cluster.pace.filled_s.clear()  # undone, like the ledger's records since the commit
        self.cluster.serving.turned.clear()  # its GPUs belong to a new process now
        self.learner.lost()
        self.fleet.roll_back(self.iteration)
        self._start_iteration()

    def _place_learner(self) -> None:
        if self.stage is Stage.IDLE:
            return  # it is being started, and does not answer yet
        untasked = self.stage in LEARNER_IDLES and not self.training.task
        idle = untasked and not self.training.prepared
        waits = untasked and self.queue.waiting_of(WorkClass.TRAIN, WorkClass.EVAL) > 0
        self.work.effects += self.learner.placed(self.iteration, idle=idle, waits=waits)

    def _stop(self, error: str | None) -> None:
        """End early: because of an error, or without one on request."""
        self._stages.move(Trigger.RUN_STOPPED)
        self.work.effects = [e for e in self.work.effects if isinstance(e, DiscardSamples)]
        self.work.effects.append(FinishRun(error, stopped=error is None))

    # -- a stop on request, or for want of scores ------------------------------------------------------

    @property
    def stops_at_once(self) -> bool:
        """Whether a stop needs nothing of the rollouts in work: the learner's weights are and stay theirs."""
        stepping = isinstance(self.training.task, StepOptimizer)
        return not stepping and self.version == self.cluster.target

    def _stop_where_exact(self) -> None:
        """Stop unless something has to be saved before.

        Rollouts can only be made again by the weights that they name. So a run resumes from the start of an
        iteration, and its state then is the learner's until the first update.
        """
        if not self.stops_at_once or self.learner.saving is not None:
            return
        if self.learner.up and self.learner.committed.iteration != self.iteration:
            self._commit(Trigger.SAVED_EARLY)
        else:
            self._stop(self.work.stopping)

    # -- checkpoints -----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state between two iterations."""
        ledger = self.ledger.snapshot()
        policies = self.work.snapshot() | self.fleet.snapshot()
        return Snapshot(self.iteration, self.version, self.queue.leases_granted, ledger, policies)

    @classmethod
    def restore(
        cls,
        plan: Plan,
        train: Sequence[Prompt],
        test: Sequence[Prompt],
        snapshot: Mapping[str, object],
        term: int = 0,
    ) -> Controller:
        """The controller that made ``snapshot``, before :class:`~spotlight.scheduler.events.RunStarted`.

        Args:
            term: of this incarnation; must increase where workers or messages outlive the controller, to
                fence what was sent to older ones.
        """
        controller = cls(plan, train, test, term)
        parsed = Snapshot.from_dict(snapshot)
        controller.iteration, controller.version = parsed.iteration, parsed.version
        controller.work.load(parsed.ledger, parsed.policies)
        controller.queue.leases_granted = parsed.leases_granted
        controller.cluster.target = parsed.version
        controller.learner.committed = parsed
        controller.fleet.restore(parsed.policies)
        return controller
