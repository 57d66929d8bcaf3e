"""The learner: scored samples in, optimizer steps out.

    learner.prepare(samples, micro_batches)      advantages; old log-probs where the algorithm needs them
    learner.accumulate(keys, update_samples)     gradients of a micro-batch, as often as there are
    learner.step()                               one optimizer step; again accumulate for the next update
    learner.finish_batch()                       the old policy follows

Invariants:
- The gradient of an update is that of the mean loss over its samples and timesteps, however it is cut into
  micro-batches and divided over ranks.
- A sample enters at most one optimizer step: its tensors are let go when it is accumulated.
- An optimizer step is applied whole or not at all: a gradient that is not finite, or samples that are
  missing, raise before a parameter changes.
- Nothing random happens here: draws of a loss are functions of a sample's seed.

With several ranks all call the same methods in the same order, with the same arguments but for the samples'
tensors, which each rank has of its own share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spotlight.algorithms.advantages import advantages
from spotlight.algorithms.base import Algorithm, TrainBatch
from spotlight.models.base import ImageSize, ModelError, ModelFamily
from spotlight.models.slots import WeightSlots
from spotlight.training import state
from spotlight.training.batch import TrainingSample, kept_steps, stack
from spotlight.training.metrics import BatchReport, StepReport, UpdateMeter
from spotlight.training.policy import MicroBatchPolicy
from spotlight.training.settings import LearnerSettings, TrainingError, TrainingGuidance
from spotlight.training.sharding import Ranks, shard

__all__ = ["Learner", "LearnerSettings", "TrainingError", "TrainingGuidance", "TrainingSample"]


@runtime_checkable
class _Checkpointable(Protocol):
    def enable_gradient_checkpointing(self) -> None: ...


@dataclass(slots=True)
class _Prepared:
    """A sample of the current batch that no update has taken yet."""

    sample: TrainingSample
    advantage: float
    old_log_probs: Tensor | None = None


@dataclass(slots=True)
class _Update:
    """What was accumulated since the last optimizer step; ``announced``: the samples it will be made of."""

    meter: UpdateMeter
    announced: int | None = None
    seconds: float = 0.0


class Learner:
    """Trains the policy slot of ``slots``.

    Args:
        family: the forward that rollouts use too.
        slots: ``policy``, the algorithm's extra slots, and ``ema`` if the settings ask for an average. With
            several ranks they are sharded in place here.
        algorithm: advantages in, loss out.
        settings: plain values.
        size: of the images trained on.
        guidance: that of the rollouts; None without.
        ranks: the processes that train together.

    Raises:
        ModelError: a slot is missing, the size does not suit the model, or it cannot checkpoint activations.
    """

    def __init__(
        self,
        family: ModelFamily,
        slots: WeightSlots,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        size: ImageSize,
        guidance: TrainingGuidance | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        needed = [*algorithm.extra_slots, *(["ema"] if settings.ema_cap is not None else [])]
        missing = [slot for slot in needed if slot not in slots.slots]
        if missing:
            raise ModelError(f"weight slots {', '.join(missing)} are missing; have {', '.join(slots.slots)}")
        family.check_size(size)
        self.family, self.slots, self.algorithm, self.settings = family, slots, algorithm, settings
        self.ranks = Ranks() if ranks is None else ranks
        self._size, self._guidance = size, guidance
        if settings.gradient_checkpointing:
            _enable_checkpointing(slots.modules()["policy"])
        shard(slots, self.ranks, settings.autocast)
        self.optimizer = torch.optim.AdamW(
            list(slots.trainable_parameters().values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps = 0
        """Optimizer steps applied: the policy version."""
        self.batches = 0
        """Batches finished."""
        self._waiting: dict[str, _Prepared] = {}
        self._labels = 0
        self._update = self._new_update()

    def prepare(
        self, samples: Sequence[TrainingSample], micro_batches: Sequence[Sequence[str]]
    ) -> BatchReport:
        """Take an iteration's samples: form advantages and, where the algorithm needs them, old log-probs.

        Args:
            samples: of whole groups, from all ranks (those of other ranks without tensors).
            micro_batches: the keys of every later :meth:`accumulate`, in order. The old log-probs are
                computed in these very micro-batches, so that the first ratio is 1 to the bit.

        Raises:
            RuntimeError: the batch before is not finished.
            ValueError: a reward is missing or not finite, or a key is in two samples.
        """
        started = time.perf_counter()
        if self._waiting or self._update.announced is not None:
            raise RuntimeError(
                "prepare() before finish_batch(): the samples of the batch before would be lost"
            )
        scaled = self._advantages(samples)
        self._waiting = {sample.key: _Prepared(sample, scaled[sample.key]) for sample in samples}
        if len(self._waiting) != len(samples):
            raise ValueError(f"{len(samples)} samples have {len(self._waiting)} different keys")
        self._compute_old_log_probs(micro_batches)
        self._labels = self._denoising_steps()
        self._update = self._new_update()
        return self._batch_report(samples, scaled, started)

    def accumulate(self, keys: Sequence[str], update_samples: int) -> None:
        """Add the gradient of a micro-batch.

        Args:
            keys: of the micro-batch, over all ranks; this rank trains those whose tensors it has.
            update_samples: samples of the whole optimizer step, over all ranks.

        Raises:
            ValueError: a key is unknown or was trained before, this rank has none of the keys, or
                ``update_samples`` differs from that of the update's other micro-batches.
        """
        started = time.perf_counter()
        if self._update.announced not in (None, update_samples):
            raise ValueError(
                f"update_samples is {update_samples}, but {self._update.announced} in this update's other "
                "micro-batches: gradients would be weighted differently"
            )
        mine = self._mine(keys)
        batch, policy = self._bind(mine)
        self._update.announced = update_samples
        timesteps = self.algorithm.timesteps(kept_steps(mine[0].sample))
        scale = self.ranks.world / (update_samples * timesteps)
        first_steps = torch.tensor([item.sample.first_step for item in mine], device=self.family.device)
        for timestep in range(timesteps):
            terms = self.algorithm.loss(policy, batch, timestep)
            (terms.per_sample.sum() * scale).backward()  # type: ignore[no-untyped-call]
            self._update.meter.add(terms, first_steps)
        self._update.meter.samples += len(mine)
        for key in keys:
            del self._waiting[key]
        self._update.seconds += time.perf_counter() - started

    def step(self) -> StepReport:
        """Apply the accumulated gradient, and update the moving average when it is due.

        Raises:
            TrainingError: fewer samples were accumulated than announced, or the gradient is not finite.
                The gradient is dropped and no parameter has changed.
        """
        started = time.perf_counter()
        settings, optimizer = self.settings, self.optimizer
        sums = self._update.meter.reduce(self.ranks)
        norm, entries = self._gradient_norm()
        grad_norm = norm.item()
        problem = self._problem(sums.samples, grad_norm)
        if problem is not None:
            self._drop_update()
            raise TrainingError(problem)
        clip_grads_with_norm_(self._trainable(), settings.max_grad_norm, norm)
        learning_rate = settings.learning_rate_at(self.steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        self.steps += 1
        decay = settings.ema_decay(self.steps)
        if decay is not None:
            self.slots.blend("ema", "policy", decay)
        rms = grad_norm / math.sqrt(entries)
        report = StepReport(
            step=self.steps,
            sums=sums,
            grad_norm=grad_norm,
            grad_rms=rms,
            epsilon_ratio=rms / settings.epsilon,
            learning_rate=learning_rate,
            seconds=self._update.seconds + time.perf_counter() - started,
        )
        self._labels = 0
        self._drop_update()
        return report

    def finish_batch(self) -> None:
        """After the last update of a batch: the old policy follows; what is left of the samples is let go."""
        if self._update.announced is not None:
            raise RuntimeError("finish_batch() with accumulated gradients: call step() first")
        self.batches += 1
        decay = self.algorithm.old_decay(self.batches)
        if decay is not None:
            self.slots.blend("old", "policy", decay)
        self._waiting.clear()

    def save(self, directory: Path) -> None:
        """Write everything a resumed learner needs into ``directory``; see :func:`state.save`."""
        if self._update.announced is not None or self._waiting:
            raise RuntimeError("save() within a batch: checkpoints are between two batches")
        counters = state.Counters(self.steps, self.batches)
        state.save(directory, self.slots, self.optimizer, counters, self.ranks)

    def load(self, directory: Path) -> None:
        """Become the learner that was saved in ``directory``; see :func:`state.load`."""
        counters = state.load(directory, self.slots, self.optimizer)
        self.steps, self.batches = counters.steps, counters.batches

    def digest(self) -> str:
        """SHA-256 of all that :meth:`save` writes: equal states have equal digests, however sharded."""
        return state.digest(self.slots, self.optimizer, state.Counters(self.steps, self.batches))

    # -- a batch ---------------------------------------------------------------------------------------

    def _advantages(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        weights = self.settings.reward_weights
        groups: dict[str, list[TrainingSample]] = {}
        for sample in samples:
            absent = [name for name in weights if name not in sample.rewards]
            if absent:
                raise ValueError(
                    f"sample {sample.key} has the rewards {sorted(sample.rewards)}; {absent[0]!r} is missing"
                )
            groups.setdefault(sample.group, []).append(sample)
        rewards = [
            [{name: sample.rewards[name] for name in weights} for sample in group]
            for group in groups.values()
        ]
        scaled = advantages(rewards, weights, self.settings.advantage)
        return {
            sample.key: value
            for group, values in zip(groups.values(), scaled, strict=True)
            for sample, value in zip(group, values, strict=True)
        }

    def _compute_old_log_probs(self, micro_batches: Sequence[Sequence[str]]) -> None:
        for keys in micro_batches:
            mine = self._mine(keys)
            batch, policy = self._bind(mine)
            with torch.no_grad():
                old = self.algorithm.old_log_probs(policy, batch)
            if old is None:
                return
            for item, row in zip(mine, old.unbind(0), strict=True):
                item.old_log_probs = row

    def _mine(self, keys: Sequence[str]) -> list[_Prepared]:
        unknown = [key for key in keys if key not in self._waiting]
        if unknown:
            raise ValueError(
                f"sample {unknown[0]} is not in the prepared batch, or was trained before: a sample enters "
                "one optimizer step"
            )
        mine = [self._waiting[key] for key in keys if self._waiting[key].sample.tensors is not None]
        if not mine:
            raise ValueError(
                f"rank {self.ranks.rank} of {self.ranks.world} has none of a micro-batch's "
                f"{len(keys)} samples: "
                "every rank must take part in every forward: deal samples out evenly"
            )
        return mine

    def _bind(self, mine: Sequence[_Prepared]) -> tuple[TrainBatch, MicroBatchPolicy]:
        samples = [item.sample for item in mine]
        old = [item.old_log_probs for item in mine if item.old_log_probs is not None]
        batch = stack(
            samples,
            [item.advantage for item in mine],
            old if len(old) == len(mine) else None,
            self.family.device,
        )
        policy = MicroBatchPolicy(
            self.family,
            self.slots,
            [sample.condition for sample in samples],
            size=self._size,
            guidance=self._guidance,
            autocast=self.settings.autocast,
        )
        return batch, policy

    def _denoising_steps(self) -> int:
        """How many denoising steps the batch's trajectories reach: the same number on every rank."""
        local = [item.sample for item in self._waiting.values() if item.sample.tensors is not None]
        if not local or self.algorithm.keeps == "final":
            return 0
        return max(item.sample.first_step for item in self._waiting.values()) + kept_steps(local[0])

    def _batch_report(
        self, samples: Sequence[TrainingSample], scaled: dict[str, float], started: float
    ) -> BatchReport:
        values = list(scaled.values())
        loudest: dict[str, float] = {}
        for sample in samples:
            loudest[sample.group] = max(loudest.get(sample.group, 0.0), abs(scaled[sample.key]))
        mean, count = math.fsum(values) / len(values), len(values)
        return BatchReport(
            samples=count,
            groups=len(loudest),
            advantage_std=math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count),
            advantage_abs_mean=math.fsum(map(abs, values)) / count,
            clipped_share=sum(abs(value) >= self.settings.advantage.clip for value in values) / count,
            silent_groups_share=sum(value == 0 for value in loudest.values()) / len(loudest),
            seconds=time.perf_counter() - started,
        )

    # -- an update -------------------------------------------------------------------------------------

    def _new_update(self) -> _Update:
        return _Update(UpdateMeter(self.family.device, self._labels))

    def _drop_update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._update = self._new_update()

    def _trainable(self) -> list[Tensor]:
        return self.optimizer.param_groups[0]["params"]  # type: ignore[no-any-return]

    def _gradient_norm(self) -> tuple[Tensor, int]:
        """2-norm of the whole gradient, and its number of entries, over all ranks."""
        gradients = [parameter.grad for parameter in self._trainable() if parameter.grad is not None]
        if not gradients:
            raise TrainingError("step() without a gradient: accumulate() at least one micro-batch first")
        norm = get_total_norm(gradients)
        return (
            norm.full_tensor() if isinstance(norm, DTensor) else norm,
            sum(gradient.numel() for gradient in gradients),
        )

    def _problem(self, samples: int, grad_norm: float) -> str | None:
        if samples != self._update.announced:
            return (
                f"an optimizer step of {self._update.announced} samples got {samples}: "
                "accumulate() every micro-batch of the update before step()"
            )
        if not math.isfinite(grad_norm):
            return (
                f"the gradient norm of optimizer step {self.steps + 1} is {grad_norm}: training has diverged "
                "or overflowed; resume from the last checkpoint with a lower learning_rate or max_grad_norm, "
                "or with autocast none"
            )
        return None


def _enable_checkpointing(module: nn.Module) -> None:
    if not isinstance(module, _Checkpointable):
        raise ModelError(
            f"{type(module).__name__} cannot recompute activations (no enable_gradient_checkpointing): "
            "set gradient_checkpointing to false"
        )
    module.enable_gradient_checkpointing()
