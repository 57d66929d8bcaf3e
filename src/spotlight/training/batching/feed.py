"""Connects the controller's rollout ids to the learner's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.rollout.state import Recipe, SampleTensors
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Rollout, RolloutId
from spotlight.training.batching.batch import TrainingSample
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.redistribute import deal
from spotlight.training.batching.sample_advantages import sample_advantages
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
