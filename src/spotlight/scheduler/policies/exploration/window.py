"""Exploration windows: preview many seeds per prompt, keep those whose rewards differ most.

Previews have the lowest priority and are expendable: those not scored when the window closes are dropped, and
a prompt with fewer previews than group members gets fresh seeds. So does a prompt without contrast, unless a
spare prompt replaces it. Idle workers deepen pools round-robin, so pool sizes depend on time, never on
rewards.

Previews are not trained on: chosen seeds are regenerated, and advantages use only the new rewards. But a
preview that is what its rollout would be is kept as that rollout (:mod:`.exploring`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.iteration import Work
from spotlight.scheduler.policies.exploration.bandit import Arm
from spotlight.scheduler.policies.exploration.evidence import GroupEvidence
from spotlight.scheduler.policies.selection import (
    Selection,
    SelectionPolicy,
    SelectionVerdict,
    sample_variance,
    select,
)
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import PolicyVersion, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt, PromptId

_START = PolicyVersion(0)


@dataclass(frozen=True, slots=True)
class ExploredGroup:
    """Seeds chosen for a slot, and the data to evaluate the choice.

    Attributes:
        previews: preview scores of ``seeds``, in order.
        drawn: number of seeds, at the end, drawn at random from those left by rank.
        pool: number of previews chosen from.
        pool_variance: unbiased variance over the pool, by score name.
        unchosen: preview scores of the pool's other seeds.
    """

    prompt: PromptId
    seeds: tuple[int, ...]
    previews: tuple[Mapping[str, float], ...]
    drawn: int
    pool: int
    pool_variance: Mapping[str, float]
    unchosen: tuple[Mapping[str, float], ...] = ()

    def evidence(self, score: str, realised: Mapping[int, Mapping[str, float]]) -> GroupEvidence | None:
        """Pair previews with regenerated scores; None with fewer than two seeds that have ``score``.

        Seeds lost since count as lost at random; one chosen by rank also shrinks the pool by one.

        Args:
            realised: regenerated scores by seed.
        """
        if score not in self.pool_variance:
            return None
        made = [realised.get(seed, {}).get(score, math.nan) for seed in self.seeds]
        kept = [at for at, value in enumerate(made) if math.isfinite(value)]
        if len(kept) < 2:
            return None
        ranked = len(self.seeds) - self.drawn
        drawn = sum(at >= ranked for at in kept)
        return GroupEvidence(
            self.pool - (ranked - (len(kept) - drawn)),
            self.pool_variance[score],
            tuple(self.previews[at][score] for at in kept),
            tuple(made[at] for at in kept),
            drawn,
        )


@dataclass(slots=True)
class Window:
    """The previews for the groups of ``iteration``.

    Attributes:
        opened_s: controller time; None while closed.
        workers: number that could explore when it opened.
        prompts: by slot; slots beyond the iteration's hold spare prompts.
        work: the previews; ``open`` counts those planned by the arm that are not scored yet, by slot.
        issued: by slot, pool-deepening previews included.
        replaced: slots without contrast that have a spare prompt.
        pools: seeds of scored previews, by slot.
        scored_s: time of the last score.
        is_full: no slot can be deepened, until a spare prompt is added.
    """

    iteration: int
    arm: Arm | None = None
    version: PolicyVersion = _START
    opened_s: float | None = None
    workers: int = 0
    prompts: dict[int, Prompt] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    slots: dict[RolloutId, int] = field(default_factory=dict)
    open: Counter[int] = field(default_factory=Counter)
    issued: Counter[int] = field(default_factory=Counter)
    replaced: set[int] = field(default_factory=set)
    pools: dict[int, dict[RolloutId, int]] = field(default_factory=dict)
    scored_s: float = 0.0
    is_full: bool = False

    def issue(self, slot: int, rollout: Rollout) -> None:
        """Add a preview."""
        self.slots[rollout.id] = slot
        self.issued[slot] += 1
        self.open[slot] += self._planned(rollout)

    def score(self, rollout: RolloutId, now: float) -> None:
        """A preview has been scored."""
        slot = self.slots[rollout]
        self.open[slot] -= self._planned(self.work.rollouts[rollout])
        self.pools.setdefault(slot, {})[rollout] = self.work.rollouts[rollout].seed
        self.scored_s = now

    def drop(self, rollout: RolloutId) -> None:
        """Remove a preview that will not be scored."""
        if rollout in self.work.unscored:
            self.open[self.slots[rollout]] -= self._planned(self.work.rollouts[rollout])
        self.work.unscored.discard(rollout)
        del self.work.rollouts[rollout], self.slots[rollout]

    def replace(self, slot: int, new: int, spare: Prompt) -> None:
        """Add a spare prompt's slot for one without contrast."""
        self.prompts[new] = spare
        self.replaced.add(slot)
        self.is_full = False

    def round(self, limit: int) -> dict[int, range]:
        """The next member of every slot with the fewest previews, up to ``limit``."""
        wanted = {slot: self.issued[slot] for slot in self.prompts if slot not in self.replaced}
        fewest = min(wanted.values(), default=limit)
        if fewest >= limit:
            self.is_full = True
            return {}
        return {slot: range(made, made + 1) for slot, made in wanted.items() if made == fewest}

    @property
    def planned(self) -> int:
        """Number of previews the arm asks for."""
        return 0 if self.arm is None else len(self.prompts) * self.arm.seeds_per_prompt

    @property
    def cut_off(self) -> bool:
        """Whether some planned previews are not scored yet."""
        return any(self.open.values())

    def _planned(self, rollout: Rollout) -> bool:
        return self.arm is not None and rollout.member < self.arm.seeds_per_prompt

    def pool(self, slot: int) -> dict[RolloutId, int]:
        """Seeds of a slot's scored previews, in rollout id order: arrival order must not matter."""
        return dict(sorted(self.pools.get(slot, {}).items()))

    def rewards(self, slot: int) -> dict[int, float]:
        """Preview reward by seed."""
        return {seed: self.work.scores[name][REWARD] for name, seed in self.pool(slot).items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of a window.

    Attributes:
        groups: by slot; absent slots take fresh seeds.
        used: previews that took part in a decision.
        verdicts: slots by verdict, spare ones included.
        replaced: slots taken by spare prompts.
        pool_contrast: mean reward variance of the pools chosen from.
        pool_size: their mean size.
    """

    groups: Mapping[int, ExploredGroup] = field(default_factory=dict)
    used: tuple[RolloutId, ...] = ()
    verdicts: Mapping[SelectionVerdict, int] = field(default_factory=dict)
    replaced: int = 0
    pool_contrast: float | None = None
    pool_size: float | None = None


def flat(window: Window, slot: int, explores: ExplorationConfig, group_size: int) -> bool:
    """Whether a slot's planned previews are all scored, without contrast."""
    if window.open[slot]:
        return False
    return _select(window, slot, explores, group_size, 0, 0).verdict is SelectionVerdict.NO_CONTRAST


def choose(window: Window, explores: ExplorationConfig, group_size: int, slots: int, run_seed: int) -> Choice:
    """Select seeds for the groups of the window's iteration.

    Args:
        slots: number of groups in the iteration; later slots hold spare prompts.
    """
    rankable = [slot for slot in window.prompts if len(window.rewards(slot)) > group_size]
    sampled = sorted(rankable, key=lambda slot: derive_seed(run_seed, "sampled", window.iteration, slot))
    drawing = set(sampled[: explores.sampled_prompts])
    found: dict[int, Selection] = {}
    for slot in window.prompts:
        draw_seed = derive_seed(run_seed, "select", window.iteration, slot)
        drawn = explores.drawn_seeds if slot in drawing else 0
        found[slot] = _select(window, slot, explores, group_size, drawn, draw_seed)
    groups = {slot: _group(window, slot, selection) for slot, selection in found.items() if selection.seeds}
    contrasts = [group.pool_variance[REWARD] for group in groups.values()]
    spares = [slot for slot in groups if slot >= slots]
    empty = sorted(
        slot for slot, each in found.items() if slot < slots and each.verdict is SelectionVerdict.NO_CONTRAST
    )
    taken = dict(zip(empty, spares, strict=False))
    kept = {slot: group for slot, group in groups.items() if slot < slots}
    kept |= {slot: groups[spare] for slot, spare in taken.items()}
    decided = [slot for slot, each in found.items() if each.verdict is not SelectionVerdict.TOO_FEW]
    return Choice(
        groups=kept,
        used=tuple(name for slot in decided for name in window.pool(slot)),
        verdicts=Counter(selection.verdict for selection in found.values()),
        replaced=len(taken),
        pool_contrast=math.fsum(contrasts) / len(contrasts) if contrasts else None,
        pool_size=sum(group.pool for group in groups.values()) / len(groups) if groups else None,
    )


def _select(
    window: Window, slot: int, explores: ExplorationConfig, group_size: int, drawn: int, draw_seed: int
) -> Selection:
    return select(
        window.rewards(slot),
        group_size,
        SelectionPolicy(explores.policy),
        draw_seed=draw_seed,
        kept_at_random=drawn,
        contrast_min=explores.contrast_min,
    )


def _group(window: Window, slot: int, selection: Selection) -> ExploredGroup:
    scores = {seed: window.work.scores[name] for name, seed in window.pool(slot).items()}
    # Scores missing from some preview cannot be compared over the pool.
    names = [name for name in next(iter(scores.values())) if all(name in one for one in scores.values())]
    finite = [name for name in names if all(math.isfinite(one[name]) for one in scores.values())]
    variance = {name: sample_variance([one[name] for one in scores.values()]) for name in finite}
    return ExploredGroup(
        prompt=window.prompts[slot].id,
        seeds=selection.seeds,
        previews=tuple({name: scores[seed][name] for name in finite} for seed in selection.seeds),
        drawn=selection.kept_at_random,
        pool=len(scores),
        pool_variance=variance,
        unchosen=tuple(
            {name: one[name] for name in finite}
            for seed, one in scores.items()
            if seed not in selection.seeds
        ),
    )
