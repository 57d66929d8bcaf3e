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

import math
from collections.abc import Iterable, Mapping, Sequence

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
    ScoreSamples,
    StepOptimizer,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.core.exploration import Arm, ArmPolicy, FixedArm, Window
from spotlight.core.issue import evaluation_rollouts, preview_rollouts, train_rollouts
from spotlight.core.iteration import LEARNER_IDLES, Iteration, Safe
from spotlight.core.iteration import Stage as Stage
from spotlight.core.ledger import Ledger
from spotlight.core.plan import Explore, require_usable
from spotlight.core.plan import Plan as Plan
from spotlight.core.queue import PullQueue, Verdict, first_epoch
from spotlight.core.records import REWARD, StepApplied
from spotlight.core.recovery import Recovery
from spotlight.core.seeds import prompts_of_iteration
from spotlight.core.snapshot import Snapshot
from spotlight.core.types import (
    DropReason,
    Group,
    LeaseId,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutId,
    WorkerId,
)

ROLLOUT_ATTEMPTS = 2
"""A rollout that fails this often is dropped: its randomness is fixed, so it will fail again."""


class Controller:
    """See the module's docstring."""

    def __init__(self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], term: int = 0) -> None:
        require_usable(plan, train, test)
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in (*train, *test)}
        self.train_prompts, self.test_prompts = tuple(train), tuple(test)
        self.queue = PullQueue(plan.lease_s, term)
        self.ledger = Ledger()
        self.stage = Stage.IDLE
        self.iteration = 0
        self.version = PolicyVersion(0)
        self.cluster = Cluster(plan.cluster, self.queue, first_epoch(term), self.version)
        explores = plan.exploration
        self.arms: ArmPolicy | None = (
            FixedArm(Arm(explores.seeds_per_prompt, explores.steps)) if explores else None
        )
        self._now = 0.0
        self._at, self._window, self._safe = Iteration(), Window(0), Safe()
        self._chosen: Mapping[int, tuple[int, ...]] = {}
        self._committed = self._snapshot()
        self._learner_up, self._restore_due = True, False
        self._undo: list[Effect] = []
        self._effects: list[Effect] = []

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
            self.cluster.serve(now)
        self.ledger.check()
        # Records come first: drivers make them durable before any checkpoint that an effect asks for. What a
        # lost learner undoes is undone before it is recorded anew.
        records = [WriteRecord(*numbered) for numbered in self.ledger.take_records()]
        effects = [*self._undo, *records, *self._effects, *self.cluster.effects]
        self._undo, self._effects, self.cluster.effects = [], [], []
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
            case ev.ProgressCommitted(_, lease, epoch, rollout, step):
                self._admit(self.queue.commit(lease, epoch, rollout, step, self._now), rollout)
            case ev.LeaseProgressed():
                self._progressed(event)
            case ev.RolloutCompleted(worker, lease, epoch, rollout, version):
                self._complete(worker, lease, epoch, (rollout,), version)
            case ev.LeaseCompleted(worker, lease, epoch, rollouts, version):
                if not self._complete(worker, lease, epoch, rollouts, version):
                    self.cluster.abandon(worker, epoch, lease)
            case ev.RolloutFailed(_, lease, epoch, rollout, error):
                self._fail_lease(lease, epoch, rollout, error)
            case ev.SampleRewarded(rollout, scores, lineage):
                self._rewarded({rollout: scores}, lineage)
            case ev.SamplesRewarded(scores_of, lineage):
                self._rewarded(scores_of, lineage)
            case ev.RewardFailed():
                self._reward_failed(event)
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
                self._committed = self._snapshot()
                self._start_iteration()
            case ev.LearnerLost() | ev.LearnerRestored():
                self._learner_changed(event)
            case ev.GpuTimeSpent(_, phase, seconds):
                self.ledger.spend(phase, seconds)
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
        waiting = sum(len(work.unscored - work.finished) for work in (self._at, self._window))
        assert self.queue.outstanding == waiting, "the queue lost or invented a rollout"
        for work in (self._at, self._window):
            assert work.unscored.isdisjoint(work.scores), "a scored rollout still waits for its scores"

    @property
    def rollouts(self) -> Mapping[RolloutId, Rollout]:
        """The rollouts of the current iteration, without previews."""
        return self._at.rollouts

    # -- issue -----------------------------------------------------------------------------------------

    def _start_iteration(self) -> None:
        self._at = Iteration()
        self.queue.forget_done()
        last = self.iteration >= self.plan.iterations
        explores = self.plan.exploration
        first = not last and explores is not None and explores.where is Explore.CRITICAL_PATH
        if not last and not first:
            self._issue_training()
        if last or self.iteration % self.plan.evaluate_every == 0:
            evaluation = evaluation_rollouts(self.plan, self.test_prompts, self.iteration, self.version)
            self._at.evaluation = [self._issue(prompt, rollout) for _, prompt, rollout in evaluation]
        self.stage = Stage.EXPLORING if first else Stage.ROLLING
        if first:
            self._open_window(self.iteration)
        else:
            self._forget_safe()
        self._advance()

    def _issue_training(self) -> None:
        prompts = self._prompts_of(self.iteration)
        issued = train_rollouts(self.plan, prompts, self.iteration, self.version, self._chosen)
        for slot, prompt, rollout in issued:
            self._at.groups.setdefault((slot, prompt.id), []).append(self._issue(prompt, rollout))

    def _forget_safe(self) -> None:
        """What outlived a lost learner and was not asked for again is of no use to anybody."""
        self._discard((*self._safe.samples, *self._safe.progress))
        self._safe = Safe()

    def _prompts_of(self, iteration: int) -> list[Prompt]:
        plan = self.plan
        return prompts_of_iteration(self.train_prompts, plan.run_seed, iteration, plan.prompts_per_iteration)

    def _issue(self, prompt: Prompt, rollout: Rollout) -> RolloutId:
        at, safe = self._at, self._safe
        at.rollouts[rollout.id] = rollout
        self.ledger.issue(rollout, prompt)
        if safe.take(rollout):
            self._recall(rollout)
            return rollout.id
        at.unscored.add(rollout.id)
        if step := safe.step_of(rollout):
            self.cluster.recoveries[Recovery.PROGRESS_KEPT] += 1
        self.queue.add([rollout], {rollout.id: step})
        return rollout.id

    # -- exploration -----------------------------------------------------------------------------------

    def _open_window(self, iteration: int) -> None:
        assert self.arms is not None
        self._window = window = Window(iteration)
        arm, prompts = self.arms.arm(iteration), self._prompts_of(iteration)
        for slot, prompt, rollout in preview_rollouts(self.plan, arm, prompts, iteration, self.version):
            window.rollouts[rollout.id], window.slots[rollout.id] = rollout, slot
            window.unscored.add(rollout.id)
            self.ledger.issue(rollout, prompt)
            self.queue.add([rollout])

    def _close_window(self) -> None:
        """Choose seeds from what was scored; drop the rest."""
        window, self._window = self._window, Window(self._window.iteration)
        self._chosen, used = window.choose(self.plan.group_size)
        for lease in self.queue.cancel([name for name in window.rollouts if name in window.unscored]):
            self.cluster.revoked(lease)
        for rollout in used:
            self.ledger.explore(rollout)
        explored = set(used)
        for rollout in window.rollouts:
            if rollout not in explored:
                self.cluster.recoveries[Recovery.PREVIEW_DROPPED] += 1
                self.ledger.drop(rollout, DropReason.EXPLORATION_OVER, "the weights it was for are published")
        self._discard(window.rollouts)

    # -- rollouts --------------------------------------------------------------------------------------

    def _grant(self, event: ev.WorkPulled) -> None:
        over = self.stage is Stage.OVER
        granted = None if over else self.queue.pull(event.worker, event.capacity, self._now)
        self._effects.append(GrantLease(*granted) if granted else NoWork(event.worker))

    def _admit(self, verdict: Verdict, rollout: RolloutId | None) -> bool:
        if verdict is not Verdict.ACCEPTED:
            stale = verdict is Verdict.STALE_EPOCH
            self.cluster.recoveries[Recovery.COMMIT_STALE if stale else Recovery.COMMIT_DUPLICATE] += 1
            self.ledger.reject(rollout, verdict.value)
        return verdict is Verdict.ACCEPTED

    def _progressed(self, event: ev.LeaseProgressed) -> None:
        verdict = self.queue.advance(event.lease, event.epoch, event.steps, self._now)
        if not self._admit(verdict, None) and verdict is Verdict.STALE_EPOCH:
            self.cluster.abandon(event.leader, event.epoch, event.lease)

    def _complete(
        self,
        worker: WorkerId,
        lease: LeaseId,
        epoch: int,
        rollouts: Sequence[RolloutId],
        version: PolicyVersion,
    ) -> bool:
        accepted: list[Rollout] = []
        self.queue.renew(lease, epoch, self._now)
        for name in rollouts:
            rollout = self._at.rollouts.get(name) or self._window.rollouts.get(name)
            if rollout is not None and version != rollout.version:
                self._fail_lease(lease, epoch, name, f"made by version {version}, not {rollout.version}")
            elif self._admit(self.queue.complete(lease, epoch, name), name):
                assert rollout is not None, "the queue accepted a rollout of another iteration"
                self._work_of(name).finished.add(name)
                self._at.makers[name] = worker, epoch
                self.ledger.finish(rollout, worker, epoch)
                accepted.append(rollout)
        if accepted:
            self._effects.append(ScoreSamples(tuple(accepted), self.cluster.lineage))
        return bool(accepted)

    def _work_of(self, rollout: RolloutId) -> Iteration | Window:
        return self._window if rollout in self._window.rollouts else self._at

    def _fail_lease(self, lease: LeaseId, epoch: int, rollout: RolloutId, error: str) -> None:
        verdict, given_up = self.queue.fail(lease, epoch, rollout, ROLLOUT_ATTEMPTS)
        if self._admit(verdict, rollout) and given_up:
            self._drop(rollout, DropReason.ROLLOUT_FAILED, error)

    # -- rewards ---------------------------------------------------------------------------------------

    def _rewarded(self, scores_of: Mapping[RolloutId, Mapping[str, float]], lineage: int) -> None:
        for rollout, scores in scores_of.items():
            if not self._scores_count(rollout, lineage):
                continue
            if not math.isfinite(scores.get(REWARD, math.nan)):
                self._drop(rollout, DropReason.REWARD_NOT_FINITE, f"{REWARD} is {scores.get(REWARD)}")
                continue
            work = self._work_of(rollout)
            self.ledger.score(rollout, scores)
            work.scores[rollout] = scores
            work.unscored.discard(rollout)
        self._advance()

    def _reward_failed(self, event: ev.RewardFailed) -> None:
        if self._scores_count(event.rollout, event.lineage):
            self._drop(event.rollout, event.reason, event.detail)

    def _scores_count(self, rollout: RolloutId, lineage: int) -> bool:
        if lineage == self.cluster.lineage:
            return self._awaits_scores(rollout)
        # Perhaps a sample of the same name, made by weights that were undone.
        self.cluster.recoveries[Recovery.SCORE_STALE] += 1
        self.ledger.reject(rollout, Verdict.STALE_EPOCH.value)
        return False

    def _awaits_scores(self, rollout: RolloutId) -> bool:
        work = self._work_of(rollout)
        if rollout in work.unscored and rollout in work.finished:
            return True
        known = rollout in work.rollouts and rollout not in work.unscored
        self.ledger.reject(rollout, (Verdict.DUPLICATE if known else Verdict.UNKNOWN).value)
        return False

    def _drop(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        if rollout in self._window.rollouts:
            self._drop_preview(rollout, reason, detail)
            return
        self._drop_quietly(rollout, reason, detail)
        self._at.unscored.discard(rollout)
        self._at.drops += 1
        share = self.plan.max_drop_share
        if share is None:
            self._stop(f"{rollout}: {reason.value}: {detail}")
        elif self._at.drops > share * len(self._at.rollouts):
            self._stop(
                f"iteration {self.iteration}: {self._at.drops} of {len(self._at.rollouts)} samples were "
                f"dropped, more than reward_policy.max_drop_share = {share}; "
                f"the last: {reason.value}: {detail}"
            )
        else:
            self._advance()

    def _drop_preview(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Previews are expendable: they never stop a run."""
        window = self._window
        self._drop_quietly(rollout, reason, detail)
        window.unscored.discard(rollout)
        del window.rollouts[rollout], window.slots[rollout]
        self._advance()

    # -- training --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Once every sample of the iteration is scored or dropped: report the evaluation, then train."""
        if self.stage is Stage.EXPLORING and not self._window.unscored:
            self._close_window()
            self._issue_training()
            self._forget_safe()
            self.stage = Stage.ROLLING
        if self.stage is not Stage.ROLLING or self._at.unscored:
            return
        if self._at.evaluation:
            self.stage = Stage.REPORTING
            self._report_evaluation()
        else:
            self._train_or_finish()

    def _report_evaluation(self) -> None:
        scored = [rollout for rollout in self._at.evaluation if rollout in self._at.scores]
        if not scored:
            self._stop(f"iteration {self.iteration}: not one evaluation sample was scored, nothing is known")
            return
        for rollout in scored:
            self.ledger.evaluate(rollout)
        rollouts = tuple(self._at.rollouts[rollout] for rollout in scored)
        scores = {rollout: self._at.scores[rollout] for rollout in scored}
        self._effects.append(
            ReportEvaluation(self.iteration, self.version, rollouts, scores, self.cluster.lineage)
        )

    def _evaluation_reported(self) -> None:
        self._discard(rollout for rollout in self._at.evaluation if rollout in self._at.scores)
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
        plan, groups = self.plan, []
        for part in split_updates(self._surviving_groups(), plan.updates_per_batch):
            even, surplus = even_out(part, plan.ranks)
            for rollout in surplus:
                self._drop_quietly(rollout, DropReason.UNEVEN_BATCH, f"{plan.ranks} ranks share an update")
            if even:
                update = len(self._at.updates)
                self._at.updates.append(micro_batches(even, self.iteration, update, plan.micro_batch_size))
                groups += even
        if not groups:
            self._stop(
                f"iteration {self.iteration}: no group kept two scored samples, nothing can be learnt from it"
            )
            return
        kept = [rollout for group in groups for rollout in group.rollouts]
        self.stage = Stage.PREPARING
        scores = {rollout: self._at.scores[rollout] for rollout in kept}
        order = tuple(micro_batch for update in self._at.updates for micro_batch in update)
        self._effects.append(PrepareBatch(self.iteration, tuple(groups), scores, order))
        explores = plan.exploration
        if explores and explores.where is Explore.IDLE and self.iteration + 1 < plan.iterations:
            self._open_window(self.iteration + 1)

    def _surviving_groups(self) -> list[Group]:
        groups = []
        for group in self._at.scored_groups():
            if len(group.rollouts) >= 2:
                groups.append(group)
                continue
            for rollout in group.rollouts:
                self._drop_quietly(rollout, DropReason.GROUP_TOO_SMALL, "the rest of its group was dropped")
        return groups

    def _drop_quietly(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """A drop that follows from others: recorded, but it does not count towards max_drop_share."""
        self.ledger.drop(rollout, reason, detail)
        self._discard([rollout])

    def _discard(self, rollouts: Iterable[RolloutId]) -> None:
        if discarded := tuple(rollouts):
            self._at.finished.difference_update(discarded)
            self._effects.append(DiscardSamples(discarded))

    def _train(
        self, event: ev.BatchPrepared | ev.MicroBatchTrained | ev.OptimizerStepped | ev.BatchFinished
    ) -> None:
        at = self._at
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
                self._effects.append(PublishWeights(self.version))

    def _next_micro_batch(self) -> None:
        pending = self._at.updates[self._at.update]
        if self._at.micro_batch < len(pending):
            self._effects.append(TrainMicroBatch(pending[self._at.micro_batch], self._at.micro_batch))
        else:
            self._effects.append(StepOptimizer(self.iteration, self._at.update))

    def _stepped(self, loss: float, grad_norm: float) -> None:
        at = self._at
        self.version = PolicyVersion(self.version + 1)
        trained = [rollout for micro_batch in at.updates[at.update] for rollout in micro_batch.rollouts]
        for rollout in trained:
            self.ledger.train(rollout, self.version)
        self.ledger.step(StepApplied(self.version, self.iteration, at.update, len(trained), loss, grad_norm))
        self._discard(trained)
        at.update, at.micro_batch = at.update + 1, 0
        if at.update < len(at.updates):
            self._next_micro_batch()
        else:
            self.stage = Stage.FINISHING
            self._effects.append(FinishBatch(self.iteration))

    # -- the end of an iteration -----------------------------------------------------------------------

    def _published(self, version: PolicyVersion) -> None:
        if self.stage is not Stage.PUBLISHING or version != self.version:
            return
        self.ledger.publish(version)
        self._close_window()
        self.cluster.publish(version, self._now)
        self.iteration += 1
        if self.iteration % self.plan.checkpoint_every and self.iteration < self.plan.iterations:
            self._start_iteration()
            return
        self.stage = Stage.COMMITTING
        # The records of this very event count as written: the driver writes them before the checkpoint.
        self._effects.append(CommitCheckpoint(self.iteration, self.ledger.position, self.snapshot()))

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
        before, previews = self._at, self._window.rollouts
        self._window = Window(0)
        revoked, unfinished = self.queue.reset()
        for lease in revoked:
            self.cluster.revoked(lease)
        older, self._safe = self._safe, Safe.of(before, unfinished)
        self._safe.merge(older)
        billed = self.ledger.gpu_seconds, self.ledger.billed_s
        self._load(self._committed)
        self.ledger.gpu_seconds, self.ledger.billed_s = billed
        self._undo.append(RollBack(self.ledger.position))
        self._effects = []
        self._discard(previews)
        self.cluster.roll_back(self.version, self._now)
        self._learner_up, self._restore_due = False, True
        self._restore_learner()
        self._start_iteration()

    def _restore_learner(self) -> None:
        """As soon as there are GPUs enough for all its ranks."""
        if self._restore_due and self.cluster.learner_gpus >= self.plan.ranks:
            self._restore_due = False
            self._effects.append(RestoreLearner(self.iteration, self.cluster.lineage))

    def _recall(self, rollout: Rollout) -> None:
        """A sample that outlived the learner counts again, without being made again."""
        self.cluster.recoveries[Recovery.SAMPLE_KEPT] += 1
        at, safe = self._at, self._safe
        at.makers[rollout.id] = safe.makers[rollout.id]
        at.finished.add(rollout.id)
        self.ledger.finish(rollout, *safe.makers[rollout.id])
        if rollout.id in safe.scores:
            at.scores[rollout.id] = safe.scores[rollout.id]
            self.ledger.score(rollout.id, safe.scores[rollout.id])
        else:
            at.unscored.add(rollout.id)
            self._effects.append(ScoreSamples((rollout,), self.cluster.lineage))

    def _finish(self) -> None:
        self.stage = Stage.OVER
        self._effects.append(FinishRun(None))

    def _stop(self, error: str) -> None:
        self.stage = Stage.OVER
        self._effects = [effect for effect in self._effects if isinstance(effect, DiscardSamples)]
        self._effects.append(FinishRun(error))

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
        return Snapshot(self.iteration, self.version, self.queue.leases_granted, self._chosen, ledger)

    def _load(self, snapshot: Snapshot) -> None:
        self.iteration, self.version = snapshot.iteration, snapshot.version
        self._chosen = snapshot.chosen
        self.ledger = snapshot.restore_ledger()

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
        controller._load(parsed)
        controller.queue.leases_granted = parsed.leases_granted
        controller.cluster.target = parsed.version
        controller._committed = parsed
        return controller


def _after_the_end(event: ev.Event) -> ev.Event:
    """Late answers change nothing once the run is over; time is still billed, and pulls still answered."""
    return event if isinstance(event, ev.GpuTimeSpent | ev.WorkPulled) else ev.TimePassed()
