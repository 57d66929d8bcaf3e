"""Forward and backward passes of a micro-batch, with as many timesteps per pass as memory allows.

Invariants:
- The gradient is the sum over a micro-batch's rows, however they are split into passes.
- A pass that runs out of memory leaves gradients and metrics unchanged.
- All ranks run the same passes. With several, a pass must be known to fit on each before it starts: a rank
  that fails inside leaves the others waiting in a collective.
- After every evaluation of the DiT the policy slot is active again, because the backward pass recomputes
  checkpointed activations with the active slot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from spotlight.algorithms.base import Algorithm, LossTerms, Slot, TrainBatch
from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.condition import Condition, Guidance
from spotlight.models.experts import rows_uncounted
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import ForwardLog
from spotlight.models.slots import WeightSlots
from spotlight.training.device_memory import free_bytes, measure_peak, release
from spotlight.training.optimizer import bytes_to_come, trained
from spotlight.training.recompute import Climb, Recomputation, modes_at
from spotlight.training.settings import TrainingError, TrainingGuidance
from spotlight.training.sharding import Ranks
from spotlight.training.step_metrics import UpdateMeter
from spotlight.training.timesteps import MARGIN, PassMemory, Shape, Trial, cut_timesteps, largest_pass
from spotlight_rewards.base.device_errors import is_out_of_memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bound:
    """A rank's share of a micro-batch, ready for passes.

    Attributes:
        batch: one row per sample.
        first_steps: [batch] int64, denoising step of each sample's first stored step.
        timesteps: training timesteps per sample.
        tokens: of an image plus the longest text.
        bind: creates the policy for the samples' prompts, repeated that many times.
    """

    batch: TrainBatch
    first_steps: Tensor
    timesteps: int
    tokens: int
    bind: Callable[..., MicroBatchPolicy]
    _policies: dict[int, MicroBatchPolicy] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples on this rank."""
        return len(self.batch.seeds)

    @property
    def key(self) -> tuple[Shape, int]:
        """What settings are found for."""
        return self.shape, self.timesteps

    @property
    def shape(self) -> Shape:
        """What memory use depends on."""
        return Shape(self.samples, self.tokens)

    def rows(self, timesteps: range) -> tuple[MicroBatchPolicy, TrainBatch, list[int]]:
        """Every sample at each of ``timesteps``, as arguments of an algorithm's loss."""
        times = len(timesteps)
        if times not in self._policies:
            self._policies[times] = self.bind(times)
        at = [timestep for timestep in timesteps for _ in range(self.samples)]
        return self._policies[times], self.batch.repeated(times), at


