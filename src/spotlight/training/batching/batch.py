"""Samples on their way into a loss, and their stacking into micro-batch tensors.

Invariant: a micro-batch's tensors depend only on its samples and their order, so old log-probs and loss use
the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spotlight.algorithms.base import Algorithm, GroupRows, TrainBatch
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.models.condition import Condition
from spotlight.rollout.state import SampleTensors
from spotlight.training.sharding import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """A scored sample.

    Attributes:
        key: names it in micro-batches.
        group: samples of a group share a prompt, and their rewards were compared.
        advantage: see :mod:`spotlight.training.batching.feed`.
        version: the policy version that made it.
        first_step: denoising step that starts from ``latents[0]``, for the logged replay difference.
        tensors: None if another rank holds them.
    """

    key: str
    group: str
    advantage: float
    condition: Condition
    seed: int
    version: int
    tensors: SampleTensors | None
    first_step: int = 0


def require_fresh(samples: Sequence[TrainingSample], version: int, algorithm: Algorithm) -> None:
    """Raise ValueError for a sample older than ``version``, the batch's weights, if its ratio is wrong."""
    if algorithm.takes_stale:
        return
    newest = max([version, *(sample.version for sample in samples)])
    for sample in samples:
        if sample.version < newest:
            raise ValueError(
                f"sample {sample.key} was made by policy version {sample.version}, and the batch starts from "
                f"version {newest}: the ratio of {algorithm.name} would be to weights that did not make it. "
                "Set algorithm.old_log_probs=rollout where the algorithm has it, or pipeline.next_share=0"
            )


def stack(
    samples: Sequence[TrainingSample],
    old_log_probs: Sequence[Tensor] | None,
    device: torch.device,
    *,
    first_update: bool,
    old_is_policy: bool = False,
) -> TrainBatch:
    """The samples as one batch on ``device``.

    Raises:
        ValueError: a sample's tensors are on another rank, or the samples do not fit together.
    """
    tensors = [_tensors(sample) for sample in samples]
    return TrainBatch(
        final=_stacked([t.final for t in tensors], device),
        latents=_optional([t.latents for t in tensors], "latents", device),
        sigmas=_stacked([t.sigmas for t in tensors], device),
        rollout_log_probs=_optional([t.log_probs for t in tensors], "log_probs", device),
        old_log_probs=None if old_log_probs is None else torch.stack(list(old_log_probs)),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
        seeds=tuple(sample.seed for sample in samples),
        versions=tuple(sample.version for sample in samples),
        first_update=first_update,
        old_is_policy=old_is_policy,
        gradient=_optional([t.gradient for t in tensors], "gradient", device),
    )


def kept_steps(sample: TrainingSample) -> int:
    """S, the stored stochastic steps; 0 if only x0 was stored."""
    latents = _tensors(sample).latents
    return 0 if latents is None else latents.shape[0] - 1


def _tensors(sample: TrainingSample) -> SampleTensors:
    if sample.tensors is None:
        raise ValueError(f"sample {sample.key} has no tensors on this rank: train it where it was made")
    return sample.tensors


def _stacked(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack(list(rows)).to(device, torch.float32, non_blocking=True)


def _optional(rows: Sequence[Tensor | None], name: str, device: torch.device) -> Tensor | None:
    present = [row for row in rows if row is not None]
    if not present:
        return None
    if len(present) != len(rows):
        raise ValueError(
            f"{len(present)} of the {len(rows)} samples of a micro-batch have {name}; expected all or none: "
            "they come from rollouts of different recipes"
        )
    return _stacked(present, device)


@dataclass(frozen=True, slots=True)
class TrainedGroups:
    """The groups of a batch, for algorithms whose samples share draws or are compared."""

    section: AlgorithmSection
    ranks: Ranks
    _draws: dict[str, tuple[int, int]] = field(default_factory=dict)
    _sizes: Counter[str] = field(default_factory=Counter)

    def take(self, samples: Sequence[TrainingSample]) -> None:
        """More samples of the batch, of all ranks; all of a group at once."""
        for sample in samples:
            seed, version = self._draws.get(sample.group, (sample.seed, sample.version))
            self._draws[sample.group] = min(seed, sample.seed), min(version, sample.version)
            self._sizes[sample.group] += 1

    def joined(
        self, batch: TrainBatch, mine: Sequence[TrainingSample], everyone: Sequence[TrainingSample]
    ) -> TrainBatch:
        """``batch`` with what the algorithm needs to know of groups.

        Args:
            mine: the batch's rows.
            everyone: the micro-batch's samples on all ranks, in the same order on each.

        Raises:
            ValueError: the micro-batch cuts a group that the loss compares.
        """
        if self.section.shares_draws:
            draws = [self._draws[sample.group] for sample in mine]
            seeds, versions = zip(*draws, strict=True)
            batch = replace(batch, seeds=seeds, versions=versions)
        if self.section.compares_groups:
            batch = replace(batch, groups=self._rows(batch.advantages.device, mine, everyone))
        return batch

    def _rows(
        self, device: torch.device, mine: Sequence[TrainingSample], everyone: Sequence[TrainingSample]
    ) -> GroupRows:
        members: dict[str, list[TrainingSample]] = {}
        for sample in everyone:
            members.setdefault(sample.group, []).append(sample)
        for group, found in members.items():
            if len(found) != self._sizes[group]:
                raise ValueError(
                    f"a micro-batch has {len(found)} of the {self._sizes[group]} samples of group {group}: "
                    f"{self.section.name} compares the samples of a group, so a micro-batch must hold whole "
                    "groups"
                )
        place = {
            sample.key: (row, column)
            for row, found in enumerate(members.values())
            for column, sample in enumerate(found)
        }
        shape = len(members), max(map(len, members.values()))
        advantages, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for sample in everyone:
            advantages[place[sample.key]] = sample.advantage
            present[place[sample.key]] = True
        return GroupRows(
            group=torch.tensor([place[sample.key][0] for sample in mine], device=device),
            member=torch.tensor([place[sample.key][1] for sample in mine], device=device),
            advantages=advantages.to(device),
            present=present.to(device),
            over_ranks=self.ranks.all_reduce,
        )
