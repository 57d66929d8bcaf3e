"""The learner: scored samples in, optimizer steps out.

    learner.prepare(samples, micro_batches)      samples with their advantages
    learner.accumulate(keys, update_samples)     gradients, once per micro-batch
    learner.step(samples, zeros)                 one optimizer step; accumulate again for the next update
    learner.finish_batch()                       the old policy follows

With ``prepare(..., part=True)`` samples arrive in parts, and micro-batches of the first update may be
accumulated in between. If later updates need old log-probs, all parts come before the first ``step``, which
computes them before it changes the weights.

Invariants:
- An update's gradient is that of the mean loss over its samples and timesteps, however it is divided into
  micro-batches and ranks.
- A sample enters at most one optimizer step; its tensors are released when it is accumulated.
- An optimizer step is atomic: a non-finite gradient or missing samples raise before any parameter changes.
- A ratio is to the weights that made the sample; older samples are refused where it cannot be.
- Nothing is random: draws in a loss are functions of a sample's seed and version.

All ranks make the same calls with the same arguments, except for tensors: each rank has those of its own
samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from spotlight.algorithms.base import Algorithm
from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.condition import Condition
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import ForwardLog
from spotlight.models.slots import WeightSlots
from spotlight.training import learner_state as state
from spotlight.training.batching.batch import TrainedGroups, TrainingSample, kept_steps, require_fresh, stack
from spotlight.training.optimizer import adamw, gradient_norm, trained
from spotlight.training.passes import Bound, MicroBatchPolicy, TrainingPasses
from spotlight.training.recompute import recompute
from spotlight.training.settings import (
    TrainingError,
    TrainingGuidance,
    adapter_type,
    autocast_type,
    compute_type,
)
from spotlight.training.sharding import Ranks, average_gradients, drop_idle_gradients, shard
from spotlight.training.step_metrics import BatchReport, IterationLog, StepReport, UpdateMeter, batch_report
from spotlight_files.model_errors import ModelError
from spotlight_kernels.measure.peak_rates import peak_of

__all__ = ["Learner", "TrainingError", "TrainingGuidance", "TrainingSample"]


@dataclass(slots=True)
class _Prepared:
    """A sample not trained yet.

    Attributes:
        old_log_probs: [timesteps], for updates after the first, if needed and trained on this rank.
        per_pass: timesteps per pass that computed them; equal on all ranks.
    """

    sample: TrainingSample
    old_log_probs: Tensor | None = None
    per_pass: int | None = None


@dataclass(slots=True)
class _Update:
    """Accumulated since the last optimizer step, which will have ``announced`` samples."""

    meter: UpdateMeter
    announced: int | None = None
    seconds: float = 0.0
    largest_pass: int = 1


class Learner:
    """Trains the policy slot of ``slots``.

    Args:
        slots: ``policy``, the algorithm's extra slots, and ``ema`` if configured. With several ranks they are
            sharded in place as ``config.shard`` says.
        guidance: that of the rollouts; None without.

    Raises:
        ModelError: a slot is missing, adapters compute in another dtype than configured, the size does not
            suit the model, or it lacks activation checkpointing.
    """

    def __init__(
        self,
        family: ModelFamily,
        slots: WeightSlots,
        algorithm: Algorithm,
        config: LearnerConfig,
        *,
        size: MediaSize,
        guidance: TrainingGuidance | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        needed = [*algorithm.extra_slots, *(["ema"] if config.ema is not None else [])]
        missing = [slot for slot in needed if slot not in slots.slots]
        if missing:
            raise ModelError(f"weight slots {', '.join(missing)} are missing; have {', '.join(slots.slots)}")
        if slots.compute != (compute := adapter_type(config, family.dtype)):
            raise ModelError(
                f"weight slots apply adapters in {slots.compute}; expected {compute}, as configured"
            )
        family.check_size(size)
        self.family, self.slots, self.algorithm, self.config = family, slots, algorithm, config
        self.advantage = algorithm.config.advantage
        self.autocast = autocast_type(config, family.dtype)
        self.ranks = Ranks() if ranks is None else ranks
        self._size, self._guidance, self._forwards = size, guidance, ForwardLog()
        module = slots.modules()["policy"]
        recomputation = recompute(module, config.recompute)
        shard(slots, self.ranks, compute_type(config), config.shard)
        if family.deferred:
            family.read_weights(list(slots.modules().values()))
        self._unread = family.unread_layers()
        self.optimizer = adamw(slots, config)
        self.passes = TrainingPasses(
            algorithm,
            self.ranks,
            family.device,
            config=config,
            module=module,
            optimizer=self.optimizer,
            recomputation=recomputation,
        )
        self.steps = 0
        """Optimizer steps applied: the policy version."""
        self.batches = 0
        """Batches finished."""
        self.samples = 0
        """Samples trained."""
        self.log = IterationLog()
        self._open_batch()

    def _open_batch(self) -> None:
        self._waiting: dict[str, _Prepared] = {}
        self._order: list[Sequence[str]] = []
        """Micro-batches of the current batch."""
        self._regrouped: dict[tuple[str, ...], Sequence[str]] = {}
        """What is trained in place of a micro-batch of the current batch."""
        self._taken: dict[str, tuple[str, float]] = {}
        """Group and advantage of every sample of the current batch, trained or not."""
        self._groups = TrainedGroups(self.algorithm.config, self.ranks)
        self._version, self._preparing_s = self.steps, 0.0
        """Policy version that the current batch starts from, and time spent on preparing it."""
        self._labels = 0
        self._stepped = False
        """Whether the current batch had an optimizer step."""
        self._update = self._new_update()

    def prepare(
        self,
        samples: Sequence[TrainingSample],
        micro_batches: Sequence[Sequence[str]],
        *,
        part: bool = False,
        regrouped: Sequence[Sequence[str]] | None = None,
    ) -> BatchReport:
        """Take an iteration's samples, or a ``part`` of them; logs and returns a report on the batch so far.

        Args:
            samples: from all ranks (those of other ranks without tensors).
            micro_batches: keys of every later :meth:`accumulate` of these samples, in order; old log-probs
                are computed in the same ones.
            regrouped: what to train in place of each of them, see
                :func:`~spotlight.training.batching.redistribute.deal`.

        Raises:
            RuntimeError: the previous batch is unfinished, or a part after an optimizer step needs old
                log-probs.
            ValueError: a duplicate key, or a sample too old for its ratio.
        """
        started = time.perf_counter()
        if not part and (self._waiting or self._update.announced is not None):
            raise RuntimeError(
                "prepare() before finish_batch(): the samples of the batch before would be lost"
            )
        again = [sample.key for sample in samples if part and sample.key in self._taken]
        if again:
            raise ValueError(
                f"sample {again[0]} was in an earlier part of the batch: a sample enters one optimizer step"
            )
        if not (part and self._taken):
            self._open_batch()
        trained = micro_batches if regrouped is None else regrouped
        self._regrouped |= zip(map(tuple, micro_batches), trained, strict=True)
        self._take(samples, trained)
        self._preparing_s += time.perf_counter() - started
        report = batch_report(self._taken.values(), self.advantage.clip, self._preparing_s)
        self.log.put(report.flat())
        return report

    def accumulate(self, keys: Sequence[str], update_samples: int) -> None:
        """Add the gradient of a micro-batch.

        Args:
            keys: a micro-batch that :meth:`prepare` got; this rank trains those whose tensors it has.
            update_samples: samples of the whole optimizer step, over all ranks.

        Raises:
            ValueError: a key is unknown or already trained, this rank has none of them, or ``update_samples``
                differs within the update.
        """
        started = time.perf_counter()
        if self._update.announced not in (None, update_samples):
            raise ValueError(
                f"update_samples is {update_samples}, but {self._update.announced} in this update's other "
                "micro-batches: gradients would be weighted differently"
            )
        keys = self._regrouped.get(tuple(keys), keys)
        mine = self._mine(keys)
        bound = self._bind(mine, keys)
        per_pass = self._per_pass(bound, keys)
        self._update.announced = update_samples
        # FSDP2 averages gradients over ranks; the factor ``world`` turns that into the sum.
        scale = self.ranks.world / (update_samples * bound.timesteps)
        taken = self.passes.backward(bound, per_pass, scale, self._update.meter)
        self._update.largest_pass = max(self._update.largest_pass, taken)
        self._update.meter.samples += len(mine)
        for key in keys:
            del self._waiting[key]
        self._update.seconds += time.perf_counter() - started

    def step(self, samples: int | None = None, zeros: int = 0) -> StepReport:
        """Apply the accumulated gradient, and update the moving average when it is due; logs the report.

        Args:
            samples: of the update, over all ranks; None: as many as announced. Others may have been announced
                and lost since: the gradient becomes the mean over the rest.
            zeros: more samples that were not trained, and count as 0 in the mean gradient.

        Raises:
            TrainingError: other samples were trained, or a non-finite gradient. The gradient is dropped and
                no parameter has changed.
        """
        started = time.perf_counter()
        if samples is not None:
            self._announce(samples + zeros)
        config, optimizer = self.config, self.optimizer
        sums = self._update.meter.reduce(self.ranks)
        drop_idle_gradients(self.slots.modules()["policy"], self.ranks)
        for name, parameter in self.slots.trainable_parameters().items():
            if name.startswith(self._unread):
                parameter.grad = None  # zeros of a compiled block, by which AdamW would decay the weights
        average_gradients(trained(self.optimizer), self.ranks)
        norm, entries = gradient_norm(optimizer)
        grad_norm = norm.item()
        problem = self._problem(sums.samples + zeros, grad_norm)
        if problem is not None:
            self._drop_update()
            raise TrainingError(problem)
        if not self._stepped:
            self._compute_old_log_probs([keys for keys in self._order if self._waiting.keys() >= {*keys}])
        clip_grads_with_norm_(trained(self.optimizer), config.max_grad_norm, norm)
        learning_rate = config.learning_rate_at(self._scheduled[0])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        self.steps += 1
        self.samples += sums.samples
        self._stepped = True
        decay = None if config.ema is None else config.ema.decay(self.steps)
        if decay is not None:
            self.slots.blend("ema", "policy", decay)
        rms = grad_norm / math.sqrt(entries)
        seconds = self._update.seconds + time.perf_counter() - started
        report = StepReport(
            step=self.steps,
            sums=sums,
            grad_norm=grad_norm,
            grad_rms=rms,
            epsilon_ratio=rms / config.epsilon,
            learning_rate=learning_rate,
            seconds=seconds,
            timesteps_per_pass=self._update.largest_pass,
            recompute_level=self.passes.recompute_level,
        )
        self.log.extend(report.flat())
        work = self._forwards.take(self.family, operations=self.family.device.type != "cpu")
        peak_flop_s = peak_of(self.family.device, self.autocast or self.family.dtype)
        self.log.worked("train", work, seconds, peak_flop_s)
        self._labels = 0
        self._drop_update()
        return report

    def finish_batch(self) -> None:
        """End a batch: update the old policy and release remaining samples."""
        if self._update.announced is not None:
            raise RuntimeError("finish_batch() with accumulated gradients: call step() first")
        self.batches += 1
        steps, batches = self._scheduled
        decay = self.algorithm.old_decay(steps if self.algorithm.config.decays_by_steps else batches)
        if decay is not None:
            self.slots.blend("old", "policy", decay)
        self._waiting.clear()
        self._taken.clear()
        self._regrouped.clear()

    def save(self, directory: Path) -> None:
        """Save everything needed to resume; see :func:`state.save`.

        Raises:
            RuntimeError: an update of an unfinished batch is applied.
        """
        if self._stepped and (self._update.announced is not None or self._waiting):
            raise RuntimeError("save() within a batch of which an update is applied: finish it first")
        state.save(directory, self.slots, self.optimizer, self._counters, self.ranks)

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` wrote; see :func:`state.load`."""
        counters = state.load(directory, self.slots, self.optimizer)
        self.steps, self.batches, self.samples = counters.steps, counters.batches, counters.samples

    def digest(self) -> str:
        """SHA-256 of what :meth:`save` writes, independent of sharding."""
        return state.digest(self.slots, self.optimizer, self._counters)

    @property
    def _counters(self) -> state.Counters:
        return state.Counters(self.steps, self.batches, self.samples)

    @property
    def _scheduled(self) -> tuple[float, float]:
        return self.config.scheduled(self.steps, self.batches, self.samples)

    # -- a batch ---------------------------------------------------------------------------------------

    def _take(self, samples: Sequence[TrainingSample], micro_batches: Sequence[Sequence[str]]) -> None:
        part = {sample.key: _Prepared(sample) for sample in samples}
        if len(part) != len(samples):
            raise ValueError(f"{len(samples)} samples have {len(part)} different keys")
        require_fresh(samples, self._version, self.algorithm)
        self._waiting |= part
        self._groups.take(samples)
        self._taken |= {sample.key: (sample.group, sample.advantage) for sample in samples}
        self._order += [keys for keys in micro_batches if self._mine(keys)]
        if self._stepped:
            self._compute_old_log_probs(micro_batches)  # raises if the algorithm needs any
        else:
            self._labels = max(self._labels, self._denoising_steps())
            self._update.meter.widen(self._labels)

    def _compute_old_log_probs(self, micro_batches: Sequence[Sequence[str]]) -> None:
        """For micro-batches of later updates, with the weights before the first update."""
        for keys in micro_batches:
            mine = self._mine(keys)
            bound = self._bind(mine, keys)
            per_pass = self.passes.per_pass(bound)
            old, per_pass = self.passes.old_log_probs(bound, per_pass)
            if old is None:
                return
            if self._stepped:
                raise RuntimeError(
                    "a part of the batch arrives after an optimizer step: its ratios would be to the weights "
                    "of now; prepare all parts before the first step, or take old_log_probs=rollout"
                )
            for item, row in zip(mine, old.unbind(0), strict=True):
                item.old_log_probs = row
            for key in keys:
                self._waiting[key].per_pass = per_pass

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
                f"rank {self.ranks.rank} of {self.ranks.world} has none of a micro-batch's {len(keys)} "
                "samples: every rank must take part in every forward: deal samples out evenly"
            )
        return mine

    def _per_pass(self, bound: Bound, keys: Sequence[str]) -> int:
        """The same timesteps per pass as for the old log-probs, so that kernels round alike."""
        made_with = {self._waiting[key].per_pass for key in keys}
        first = made_with.pop()
        if first is None or made_with:
            return self.passes.per_pass(bound)
        return min(first, self.passes.limit(bound))

    def _bind(self, mine: Sequence[_Prepared], keys: Sequence[str]) -> Bound:
        samples = [item.sample for item in mine]
        old = [item.old_log_probs for item in mine if item.old_log_probs is not None]
        batch = stack(
            samples,
            old if len(old) == len(mine) else None,
            self.family.device,
            first_update=not self._stepped,
            old_is_policy="old" in self.slots.slots and self.slots.equals_policy("old"),
        )
        batch = self._groups.joined(batch, samples, [self._waiting[key].sample for key in keys])
        conditions = [sample.condition for sample in samples]
        texts = [*conditions, *([self._guidance.negative] if self._guidance else [])]
        return Bound(
            batch,
            torch.tensor([sample.first_step for sample in samples], device=self.family.device),
            timesteps=self.algorithm.timesteps(kept_steps(samples[0])),
            tokens=self.family.dimensions.tokens(self._size) + max(text.tokens for text in texts),
            bind=partial(self._policy, conditions),
        )

    def _policy(self, conditions: Sequence[Condition], times: int, counted: bool = True) -> MicroBatchPolicy:
        return MicroBatchPolicy(
            self.family,
            self.slots,
            [*conditions] * times,
            size=self._size,
            guidance=self._guidance,
            autocast=self.autocast,
            log=self._forwards if counted else None,
        )

    def _denoising_steps(self) -> int:
        local = [item.sample for item in self._waiting.values() if item.sample.tensors is not None]
        if not local or self.algorithm.keeps != "trajectory":
            return 0
        return max(item.sample.first_step for item in self._waiting.values()) + kept_steps(local[0])

    # -- an update -------------------------------------------------------------------------------------

    def _new_update(self) -> _Update:
        self._forwards.clear()
        return _Update(UpdateMeter(self.family.device, self._labels))

    def _announce(self, samples: int) -> None:
        """Correct the announced number: gradients are weighted by it."""
        announced = self._update.announced
        if announced in (None, samples):
            return
        for parameter in trained(self.optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(announced / samples)
        self._update.announced = samples

    def _drop_update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._update = self._new_update()

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
