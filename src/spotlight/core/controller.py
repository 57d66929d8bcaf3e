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
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.core import events as ev
from spotlight.core.batches import even_out, micro_batches, split_updates
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
    ScoreSamples,
    StepOptimizer,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.core.ledger import Ledger
from spotlight.core.plan import Plan as Plan
from spotlight.core.plan import require_usable
from spotlight.core.queue import PullQueue, Verdict
from spotlight.core.records import REWARD, StepApplied
from spotlight.core.seeds import derive_seed, prompts_of_iteration
from spotlight.core.types import (
    DropReason,
    Group,
    LeaseId,
    MicroBatch,
    PolicyVersion,
    Prompt,
    PromptId,
    Purpose,
    Rollout,
    RolloutId,
)

ROLLOUT_ATTEMPTS = 2
"""A rollout that fails this often is dropped: its randomness is fixed, so it will fail again."""


class Stage(StrEnum):
    """Where the current iteration stands."""

    IDLE = "idle"
    ROLLING = "rolling"
    REPORTING = "reporting"
    PREPARING = "preparing"
    TRAINING = "training"
    FINISHING = "finishing"
    PUBLISHING = "publishing"
    COMMITTING = "committing"
    OVER = "over"


@dataclass(slots=True)
class _Iteration:
    """Bookkeeping of the current iteration; ``unscored`` holds rollouts neither scored nor dropped."""

    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    groups: dict[tuple[int, PromptId], list[RolloutId]] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)
    evaluation: list[RolloutId] = field(default_factory=list)
    updates: list[list[MicroBatch]] = field(default_factory=list)
    update: int = 0
    micro_batch: int = 0
    drops: int = 0


