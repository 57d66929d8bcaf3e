"""Connects the controller's rollout ids to the learner's tensors, and collects an iteration's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.models.shared.flop_count import Work, rates
from spotlight.rollout.state import Recipe, SampleTensors
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import MicroBatch, Purpose, Rollout, RolloutId
from spotlight.training.batching.batch import TrainingSample
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.redistribute import deal
from spotlight.training.batching.sample_advantages import sample_advantages
from spotlight.training.learner import Learner


@dataclass(slots=True)
class IterationLog:
    """Collects the current iteration's row of metrics."""

    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _once: dict[str, float] = field(default_factory=dict)
    _scores: dict[RolloutId, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    _work: dict[str, tuple[Work, float, float | None]] = field(default_factory=dict)  # and most operations

    def add(self, name: str, value: float) -> None:
        """Add a value to a curve; the row holds the mean."""
        self._sums[name] += value
        self._counts[name] += 1

    def extend(self, row: Mapping[str, float]) -> None:
        """Add a value to several curves."""
        for name, value in row.items():
            self.add(name, value)

    def scored(self, rollout: Rollout, scores: Mapping[str, float]) -> None:
        """Record rewards of a train sample, of this iteration or early for the next; the last call counts."""
        if rollout.purpose is Purpose.TRAIN:
            self._scores[rollout.id] = rollout.iteration, scores

    def worked(self, what: str, work: Work, seconds: float, peak_flop_s: float | None) -> None:
        """Add what a device did in ``seconds``; the row holds all of it over all seconds (:func:`rates`)."""
        before, spent, most = self._work.get(what, (Work(0.0, 0.0), 0.0, 0.0))
        known = peak_flop_s is not None and most is not None
        most = (most or 0.0) + seconds * (peak_flop_s or 0.0) if known else None
        self._work[what] = before + work, spent + seconds, most

    def put(self, row: Mapping[str, float]) -> None:
        """Set values that occur once per iteration, replacing those of an earlier attempt at it."""
        self._once.update(row)

    def take(self, iteration: int | None = None) -> dict[str, float]:
        """Means, single values and rates since the last call.

        Args:
            iteration: rewards of later iterations stay for their own rows; None takes all.
        """
        for name, (of, scores) in list(self._scores.items()):
            if iteration is None or of <= iteration:
                del self._scores[name]
                for reward, value in scores.items():
                    self.add("rollout/reward" if reward == REWARD else f"rollout/{reward}", value)
        row = {name: total / self._counts[name] for name, total in self._sums.items()} | self._once
        for what, (work, seconds, most) in self._work.items():
            row |= rates(what, work, seconds, None if most is None else most / seconds)
        self._work.clear()
        self._sums.clear()
        self._counts.clear()
        self._once.clear()
        return row


@dataclass(frozen=True, slots=True)
class Trainer:
    """Feeds the learner by rollout ids.

    Attributes:
        reward_weights: factor per reward; every sample has exactly these rewards.
    """

    learner: Learner
    conditions: Conditions
    recipe: Recipe
    reward_weights: Mapping[str, float]
    log: IterationLog = field(default_factory=IterationLog)
    _regrouped: dict[tuple[RolloutId, ...], tuple[RolloutId, ...]] = field(default_factory=dict)

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
        order = [micro_batch.rollouts for micro_batch in trained]
        self._regrouped.update(zip((each.rollouts for each in effect.micro_batches), order, strict=True))
        batch = self._batch(effect, rollouts, dealt)
        report = self.learner.prepare(batch, order, part=effect.partial)
        self.log.put(report.flat())  # of all parts so far

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one micro-batch."""
        rollouts = self._regrouped.get(micro_batch.rollouts, micro_batch.rollouts)
        self.learner.accumulate(rollouts, micro_batch.update_samples)

    def step(self, samples: int, zeros: int = 0) -> tuple[float, float]:
        """Apply the mean gradient over ``samples``. Returns the loss and the norm before clipping.

        Args:
            zeros: more samples that the mean counts, as 0.
        """
        if samples + zeros != self.learner.announced:
            self.learner.amend(samples + zeros)
        report = self.learner.step(zeros)
        self.log.extend(report.flat())
        if report.work is not None:
            self.log.worked("train", report.work, report.seconds, report.peak_flop_s)
        return report.sums.loss, report.grad_norm

    def finish_batch(self) -> None:
        """End the batch; the old policy follows."""
        self.learner.finish_batch()
        self._regrouped.clear()

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
