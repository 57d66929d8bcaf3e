"""Price quotes with instance type, place, source and date. Pure.

Every displayed price comes with its :meth:`Quote.age`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spotlight_fleet.gpus import gpu_type
from spotlight_rewards.base.errors import UserError

_PROBLEMS_SHOWN_MAX = 10
OLD = timedelta(days=90)
"""Prices older than this are warned of wherever they are shown."""


def age_of(as_of: datetime, now: datetime) -> timedelta:
    """Age of a price, at least 0 since clocks differ."""
    return max(now - as_of, timedelta())


class PriceError(UserError, ValueError):
    """Missing or unusable prices; names the source, position, value and expectation."""


@dataclass(frozen=True, slots=True)
class Quote:
    """Price of an instance type in one place.

    Attributes:
        region: empty if unknown.
        zone: empty for a price of the whole region.
        gpus: per instance.
        on_demand_usd_h, spot_usd_h: per instance; None if the source has none.
        as_of: when the price held, with time zone.
        caveat: warning for the reader, such as a stale price.
    """

    cloud: str
    region: str
    zone: str
    instance_type: str
    gpu: str
    gpus: int
    on_demand_usd_h: float | None
    spot_usd_h: float | None
    as_of: datetime
    source: str
    caveat: str = ""

    def __post_init__(self) -> None:
        for name in (self.cloud, self.region, self.zone, self.instance_type):
            if not name.isprintable():  # another line would be a command in start.sh of a launch
                raise PriceError(f"{self.source}: {name!r}; expected a name on one line")
        if self.as_of.tzinfo is None:
            raise PriceError(f"{self.source}: as_of is {self.as_of.isoformat()}; expected a time zone")
        if self.on_demand_usd_h is None and self.spot_usd_h is None:
            raise PriceError(f"{self.source}: {self.instance_type} has no price at all; expected one")
        for name, price in (("on demand", self.on_demand_usd_h), ("spot", self.spot_usd_h)):
            if price is not None and not (math.isfinite(price) and price > 0):
                raise PriceError(
                    f"{self.source}: {self.instance_type} costs {price!r} $/h {name}; expected more than 0"
                )
        if self.gpus < 1:
            raise PriceError(f"{self.source}: {self.instance_type} has {self.gpus} GPUs; expected at least 1")

    @property
    def on_demand_usd_gpu_h(self) -> float | None:
        """Per GPU."""
        return None if self.on_demand_usd_h is None else self.on_demand_usd_h / self.gpus

    @property
    def spot_usd_gpu_h(self) -> float | None:
        """Per spot GPU."""
        return None if self.spot_usd_h is None else self.spot_usd_h / self.gpus

    @property
    def saving(self) -> float | None:
        """Share of the on-demand price that spot saves (negative if spot costs more)."""
        if self.on_demand_usd_h is None or self.spot_usd_h is None:
            return None
        return 1 - self.spot_usd_h / self.on_demand_usd_h

    def age(self, now: datetime) -> timedelta:
        """See :func:`age_of`."""
        return age_of(self.as_of, now)


def with_caveat(quotes: Iterable[Quote], caveat: str) -> tuple[Quote, ...]:
    """The same prices with a caveat."""
    return tuple(replace(quote, caveat=caveat) for quote in quotes)


def select(
    quotes: Iterable[Quote],
    *,
    gpus: Collection[str] = (),
    clouds: Collection[str] = (),
    regions: Collection[str] = (),
) -> tuple[Quote, ...]:
    """Filter by GPU type, cloud and region (empty: all), cheapest per GPU first.

    A price without a region holds in all regions.

    Raises:
        UnknownGpuError: an unknown GPU type.
    """
    gpus = [gpu_type(name).name for name in gpus]
    found = (
        quote
        for quote in quotes
        if (not gpus or quote.gpu in gpus)
        and (not clouds or quote.cloud in clouds)
        and (not regions or quote.region in {"", *regions})
    )
    return tuple(sorted(found, key=_order))


def cheapest(quotes: Iterable[Quote]) -> tuple[Quote, ...]:
    """The zone with the cheapest spot GPU, per instance type, region and source."""
    best: dict[tuple[str, ...], Quote] = {}
    for quote in quotes:
        key = (quote.cloud, quote.region, quote.instance_type, quote.gpu, quote.source)
        if key not in best or _order(quote) < _order(best[key]):
            best[key] = quote
    return tuple(sorted(best.values(), key=_order))


def _order(quote: Quote) -> tuple[str, float, float, str, str, str, str]:
    spot, on_demand = quote.spot_usd_gpu_h, quote.on_demand_usd_gpu_h
    return (
        quote.gpu,
        math.inf if spot is None else spot,
        math.inf if on_demand is None else on_demand,
        quote.cloud,
        quote.region,
        quote.zone,
        quote.instance_type,
    )


def refuse(source: str, problems: Sequence[str], remedy: str = "") -> PriceError:
    """Build an error that lists the first problems of a source; the caller raises it."""
    shown = list(problems[:_PROBLEMS_SHOWN_MAX])
    if len(problems) > _PROBLEMS_SHOWN_MAX:
        shown.append(f"... and {len(problems) - _PROBLEMS_SHOWN_MAX} more")
    head = f"Cannot use the prices of {source}:"
    return PriceError("\n  ".join([head, *shown, *([remedy] if remedy else [])]))