class TrainingPasses:
    """Runs passes and tracks how many timesteps fit.

    Args:
        config: says how many timesteps share a pass, and what memory a pass may take.
        module: what is trained.
        optimizer: of its parameters; what it is still to allocate, passes leave free.
        recomputation: whose level is to be found for each new shape; None: it is given. Of ``auto``
            timesteps, several share a pass only where nothing is computed again.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        ranks: Ranks,
        device: torch.device,
        *,
        config: LearnerConfig,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        recomputation: Recomputation | None,
    ) -> None:
        self._algorithm, self._ranks, self._device = algorithm, ranks, device
        self._least = partial(ranks.least, device=device)
        self._setting, self._budget_bytes = config.timesteps_per_pass, config.pass_memory_bytes
        self._module, self._optimizer = module, optimizer
        self._recomputation = recomputation
        self._blocks = 0 if recomputation is None else recomputation.blocks
        self._levels: dict[tuple[Shape, int], int] = {}
        self._level = 0
        self.memory = PassMemory()
        """Measured memory use of passes."""
        self._settled: dict[tuple[Shape, int], int] = {}

    def per_pass(self, bound: Bound) -> int:
        """Timesteps per pass, the same on every rank. May run trial passes, without side effects."""
        key = bound.key
        least = 1 if self._setting == "auto" else min(self._setting, bound.timesteps)
        if self._recomputation is not None:
            # Prompts are of other lengths on each rank: what one has measured, another may not have.
            if not self._least(int(key in self._levels)):
                self._climb(bound, least)
            if self._setting == "auto" and self._least(self._levels[key]) < 2 * self._blocks:
                return least
        if self._setting != "auto":
            return least
        while True:
            known = self._settled.get(key)
            most = self.memory.most(*key, self._budget()) if known is None else min(known, self.limit(bound))
            wanted = largest_pass(bound.timesteps, self._least(most))
            if self._least(self.memory.proven(bound.shape, wanted)):
                self._settled[key] = wanted
                return wanted
            self._try(bound, wanted)

    def limit(self, bound: Bound) -> int:
        """Most timesteps for this shape, given the passes that ran out of memory.

        No such pass exists with several ranks, where running out of memory is fatal, so there is no limit.
        """
        return self.memory.most(bound.shape, bound.timesteps, math.inf)

    def old_log_probs(self, bound: Bound, per_pass: int) -> tuple[Tensor | None, int]:
        """[batch, timesteps] under the current weights, computed in the loss's passes, or None if not needed.

        Also returns the timesteps per pass used: fewer than ``per_pass`` if that ran out of memory.
        """
        while True:
            try:
                return self._old_log_probs(bound, per_pass), per_pass
            except RuntimeError as error:
                if not (is_out_of_memory(error) and self._shrinks(bound, per_pass)):
                    raise
            per_pass = self._halved(bound, per_pass)

    def backward(self, bound: Bound, per_pass: int, scale: float, meter: UpdateMeter) -> int:
        """Add the gradient of ``scale`` times the summed losses over all samples and timesteps.

        Returns the timesteps of the largest pass.
        """
        pending = cut_timesteps(range(bound.timesteps), per_pass)
        largest = 1
        while pending:
            timesteps = pending[0]
            terms = self._recoverably(bound, timesteps, scale)
            if terms is not None:
                meter.add(terms, bound.first_steps.repeat(len(timesteps)))
                largest = max(largest, len(timesteps))
                pending = pending[1:]
                continue
            smaller = self._halved(bound, len(timesteps))
            pending = cut_timesteps(range(timesteps.start, bound.timesteps), smaller)
        return largest

    @property
    def recompute_level(self) -> float | None:
        """Level of the last pass over the number of blocks; None: it is given."""
        return None if self._recomputation is None else self._level / self._blocks

    # -- one pass --------------------------------------------------------------------------------------

    def _old_log_probs(self, bound: Bound, per_pass: int) -> Tensor | None:
        columns = []
        for timesteps in cut_timesteps(range(bound.timesteps), per_pass):
            with torch.no_grad():
                old = self._algorithm.old_log_probs(*bound.rows(timesteps))
            if old is None:
                return None
            columns.append(old.view(len(timesteps), bound.samples))
        return torch.cat(columns).T

    def _backward(self, bound: Bound, timesteps: range, scale: float) -> LossTerms:
        if self._recomputation is not None:
            self._level = self._levels.get(bound.key, 0)
            self._recomputation.use(modes_at(self._level, self._blocks))
        terms = self._algorithm.loss(*bound.rows(timesteps))
        _require_fitting(terms, bound.samples * len(timesteps), self._algorithm.name)
        (terms.per_sample.sum() * scale).backward()  # type: ignore[no-untyped-call]
        return terms

    def _recoverably(self, bound: Bound, timesteps: range, scale: float) -> LossTerms | None:
        """None if the pass did not fit; then nothing changed."""
        if not self._shrinks(bound, len(timesteps)):
            return self._backward(bound, timesteps, scale)
        terms = None
        with self._gradients_aside() as before:
            try:
                terms = self._backward(bound, timesteps, scale)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                before[:] = [
                    _sum(parameter.grad, held)
                    for parameter, held in zip(trained(self._optimizer), before, strict=True)
                ]
        return terms

    def _shrinks(self, bound: Bound, per_pass: int) -> bool:
        """Whether less memory will do if a pass runs out of it, which only one rank may."""
        smaller = (self._setting == "auto" and per_pass > 1) or self._levels.get(bound.key, 0) > 0
        return smaller and self._ranks.world == 1

    def _halved(self, bound: Bound, per_pass: int) -> int:
        """Remembers the failure, too. The failed pass's tensors must be released before."""
        release(self._device)
        key = bound.key
        if self._setting != "auto" or per_pass == 1:
            self._levels[key] //= 2
            _log.warning("out of memory in training: from now on %s", self._said(self._levels[key]))
            return per_pass
        self._settled[key] = per_pass // 2
        self.memory = self.memory.after(Trial(bound.tokens, bound.samples * per_pass, None))
        return per_pass // 2

    @contextmanager
    def _gradients_aside(self) -> Iterator[list[Tensor | None]]:
        """Yields the gradients set aside; on exit, the list's contents become the gradients."""
        parameters = trained(self._optimizer)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield before
        finally:
            for parameter, held in zip(parameters, before, strict=True):
                parameter.grad = held

    # -- what fits -------------------------------------------------------------------------------------

    def _climb(self, bound: Bound, per_pass: int) -> None:
        key, climb = bound.key, Climb(self._blocks, 2 * self._blocks)
        while (level := self._least(climb.next(self._budget()))) != climb.level:
            self._levels[key] = level
            climb = climb.after(level, self._measured(bound, per_pass))
        self._levels[key] = level
        _log.info("passes of %d rows: %s", bound.samples * per_pass, self._said(level))

    def _said(self, level: int) -> str:
        modes = modes_at(level, self._blocks)
        return ", ".join(f"{modes.count(mode)} blocks recompute {mode}" for mode in sorted({*modes}))

    def _try(self, bound: Bound, per_pass: int) -> None:
        needed = self._measured(bound, per_pass)
        self.memory = self.memory.after(Trial(bound.tokens, bound.samples * per_pass, needed))

    def _measured(self, bound: Bound, per_pass: int) -> int | None:
        """Peak bytes of a pass that changes nothing; None: it did not fit."""
        needed = None
        with self._gradients_aside(), rows_uncounted(self._module):
            try:
                _, needed = measure_peak(self._device, lambda: self._trial(bound, per_pass))
            except RuntimeError as error:
                if not (is_out_of_memory(error) and self._shrinks(bound, per_pass)):
                    raise
        if needed is None:
            release(self._device)
        return needed

    def _trial(self, bound: Bound, per_pass: int) -> None:
        # Later passes of the shape may evaluate the old policy, which takes memory, where this one need not.
        batch = replace(bound.batch, old_is_policy=False)
        bound = replace(bound, batch=batch, bind=partial(bound.bind, counted=False), _policies={})
        self._backward(bound, max(cut_timesteps(range(bound.timesteps), per_pass), key=len), 0.0)

    def _budget(self) -> float:
        if self._budget_bytes is not None:
            return self._budget_bytes
        return MARGIN * free_bytes(self._device) - bytes_to_come(self._optimizer)


