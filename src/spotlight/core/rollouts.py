"""The rollouts of an iteration and their previews: issued, made, scored or dropped. Part of the controller.

Invariants
    1. A rollout that is neither scored nor dropped is in the queue, or its sample is at the reward pool.
    2. Commits, completions and scores count once, from who holds the lease now, and of the current lineage.
    3. What outlived a lost learner counts again only for the very same rollout: id, seed, steps, version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from spotlight.core import events as ev
from spotlight.core.cluster import Cluster
from spotlight.core.effects import DiscardSamples, Effect, ScoreSamples
from spotlight.core.exploration import ArmPolicy, FixedArm, Window
from spotlight.core.issue import evaluation_rollouts, preview_rollouts, train_rollouts
from spotlight.core.iteration import Iteration, Safe
from spotlight.core.ledger import Ledger
from spotlight.core.plan import Plan
from spotlight.core.planner.arms import Arm
from spotlight.core.queue import PullQueue, Verdict
from spotlight.core.records import REWARD
from spotlight.core.recovery import Recovery
from spotlight.core.seeds import prompts_of_iteration
from spotlight.core.types import DropReason, LeaseId, PolicyVersion, Prompt, Rollout, RolloutId, WorkerId

ROLLOUT_ATTEMPTS = 2
"""A rollout that fails this often is dropped: its randomness is fixed, so it will fail again."""


class Rollouts:
    """See the module's docstring.

    Attributes:
        at: the current iteration.
        window: previews, for this iteration or the next.
        chosen: seeds that previews chose, by slot.
        safe: what outlived a lost learner and was not asked for yet.
        stopping: why the run has to stop.
        effects: what to do; the controller takes them after each event.
    """

    def __init__(
        self, plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt], queue: PullQueue, cluster: Cluster
    ) -> None:
        self.plan, self.queue, self.cluster = plan, queue, cluster
        self.train_prompts, self.test_prompts = tuple(train), tuple(test)
        explores = plan.exploration
        self.arms: ArmPolicy | None = (
            FixedArm(Arm(explores.seeds_per_prompt, explores.steps)) if explores else None
        )
        self.ledger = Ledger()
        self.at, self.window, self.safe = Iteration(), Window(0), Safe()
        self.chosen: Mapping[int, tuple[int, ...]] = {}
        self.stopping: str | None = None
        self.effects: list[Effect] = []

    # -- issue -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new iteration, without rollouts yet."""
        self.at = Iteration()
        self.queue.forget_done()

    def issue_evaluation(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the validation images."""
        issued = evaluation_rollouts(self.plan, self.test_prompts, iteration, version)
        self.at.evaluation = [self._issue(prompt, rollout) for _, prompt, rollout in issued]

    def issue_training(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the groups, with the seeds that exploration chose."""
        issued = train_rollouts(self.plan, self._prompts_of(iteration), iteration, version, self.chosen)
        for slot, prompt, rollout in issued:
            self.at.groups.setdefault((slot, prompt.id), []).append(self._issue(prompt, rollout))

    def forget_safe(self) -> None:
        """What outlived a lost learner and was not asked for again is of no use to anybody."""
        self.discard((*self.safe.samples, *self.safe.progress))
        self.safe = Safe()

    def _prompts_of(self, iteration: int) -> list[Prompt]:
        plan = self.plan
        return prompts_of_iteration(self.train_prompts, plan.run_seed, iteration, plan.prompts_per_iteration)

    def _issue(self, prompt: Prompt, rollout: Rollout) -> RolloutId:
        at, safe = self.at, self.safe
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

    def open_window(self, iteration: int, version: PolicyVersion) -> None:
        """Queue the previews that choose the seeds of ``iteration``."""
        assert self.arms is not None
        self.window = window = Window(iteration)
        arm, prompts = self.arms.arm(iteration), self._prompts_of(iteration)
        for slot, prompt, rollout in preview_rollouts(self.plan, arm, prompts, iteration, version):
            window.rollouts[rollout.id], window.slots[rollout.id] = rollout, slot
            window.unscored.add(rollout.id)
            self.ledger.issue(rollout, prompt)
            self.queue.add([rollout])

    def close_window(self) -> None:
        """Choose seeds from what was scored; drop the rest."""
        window, self.window = self.window, Window(self.window.iteration)
        self.chosen, used = window.choose(self.plan.group_size)
        for lease in self.queue.cancel([name for name in window.rollouts if name in window.unscored]):
            self.cluster.revoked(lease)
        for rollout in used:
            self.ledger.explore(rollout)
        explored = set(used)
        for rollout in window.rollouts:
            if rollout not in explored:
                self.cluster.recoveries[Recovery.PREVIEW_DROPPED] += 1
                self.ledger.drop(rollout, DropReason.EXPLORATION_OVER, "the weights it was for are published")
        self.discard(window.rollouts)

    # -- made ------------------------------------------------------------------------------------------

    def _admit(self, verdict: Verdict, rollout: RolloutId | None) -> bool:
        if verdict is not Verdict.ACCEPTED:
            stale = verdict is Verdict.STALE_EPOCH
            self.cluster.recoveries[Recovery.COMMIT_STALE if stale else Recovery.COMMIT_DUPLICATE] += 1
            self.ledger.reject(rollout, verdict.value)
        return verdict is Verdict.ACCEPTED

    def commit(self, event: ev.ProgressCommitted, now: float) -> None:
        """A worker says that a rollout is safe at a step."""
        self._admit(
            self.queue.commit(event.lease, event.epoch, event.rollout, event.step, now), event.rollout
        )

    def progress(self, event: ev.LeaseProgressed, now: float) -> None:
        """A group says that all its rollouts are safe at a step."""
        verdict = self.queue.advance(event.lease, event.epoch, event.steps, now)
        if not self._admit(verdict, None) and verdict is Verdict.STALE_EPOCH:
            self.cluster.abandon(event.leader, event.epoch, event.lease)

    def complete(
        self,
        worker: WorkerId,
        lease: LeaseId,
        epoch: int,
        rollouts: Sequence[RolloutId],
        version: PolicyVersion,
        now: float,
    ) -> bool:
        """Rollouts are finished; returns whether any counts."""
        accepted: list[Rollout] = []
        self.queue.renew(lease, epoch, now)
        for name in rollouts:
            rollout = self.at.rollouts.get(name) or self.window.rollouts.get(name)
            if rollout is not None and version != rollout.version:
                self.fail(lease, epoch, name, f"made by version {version}, not {rollout.version}")
            elif self._admit(self.queue.complete(lease, epoch, name), name):
                assert rollout is not None, "the queue accepted a rollout of another iteration"
                self._work_of(name).finished.add(name)
                self.at.makers[name] = worker, epoch
                self.ledger.finish(rollout, worker, epoch)
                accepted.append(rollout)
        if accepted:
            self.effects.append(ScoreSamples(tuple(accepted), self.cluster.lineage))
        return bool(accepted)

    def _work_of(self, rollout: RolloutId) -> Iteration | Window:
        return self.window if rollout in self.window.rollouts else self.at

    def fail(self, lease: LeaseId, epoch: int, rollout: RolloutId, error: str) -> None:
        """A rollout could not be finished: once more, or never."""
        verdict, given_up = self.queue.fail(lease, epoch, rollout, ROLLOUT_ATTEMPTS)
        if self._admit(verdict, rollout) and given_up:
            self._drop(rollout, DropReason.ROLLOUT_FAILED, error)

    # -- rewards ---------------------------------------------------------------------------------------

    def reward(self, scores_of: Mapping[RolloutId, Mapping[str, float]], lineage: int) -> None:
        """Scores came."""
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

    def fail_reward(self, event: ev.RewardFailed) -> None:
        """Scores will not come."""
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
        if rollout in self.window.rollouts:
            self._drop_preview(rollout, reason, detail)
            return
        self.drop_quietly(rollout, reason, detail)
        at, share = self.at, self.plan.max_drop_share
        at.unscored.discard(rollout)
        at.drops += 1
        if share is None:
            self.stopping = self.stopping or f"{rollout}: {reason.value}: {detail}"
        elif at.drops > share * len(at.rollouts):
            iteration = at.rollouts[rollout].iteration
            self.stopping = self.stopping or (
                f"iteration {iteration}: {at.drops} of {len(at.rollouts)} samples were "
                f"dropped, more than reward_policy.max_drop_share = {share}; "
                f"the last: {reason.value}: {detail}"
            )

    def _drop_preview(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Previews are expendable: they never stop a run."""
        window = self.window
        self.drop_quietly(rollout, reason, detail)
        window.unscored.discard(rollout)
        del window.rollouts[rollout], window.slots[rollout]

    def drop_quietly(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """A drop that follows from others: recorded, but it does not count towards max_drop_share."""
        self.ledger.drop(rollout, reason, detail)
        self.discard([rollout])

    def discard(self, rollouts: Iterable[RolloutId]) -> None:
        """Free the tensors of rollouts."""
        if discarded := tuple(rollouts):
            self.at.finished.difference_update(discarded)
            self.effects.append(DiscardSamples(discarded))

    # -- a lost learner --------------------------------------------------------------------------------

    def roll_back(self, ledger: Mapping[str, object], chosen: Mapping[int, tuple[int, ...]]) -> None:
        """Forget everything but what is safe, and return to an earlier ledger; the bill stays."""
        previews, self.window = self.window.rollouts, Window(0)
        revoked, unfinished = self.queue.reset()
        for lease in revoked:
            self.cluster.revoked(lease)
        older, self.safe = self.safe, Safe.of(self.at, unfinished)
        self.safe.merge(older)
        billed = self.ledger.gpu_seconds, self.ledger.billed_s
        self.load(ledger, chosen)
        self.ledger.gpu_seconds, self.ledger.billed_s = billed
        self.discard(previews)

    def load(self, ledger: Mapping[str, object], chosen: Mapping[int, tuple[int, ...]]) -> None:
        """Stand where a snapshot was taken."""
        self.ledger, self.chosen = Ledger.restore(ledger), chosen

    def _recall(self, rollout: Rollout) -> None:
        """A sample that outlived the learner counts again, without being made again."""
        self.cluster.recoveries[Recovery.SAMPLE_KEPT] += 1
        at, safe = self.at, self.safe
        at.makers[rollout.id] = safe.makers[rollout.id]
        at.finished.add(rollout.id)
        self.ledger.finish(rollout, *safe.makers[rollout.id])
        if rollout.id in safe.scores:
            at.scores[rollout.id] = safe.scores[rollout.id]
            self.ledger.score(rollout.id, safe.scores[rollout.id])
        else:
            at.unscored.add(rollout.id)
            self.effects.append(ScoreSamples((rollout,), self.cluster.lineage))

    def check(self) -> None:
        """Assert the first invariant of the module's docstring (O(rollouts of the iteration))."""
        waiting = sum(len(work.unscored - work.finished) for work in (self.at, self.window))
        assert self.queue.outstanding == waiting, "the queue lost or invented a rollout"
        for work in (self.at, self.window):
            assert work.unscored.isdisjoint(work.scores), "a scored rollout still waits for its scores"
