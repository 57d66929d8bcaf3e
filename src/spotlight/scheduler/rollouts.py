"""The rollouts and previews of an iteration, from issue to score or drop. Part of the controller.

Rollouts of the next iteration may be made early, one published version stale. They enter the ledger when that
iteration begins, so no checkpoint contains them.

Invariants
    1. A rollout neither scored nor dropped is in the queue, or its sample is at the reward pool.
    2. Commits, completions and scores count once, and only from the current lease and lineage.
    3. Work that survived a lost learner is reused only for an identical rollout (id, seed, steps, version).
    4. A sample is at most one published version old, at admission and when trained on.
    5. A rollout whose sample was made as a preview is not queued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.cluster.queue import CommitVerdict, WorkClass
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import DiscardSamples, Effect, KeepPreview, ReportExploration, ScoreSamples
from spotlight.scheduler.exploration.explorer import Explorer
from spotlight.scheduler.exploration.kept import KeptPreviews
from spotlight.scheduler.exploration.window import Window
from spotlight.scheduler.group_gate import GroupProgress
from spotlight.scheduler.iteration import (
    Iteration,
    Safe,
    Unsaved,
    evaluation_rollouts,
    preview_rollouts,
    train_rollouts,
)
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import prompts_of_iteration
from spotlight.scheduler.types import DropReason, LeaseId, Maker, PolicyVersion, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt

ROLLOUT_ATTEMPTS = 2
"""A rollout failing this often is dropped: with fixed randomness it would fail again."""


class Rollouts:
    """See the module's docstring.

    Attributes:
        at: the current iteration.
        early: the next iteration's rollouts.
        early_samples: samples of this iteration begun before it.
        older: unfinished rollouts of the previously published version.
        explorer: None without exploration.
        explores_beside: previews are made while the previous iteration trains.
        kept: previews that become rollouts.
        safe: work that survived a lost learner, not reissued yet.
        unsaved: trained samples whose step may be lost.
        stopping: why the run has to stop, if it has to.
        effects: taken by the controller after each event.
    """

    def __init__(
        self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], dispatcher: Dispatcher
    ) -> None:
        self.plan, self.dispatcher = plan, dispatcher
        self.queue, self.cluster = dispatcher.queue, dispatcher.cluster
        self.train_prompts, self.test_prompts = tuple(train), tuple(test)
        self._prompts = {prompt.id: prompt for prompt in train}
        explores = plan.exploration
        self.explorer = Explorer(plan, train) if explores else None
        self.kept = KeptPreviews(plan)
        self.ledger = Ledger()
        self.explores_beside = explores is not None and explores.where == "idle"
        dispatcher.spare.explores = self.explores_beside
        self.at, self.early, self.safe = Iteration(), Iteration(), Safe()
        self.unsaved = Unsaved()
        self.early_samples = 0
        self.older: set[RolloutId] = set()
        self._oldest = PolicyVersion(0)
        self._no_window = Window(0)
        self.stopping: str | None = None
        self.effects: list[Effect] = []

    @property
    def window(self) -> Window:
        """The preview window, for this iteration or the next."""
        return self.explorer.window if self.explorer else self._no_window

    def find(self, name: RolloutId) -> Rollout | None:
        """A rollout of this or the next iteration, or a preview."""
        return self._work_of(name).rollouts.get(name)

    @property
    def names(self) -> set[RolloutId]:
        """Ids of everything :meth:`find` finds."""
        return {*self.at.rollouts, *self.early.rollouts, *self.window.rollouts}

    def group_progress(self) -> GroupProgress:
        """Which groups of this and the next iteration are complete, for rewards that compare members."""
        works = self.at, self.early
        unmade = (work.rollouts[name] for work in works for name in work.unscored - work.finished)
        issued = (rollout for work in works for rollout in work.rollouts.values())
        return GroupProgress.of(issued, unmade, self.plan.group_size)

    # -- issue -----------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start an iteration; rollouts made early are adopted by :meth:`issue_training`."""
        self.unsaved.begin(self.at)
        self.at, self.early_samples = Iteration(), 0
        self.queue.forget_done()
        self.queue.promote()
        self.cluster.pace.promote(now)

    def issue_evaluation(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the evaluation rollouts."""
        issued = evaluation_rollouts(self.plan, self.test_prompts, iteration, version)
        self.at.evaluation = [self._issue(prompt, rollout) for _, prompt, rollout in issued]

    def issue_training(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the groups, with explored seeds if any, and adopt early rollouts."""
        prompts, explorer = self._prompts_of(iteration), self.explorer
        if explorer:
            prompts = explorer.prompts(prompts)
        chosen = explorer.seeds if explorer else {}
        issued = train_rollouts(self.plan, prompts, iteration, version, chosen)
        for slot, prompt, rollout in issued:
            adopted = self._adopt(prompt, rollout.id)
            name = rollout.id if adopted else self._issue(prompt, rollout)
            self.at.groups.setdefault((slot, prompt.id), []).append(name)
        lost, self.early = self.early.lost, Iteration()
        for name, why in lost.items():
            self._drop(name, *why)
        self.discard(self.kept.rest())

    def issue_early(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the next iteration's first groups, behind this one's."""
        prompts = self._prompts_of(iteration)[: self.plan.early_groups]
        for _, _, rollout in train_rollouts(self.plan, prompts, iteration, version, {}):
            self.early.rollouts[rollout.id] = rollout
            self.early.unscored.add(rollout.id)
            self.queue.add([rollout], value=WorkClass.NEXT)

    def _adopt(self, prompt: Prompt, name: RolloutId) -> bool:
        """Move an early rollout into this iteration, if there is one."""
        at, early = self.at, self.early
        rollout = early.rollouts.get(name)
        if rollout is None:
            return False
        self.early_samples += 1
        at.rollouts[name] = rollout
        at.unscored.add(name)
        self.ledger.issue(rollout, prompt)
        if name in early.finished:
            self._made(rollout, early.makers[name], None)
        if name in early.scores:
            self._scored(at, name, early.scores[name])
        return True

    # -- older versions --------------------------------------------------------------------------------

    def published(self, before: PolicyVersion) -> None:
        """From now on only rollouts under way may still be made by version ``before``."""
        self._oldest = before
        self.older = self.early.unscored - self.early.finished
        self.renew()

    def renew(self) -> None:
        """Reissue unleased rollouts of an older version with the published one."""
        if not self.older or not self.queue.waiting:
            return
        for name in sorted(name for name in self.older if self.queue.waits(name)):
            self.older.discard(name)
            begun = self.queue.step_of(name) > 0
            self.queue.cancel([name])
            if name in self.early.rollouts:
                self.early.unscored.discard(name)
                del self.early.rollouts[name]  # issued again when its iteration begins
                if begun:
                    self.cluster.recoveries[Recovery.ROLLOUT_RENEWED] += 1
                    self.discard([name])  # what is committed of it is by the older weights
            else:
                self._replace(name)

    def _replace(self, name: RolloutId) -> None:
        at = self.at
        old = at.rollouts.pop(name)
        at.unscored.discard(name)
        self.cluster.recoveries[Recovery.ROLLOUT_RENEWED] += 1
        self.drop_quietly(name, DropReason.STALE, f"its holder is gone, and so is version {old.version}")
        new = replace(old, id=RolloutId(f"{name}r"), version=self.cluster.target)
        for members in at.groups.values():
            if name in members:
                members[members.index(name)] = new.id
        self._issue(self._prompts[old.prompt_id], new)

    def require_fresh(self, rollouts: Iterable[RolloutId]) -> None:
        """Raise RuntimeError if a sample is more than one published version old."""
        for name in rollouts:
            if (made_by := self.at.rollouts[name].version) < self._oldest:
                raise RuntimeError(
                    f"sample {name} of version {made_by} is too old to train on; expected {self._oldest}"
                )

    def forget_safe(self) -> None:
        """Free surviving work that was not reissued; a kept preview may have its name by now."""
        self.discard(name for name in self.safe.names if name not in self.at.finished)
        self.safe = Safe()

    def _prompts_of(self, iteration: int) -> list[Prompt]:
        plan = self.plan
        return prompts_of_iteration(self.train_prompts, plan.run_seed, iteration, plan.prompts_per_iteration)

    def _issue(self, prompt: Prompt, rollout: Rollout) -> RolloutId:
        at, safe = self.at, self.safe
        at.rollouts[rollout.id] = rollout
        self.ledger.issue(rollout, prompt)
        maker = safe.makers.get(rollout.id)
        # A sample that was a preview comes from the preview that is made again. The planner may have given
        # the one before the loss other steps; the ledger would then name the wrong one.
        if (maker is None or maker.preview is None) and safe.take(rollout):
            self._recall(rollout)
            return rollout.id
        if sample := self.kept.take(rollout):
            self._made(rollout, sample.maker, sample.scores)
            self.effects.append(KeepPreview(sample.preview, rollout, sample.scores))
            return rollout.id
        at.unscored.add(rollout.id)
        if step := safe.step_of(rollout):
            self.cluster.recoveries[Recovery.PROGRESS_KEPT] += 1
        self.queue.add([rollout], {rollout.id: step})
        return rollout.id

    # -- exploration -----------------------------------------------------------------------------------

    def open_window(self, iteration: int, version: PolicyVersion, now: float) -> None:
        """Queue the previews that choose the seeds of ``iteration``."""
        assert self.explorer is not None
        prompts = self._prompts_of(iteration)
        # Groups made early already have seeds.
        early = self.plan.early_groups if self.explores_beside else 0
        able = self.dispatcher.preview_workers(trainers=not self.explores_beside)
        self.explorer.open(iteration, version, prompts, early, able, now)
        self._preview_whole(range(early, len(prompts)))

    def explore_ahead(self, iteration: int, now: float) -> None:
        """Give workers that would idle previews for the next iteration.

        The window opens when no rollout waits. Once all planned previews are leased, pools are deepened as
        groups ask for work.
        """
        explorer, window = self.explorer, self.window
        if explorer is None or not self.explores_beside or iteration + 1 >= self.plan.iterations:
            return
        if window.opened_s is None and not self.queue.waiting:
            self.open_window(iteration + 1, self.cluster.target, now)
        if self.window.opened_s is None or not explorer.deepens or self.window.is_full:
            return
        wanted = self.dispatcher.preview_capacity
        while self.queue.waiting < wanted and (members := explorer.deepen()):
            self._preview(members)

    def _preview_whole(self, slots: Iterable[int]) -> None:
        if (arm := self.window.arm) is not None:
            self._preview({slot: range(arm.seeds_per_prompt) for slot in slots})

    def _preview(self, members: Mapping[int, range]) -> None:
        window = self.window
        assert window.arm is not None, "previews without an arm"
        steps, prompts = window.arm.steps, window.prompts
        previews = preview_rollouts(self.plan, members, prompts, steps, window.iteration, window.version)
        for slot, prompt, rollout in previews:
            window.issue(slot, rollout)
            self.ledger.issue(rollout, prompt)
            self.queue.add([rollout])

    def _preview_spare(self, slot: int) -> None:
        spare = self.explorer.spare(slot) if self.explorer else None
        if spare is not None:
            self._preview_whole([spare[0]])

    def close_window(self, now: float) -> None:
        """Choose seeds from the scored previews; drop the rest."""
        if self.explorer is None:
            return
        window, choice = self.explorer.close(now)
        self.ledger.replace_prompts(choice.replaced)
        for lease in self.queue.cancel([name for name in window.rollouts if name in window.unscored]):
            self.dispatcher.revoked(lease)
        for rollout in choice.used:
            self.ledger.explore(rollout)
        explored = set(choice.used)
        for rollout in window.rollouts:
            if rollout not in explored:
                self.cluster.recoveries[Recovery.PREVIEW_DROPPED] += 1
                self.ledger.drop(rollout, DropReason.EXPLORATION_OVER, "the weights it was for are published")
        self.discard(name for name in window.rollouts if name in window.unscored)
        self.kept.offer(window)

    def learn_from_groups(self, iteration: int, version: PolicyVersion) -> None:
        """Report the groups' realised scores to the explorer."""
        if self.explorer is None:
            return
        realised: dict[int, dict[int, Mapping[str, float]]] = {}
        for (slot, _), members in self.at.groups.items():
            scored = [name for name in members if name in self.at.scores]
            realised[slot] = {self.at.rollouts[name].seed: self.at.scores[name] for name in scored}
        report = self.explorer.learn(realised, version)
        if report is not None:
            self.effects.append(ReportExploration(iteration, report | self.kept.report()))

    def explored_beside(self, slot: int, members: Sequence[RolloutId]) -> Sequence[Mapping[str, float]]:
        """Preview scores of a slot's prompt, except at the seeds of ``members``."""
        if self.explorer is None:
            return ()
        named = (self.at.rollouts.get(name) for name in members)
        return self.explorer.explored_beside(slot, {rollout.seed for rollout in named if rollout is not None})

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
                self.older.discard(name)
                work.finished.add(name)
                work.makers[name] = Maker(worker, epoch)
                if work is not self.early:
                    self.ledger.finish(rollout, work.makers[name])
                accepted.append(rollout)
        if accepted:
            self.effects.append(ScoreSamples(tuple(accepted), self.cluster.lineage))
        return bool(accepted)

    def _work_of(self, rollout: RolloutId) -> Iteration | Window:
        if rollout in self.window.rollouts:
            return self.window
        return self.early if rollout in self.early.rollouts else self.at

    def fail(self, lease: LeaseId, epoch: int, rollout: RolloutId, error: str) -> None:
        """Retry a failed rollout, or drop it after ``ROLLOUT_ATTEMPTS``."""
        verdict, given_up = self.queue.fail(lease, epoch, rollout, ROLLOUT_ATTEMPTS)
        if self._admit(verdict, rollout) and given_up:
            self._drop(rollout, DropReason.ROLLOUT_FAILED, error)

    # -- rewards ---------------------------------------------------------------------------------------

    def reward(self, scores_of: Mapping[RolloutId, Mapping[str, float]], lineage: int, now: float) -> None:
        """Accept scores; non-finite rewards drop the sample."""
        judged: list[RolloutId] = []
        for rollout, scores in scores_of.items():
            if not self._scores_count(rollout, lineage):
                continue
            if not math.isfinite(scores.get(REWARD, math.nan)):
                self._drop(rollout, DropReason.REWARD_NOT_FINITE, f"{REWARD} is {scores.get(REWARD)}")
                continue
            work = self._work_of(rollout)
            if isinstance(work, Window):
                self.ledger.score(rollout, scores)
                work.score(rollout, scores, now)
                if not self.kept.wants(work.rollouts[rollout]):
                    judged.append(rollout)
                self._preview_spare(work.slots[rollout])
            else:
                self._scored(work, rollout, scores)
        self.discard(judged)  # of most previews only the scores count

    def _scored(self, work: Iteration, rollout: RolloutId, scores: Mapping[str, float]) -> None:
        work.scores[rollout] = scores
        work.unscored.discard(rollout)
        if work is self.at:
            self.ledger.score(rollout, scores)

    def fail_reward(self, event: ev.RewardFailed) -> None:
        """Drop a sample that could not be scored."""
        if self._scores_count(event.rollout, event.lineage):
            self._drop(event.rollout, event.reason, event.detail)

    def _scores_count(self, rollout: RolloutId, lineage: int) -> bool:
        if lineage == self.cluster.lineage:
            return self._awaits_scores(rollout)
        # Possibly a sample of the same id made by weights that were rolled back.
        self.cluster.recoveries[Recovery.SCORE_STALE] += 1
        self.ledger.reject(rollout, CommitVerdict.STALE_EPOCH.value)
        return False

    def _awaits_scores(self, rollout: RolloutId) -> bool:
        work = self._work_of(rollout)
        if rollout in work.unscored and rollout in work.finished:
            return True
        known = rollout in work.rollouts and rollout not in work.unscored
        self.ledger.reject(rollout, (CommitVerdict.DUPLICATE if known else CommitVerdict.UNKNOWN).value)
        return False

    def _drop(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        if rollout in self.window.rollouts:
            self._drop_preview(rollout, reason, detail)
            return
        if rollout in self.early.rollouts and rollout not in self.at.rollouts:
            self.early.lost[rollout] = reason, detail
            self.early.unscored.discard(rollout)
            self.older.discard(rollout)
            return
        self.older.discard(rollout)
        self.drop_quietly(rollout, reason, detail)
        too_many = self.at.drop(rollout, f"{reason.value}: {detail}", self.plan.max_drop_share)
        self.stopping = self.stopping or too_many

    def _drop_preview(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Unlike other drops, this never stops a run."""
        slot = self.window.slots[rollout]
        self.drop_quietly(rollout, reason, detail)
        self.window.drop(rollout)
        self._preview_spare(slot)

    def drop_quietly(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Record a consequential drop, which does not count towards ``max_drop_share``."""
        self.ledger.drop(rollout, reason, detail)
        self.discard([rollout])

    def discard(self, rollouts: Iterable[RolloutId]) -> None:
        """Have the samples' tensors freed."""
        if discarded := tuple(rollouts):
            self.at.finished.difference_update(discarded)
            self.effects.append(DiscardSamples(discarded))

    # -- a lost learner --------------------------------------------------------------------------------

    def roll_back(self, ledger: Mapping[str, object], exploration: Mapping[str, object]) -> None:
        """Return to an earlier ledger, keeping what is safe. GPU time stays billed."""
        previews, early = self.window.rollouts, self.early
        self.early, self.older, self._oldest = Iteration(), set(), PolicyVersion(0)
        revoked, unfinished = self.queue.reset()
        for lease in revoked:
            self.dispatcher.revoked(lease)
        older, self.safe = self.safe, Safe.of(self.at, unfinished)
        self.safe.merge(Safe.of(self.unsaved.before, {}))
        self.safe.merge(older)
        self.cluster.recoveries[Recovery.TRAINED_AGAIN] += bool(self.unsaved.take())
        billed = self.ledger.gpu_seconds, self.ledger.billed_s
        self.load(ledger, exploration)
        self.ledger.gpu_seconds, self.ledger.billed_s = billed
        self.discard((*previews, *early.rollouts))

    def load(self, ledger: Mapping[str, object], exploration: Mapping[str, object]) -> None:
        """Restore the state of a snapshot."""
        self.ledger = Ledger.restore(ledger)
        if self.explorer:
            self.explorer.load(exploration)

    def _recall(self, rollout: Rollout) -> None:
        self.cluster.recoveries[Recovery.SAMPLE_KEPT] += 1
        scores = self.safe.scores.get(rollout.id)
        self._made(rollout, self.safe.makers[rollout.id], scores)
        if scores is None:
            self.at.unscored.add(rollout.id)
            self.effects.append(ScoreSamples((rollout,), self.cluster.lineage))

    def _made(self, rollout: Rollout, maker: Maker, scores: Mapping[str, float] | None) -> None:
        """Count a sample of this iteration that needs not be made."""
        self.at.makers[rollout.id] = maker
        self.at.finished.add(rollout.id)
        self.ledger.finish(rollout, maker)
        if scores is not None:
            self._scored(self.at, rollout.id, scores)

    def check(self) -> None:
        """Assert invariant 1 of the module, in O(rollouts of the iteration)."""
        works = (self.at, self.early, self.window)
        waiting = sum(len(work.unscored - work.finished) for work in works)
        assert self.queue.outstanding == waiting, "the queue lost or invented a rollout"
        for work in works:
            assert work.unscored.isdisjoint(work.scores), "a scored rollout still waits for its scores"