def _require_fitting(terms: LossTerms, rows: int, algorithm: str) -> None:
    """Sums of wrongly shaped terms would be taken without an error."""
    metrics = {f"metrics[{name!r}]": value for name, value in terms.metrics.items()}
    by_row = {"per_sample": terms.per_sample, **metrics}
    if terms.kept_step is not None:
        by_row["kept_step"] = terms.kept_step
    for name, value in by_row.items():
        shape = getattr(value, "shape", None)
        if shape != (rows,):
            found = f"type {type(value).__name__!r}" if shape is None else f"shape {list(shape)}"
            raise TrainingError(
                f"algorithm {algorithm!r}: its loss returned a {name} of {found}; expected [{rows}], a value "
                "for each row of the batch. Average over the other dimensions, and leave out no row."
            )
    if not terms.per_sample.requires_grad:
        raise TrainingError(
            f"algorithm {algorithm!r}: its loss returned a per_sample without gradient; expected one that "
            "depends on policy.velocity(...). Remove a detach() or no_grad() on the way."
        )


def _sum(gradient: Tensor | None, held: Tensor | None) -> Tensor | None:
    if gradient is None or held is None:
        return held if gradient is None else gradient
    return held.add_(gradient)


class MicroBatchPolicy:
    """Implements :class:`spotlight.algorithms.base.PolicyModel` for a micro-batch's prompts, in order."""

    def __init__(
        self,
        family: ModelFamily,
        slots: WeightSlots,
        conditions: Sequence[Condition],
        *,
        size: MediaSize,
        guidance: TrainingGuidance | None,
        autocast: torch.dtype | None,
        log: ForwardLog | None = None,
    ) -> None:
        self._family, self._slots, self._log = family, slots, log
        self._size, self._autocast = size, autocast
        self._condition = family.collate(conditions)
        self._guidance: Guidance | None = None
        if guidance is not None:
            twice = guidance.scale > 1
            negative = family.negatives(conditions, guidance.negative) if twice else None
            self._guidance = Guidance(guidance.scale, negative, guidance.embedded)

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        """Float32, shape of ``latents`` [batch, ...]. Frozen slots never build a graph."""
        frozen = nullcontext() if slot == "policy" else torch.no_grad()
        autocast = torch.autocast(
            self._family.device.type, dtype=self._autocast, enabled=self._autocast is not None
        )
        with frozen, autocast, self._slots.use(slot) as model:
            return self._family.velocity(
                model, latents, sigma, self._condition, self._guidance, self._size, self._log
            )
