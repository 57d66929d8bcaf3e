"""The interface of RL algorithms: what rollouts store, which weights they use, and the loss.

An algorithm sees a :class:`TrainBatch` of tensors and a :class:`PolicyModel` to evaluate, never adapters,
optimizers, ranks or rollout ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.diffusion.samplers import Sampler

Keeps = Literal["trajectory", "final", "query"]
"""The states around the stochastic steps; x0 alone; or x0 and the state before the last step, the query."""
Slot = Literal["policy", "reference", "old", "ema"]
"""Named weights of the one DiT: trained, initial, behaviour policy, moving average."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The groups whose samples are in a micro-batch, all of them, over all ranks.

    With several timesteps in a pass, a group counts once per timestep. N is the number of groups, K the
    size of the largest.

    Attributes:
        group: [batch] int64, the group of every row of this rank.
        member: [batch] int64, which of the group's samples it is.
        advantages: [N, K], 0 where a group has fewer samples.
        present: [N, K] bool.
        over_ranks: sums a tensor over all ranks; every rank must call it.
    """

    group: Tensor
    member: Tensor
    advantages: Tensor
    present: Tensor
    over_ranks: Callable[[Tensor], Tensor]

    @property
    def sizes(self) -> Tensor:
        """[N], samples of each group."""
        return self.present.sum(1)

    def table(self, values: Tensor) -> Tensor:
        """[N, K]: the rows' ``values`` [batch] by group and member, of all ranks, without gradient."""
        table = torch.zeros(self.present.shape, dtype=values.dtype, device=values.device)
        table[self.group, self.member] = values.detach()
        return self.over_ranks(table)

    def pick(self, table: Tensor) -> Tensor:
        """[batch]: the rows' entries of ``table`` [N, K] or [N]."""
        return table[self.group] if table.ndim == 1 else table[self.group, self.member]

    def repeated(self, times: int) -> GroupRows:
        """For a batch tiled ``times`` times."""
        count = len(self.present)
        return replace(
            self,
            group=torch.cat([self.group + count * i for i in range(times)]),
            member=self.member.repeat(times),
            advantages=self.advantages.repeat(times, 1),
            present=self.present.repeat(times, 1),
        )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Tensors of a micro-batch of samples, all float32 on the model's device.

    S is the number of stored (stochastic) steps if the algorithm ``keeps`` trajectories.

    Attributes:
        final: x0, [batch, tokens, channels].
        latents: the S + 1 states around the stored steps, [batch, S + 1, tokens, channels]; None if only
            ``final`` is stored.
        sigmas: the rollout's exact noise levels: of ``latents``, [batch, S + 1], or the whole schedule,
            [batch, T + 1].
        rollout_log_probs: [batch, S] as computed during the rollout, or None.
        old_log_probs: [batch, T], one per training timestep, from :meth:`Algorithm.old_log_probs`; None
            if it returns None, and in a batch's first update.
        advantages: [batch].
        seeds: with ``versions``, the key of all random draws in training: both must be the same in
            :meth:`Algorithm.old_log_probs` and in every loss of a sample, across updates. One seed per group
            if the algorithm ``shares_draws``.
        versions: the policy versions that made the samples.
        first_update: no optimizer step was taken since the batch began, so ratios to the weights before
            the batch are 1.
        old_is_policy: the ``old`` slot is known to hold the policy's weights, so their velocities are equal.
        groups: the rows' groups, if the algorithm ``compares_groups``.
        gradient: of the total reward by ``final``, in its shape, if the algorithm ``needs_gradients``.
    """

    final: Tensor
    latents: Tensor | None
    sigmas: Tensor
    rollout_log_probs: Tensor | None
    old_log_probs: Tensor | None
    advantages: Tensor
    seeds: tuple[int, ...]
    versions: tuple[int, ...]
    first_update: bool = False
    old_is_policy: bool = False
    groups: GroupRows | None = None
    gradient: Tensor | None = None

    def repeated(self, times: int) -> TrainBatch:
        """The whole batch tiled ``times`` times along rows, to train several timesteps at once."""
        if times == 1:
            return self

        def tiled(rows: Tensor) -> Tensor:
            return rows.repeat(times, *[1] * (rows.ndim - 1))

        rollout, old, gradient = self.rollout_log_probs, self.old_log_probs, self.gradient
        return replace(
            self,
            final=tiled(self.final),
            latents=None if self.latents is None else tiled(self.latents),
            sigmas=tiled(self.sigmas),
            rollout_log_probs=None if rollout is None else tiled(rollout),
            old_log_probs=None if old is None else tiled(old),
            advantages=self.advantages.repeat(times),
            seeds=self.seeds * times,
            versions=self.versions * times,
            groups=None if self.groups is None else self.groups.repeated(times),
            gradient=None if gradient is None else tiled(gradient),
        )


Timesteps = int | Sequence[int]
"""Training timestep of a batch's rows: one for all, or [batch]."""


