"""Previews choose the seeds that are trained on. What the core asks, answered by the :class:`Explorer`.

Previews are work of the lowest class. On the critical path an iteration's rollouts are held back until all
of its previews are scored; otherwise the window for the next iteration opens when workers would idle, and
closes when the weights that it was for are published.

Some previews are not made again as rollouts (:class:`KeptPreviews`): a preview by its iteration's weights,
with a rollout's steps, guidance and precision, is what the rollout of its prompt and seed would be, bit for
bit. Where the plan says ``keeps_previews``, the samples of such previews stay stored until their window has
closed. Those of chosen seeds then become their rollouts' samples, with their scores; the others are
discarded.

Invariant: a preview becomes at most one rollout, of its prompt, seed, steps and version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.config.section import Section
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import KeepPreview, ReportExploration
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.exploration.explorer import Explorer
from spotlight.scheduler.policies.exploration.window import Window
from spotlight.scheduler.policy import Begun, GroupPlan, Policy
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import DropReason, Maker, PolicyVersion, Purpose, Rollout, RolloutId, Scores
from spotlight_rewards.base.prompts import PromptId


class Exploration(Policy):
    """See the module's docstring.

    Attributes:
        beside: previews are made while the previous iteration trains.
        kept: previews that become rollouts.
    """

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work
        assert work.plan.exploration is not None, "a plan without exploration"
        self.explorer = Explorer(work.plan, work.train_prompts, self)
        self.kept = KeptPreviews(work.plan)
        self.beside = work.plan.exploration.where == "idle"
        work.dispatcher.spare.explores = self.beside
        work.extra.append(self.window.work)

    @property
    def window(self) -> Window:
        """The previews for this iteration or the next."""
        return self.explorer.window

    def _window_changed(self, old: Window) -> None:
        self.work.extra[self.work.extra.index(old.work)] = self.window.work

    # -- which rollouts --------------------------------------------------------------------------------

    @property
    def holds_back(self) -> bool:
        """See :class:`Policy`."""
        return not self.beside

    @property
    def decided(self) -> bool:
        """See :class:`Policy`."""
        return not self.window.work.unscored

    def begin(self, iteration: int, version: PolicyVersion, now: float) -> None:
        """See :class:`Policy`."""
        if not self.beside and iteration < self.work.plan.iterations:
            self._open(iteration, version, now)

    def fill(self, iteration: int, now: float) -> None:
        """Previews for the next iteration, for workers that would idle.

        The window opens when no rollout waits. Once all planned previews are leased, pools are deepened as
        groups ask for work.
        """
        work, explorer = self.work, self.explorer
        if not self.beside or iteration + 1 >= work.plan.iterations:
            return
        if self.window.opened_s is None and not work.queue.waiting:
            self._open(iteration + 1, work.cluster.target, now)
        if self.window.opened_s is None or not explorer.deepens or self.window.is_full:
            return
        wanted = work.dispatcher.preview_capacity
        while work.queue.waiting < wanted and (members := explorer.deepen()):
            self._preview(members)

    def _open(self, iteration: int, version: PolicyVersion, now: float) -> None:
        """Queue the previews that choose the seeds of ``iteration``."""
        work, old = self.work, self.window
        prompts = work.prompts_of(iteration)
        # Groups made early already have seeds.
        early = work.plan.early_groups if self.beside else 0
        able = work.dispatcher.preview_workers(trainers=not self.beside)
        self.explorer.open(iteration, version, prompts, early, able, now)
        self._window_changed(old)
        self._preview_whole(range(early, len(prompts)))

    def _preview_whole(self, slots: Iterable[int]) -> None:
        if (arm := self.window.arm) is not None:
            self._preview({slot: range(arm.seeds_per_prompt) for slot in slots})

    def _preview(self, members: Mapping[int, range]) -> None:
        """Queue previews for an iteration, prompt by prompt.

        Not round-robin: if time runs out, some prompts are fully explored rather than all too little.

        Args:
            members: to preview, by slot.
        """
        window, run_seed = self.window, self.work.plan.run_seed
        assert window.arm is not None, "previews without an arm"
        for slot, wanted in members.items():
            prompt = window.prompts[slot]
            for member in wanted:
                seed = derive_seed(run_seed, "explore", window.iteration, slot, member)
                name = RolloutId(f"x{window.iteration:06d}-{slot:03d}-{member:03d}")
                steps, version = window.arm.steps, window.version
                preview = Rollout(
                    name, Purpose.EXPLORE, window.iteration, prompt.id, member, seed, steps, version
                )
                window.issue(slot, preview)
                self.work.issue_extra(window.work, prompt, preview)

    def close(self, now: float) -> None:
        """Choose seeds from the scored previews; drop the rest."""
        work, old = self.work, self.window
        window, choice = self.explorer.close(now)
        self._window_changed(old)
        work.ledger.replace_prompts(choice.replaced)
        unscored = [name for name in window.work.rollouts if name in window.work.unscored]
        for lease in work.queue.cancel(unscored):
            work.dispatcher.revoked(lease)
        for rollout in choice.used:
            work.ledger.explore(rollout)
        explored = set(choice.used)
        for rollout in window.work.rollouts:
            if rollout not in explored:
                work.cluster.recoveries[Recovery.PREVIEW_DROPPED] += 1
                work.ledger.drop(rollout, DropReason.EXPLORATION_OVER, "the weights it was for are published")
        work.discard(unscored)
        self.kept.offer(window)

    def groups(self, iteration: int, planned: Sequence[GroupPlan]) -> list[GroupPlan]:
        """See :class:`Policy`."""
        chosen = self.explorer.groups
        return [
            GroupPlan(self.work.prompts[chosen[slot].prompt], self._mixed(iteration, chosen[slot].seeds))
            if slot in chosen
            else group
            for slot, group in enumerate(planned)
        ]

    def _mixed(self, iteration: int, seeds: Sequence[int]) -> tuple[int, ...]:
        """Chosen seeds come sorted by preview; unshuffled, a first slice would hold only the best."""
        run_seed = self.work.plan.run_seed
        return tuple(sorted(seeds, key=lambda seed: derive_seed(run_seed, "order", iteration, seed)))

    def take(self, rollout: Rollout) -> Begun | None:
        """A preview that is this rollout."""
        taken = self.kept.take(rollout)
        if taken is None:
            return None
        keep, maker = taken
        self.work.effects.append(keep)
        return Begun(rollout, maker, keep.scores)

    def issued(self) -> None:
        """See :class:`Policy`."""
        self.work.discard(self.kept.rest())

    # -- what became of them ---------------------------------------------------------------------------

    def scored(self, rollout: RolloutId, scores: Scores, now: float) -> None:
        """See :class:`Policy`."""
        self.window.score(rollout, now)
        if not self.kept.wants(self.window.work.rollouts[rollout]):
            self.work.discard([rollout])  # of most previews only the scores count
        self._preview_spare(self.window.slots[rollout])

    def dropped(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Unlike other drops, this never stops a run."""
        slot = self.window.slots[rollout]
        self.work.drop_quietly(rollout, reason, detail)
        self.window.drop(rollout)
        self._preview_spare(slot)

    def _preview_spare(self, slot: int) -> None:
        spare = self.explorer.spare(slot)
        if spare is not None:
            self._preview_whole([spare])

    def arrived(self, iteration: int, version: PolicyVersion) -> None:
        """Report the groups' realised scores to the explorer."""
        report = self.explorer.learn(dict(self.work.groups_scored()), version)
        if report is not None:
            self.work.effects.append(ReportExploration(iteration, report | self.kept.report()))

    def rolled_back(self) -> list[RolloutId]:
        """See :class:`Policy`; the window is closed when the state is restored."""
        return list(self.window.work.rollouts)

    # -- training --------------------------------------------------------------------------------------

    def others(self, slot: int, members: Sequence[RolloutId]) -> Sequence[Scores]:
        """Preview scores of a slot's prompt, except at the seeds of ``members``."""
        named = (self.work.current.rollouts.get(name) for name in members)
        return self.explorer.explored_beside(slot, {rollout.seed for rollout in named if rollout is not None})

    # -- state -----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """See :class:`Policy`."""
        return self.explorer.snapshot()

    def restore(self, state: Mapping[str, object]) -> None:
        """See :class:`Policy`."""
        old = self.window
        self.explorer.load(state)
        self._window_changed(old)


