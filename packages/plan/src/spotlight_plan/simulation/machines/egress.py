"""Bytes between spot nodes and a learner in another region: what they cost, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.scheduler.types import NodeKind, Purpose, WeightKind
from spotlight_plan.simulation.machines.other_costs import OtherCosts

NAME = "egress"
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Egress:
    """Between two regions, of which one has all spot nodes and the other the learner and the store.

    A version crosses once per node (its other workers pull from a peer), a finished sample once.

    Attributes:
        to_spot_usd_gb, from_spot_usd_gb: per 10^9 bytes.
        bytes_s: of one node.
        weight_bytes: of a version, and of the whole model.
        sample_bytes: of a rollout to train on.
        picture_bytes: of a preview, or a picture of an evaluation.
    """

    to_spot_usd_gb: float
    from_spot_usd_gb: float
    bytes_s: float
    weight_bytes: Mapping[WeightKind, float]
    sample_bytes: float
    picture_bytes: float

    def pull(self, kind: WeightKind, to: NodeKind, costs: OtherCosts) -> float:
        """Pay for weights that a node pulls from the store; returns the least seconds that it takes."""
        if to is not NodeKind.SPOT:
            return 0.0
        size = self.weight_bytes[kind]
        costs.pay(NAME, size / _GB * self.to_spot_usd_gb)
        return size / self.bytes_s

    def samples(self, purpose: Purpose, count: int, came_from: NodeKind, costs: OtherCosts) -> None:
        """Pay for finished samples."""
        if came_from is NodeKind.SPOT:
            size = count * (self.sample_bytes if purpose is Purpose.TRAIN else self.picture_bytes)
            costs.pay(NAME, size / _GB * self.from_spot_usd_gb)
