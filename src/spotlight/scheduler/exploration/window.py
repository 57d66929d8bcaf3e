"""Exploration: previews of many seeds, of which those whose rewards differ most form groups.

A preview is a rollout like any other, of the lowest class of the queue. Losing one costs nothing but itself:
what is not scored when the window closes is dropped, and a prompt left with fewer previews than its group
has members keeps seeds of its own. So does a prompt whose previews show no contrast, unless a spare prompt
takes its place, or the choice is to be undone: then it keeps any of its previewed seeds. Workers that are
left with nothing to do deepen the pools, a preview of each prompt after the other: which previews a pool
gets depends on time and never on rewards, so pools may differ in size.

Of the previews only numbers stay, and training never sees them: what was chosen is generated anew, and
advantages come from the new rewards alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.evidence import GroupEvidence
from spotlight.scheduler.exploration.selection import Selection, SelectionVerdict, sample_variance, select
from spotlight.scheduler.plan import ExplorationPlan
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import PolicyVersion, Prompt, PromptId, Rollout, RolloutId

_START = PolicyVersion(0)


@dataclass(frozen=True, slots=True)
class ExploredGroup:
    """Seeds that previews chose for a slot, and what is needed to judge the choice.

    Attributes:
        previews: scores of the seeds' previews, in the order of the seeds.
        drawn: how many of the seeds, from the end, were drawn at random among those that rank left.
        inclusion: probability with which each was chosen; None where some seed of the pool had none.
        pool: number of previews that they were chosen among.
        pool_variance: unbiased variance of these, by score.
        unchosen: scores of the previews of other seeds.
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
        """What regenerated scores, by seed, tell of the pool; None if fewer than two seeds have this score.

        A seed lost since is taken for lost by chance, and one that rank had chosen for one less in the pool.
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
        """Factors, by seed, that let the group's mean estimate the pool's without bias; empty if none do."""
        if self.inclusion is None:
            return {}
        share = len(self.seeds) / self.pool
        return {seed: share / chance for seed, chance in zip(self.seeds, self.inclusion, strict=True)}

    def to_dict(self) -> dict[str, object]:
        """What :meth:`from_dict` takes."""
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
        """Raises ValueError for anything else than what :meth:`to_dict` made."""
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
        version: that makes the previews.
        opened_s: controller time; None: no window is open.
        workers: that could explore when it opened.
        prompts: by slot; slots after those of the iteration hold spare prompts.
        unscored: previews neither scored nor dropped; ``open`` counts those that the arm planned, by slot.
        issued: previews so far, by slot; those that the arm did not plan are more than its seeds.
        replaced: slots without contrast, for each of which a spare prompt is previewed.
        pools: seeds of scored previews, by slot.
        scored_s: when the last score came.
        is_full: no slot may be deepened any more, unless a spare prompt comes.
    """

    iteration: int
    arm: Arm | None = None
    version: PolicyVersion = _START
    opened_s: float | None = None
    workers: int = 0
    prompts: dict[int, Prompt] = field(default_factory=dict)
    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    slots: dict[RolloutId, int] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)
    open: Counter[int] = field(default_factory=Counter)
    issued: Counter[int] = field(default_factory=Counter)
    replaced: set[int] = field(default_factory=set)
    pools: dict[int, dict[RolloutId, int]] = field(default_factory=dict)
    scored_s: float = 0.0
    is_full: bool = False

    def issue(self, slot: int, rollout: Rollout) -> None:
        """A preview is wanted."""
        self.rollouts[rollout.id], self.slots[rollout.id] = rollout, slot
        self.unscored.add(rollout.id)
        self.issued[slot] += 1
        self.open[slot] += self._planned(rollout)

    def score(self, rollout: RolloutId, scores: Mapping[str, float], now: float) -> None:
        """A preview has its rewards."""
        slot = self.slots[rollout]
        self.scores[rollout] = scores
        self.unscored.discard(rollout)
        self.open[slot] -= self._planned(self.rollouts[rollout])
        self.pools.setdefault(slot, {})[rollout] = self.rollouts[rollout].seed
        self.scored_s = now

    def drop(self, rollout: RolloutId) -> None:
        """A preview will have none."""
        if rollout in self.unscored:
            self.open[self.slots[rollout]] -= self._planned(self.rollouts[rollout])
        self.unscored.discard(rollout)
        del self.rollouts[rollout], self.slots[rollout]

    def replace(self, slot: int, new: int, spare: Prompt) -> None:
        """Preview a spare prompt, in a slot of its own, for one without contrast."""
        self.prompts[new] = spare
        self.replaced.add(slot)
        self.is_full = False

    def round(self, limit: int) -> dict[int, range]:
        """One more member of each slot that has the fewest; none where all have ``limit``."""
        wanted = {slot: self.issued[slot] for slot in self.prompts if slot not in self.replaced}
        fewest = min(wanted.values(), default=limit)
        if fewest >= limit:
            self.is_full = True
            return {}
        return {slot: range(made, made + 1) for slot, made in wanted.items() if made == fewest}

    @property
    def planned(self) -> int:
        """Previews that the arm asks for."""
        return 0 if self.arm is None else len(self.prompts) * self.arm.seeds_per_prompt

    @property
    def cut_off(self) -> bool:
        """Whether previews that the arm asks for are not scored yet; deeper pools are a bonus."""
        return any(self.open.values())

    def _planned(self, rollout: Rollout) -> bool:
        return self.arm is not None and rollout.member < self.arm.seeds_per_prompt

    def pool(self, slot: int) -> dict[RolloutId, int]:
        """The seeds of a slot's scored previews, in the order of their names: not of their coming."""
        return dict(sorted(self.pools.get(slot, {}).items()))

    def rewards(self, slot: int) -> dict[int, float]:
        """Preview reward by seed."""
        return {seed: self.scores[name][REWARD] for name, seed in self.pool(slot).items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a window's previews chose.

    Attributes:
        groups: by slot; other slots take seeds of their own.
        used: previews whose scores decided something.
        verdicts: of the slots, spare ones included.
        replaced: slots that a spare prompt took.
        pool_contrast: mean variance of the pools that groups were chosen from.
        pool_size: mean number of previews in these.
    """

    groups: Mapping[int, ExploredGroup] = field(default_factory=dict)
    used: tuple[RolloutId, ...] = ()
    verdicts: Mapping[SelectionVerdict, int] = field(default_factory=dict)
    replaced: int = 0
    pool_contrast: float | None = None
    pool_size: float | None = None


def flat(window: Window, slot: int, plan: ExplorationPlan, group_size: int) -> bool:
    """Whether all previews planned for a slot are there, and show no contrast."""
    if window.open[slot]:
        return False
    return _select(window, slot, plan, group_size, 0, 0).verdict is SelectionVerdict.NO_CONTRAST


def choose(window: Window, plan: ExplorationPlan, group_size: int, slots: int, run_seed: int) -> Choice:
    """Seeds for the groups of the window's iteration.

    Args:
        slots: groups of the iteration; later slots of the window hold spare prompts.
    """
    rankable = [slot for slot in window.prompts if len(window.rewards(slot)) > group_size]
    sampled = sorted(rankable, key=lambda slot: derive_seed(run_seed, "sampled", window.iteration, slot))
    drawing = set(rankable if plan.undo_selection else sampled[: plan.sampled_prompts])
    found: dict[int, Selection] = {}
    for slot in window.prompts:
        draw_seed = derive_seed(run_seed, "select", window.iteration, slot)
        drawn = plan.drawn_seeds if slot in drawing else 0
        found[slot] = _select(window, slot, plan, group_size, drawn, draw_seed)
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
    window: Window, slot: int, plan: ExplorationPlan, group_size: int, drawn: int, draw_seed: int
) -> Selection:
    return select(
        window.rewards(slot),
        group_size,
        plan.policy,
        draw_seed=draw_seed,
        kept_at_random=drawn,
        contrast_min=plan.contrast_min,
        draw_flat=plan.undo_selection,
    )


def _group(window: Window, slot: int, selection: Selection) -> ExploredGroup:
    scores = {seed: window.scores[name] for name, seed in window.pool(slot).items()}
    # A score that some preview lacks cannot be compared over the pool.
    names = [name for name in next(iter(scores.values())) if all(name in one for one in scores.values())]
    finite = [name for name in names if all(math.isfinite(one[name]) for one in scores.values())]
    return ExploredGroup(
        prompt=window.prompts[slot].id,
        seeds=selection.seeds,
        previews=tuple({name: scores[seed][name] for name in finite} for seed in selection.seeds),
        drawn=selection.kept_at_random,
        inclusion=selection.inclusion,
        pool=len(scores),
        pool_variance={name: sample_variance([one[name] for one in scores.values()]) for name in finite},
        unchosen=tuple(
            {name: one[name] for name in finite}
            for seed, one in scores.items()
            if seed not in selection.seeds
        ),
    )
