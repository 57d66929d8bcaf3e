"""What an update reports, summed on the device: one transfer to the host per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spotlight.algorithms.base import LossTerms
from spotlight.training.sharding import Ranks

RATIO = "ratio"
"""The metric of which the largest value is logged too."""
REPLAY_DIFFERENCE = "log_prob_rollout_difference"
"""The metric that is logged per denoising step, for a batch's first update."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Advantages of an iteration's samples.

    Attributes:
        samples: how many there are, over all ranks.
        groups: how many prompts.
        advantage_std: population standard deviation (the mean is 0 up to clipping).
        advantage_abs_mean: mean absolute value: how much signal there is.
        clipped_share: share of samples whose advantage is at the clip.
        silent_groups_share: share of groups without any contrast: nothing is learnt from them.
        seconds: time taken.
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
    """Of samples, each as its group's name and its advantage.

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
    """Totals of an update over its samples and training timesteps, over all ranks.

    Attributes:
        samples: samples trained.
        loss: mean over samples and timesteps.
        means: of the algorithm's metrics, likewise.
        ratio_max: largest probability ratio; None for algorithms without one.
        replay_difference: mean |log p of replay - log p of rollout| by index of the denoising step; empty
            after a batch's first update, where it would measure the update instead.
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
        step: its number, 1 is the first; the policy version it made.
        sums: of the samples it was made of.
        grad_norm: 2-norm of the gradient before clipping.
        grad_rms: root mean square of the gradient's entries.
        epsilon_ratio: ``grad_rms`` over AdamW's epsilon: near or below 1, epsilon swamps the gradient.
        learning_rate: used.
        seconds: forward, backward and step.
        timesteps_per_pass: of its largest pass on this rank.
    """

    step: int
    sums: UpdateSums
    grad_norm: float
    grad_rms: float
    epsilon_ratio: float
    learning_rate: float
    seconds: float
    timesteps_per_pass: int = 1

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
        row |= {f"train/{name}": value for name, value in self.sums.means.items()}
        if self.sums.ratio_max is not None:
            row["train/ratio_max"] = self.sums.ratio_max
        row |= {f"replay/step_{i:03d}": value for i, value in self.sums.replay_difference.items()}
        return row


class UpdateMeter:
    """Sums of one update, kept on ``device``.

    Args:
        steps: denoising steps that may be labelled; 0: no replay difference is kept.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.samples = 0
        self._terms = 0
        self._loss = torch.zeros((), device=device)
        self._ratio_max = torch.zeros((), device=device)
        self._sums: dict[str, Tensor] = {}
        self._replay = torch.zeros(2, steps, device=device)  # sums, counts

    def widen(self, steps: int) -> None:
        """Let at least so many denoising steps be labelled; what was counted stays."""
        more = steps - self._replay.shape[1]
        if more > 0:
            self._replay = torch.cat([self._replay, self._replay.new_zeros(2, more)], 1)

    def add(self, terms: LossTerms, first_steps: Tensor) -> None:
        """Count the rows of one pass.

        Args:
            first_steps: [batch] int64, denoising step of every row's sample's first kept step.
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
        """Totals over all ranks (every rank must call it); the one synchronisation with the device."""
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