class Controller:
    """See the module's docstring."""

    def __init__(self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
        require_usable(plan, train, test)
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in (*train, *test)}
        self.train_prompts, self.test_prompts = tuple(train), tuple(test)
        self.queue = PullQueue(plan.lease_s)
        self.ledger = Ledger()
        self.stage = Stage.IDLE
        self.iteration = 0
        self.version = PolicyVersion(0)
        self._now = 0.0
        self._at: _Iteration = _Iteration()
        self._effects: list[Effect] = []

    # -- the one entry ---------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event at controller time ``now`` (seconds); return the effects, in order."""
        self._now = now
        self.queue.expire(now)
        if self.stage is Stage.OVER:
            event = _after_the_end(event)
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
            case ev.ProgressCommitted(_, lease, epoch, rollout, step):
                self._admit(self.queue.commit(lease, epoch, rollout, step, now), rollout)
            case ev.RolloutCompleted():
                self._complete(event)
            case ev.RolloutFailed():
                self._fail(event)
            case ev.SampleRewarded(rollout, scores):
                self._rewarded(rollout, scores)
            case ev.RewardFailed(rollout, reason, detail):
                self._reward_failed(rollout, reason, detail)
            case ev.BatchPrepared() | ev.MicroBatchTrained() | ev.OptimizerStepped() | ev.BatchFinished():
                self._train(event)
            case ev.EvaluationReported():
                self._expect(Stage.REPORTING, event)
                self._evaluation_reported()
            case ev.WeightsPublished(version):
                self._published(version)
            case ev.CheckpointCommitted():
                self._expect(Stage.COMMITTING, event)
                self._start_iteration()
            case ev.GpuTimeSpent(_, phase, seconds):
                self.ledger.spend(phase, seconds)
            case ev.TimePassed():
                pass
        self.ledger.check()
        effects, self._effects = self._effects, []
        # Records come first: drivers make them durable before any checkpoint that an effect asks for.
        return [WriteRecord(*numbered) for numbered in self.ledger.take_records()] + effects

    def check(self) -> None:
        """Assert every invariant, in O(rollouts of the iteration): for tests, and when there is time."""
        self.ledger.check()
        self.queue.check()
        at = self._at
        waiting = len(at.unscored - at.finished)
        assert self.queue.outstanding == waiting, "the queue lost or invented a rollout"
        assert at.unscored.isdisjoint(at.scores), "a scored rollout still waits for its scores"

    @property
    def rollouts(self) -> Mapping[RolloutId, Rollout]:
        """The rollouts of the current iteration."""
        return self._at.rollouts

    # -- issue -----------------------------------------------------------------------------------------

    def _start_iteration(self) -> None:
        self._at = _Iteration()
        self.queue.forget_done()
        last = self.iteration >= self.plan.iterations
        if not last:
            self._issue_training()
        if last or self.iteration % self.plan.evaluate_every == 0:
            self._issue_evaluation()
        self.stage = Stage.ROLLING
        self._at.unscored = set(self._at.rollouts)
        self._advance()

    def _issue_training(self) -> None:
        plan = self.plan
        prompts = prompts_of_iteration(
            self.train_prompts, plan.run_seed, self.iteration, plan.prompts_per_iteration
        )
        for slot, prompt in enumerate(prompts):
            for member in range(plan.group_size):
                seed = derive_seed(plan.run_seed, "train", self.iteration, slot, member)
                name = f"t{self.iteration:06d}-{slot:03d}-{member:03d}"
                rollout = self._issue(name, Purpose.TRAIN, prompt, member, seed, plan.rollout_steps)
                self._at.groups.setdefault((slot, prompt.id), []).append(rollout.id)

    def _issue_evaluation(self) -> None:
        plan = self.plan
        for slot, prompt in enumerate(self.test_prompts):
            for member in range(plan.evaluation_images):
                # The same seeds at every evaluation AND in every run: curves differ only by the weights.
                seed = derive_seed(0, "eval", prompt.id, member)
                name = f"e{self.iteration:06d}-{slot:03d}-{member:03d}"
                rollout = self._issue(name, Purpose.EVAL, prompt, member, seed, plan.evaluation_steps)
                self._at.evaluation.append(rollout.id)

    def _issue(
        self, name: str, purpose: Purpose, prompt: Prompt, member: int, seed: int, steps: int
    ) -> Rollout:
        rollout = Rollout(
            RolloutId(name), purpose, self.iteration, prompt.id, member, seed, steps, self.version
        )
        self._at.rollouts[rollout.id] = rollout
        self.ledger.issue(rollout, prompt)
        self.queue.add([rollout])
        return rollout

    # -- rollouts --------------------------------------------------------------------------------------

    def _grant(self, event: ev.WorkPulled) -> None:
        over = self.stage is Stage.OVER
        granted = None if over else self.queue.pull(event.worker, event.capacity, self._now)
        self._effects.append(GrantLease(*granted) if granted else NoWork(event.worker))

    def _admit(self, verdict: Verdict, rollout: RolloutId) -> bool:
        if verdict is not Verdict.ACCEPTED:
            self.ledger.reject(rollout, verdict.value)
        return verdict is Verdict.ACCEPTED

    def _complete(self, event: ev.RolloutCompleted) -> None:
        rollout = self._at.rollouts.get(event.rollout)
        if rollout is not None and event.version != rollout.version:
            error = f"made by version {event.version}, not {rollout.version}"
            self._fail_lease(event.lease, event.epoch, event.rollout, error)
            return
        if not self._admit(self.queue.complete(event.lease, event.epoch, event.rollout), event.rollout):
            return
        assert rollout is not None, "the queue accepted a rollout of another iteration"
        self._at.finished.add(rollout.id)
        self.ledger.finish(rollout, event.worker, event.epoch)
        self._effects.append(ScoreSamples((rollout,)))

    def _fail(self, event: ev.RolloutFailed) -> None:
        self._fail_lease(event.lease, event.epoch, event.rollout, event.error)

    def _fail_lease(self, lease: LeaseId, epoch: int, rollout: RolloutId, error: str) -> None:
        verdict, given_up = self.queue.fail(lease, epoch, rollout, ROLLOUT_ATTEMPTS)
        if self._admit(verdict, rollout) and given_up:
            self._drop(rollout, DropReason.ROLLOUT_FAILED, error)

    # -- rewards ---------------------------------------------------------------------------------------

    def _rewarded(self, rollout: RolloutId, scores: Mapping[str, float]) -> None:
        if not self._awaits_scores(rollout):
            return
        if not math.isfinite(scores.get(REWARD, math.nan)):
            self._drop(rollout, DropReason.REWARD_NOT_FINITE, f"{REWARD} is {scores.get(REWARD)}")
            return
        self.ledger.score(rollout, scores)
        self._at.scores[rollout] = scores
        self._at.unscored.discard(rollout)
        self._advance()

    def _reward_failed(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        if self._awaits_scores(rollout):
            self._drop(rollout, reason, detail)

    def _awaits_scores(self, rollout: RolloutId) -> bool:
        at = self._at
        if rollout in at.unscored and rollout in at.finished:
            return True
        known = rollout in at.rollouts and rollout not in at.unscored
        self.ledger.reject(rollout, (Verdict.DUPLICATE if known else Verdict.UNKNOWN).value)
        return False

    def _drop(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
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

    # -- training --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Once every sample of the iteration is scored or dropped: report the evaluation, then train."""
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
        self._effects.append(ReportEvaluation(self.iteration, self.version, rollouts, scores))

    def _evaluation_reported(self) -> None:
        self._discard(rollout for rollout in self._at.evaluation if rollout in self._at.scores)
        self._train_or_finish()

    def _train_or_finish(self) -> None:
        if self.iteration >= self.plan.iterations:
            self._finish()
        else:
            self._prepare_batch()

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

    def _surviving_groups(self) -> list[Group]:
        groups = []
        for (_, prompt), members in self._at.groups.items():
            scored = tuple(rollout for rollout in members if rollout in self._at.scores)
            if len(scored) >= 2:
                groups.append(Group(prompt, scored))
                continue
            for rollout in scored:
                self._drop_quietly(rollout, DropReason.GROUP_TOO_SMALL, "the rest of its group was dropped")
        return groups

    def _drop_quietly(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """A drop that follows from others: recorded, but it does not count towards max_drop_share."""
        self.ledger.drop(rollout, reason, detail)
        self._discard([rollout])

    def _discard(self, rollouts: Iterable[RolloutId]) -> None:
        if discarded := tuple(rollouts):
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
        self.iteration += 1
        if self.iteration % self.plan.checkpoint_every and self.iteration < self.plan.iterations:
            self._start_iteration()
            return
        self.stage = Stage.COMMITTING
        # The records of this very event count as written: the driver writes them before the checkpoint.
        self._effects.append(CommitCheckpoint(self.iteration, self.ledger.position, self.snapshot()))

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
        return {
            "iteration": self.iteration,
            "version": self.version,
            "leases_granted": self.queue.leases_granted,
            "ledger": self.ledger.snapshot(),
        }

    @classmethod
    def restore(
        cls, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], snapshot: Mapping[str, object]
    ) -> Controller:
        """The controller that made ``snapshot``, ready for :class:`~spotlight.core.events.RunStarted`."""
        controller = cls(plan, train, test)
        iteration, version = snapshot.get("iteration"), snapshot.get("version")
        leases, ledger = snapshot.get("leases_granted"), snapshot.get("ledger")
        if not (
            isinstance(iteration, int)
            and isinstance(version, int)
            and isinstance(leases, int)
            and isinstance(ledger, Mapping)
        ):
            raise ValueError(f"not a controller snapshot: {sorted(snapshot)}")
        controller.iteration, controller.version = iteration, PolicyVersion(version)
        controller.queue.leases_granted = leases
        controller.ledger = Ledger.restore(ledger)
        return controller


def _after_the_end(event: ev.Event) -> ev.Event:
    """Late answers change nothing once the run is over; time is still billed, and pulls still answered."""
    return event if isinstance(event, ev.GpuTimeSpent | ev.WorkPulled) else ev.TimePassed()
