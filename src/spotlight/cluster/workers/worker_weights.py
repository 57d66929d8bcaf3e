"""How a worker gets a published version: from the blob store, one download per node, verified and bound.

Invariant: every slot that rollouts use holds the version, or NaN, which no rollout survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spotlight.models.slots import Slot, WeightSlots
from spotlight.scheduler.effects import PullWeights
from spotlight.worker.interfaces import HeadClient, LoadError
from spotlight_weights.bundle import WeightsManifest, bind
from spotlight_weights.node_cache import NodeCache
from spotlight_weights.weight_errors import NoSpaceError, WeightsError


def version_name(version: int, lineage: int) -> str:
    """Name of a version's manifest in the blob store."""
    return f"{lineage}.{version}"


@dataclass(frozen=True, slots=True)
class BundleLoader:
    """A :class:`spotlight.worker.interfaces.Loader`.

    Attributes:
        used: slots that rollouts use, those of training first, which every version must contain; it may lack
            the evaluated ones, unless it is to be evaluated.
        dtype: of published tensors.
        base: digest of what the base holds in few bits.
    """

    home: HeadClient
    cache: NodeCache
    slots: WeightSlots
    used: Sequence[Slot]
    dtype: torch.dtype | None = None
    base: str = ""

    def load(self, pull: PullWeights) -> str:
        """See :class:`spotlight.worker.interfaces.Loader`.

        Raises:
            LoadError: the version is missing or differs from its manifest; current weights stay unchanged.
            NoSpaceError: shared memory is full; a retry would fail too.
        """
        (stored,) = self.home.fetch("manifest", [version_name(pull.version, pull.lineage)])
        if stored is None:
            raise LoadError(f"version {pull.version} of lineage {pull.lineage} is not published")
        try:
            manifest = WeightsManifest.from_json(stored.data.decode())
            if (manifest.version, manifest.lineage) != (pull.version, pull.lineage):
                raise WeightsError(
                    f"asked for version {pull.version} of lineage {pull.lineage}, found {manifest}"
                )
            if manifest.base != self.base:
                raise WeightsError(
                    f"weights of {manifest}: trained beside a quantised base of digest "
                    f"{manifest.base[:12] or 'none'}, and this one has {self.base[:12] or 'none'}; expected "
                    "the same: give learner and workers the same model files and package"
                )
            bundle = self.cache.get(manifest, lambda: self._fetch(manifest))
            bind(bundle, self.slots, needs=self.used[:1], dtype=self.dtype)
        except NoSpaceError:
            raise
        except WeightsError as error:
            raise LoadError(str(error)) from error
        for slot in self.used:
            if slot not in manifest.slots:
                self._spoil(slot)
        return manifest.digest

    def _spoil(self, slot: Slot) -> None:
        """Of an older version: an evaluation with it would look right."""
        for tensor in self.slots.state(slot).values():
            tensor.fill_(float("nan"))

    def _fetch(self, manifest: WeightsManifest) -> bytes:
        (kept,) = self.home.fetch("weights", [manifest.digest])
        if kept is None:
            raise WeightsError(
                f"the blob store no longer has the weights of {manifest}: a newer version is published"
            )
        return kept.data