def timestep_of_rows(timesteps: Timesteps, rows: int) -> list[int]:
    """[rows]: the training timestep of every row. Raises ValueError if the count differs."""
    if isinstance(timesteps, int):
        return [timesteps] * rows
    if len(timesteps) != rows:
        raise ValueError(f"{len(timesteps)} training timesteps for a batch of {rows} rows; expected {rows}")
    return list(timesteps)


class PolicyModel(Protocol):
    """The DiT bound to a micro-batch's prompts; evaluates the velocity under one of its weight slots."""

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        """[batch, tokens, channels] at noise levels sigma [batch]. Gradients flow only for ``policy``."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Loss of a micro-batch's rows, each a sample at one of its training timesteps.

    Attributes:
        per_sample: [batch], with gradient; averaged over an optimizer step's samples and their timesteps.
        metrics: [batch] detached values to average and log (ratio, kl, clip fraction ...).
        kept_step: [batch] int64, which of the S stored steps was trained, for metrics per denoising step;
            None without a trajectory.
    """

    per_sample: Tensor
    metrics: Mapping[str, Tensor]
    kept_step: Tensor | None = None


class Algorithm(Protocol):
    """One RL algorithm for flow-matching DiTs. Stateless: everything is a function of the arguments."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    @property
    def config(self) -> AlgorithmSection:
        """Its section of the configuration."""

    @property
    def keeps(self) -> Keeps:
        """What a rollout must store for the loss."""

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        """Slots besides ``policy`` that rollouts or the loss evaluate."""

    @property
    def rollout_slot(self) -> Slot:
        """The weights that generate training rollouts."""

    @property
    def takes_stale(self) -> bool:
        """Whether a sample may be older than the weights it is trained on.

        True if the loss uses the ratio to the weights that made the sample, or no ratio at all.
        """

    @property
    def sampler(self) -> Sampler:
        """Sampler of the training rollouts (stochastic inside the SDE window, ODE outside)."""

    def timesteps(self, kept_steps: int) -> int:
        """Forward/backward passes per sample, given the S stored steps of its trajectory.

        Raises:
            ValueError: the trajectory is shorter than the configured number.
        """

    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor | None:
        """Log-probs under the weights before the batch's first update, where the ratio needs them.

        Called for samples of later updates only: in the first (``batch.first_update``) the ratio is 1.

        Returns:
            [batch] without gradient, at every row's timestep; None if the algorithm needs none.
        """

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """Loss of every row at its training timestep t, 0 <= t < timesteps(S).

        Several timesteps of a sample may be rows of one batch (:meth:`TrainBatch.repeated`). A row's loss
        depends on no other row, unless the section ``compares_groups``: then each group is whole in
        ``batch.groups``, and of rows of other ranks only values without gradient are known.
        """

    def old_decay(self, n: float) -> float | None:
        """m of ``old <- m old + (1 - m) policy`` after a batch; None without an old slot.

        ``n`` counts the batches (iterations) trained so far, 1 after the first; optimizer steps if the
        section ``decays_by_steps``; either by trained samples with ``learner.schedule_samples``.
        """
