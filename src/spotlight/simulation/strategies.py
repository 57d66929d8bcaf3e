"""Strategies that are compared: who trains, who denoises, and when previews are made.

A strategy is data: how it uses the places of the spot nodes, and where it explores. A new one is a line in
:data:`STRATEGIES`; what the controller then does is the controller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from spotlight.core.plan import Explore


class SpotPlaces(StrEnum):
    """What stands where the scenario has spot nodes."""

    NOTHING = "nothing"
    SPOT = "spot"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run the work.

    Attributes:
        about: what it does, for the line below the table.
        places: what stands where the scenario has spot nodes; on demand they train too.
        explore: when previews are made; None: never.
    """

    name: str
    about: str
    places: SpotPlaces
    explore: Explore | None


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy("reserved_only", "the reserved GPUs alone", SpotPlaces.NOTHING, None),
            Strategy(
                "all_on_demand",
                "as many GPUs, all at the on-demand price, never taken back; all denoise, then all train",
                SpotPlaces.ON_DEMAND,
                None,
            ),
            Strategy(
                "spot_rollout_only",
                "spot GPUs denoise, and idle while the reserved ones train",
                SpotPlaces.SPOT,
                None,
            ),
            Strategy(
                "critical_path",
                "previews choose the seeds before each iteration's rollouts",
                SpotPlaces.SPOT,
                Explore.CRITICAL_PATH,
            ),
            Strategy(
                "spotlight",
                "previews for the next iteration on spot GPUs while the reserved ones train",
                SpotPlaces.SPOT,
                Explore.IDLE,
            ),
        )
    }
)