# -- previews that are rollouts already, and are not made again --------------------------------------------


@dataclass(slots=True)
class KeptPreviews:
    """See the module's docstring. Between two events it holds nothing.

    Attributes:
        kept: number of rollouts since the last window.
    """

    plan: Plan
    kept: int = 0
    _offered: dict[tuple[PromptId, int], Rollout] = field(default_factory=dict)
    _window: Window = field(default_factory=lambda: Window(0))

    def wants(self, preview: Rollout) -> bool:
        """Whether a preview's sample has to stay until its window closes."""
        return self.plan.keeps_previews and preview.steps == self.plan.rollout_steps

    def offer(self, closed: Window) -> None:
        """Take the scored previews of a window whose rollouts are issued next."""
        scored = (closed.work.rollouts[name] for name in closed.work.scores)
        self._offered = {(one.prompt_id, one.seed): one for one in scored if self.wants(one)}
        self._window, self.kept = closed, 0

    def take(self, rollout: Rollout) -> tuple[KeepPreview, Maker] | None:
        """The sample of this rollout, to be kept, and who made it; None unless it was made as a preview."""
        preview = self._offered.get((rollout.prompt_id, rollout.seed))
        if preview is None or rollout.purpose is not Purpose.TRAIN or preview.version != rollout.version:
            return None
        del self._offered[rollout.prompt_id, rollout.seed]
        self.kept += 1
        maker = self._window.work.makers[preview.id]._replace(preview=preview.id)
        return KeepPreview(preview.id, rollout, self._window.work.scores[preview.id]), maker

    def report(self) -> dict[str, object]:
        """JSON-able: how many rollouts were not made again; empty where none can be kept."""
        return {"kept": self.kept} if self.plan.keeps_previews else {}

    def rest(self) -> list[RolloutId]:
        """Previews that no rollout took, to be discarded."""
        left, self._offered = [one.id for one in self._offered.values()], {}
        self._window = Window(0)
        return left
