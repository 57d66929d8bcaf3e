"""From the controller's rollouts and rewards to the learner's samples and advantages.

The one place where rewards become advantages. A whole batch is scaled together; each group of a part uses
the comparison chosen by the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spotlight.algorithms.advantages import Rewards, advantages, exploration_advantages, slice_advantages
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.rollout.state import Recipe, SampleTensors
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import COMPARED_MIN, Baseline, Comparison, Rollout, RolloutId
from spotlight.training.batching.batch import TrainingSample
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.redistribute import deal
from spotlight.training.learner import Learner


@dataclass(frozen=True, slots=True)
class BatchFeed:
    """Makes the learner's samples of rollouts.

    Attributes:
        reward_weights: factor per reward; every sample has exactly these rewards.
    """

    learner: Learner
    conditions: Conditions
    recipe: Recipe
    reward_weights: Mapping[str, float]

    def prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        samples: Mapping[RolloutId, SampleTensors],
    ) -> None:
        """Pass an iteration's groups, or a part of them, to the learner.

        Args:
            rollouts: at least those of the groups.
            samples: those whose tensors this rank has.
        """
        here = {name: samples[name] for group in effect.groups for name in group.rollouts if name in samples}
        whole = self.learner.algorithm.config.compares_groups
        trained, dealt = deal(effect.micro_batches, here, self.learner.ranks, whole_groups=whole)
        self.learner.prepare(
            self._batch(effect, rollouts, dealt),
            [micro_batch.rollouts for micro_batch in effect.micro_batches],
            part=effect.partial,
            regrouped=[micro_batch.rollouts for micro_batch in trained],
        )

    def _batch(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        dealt: Mapping[RolloutId, SampleTensors],
    ) -> list[TrainingSample]:
        if self.learner.algorithm.config.trains_on_stored:
            scaled = advantages_in_order(effect)
        else:
            scaled = sample_advantages(effect, self.reward_weights, self.learner.advantage)
        return [
            TrainingSample(
                key=rollout,
                group=group.rollouts[0],
                advantage=scaled[rollout],
                condition=self.conditions[group.prompt_id],
                seed=rollouts[rollout].seed,
                version=rollouts[rollout].version,
                first_step=self._first_step(rollouts[rollout]),
                tensors=dealt.get(rollout),
            )
            for group in effect.groups
            for rollout in group.rollouts
        ]

    def _first_step(self, rollout: Rollout) -> int:
        window = self.recipe.window
        return 0 if window is None else window.steps(rollout.steps, rollout.seed, rollout.iteration).start


def advantages_in_order(effect: PrepareBatch) -> dict[RolloutId, float]:
    """From 1 of a group's first sample to -1 of its last: pictures of the training data, the best first."""
    return {
        name: 1 - 2 * at / max(len(group.rollouts) - 1, 1)
        for group in effect.groups
        for at, name in enumerate(group.rollouts)
    }


def sample_advantages(
    effect: PrepareBatch, weights: Mapping[str, float], config: AdvantageConfig
) -> dict[RolloutId, float]:
    """Advantages of all samples of ``effect``.

    In a part, slice members with fewer than two others to compare with get 0, like a group of one.

    Args:
        weights: factor per reward; other rewards are ignored.

    Raises:
        ValueError: not one comparison per group, ``advantage.std`` is unsuitable for a part, or scores are
            missing or not finite.
    """
    comparisons = effect.comparisons or (Comparison(),) * len(effect.groups)
    if len(comparisons) != len(effect.groups):
        raise ValueError(
            f"{len(effect.groups)} groups have {len(comparisons)} comparisons; expected one a group"
        )
    rewards = [[_only(weights, effect.scores[name]) for name in group.rollouts] for group in effect.groups]
    others = [[_only(weights, scores) for scores in each.others] for each in comparisons]
    if effect.partial:
        rows = zip(comparisons, rewards, others, strict=True)
        scaled = [_values(each.baseline, mine, more, weights, config) for each, mine, more in rows]
    else:
        scaled = advantages(rewards, weights, config, others)
    names = (name for group in effect.groups for name in group.rollouts)
    return dict(zip(names, (value for values in scaled for value in values), strict=True))


def _values(
    baseline: Baseline,
    rewards: Sequence[Rewards],
    others: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
) -> list[float]:
    match baseline:
        case Baseline.GROUP:
            if config.std == "global":
                raise ValueError(
                    "advantage.std is 'global', the spread of the whole batch, which a part does not know: "
                    "set it to 'group', or pipeline.axis to 'none'"
                )
            return advantages([rewards], weights, config, [others])[0]
        case Baseline.SLICE if len(rewards) + len(others) - 1 < COMPARED_MIN:
            return [0.0] * len(rewards)
        case Baseline.SLICE:
            return slice_advantages(rewards, others, weights, config)
        case Baseline.EXPLORATION:
            return exploration_advantages(rewards, others, weights, config)


def _only(weights: Mapping[str, float], scores: Mapping[str, float]) -> dict[str, float]:
    absent = [name for name in weights if name not in scores]
    if absent:
        raise ValueError(f"a sample has the rewards {sorted(scores)}; {absent[0]!r} is missing")
    return {name: scores[name] for name in weights}
