"""What the samples of a group share in training: their draws, and a loss that compares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spotlight.algorithms.base import GroupRows, TrainBatch
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.training.batching.batch import TrainingSample
from spotlight.training.sharding import Ranks


@dataclass(frozen=True, slots=True)
class TrainedGroups:
    """The groups of a batch, for algorithms whose samples share draws or are compared."""

    section: AlgorithmSection
    ranks: Ranks
    _draws: dict[str, tuple[int, int]] = field(default_factory=dict)
    _sizes: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Before a new batch."""
        self._draws.clear()
        self._sizes.clear()

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
            over_ranks=self._over_ranks,
        )

    def _over_ranks(self, values: Tensor) -> Tensor:
        return self.ranks.all_reduce(values)
