"""Metrics of an update, summed on the device with one transfer to the host; and an iteration's row."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from spotlight.algorithms.base import LossTerms
from spotlight.models.shared.flop_count import Compute, rates
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import Purpose, Rollout, RolloutId
from spotlight.training.sharding import Ranks

RATIO = "ratio"
"""Metric whose maximum is logged too."""
REPLAY_DIFFERENCE = "log_prob_rollout_difference"
"""Metric logged per denoising step, for a batch's first update."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Advantages of an iteration's samples, over all ranks.

    Attributes:
        groups: number of prompts.
        advantage_std: population standard deviation (the mean is 0 up to clipping).
        advantage_abs_mean: a measure of signal.
        clipped_share: share of samples at the clip.
        silent_groups_share: share of groups without contrast, from which nothing is learnt.
    """

    samples: int
    groups: int
    advantage_std: float
    advantage_abs_mean: float
    clipped_share: float
    silent_groups_share: float
    seconds: float

    def flat(self) -> dict[str, float]:
        """As curves."""
        return {
            "advantage/std": self.advantage_std,
            "advantage/abs_mean": self.advantage_abs_mean,
            "advantage/clipped_share": self.clipped_share,
            "advantage/silent_groups_share": self.silent_groups_share,
            "train/prepare_s": self.seconds,
        }


def batch_report(values: Iterable[tuple[str, float]], clip: float, seconds: float) -> BatchReport:
    """Report on (group, advantage) pairs.

    Args:
        clip: advantages lie within [-clip, clip].
    """
    loudest: dict[str, float] = {}
    scaled = []
    for group, value in values:
        loudest[group] = max(loudest.get(group, 0.0), abs(value))
        scaled.append(value)
    count = len(scaled)
    mean = math.fsum(scaled) / count
    return BatchReport(
        samples=count,
        groups=len(loudest),
        advantage_std=math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / count),
        advantage_abs_mean=math.fsum(map(abs, scaled)) / count,
        clipped_share=sum(abs(value) >= clip for value in scaled) / count,
        silent_groups_share=sum(value == 0 for value in loudest.values()) / len(loudest),
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """Totals over an update's samples, training timesteps and ranks.

    Attributes:
        loss: mean over samples and timesteps.
        means: of the algorithm's metrics, likewise.
        ratio_max: largest probability ratio; None for algorithms without one.
        replay_difference: mean |log p of replay - log p of rollout| per denoising step, in a batch's first
            update only.
    """

    samples: int
    loss: float
    means: Mapping[str, float]
    ratio_max: float | None
    replay_difference: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: the policy version it made, from 1.
        grad_norm: 2-norm before clipping.
        grad_rms: root mean square of the gradient's entries.
        epsilon_ratio: ``grad_rms`` over AdamW's epsilon; near or below 1, epsilon swamps the gradient.
        timesteps_per_pass: of the largest pass on this rank.
        recompute_level: with ``learner.recompute: auto``, of the last pass: 0 with all blocks computed again,
            1 with all products kept, 2 with everything kept.
    """

    step: int
    sums: UpdateSums
    grad_norm: float
    grad_rms: float
    epsilon_ratio: float
    learning_rate: float
    seconds: float
    timesteps_per_pass: int = 1
    recompute_level: float | None = None

    def flat(self) -> dict[str, float]:
        """As curves."""
        row = {
            "train/loss": self.sums.loss,
            "train/samples": float(self.sums.samples),
            "train/grad_norm": self.grad_norm,
            "train/grad_rms": self.grad_rms,
            "train/grad_rms_over_epsilon": self.epsilon_ratio,
            "train/learning_rate": self.learning_rate,
            "train/step_s": self.seconds,
            "train/timesteps_per_pass": float(self.timesteps_per_pass),
        }
        if self.recompute_level is not None:
            row["train/recompute_level"] = self.recompute_level
        row |= {f"train/{name}": value for name, value in self.sums.means.items()}
        if self.sums.ratio_max is not None:
            row["train/ratio_max"] = self.sums.ratio_max
        row |= {f"replay/step_{i:03d}": value for i, value in self.sums.replay_difference.items()}
        return row


class UpdateMeter:
    """Sums of one update, kept on ``device``.

    Args:
        steps: denoising steps to label; 0 records no replay difference.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.samples = 0
        self._terms = 0
        self._loss = torch.zeros((), device=device)
        self._ratio_max = torch.zeros((), device=device)
        self._sums: dict[str, Tensor] = {}
        self._replay = torch.zeros(2, steps, device=device)  # sums, counts

    def widen(self, steps: int) -> None:
        """Allow at least ``steps`` labels; existing counts stay."""
        more = steps - self._replay.shape[1]
        if more > 0:
            self._replay = torch.cat([self._replay, self._replay.new_zeros(2, more)], 1)

    def add(self, terms: LossTerms, first_steps: Tensor) -> None:
        """Count the rows of one pass.

        Args:
            first_steps: [batch] int64, denoising step of the first stored step of each row's sample.
        """
        self._terms += terms.per_sample.shape[0]
        self._loss += terms.per_sample.detach().sum()
        for name, values in terms.metrics.items():
            total = values.sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        if RATIO in terms.metrics:
            torch.maximum(self._ratio_max, terms.metrics[RATIO].max(), out=self._ratio_max)
        difference = terms.metrics.get(REPLAY_DIFFERENCE)
        if self._replay.shape[1] and terms.kept_step is not None and difference is not None:
            rows = torch.stack([difference, torch.ones_like(difference)])
            self._replay.index_add_(1, first_steps + terms.kept_step, rows)

    def reduce(self, ranks: Ranks) -> UpdateSums:
        """Totals over all ranks, which must all call this; the only device synchronisation."""
        names = sorted(self._sums)
        counts = self._loss.new_tensor([self.samples, self._terms])
        totals = torch.stack([self._loss, *(self._sums[name] for name in names)])
        flat = torch.cat([counts, totals, self._replay.flatten()]).double()
        ranks.all_reduce(flat)
        ranks.all_reduce(self._ratio_max, dist.ReduceOp.MAX)
        samples, terms, loss, *rest = torch.cat([flat, self._ratio_max.double()[None]]).tolist()
        labels = self._replay.shape[1]
        sums, replay = rest[: len(names)], rest[len(names) : len(names) + 2 * labels]
        return UpdateSums(
            samples=round(samples),
            loss=loss / max(terms, 1),
            means={name: value / max(terms, 1) for name, value in zip(names, sums, strict=True)},
            ratio_max=rest[-1] if RATIO in names else None,
            replay_difference={
                i: total / count
                for i, (total, count) in enumerate(zip(replay[:labels], replay[labels:], strict=True))
                if count
            },
        )


@dataclass(slots=True)
class IterationLog:
    """Collects the current iteration's row of metrics."""

    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _once: dict[str, float] = field(default_factory=dict)
    _scores: dict[RolloutId, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    _work: dict[str, tuple[Compute, float, float | None]] = field(default_factory=dict)  # and most operations

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

    def worked(self, what: str, work: Compute, seconds: float, peak_flop_s: float | None) -> None:
        """Add what a device did in ``seconds``; the row holds all of it over all seconds (:func:`rates`)."""
        before, spent, most = self._work.get(what, (Compute(0.0, 0.0), 0.0, 0.0))
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
