"""Exploration windows: preview many seeds per prompt, keep those whose rewards differ most.

Previews have the lowest priority and are expendable: those not scored when the window closes are dropped, and
a prompt with fewer previews than group members gets fresh seeds. So does a prompt without contrast, unless a
spare prompt replaces it, or weights undo the selection: then it keeps random previewed seeds. Idle workers
deepen pools round-robin, so pool sizes depend on time, never on rewards.

Previews are not trained on: chosen seeds are regenerated, and advantages use only the new rewards. But a
preview that is what its rollout would be is kept as that rollout (:mod:`.kept`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.evidence import GroupEvidence
from spotlight.scheduler.exploration.halving import Rung, pool_variance, stopped
from spotlight.scheduler.exploration.selection import (
    Selection,
    SelectionPolicy,
    SelectionVerdict,
    sample_variance,
    select,
)
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Maker, PolicyVersion, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt, PromptId

_START = PolicyVersion(0)


@dataclass(frozen=True, slots=True)
class ExploredGroup:
    """Seeds chosen for a slot, and the data to evaluate the choice.

    Attributes:
        previews: preview scores of ``seeds``, in order.
        drawn: number of seeds, at the end, drawn at random from those left by rank.
        inclusion: selection probabilities; None where some seed of the pool had none.
        pool: number of previews chosen from.
        pool_variance: unbiased variance over the pool, by score name.
        unchosen: preview scores of the pool's other seeds.
    """

    prompt: PromptId
    seeds: tuple[int, ...]
    previews: tuple[Mapping[str, float], ...]
    drawn: int
    inclusion: tuple[float, ...] | None
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

    def weights(self) -> dict[int, float]:
        """Importance weights by seed for an unbiased estimate of the pool mean; empty if impossible."""
        if self.inclusion is None:
            return {}
        share = len(self.seeds) / self.pool
        return {seed: share / chance for seed, chance in zip(self.seeds, self.inclusion, strict=True)}

    def to_dict(self) -> dict[str, object]:
        """JSON-able, for :meth:`from_dict`."""
        return {
            "prompt": self.prompt,
            "seeds": list(self.seeds),
            "previews": [dict(scores) for scores in self.previews],
            "drawn": self.drawn,
            "inclusion": None if self.inclusion is None else list(self.inclusion),
            "pool": self.pool,
            "pool_variance": dict(self.pool_variance),
            "unchosen": [dict(scores) for scores in self.unchosen],
        }

    @classmethod
    def from_dict(cls, tree: object) -> ExploredGroup:
        """Inverse of :meth:`to_dict`. Raises ValueError for anything else."""
        match tree:
            case {
                "prompt": str(prompt),
                "seeds": [*seeds],
                "previews": [*previews],
                "drawn": int(drawn),
                "inclusion": inclusion,
                "pool": int(pool),
                "pool_variance": {**variance},
                "unchosen": [*unchosen],
            }:
                return cls(
                    PromptId(prompt),
                    tuple(int(seed) for seed in seeds),
                    tuple(_numbers(scores) for scores in previews),
                    drawn,
                    None if inclusion is None else tuple(float(chance) for chance in inclusion),
                    pool,
                    _numbers(variance),
                    tuple(_numbers(scores) for scores in unchosen),
                )
        raise ValueError(f"not an explored group: {tree!r}")


@dataclass(slots=True)
class Window:
    """The previews for the groups of ``iteration``.

    Attributes:
        opened_s: controller time; None while closed.
        workers: number that could explore when it opened.
        rungs: where previews pause; none without successive halving.
        prompts: by slot; slots beyond the iteration's hold spare prompts.
        unscored: neither scored nor dropped; ``open`` counts those planned by the arm, by slot.
        issued: by slot, pool-deepening previews included.
        replaced: slots without contrast that have a spare prompt.
        pools: seeds of scored previews, by slot.
        looks: scores of predicted samples, by slot, rung and seed; without previews that were lost.
        at_rung: scores of the previews of a slot that wait at a rung.
        stopped: number that ended at a rung; ``steps_saved``: those that they did not take.
        scored_s: time of the last score.
        is_full: no slot can be deepened, until a spare prompt is added.
    """

    iteration: int
    arm: Arm | None = None
    version: PolicyVersion = _START
    opened_s: float | None = None
    workers: int = 0
    rungs: tuple[Rung, ...] = ()
    prompts: dict[int, Prompt] = field(default_factory=dict)
    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    slots: dict[RolloutId, int] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)
    makers: dict[RolloutId, Maker] = field(default_factory=dict)
    open: Counter[int] = field(default_factory=Counter)
    issued: Counter[int] = field(default_factory=Counter)
    replaced: set[int] = field(default_factory=set)
    pools: dict[int, dict[RolloutId, int]] = field(default_factory=dict)
    looks: dict[int, dict[int, dict[int, Mapping[str, float]]]] = field(default_factory=dict)
    at_rung: dict[int, dict[RolloutId, Mapping[str, float]]] = field(default_factory=dict)
    stopped: int = 0
    steps_saved: int = 0
    scored_s: float = 0.0
    is_full: bool = False

    def issue(self, slot: int, rollout: Rollout) -> None:
        """Add a preview."""
        self.rollouts[rollout.id], self.slots[rollout.id] = rollout, slot
        self.unscored.add(rollout.id)
        self.issued[slot] += 1
        self.open[slot] += self._planned(rollout)

    def score(self, rollout: RolloutId, scores: Mapping[str, float], now: float) -> None:
        """Record a preview's rewards."""
        slot = self.slots[rollout]
        self.scores[rollout] = scores
        self.unscored.discard(rollout)
        self.open[slot] -= self._planned(self.rollouts[rollout])
        self.pools.setdefault(slot, {})[rollout] = self.rollouts[rollout].seed
        self.scored_s = now

    def drop(self, rollout: RolloutId) -> None:
        """Remove a preview that will not be scored."""
        for looks in self.looks.get(self.slots[rollout], {}).values():
            looks.pop(self.rollouts[rollout].seed, None)
        self._remove(rollout)

    def _remove(self, rollout: RolloutId) -> None:
        if rollout in self.unscored:
            self.open[self.slots[rollout]] -= self._planned(self.rollouts[rollout])
        self.unscored.discard(rollout)
        del self.rollouts[rollout], self.slots[rollout]

    def look(self, rollout: RolloutId, scores: Mapping[str, float]) -> None:
        """Record the scores of a preview that waits at a rung."""
        slot, seed, step = self.slots[rollout], self.rollouts[rollout].seed, self.rollouts[rollout].until
        self.looks.setdefault(slot, {}).setdefault(step, {})[seed] = scores
        self.at_rung.setdefault(slot, {})[rollout] = scores

    def climb(self, slot: int, policy: SelectionPolicy) -> tuple[list[RolloutId], list[RolloutId]]:
        """Decide a slot's rung, once all of its previews that are left have been looked at.

        Returns:
            Those that go on, and those that stop; both in the order of their ids.
        """
        waiting = self.at_rung.get(slot, {})
        if not waiting or len(waiting) < self.open[slot]:
            return [], []
        del self.at_rung[slot]
        names = sorted(waiting)
        step = self.rollouts[names[0]].pause
        goes_on = next(rung.goes_on for rung in self.rungs if rung.step == step)
        rewards = {self.rollouts[name].seed: waiting[name][REWARD] for name in names}
        ends = stopped(rewards, goes_on, policy)
        return (
            [name for name in names if self.rollouts[name].seed not in ends],
            [name for name in names if self.rollouts[name].seed in ends],
        )

    def stop(self, rollout: RolloutId) -> None:
        """End a preview at its rung."""
        self.stopped += 1
        self.steps_saved += self.rollouts[rollout].steps - self.rollouts[rollout].until
        self._remove(rollout)

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
        return {seed: self.scores[name][REWARD] for name, seed in self.pool(slot).items()}


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
    drawing = set(rankable if explores.undo_selection else sampled[: explores.sampled_prompts])
    found: dict[int, Selection] = {}
    for slot in window.prompts:
        draw_seed = derive_seed(run_seed, "select", window.iteration, slot)
        drawn = explores.drawn_seeds if slot in drawing else 0
        found[slot] = _select(window, slot, explores, group_size, drawn, draw_seed)
    groups = {slot: _group(window, slot, selection) for slot, selection in found.items() if selection.seeds}
    contrasts = [group.pool_variance[REWARD] for group in groups.values()]
    spares = [slot for slot in groups if slot >= slots]
    empty = [
        slot for slot in range(slots) if slot in found and _has(found, slot, SelectionVerdict.NO_CONTRAST)
    ]
    taken = dict(zip(empty, spares, strict=False))
    kept = {slot: group for slot, group in groups.items() if slot < slots}
    kept |= {slot: groups[spare] for slot, spare in taken.items()}
    decided = [slot for slot in found if not _has(found, slot, SelectionVerdict.TOO_FEW)]
    return Choice(
        groups=kept,
        used=tuple(name for slot in decided for name in window.pool(slot)),
        verdicts=Counter(selection.verdict for selection in found.values()),
        replaced=len(taken),
        pool_contrast=math.fsum(contrasts) / len(contrasts) if contrasts else None,
        pool_size=sum(group.pool for group in groups.values()) / len(groups) if groups else None,
    )


