"""The work of a run: rollouts issued, made, scored or dropped. Part of the controller.

The current iteration's rollouts, and those that policies have issued beside them, each in the :class:`Work`
of its owner. Only what the owner is told becomes of the latter (:mod:`spotlight.scheduler.policy`).

Invariants
    1. A rollout neither scored nor dropped is in the queue, or its sample waits for its scores.
    2. Commits, completions and scores count once, and only from the current lease and lineage.
    3. Work that survived a lost learner is reused only for an identical rollout (id, seed, steps, version).
    4. A sample is at most one published version old, at admission and when trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from spotlight.config.section import Section
from spotlight.registry import POLICIES
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.cluster.queue import CommitVerdict, WorkClass
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import DiscardSamples, Effect, ReportEvaluation, ScoreSamples
from spotlight.scheduler.iteration import (
    Iteration,
    Survived,
    Unsaved,
    Work,
    evaluation_rollouts,
    train_rollouts,
)
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policy import Begun, GroupPlan, Policy
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import prompts_of_iteration
from spotlight.scheduler.types import DropReason, LeaseId, Maker, PolicyVersion, Rollout, RolloutId, Scores
from spotlight_rewards.base.prompts import Prompt, PromptId


class PolicyKind(Protocol):
    """What the registry has: the class of a policy."""

    section: ClassVar[type[Section]]

    def __call__(self, work: Rollouts, settings: Section | None, /) -> Policy:
        """The policy of a run, with its settings if another package adds it."""
        ...


ROLLOUT_ATTEMPTS = 2
"""A rollout failing this often is dropped: with fixed randomness it would fail again."""


class Rollouts:
    """See the module's docstring.

    Attributes:
        current: the iteration under way.
        extra: work beside it, each with its owner.
        prompts: for training, by id.
        policies: that this run uses, by name.
        survived: work that survived a lost learner, not reissued yet.
        unsaved: samples whose step may be lost.
        stopping: why the run has to stop, if it has to.
        effects: taken by the controller after each event.
    """

    def __init__(
        self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], dispatcher: Dispatcher
    ) -> None:
        self.plan, self.dispatcher = plan, dispatcher
        self.queue, self.cluster = dispatcher.queue, dispatcher.cluster
        self.train_prompts, self.test_prompts = tuple(train), tuple(test)
        self.prompts: Mapping[PromptId, Prompt] = {prompt.id: prompt for prompt in train}
        self.ledger = Ledger()
        self.current, self.survived = Iteration(), Survived()
        self.extra: list[Work] = []
        self.unsaved = Unsaved()
        self._oldest = PolicyVersion(0)
        self.stopping: str | None = None
        self.effects: list[Effect] = []
        used = plan.policies  # no other is imported
        self.policies: Mapping[str, Policy] = {
            name: POLICIES.load(name)(self, used[name]) for name in POLICIES if name in used
        }

    def find(self, name: RolloutId) -> Rollout | None:
        """A rollout of this iteration or of a policy."""
        return self._work_of(name).rollouts.get(name)

    @property
    def names(self) -> set[RolloutId]:
        """Ids of everything :meth:`find` finds."""
        return {name for work in (self.current, *self.extra) for name in work.rollouts}

    def _work_of(self, rollout: RolloutId) -> Work:
        for work in self.extra:
            if rollout in work.rollouts:
                return work
        return self.current

    # -- issue -----------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start an iteration."""
        self.unsaved.begin(self.current)
        self.current = Iteration()
        self.queue.forget_done()
        self.queue.promote()
        self.cluster.pace.promote(now)

    def issue_evaluation(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the evaluation rollouts."""
        issued = evaluation_rollouts(self.plan, self.test_prompts, iteration, version)
        self.current.evaluation = [self._issue(prompt, rollout) for prompt, rollout in issued]

    def issue_training(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the groups, with prompts and seeds as policies have them."""
        groups: Sequence[GroupPlan] = [GroupPlan(prompt) for prompt in self.prompts_of(iteration)]
        for policy in self.policies.values():
            groups = policy.groups(iteration, groups)
        for slot, prompt, rollout in train_rollouts(self.plan, groups, iteration, version):
            name = self._issue(prompt, rollout)
            self.current.groups.setdefault(slot, []).append(name)
        for policy in self.policies.values():
            policy.issued()

    def prompts_of(self, iteration: int) -> list[Prompt]:
        """The prompts of an iteration, by slot, as drawn from the run seed."""
        plan = self.plan
        return prompts_of_iteration(self.train_prompts, plan.run_seed, iteration, plan.prompts_per_iteration)

    def _issue(self, prompt: Prompt, rollout: Rollout) -> RolloutId:
        recalled = self._recall(rollout)
        taken = (policy.take(rollout) for policy in self.policies.values())
        begun = recalled or next((each for each in taken if each is not None), None)
        if begun is not None:
            rollout = begun.rollout
        self.current.issue(rollout)
        self.ledger.issue(rollout, prompt)
        if begun is None:
            if step := self.survived.step_of(rollout):
                self.cluster.recoveries[Recovery.PROGRESS_KEPT] += 1
            self.queue.add([rollout], {rollout.id: step})
            return rollout.id
        if begun.maker is not None:
            self.current.makers[rollout.id] = begun.maker
            self.ledger.finish(rollout, begun.maker)
        if begun.scores is not None:
            self.current.score(rollout.id, begun.scores)
            self.ledger.score(rollout.id, begun.scores)
        elif recalled is not None:  # of what a policy has, scores are asked for already
            self._have_scored([rollout])
        return rollout.id

    def _recall(self, rollout: Rollout) -> Begun | None:
        """The sample of this rollout that survived a lost learner."""
        maker = self.survived.makers.get(rollout.id)
        # A sample that was a preview comes from the preview that is made again. The planner may have given
        # the one before the loss other steps; the ledger would then name the wrong one.
        if maker is None or maker.preview is not None or not self.survived.take(rollout):
            return None
        self.cluster.recoveries[Recovery.SAMPLE_KEPT] += 1
        return Begun(rollout, maker, self.survived.scores.get(rollout.id))

    def issue_extra(
        self, work: Work, prompt: Prompt, rollout: Rollout, value: WorkClass | None = None
    ) -> None:
        """Queue a rollout of a policy's own.

        Args:
            value: its class in the queue; None: that of its purpose.
        """
        work.issue(rollout)
        if work.recorded:
            self.ledger.issue(rollout, prompt)
        self.queue.add([rollout], value=value)

    def issue_again(self, name: RolloutId) -> None:
        """Replace a rollout of an older version, which nobody makes any more, by one of the published."""
        current = self.current
        old = current.rollouts.pop(name)
        current.unscored.discard(name)
        self.cluster.recoveries[Recovery.ROLLOUT_RENEWED] += 1
        self.drop_quietly(name, DropReason.STALE, f"its holder is gone, and so is version {old.version}")
        new = replace(old, id=RolloutId(f"{name}r"), version=self.cluster.target)
        for members in current.groups.values():
            if name in members:
                members[members.index(name)] = new.id
        self._issue(self.prompts[old.prompt_id], new)

    def forget_survived(self) -> None:
        """Free surviving work that was not reissued; a kept preview may have its name by now."""
        self.discard(name for name in self.survived.names if name not in self.current.makers)
        self.survived = Survived()

    # -- versions --------------------------------------------------------------------------------------

    def published(self, before: PolicyVersion) -> None:
        """From now on only rollouts under way may still be made by version ``before``."""
        self._oldest = before
        for policy in self.policies.values():
            policy.published()

    def require_fresh(self, rollouts: Iterable[RolloutId]) -> None:
        """Raise RuntimeError if a sample is more than one published version old."""
        for name in rollouts:
            if (made_by := self.current.rollouts[name].version) < self._oldest:
                raise RuntimeError(
                    f"sample {name} of version {made_by} is too old to train on; expected {self._oldest}"
                )

    # -- made ------------------------------------------------------------------------------------------

    def _admit(self, verdict: CommitVerdict, rollout: RolloutId | None) -> bool:
        if verdict is not CommitVerdict.ACCEPTED:
            stale = verdict is CommitVerdict.STALE_EPOCH
            self.cluster.recoveries[Recovery.COMMIT_STALE if stale else Recovery.COMMIT_DUPLICATE] += 1
            self.ledger.reject(rollout, verdict.value)
        return verdict is CommitVerdict.ACCEPTED

    def progress(self, event: ev.LeaseProgressed, now: float) -> None:
        """Record committed progress; abandon the lease if it is stale."""
        verdict = self.queue.advance(event.lease, event.epoch, event.steps, now)
        if not self._admit(verdict, None) and verdict is CommitVerdict.STALE_EPOCH:
            self.dispatcher.abandon(event.leader, event.epoch, event.lease)

    def complete(self, event: ev.LeaseCompleted, now: float) -> bool:
        """Accept finished rollouts and have them scored. Returns whether any counted."""
        accepted: list[Rollout] = []
        worker, lease, epoch, version = event.leader, event.lease, event.epoch, event.version
        self.queue.renew(lease, epoch, now)
        for name in event.rollouts:
            work = self._work_of(name)
            rollout = work.rollouts.get(name)
            if rollout is not None and version != rollout.version:
                self.fail(lease, epoch, name, f"made by version {version}, not {rollout.version}")
            elif self._admit(self.queue.complete(lease, epoch, name), name):
                assert rollout is not None, "the queue accepted a rollout of another iteration"
                work.makers[name] = Maker(worker, epoch)
                if work.recorded:
                    self.ledger.finish(rollout, work.makers[name])
                accepted.append(rollout)
        if accepted:
            self._have_scored(accepted)
        return bool(accepted)

    def _have_scored(self, samples: Sequence[Rollout]) -> None:
        if not any(policy.waits_to_score(samples) for policy in self.policies.values()):
            self.effects.append(ScoreSamples(tuple(samples), self.cluster.lineage))

    def fail(self, lease: LeaseId, epoch: int, rollout: RolloutId, error: str) -> None:
        """Retry a failed rollout, or drop it after ``ROLLOUT_ATTEMPTS``."""
        verdict, given_up = self.queue.fail(lease, epoch, rollout, ROLLOUT_ATTEMPTS)
        if self._admit(verdict, rollout) and given_up:
            self.drop(rollout, DropReason.ROLLOUT_FAILED, error)

    # -- rewards ---------------------------------------------------------------------------------------

    def reward(self, scores_of: Mapping[RolloutId, Scores], lineage: int, now: float) -> None:
        """Accept scores; non-finite rewards drop the sample."""
        for rollout, scores in scores_of.items():
            if not self._scores_count(rollout, lineage):
                continue
            if not math.isfinite(scores.get(REWARD, math.nan)):
                self.drop(rollout, DropReason.REWARD_NOT_FINITE, f"{REWARD} is {scores.get(REWARD)}")
                continue
            work = self._work_of(rollout)
            work.score(rollout, scores)
            if work.recorded:
                self.ledger.score(rollout, scores)
            if work.owner is not None:
                work.owner.scored(rollout, scores, now)

    def fail_reward(self, event: ev.RewardFailed) -> None:
        """Drop a sample that could not be scored."""
        if self._scores_count(event.rollout, event.lineage):
            self.drop(event.rollout, event.reason, event.detail)

    def _scores_count(self, rollout: RolloutId, lineage: int) -> bool:
        if lineage == self.cluster.lineage:
            return self._awaits_scores(rollout)
        # Possibly a sample of the same id made by weights that were rolled back.
        self.cluster.recoveries[Recovery.SCORE_STALE] += 1
        self.ledger.reject(rollout, CommitVerdict.STALE_EPOCH.value)
        return False

    def _awaits_scores(self, rollout: RolloutId) -> bool:
        work = self._work_of(rollout)
        if rollout in work.unscored and rollout in work.makers:
            return True
        known = rollout in work.rollouts and rollout not in work.unscored
        self.ledger.reject(rollout, (CommitVerdict.DUPLICATE if known else CommitVerdict.UNKNOWN).value)
        return False

    def report_evaluation(self, iteration: int, version: PolicyVersion) -> bool:
        """Count the scored samples of the evaluation, and have them reported; False: there are none."""
        current = self.current
        scores = {name: current.scores[name] for name in current.evaluation if name in current.scores}
        for rollout in scores:
            self.ledger.evaluate(rollout)
        issued = tuple(current.rollouts[rollout] for rollout in current.evaluation)
        if scores:
            report = ReportEvaluation(iteration, version, issued, scores, self.cluster.lineage)
            self.effects.append(report)
        return bool(scores)

    def evaluation_reported(self) -> None:
        """Free its samples."""
        self.discard(name for name in self.current.evaluation if name in self.current.scores)

    # -- dropped ---------------------------------------------------------------------------------------

    def drop(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """A rollout will not be scored; of this iteration's, too many such stop the run."""
        if (owner := self._work_of(rollout).owner) is not None:
            owner.dropped(rollout, reason, detail)
            return
        self.drop_quietly(rollout, reason, detail)
        too_many = self.current.drop(rollout, f"{reason.value}: {detail}", self.plan.max_drop_share)
        self.stopping = self.stopping or too_many

    def drop_quietly(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Record a consequential drop, which does not count towards ``max_drop_share``."""
        self.ledger.drop(rollout, reason, detail)
        self.discard([rollout])

    def leave_out(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Record that a scored sample is not trained; a lost learner finds it again, to choose alike."""
        self.ledger.drop(rollout, reason, detail)
        self.keep_until_saved([rollout], self.unsaved.left_out)

    def keep_until_saved(self, rollouts: Sequence[RolloutId], unsaved: list[RolloutId]) -> None:
        """Free samples that the learner is done with, at once where it cannot be lost alone."""
        if self.plan.cluster.learner_moves:
            unsaved += rollouts
        else:
            self.discard(rollouts)

    def discard(self, rollouts: Iterable[RolloutId]) -> None:
        """Have the samples' tensors freed."""
        if discarded := tuple(rollouts):
            for name in discarded:
                self.current.makers.pop(name, None)
            self.effects.append(DiscardSamples(discarded))

    # -- a lost learner --------------------------------------------------------------------------------

    def roll_back(self, ledger: Mapping[str, object], states: Mapping[str, Mapping[str, object]]) -> None:
        """Return to an earlier ledger and earlier policies, keeping what survived. GPU time stays billed."""
        extra = [name for policy in self.policies.values() for name in policy.rolled_back()]
        self._oldest = PolicyVersion(0)
        revoked, unfinished = self.queue.reset()
        for lease in revoked:
            self.dispatcher.revoked(lease)
        older, self.survived = self.survived, Survived.of(self.current, unfinished)
        self.survived.merge(Survived.of(self.unsaved.before, {}))
        self.survived.merge(older)
        self.cluster.recoveries[Recovery.TRAINED_AGAIN] += bool(self.unsaved.trained)
        self.unsaved.take()
        billed = self.ledger.gpu_seconds, self.ledger.billed_s
        self.load(ledger, states)
        self.ledger.gpu_seconds, self.ledger.billed_s = billed
        self.discard(extra)

    def load(self, ledger: Mapping[str, object], states: Mapping[str, Mapping[str, object]]) -> None:
        """Restore a snapshot's ledger and policies."""
        self.ledger = Ledger.restore(ledger)
        for name, policy in self.policies.items():
            policy.restore(states.get(name, {}))

    def snapshot(self) -> dict[str, Mapping[str, object]]:
        """The policies' states, without empty ones."""
        states = {name: policy.snapshot() for name, policy in self.policies.items()}
        return {name: state for name, state in states.items() if state}

    def check(self) -> None:
        """Assert invariant 1 of the module, in O(rollouts of the iteration)."""
        works = (self.current, *self.extra)
        waiting = sum(len(work.unmade) for work in works)
        assert self.queue.outstanding == waiting, "the queue lost or invented a rollout"
        for work in works:
            assert work.unscored.isdisjoint(work.scores), "a scored rollout still waits for its scores"

    # -- groups ----------------------------------------------------------------------------------------

    def groups_scored(self) -> Iterator[tuple[int, dict[int, Scores]]]:
        """Of each slot of this iteration, the scores by seed."""
        for slot, members in self.current.groups.items():
            scored = [name for name in members if name in self.current.scores]
            yield slot, {self.current.rollouts[name].seed: self.current.scores[name] for name in scored}