def _numbers(tree: object) -> dict[str, float]:
    if not isinstance(tree, Mapping) or not all(isinstance(value, int | float) for value in tree.values()):
        raise ValueError(f"not scores by name: {tree!r}")
    return {str(name): float(value) for name, value in tree.items()}


def _has(found: Mapping[int, Selection], slot: int, verdict: SelectionVerdict) -> bool:
    return found[slot].verdict is verdict


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
        draw_flat=explores.undo_selection,
    )


def _group(window: Window, slot: int, selection: Selection) -> ExploredGroup:
    scores = {seed: window.scores[name] for name, seed in window.pool(slot).items()}
    # Scores missing from some preview cannot be compared over the pool.
    names = [name for name in next(iter(scores.values())) if all(name in one for one in scores.values())]
    finite = [name for name in names if all(math.isfinite(one[name]) for one in scores.values())]
    looks = [window.looks[slot][step] for step in sorted(window.looks[slot])] if slot in window.looks else []
    everyone = scores.keys() | (looks[0].keys() if looks else set())
    variance = {name: _variance(name, looks, scores) for name in finite}
    return ExploredGroup(
        prompt=window.prompts[slot].id,
        seeds=selection.seeds,
        previews=tuple({name: scores[seed][name] for name in finite} for seed in selection.seeds),
        drawn=selection.kept_at_random,
        inclusion=selection.inclusion,
        pool=len(everyone),
        pool_variance=variance,
        unchosen=tuple(
            {name: one[name] for name in finite}
            for seed, one in scores.items()
            if seed not in selection.seeds
        ),
    )


def _variance(
    name: str, looks: Sequence[Mapping[int, Mapping[str, float]]], scores: Mapping[int, Mapping[str, float]]
) -> float:
    """Of the pool's scores ``name``; of seeds that stopped, only the looks are known."""
    finished = {seed: one[name] for seed, one in scores.items()}
    seen = [{seed: one.get(name, math.nan) for seed, one in rung.items()} for rung in looks]
    known = all(math.isfinite(value) for rung in seen for value in rung.values())
    if not looks or looks[0].keys() <= scores.keys() or not known:
        return sample_variance(list(finished.values()))
    return pool_variance(seen, finished)
