"""Prices of a scenario's machines, with their sources, and what traffic between places costs.

Looked-up prices are of whole machines with as many GPUs as a node has (unless ``prices.whole_machines`` is
false). All are of one cloud and region, the place where all GPUs together cost least, unless the pools name
places of their own. If no place has them all, each price is the lowest anywhere and :attr:`Pricing.caveat`
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeAlias

from spotlight_plan.prices.quotes import PriceError, Quote, select
from spotlight_plan.prices.sources import PriceQuery, load_prices
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import Pool, PricesSection, TraceFile

STATED = "stated in the scenario"
Crossing: TypeAlias = Literal["", "region", "cloud"]
"""What lies between two places: nothing that is known of, a region's border, or a cloud's."""


@dataclass(frozen=True, slots=True)
class PriceTag:
    """The price of one GPU.

    Attributes:
        source: origin of the figure, and the instance type.
        as_of: when it held; None if the scenario states it.
        place: cloud and region (empty: unknown); None if the scenario states the price and no cloud.
    """

    usd_gpu_h: float
    source: str
    as_of: datetime | None = None
    place: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Pricing:
    """All prices of a scenario.

    Attributes:
        reserved: None: no strategy has reserved GPUs.
        on_demand: for GPUs that replace spot nodes; None: not needed.
        spot: None: the trace's price over time, or not needed.
        caveat: warning for the reader; empty: none.
    """

    reserved: PriceTag | None
    on_demand: PriceTag | None
    spot: PriceTag | None
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class MachineWish:
    """Which machines a pool may have; None: any."""

    cloud: str | None
    region: str | None
    machine: str | None
    gpus: int | None

    def takes(self, quote: Quote) -> bool:
        """Whether a quote is of such a machine; a price without a region holds in all regions."""
        return (
            self.cloud in {None, quote.cloud}
            and (self.region is None or quote.region in {"", self.region})
            and self.machine in {None, quote.instance_type}
            and self.gpus in {None, quote.gpus}
        )


@dataclass(frozen=True, slots=True)
class _PriceRequest:
    """One price that is wanted, of ``gpus`` GPUs; ``place`` of one that is stated."""

    pool: str
    key: str
    stated: float | None
    gpu_type: str
    gpus: int
    kind: str
    price: Callable[[Quote], float | None]
    wish: MachineWish
    place: tuple[str, str] | None


def pricing_of(
    scenario: ScenarioFile,
    *,
    reserved: bool = True,
    on_demand: bool,
    spot: bool,
    now: datetime,
    quotes: Sequence[Quote] | None = None,
) -> Pricing:
    """Look up the prices that the scenario does not state.

    Args:
        reserved: whether any strategy has reserved GPUs.
        on_demand: whether spot places need on-demand prices. The stated reserved price does not apply even
            for equal types: it may be a committed rate.
        spot: whether spot prices are needed.
        quotes: those of the scenario's source, already read; None reads them.

    Raises:
        PriceError: the source lacks a price or cannot be read; names the key that states it instead.
    """
    by_trace = isinstance(scenario.trace, TraceFile) and scenario.trace.use_prices
    wants = _wants(scenario, reserved=reserved, on_demand=on_demand, spot=spot and not by_trace)
    asked = {name: want for name, want in wants.items() if want.stated is None}
    unread: dict[str, str] = {}
    if asked and quotes is None:
        quotes = quotes_of(scenario, sorted({want.gpu_type for want in asked.values()}), now, unread)
    tags, together = _looked_up(asked, quotes or (), scenario)
    tags |= {
        name: PriceTag(want.stated, STATED, place=want.place)
        for name, want in wants.items()
        if want.stated is not None
    }
    caveats = ["" if together else _caveat(tags), _unread(unread)]
    caveat = "; ".join(filter(None, caveats))
    return Pricing(tags.get("reserved"), tags.get("on_demand"), tags.get("spot"), caveat)


def _unread(unread: Mapping[str, str]) -> str:
    if not unread:
        return ""
    _, why = next(iter(unread.items()))
    return f"prices of {', '.join(unread)} could not be read, and may be lower: {why.splitlines()[0]}"


def _looked_up(
    asked: Mapping[str, _PriceRequest], quotes: Sequence[Quote], scenario: ScenarioFile
) -> tuple[dict[str, PriceTag], bool]:
    """Tags, and whether those of pools that name no places of their own are of one place."""
    for want in asked.values():
        if not _priced(want, quotes):
            raise _missing(want, scenario, quotes)
    apart = len({(want.wish.cloud, want.wish.region) for want in asked.values()}) > 1
    tags: dict[str, PriceTag] = {}
    all_together = True
    for pools in [("reserved",), ("spot",)] if apart else [("reserved", "spot")]:
        group = {name: want for name, want in asked.items() if want.pool in pools}
        here = _place(list(group.values()), quotes)
        all_together = all_together and (bool(here) or not group)
        tags |= {name: _tag(want, here or quotes) for name, want in group.items()}
    return tags, all_together


def _caveat(tags: Mapping[str, PriceTag]) -> str:
    places = {name: tag.place for name, tag in tags.items() if tag.place}
    if len(set(places.values())) < 2:
        return ""
    listed = ", ".join(
        f"{name.replace('_', ' ')} in {' '.join(filter(None, at))}" for name, at in places.items()
    )
    return (
        f"no cloud and region has all prices, so they are of different ones ({listed}): set prices.cloud "
        "and prices.region, or those of cluster.reserved and cluster.spot, or state prices in cluster"
    )


def crossing_of(one: tuple[str, str] | None, other: tuple[str, str] | None) -> Crossing:
    """What lies between two places of cloud and region; unknown ones count as the same place."""
    if one is None or other is None or not one[0] or not other[0]:
        return ""
    if one[0] != other[0]:
        return "cloud"
    return "region" if one[1] and other[1] and one[1] != other[1] else ""


def quotes_of(
    scenario: ScenarioFile, gpus: Sequence[str], now: datetime, unread: dict[str, str]
) -> tuple[Quote, ...]:
    """Quotes of these GPU types from the scenario's price source. Raises :class:`PriceError`.

    Args:
        unread: takes the clouds whose prices could not be read, and why.
    """
    pools = scenario.cluster.reserved, scenario.cluster.spot
    clouds = {pool.cloud or scenario.prices.cloud for pool in pools}
    regions = {pool.region or scenario.prices.region for pool in pools}
    question = PriceQuery(
        gpus=tuple(gpus),
        clouds=tuple(sorted(cloud for cloud in clouds if cloud)) if None not in clouds else (),
        regions=tuple(sorted(region for region in regions if region)) if None not in regions else (),
        now=now,
        unread=unread,
    )
    return select(load_prices(scenario.prices.source, question), gpus=gpus)


def wish_of(prices: PricesSection, pool: Pool) -> MachineWish:
    """Which machines a pool may have."""
    return MachineWish(
        pool.cloud or prices.cloud,
        pool.region or prices.region,
        pool.machine or prices.instance_type,
        pool.gpus_per_node if prices.whole_machines else None,
    )


def _wants(
    scenario: ScenarioFile, *, reserved: bool, on_demand: bool, spot: bool
) -> dict[str, _PriceRequest]:
    fixed, coming = scenario.cluster.reserved, scenario.cluster.spot

    def want(
        name: str, pool: Pool, key: str, kind: str, of: Callable[[Quote], float | None]
    ) -> _PriceRequest:
        wish, gpus = wish_of(scenario.prices, pool), pool.nodes * pool.gpus_per_node
        stated: float | None = getattr(pool, key)
        place = (pool.cloud, pool.region or "") if pool.cloud else None
        return _PriceRequest(
            name, f"cluster.{name}.{key}", stated, pool.gpu_type, gpus, kind, of, wish, place
        )

    wants: dict[str, _PriceRequest] = {}
    if reserved:
        wants["reserved"] = want("reserved", fixed, "usd_gpu_h", "on-demand", _on_demand)
    if on_demand:
        wants["on_demand"] = want("spot", coming, "usd_gpu_h_on_demand", "on-demand", _on_demand)
    if spot:
        wants["spot"] = want("spot", coming, "usd_gpu_h", "spot", _spot)
    return wants


def _on_demand(quote: Quote) -> float | None:
    return quote.on_demand_usd_gpu_h


def _spot(quote: Quote) -> float | None:
    return quote.spot_usd_gpu_h


def _place(wants: Sequence[_PriceRequest], quotes: Sequence[Quote]) -> tuple[Quote, ...]:
    """Quotes of the cloud and region with the lowest total price; empty if none has all."""
    found: list[tuple[float, tuple[Quote, ...]]] = []
    for cloud, region in dict.fromkeys((quote.cloud, quote.region) for quote in quotes):
        # A price without a region holds in all regions.
        here = tuple(quote for quote in quotes if quote.cloud == cloud and quote.region in {region, ""})
        priced = [_priced(want, here) for want in wants]
        if all(priced):
            total = sum(
                want.gpus * min(usd for usd, _ in one) for want, one in zip(wants, priced, strict=True)
            )
            found.append((total, here))
    return min(found, key=lambda item: item[0])[1] if found else ()


def _tag(want: _PriceRequest, quotes: Sequence[Quote]) -> PriceTag:
    usd, quote = min(_priced(want, quotes), key=lambda item: item[0])
    where = " ".join(filter(None, (quote.cloud, quote.zone or quote.region, quote.instance_type)))
    caveat = f"; {quote.caveat}" if quote.caveat else ""
    source, place = f"{where}: {quote.source}{caveat}", (quote.cloud, quote.region)
    return PriceTag(usd, source, quote.as_of, place)


def _priced(want: _PriceRequest, quotes: Sequence[Quote]) -> list[tuple[float, Quote]]:
    return [
        (usd, quote)
        for quote in quotes
        if quote.gpu == want.gpu_type and want.wish.takes(quote) and (usd := want.price(quote))
    ]


def _missing(want: _PriceRequest, scenario: ScenarioFile, quotes: Sequence[Quote]) -> PriceError:
    wish = scenario.prices.model_dump(exclude_none=True, exclude={"whole_machines"})
    wish |= {key: value for key in ("cloud", "region") if (value := getattr(want.wish, key))}
    if want.wish.machine:
        wish["instance_type"] = want.wish.machine
    there = [
        f"{quote.instance_type} ({quote.gpus})"
        for quote in quotes
        if quote.gpu == want.gpu_type and replace(want.wish, gpus=None).takes(quote) and want.price(quote)
    ]
    found = f"prices: found no {want.kind} price of {want.gpu_type}"
    asked = f"with {', '.join(f'{key}={value}' for key, value in wish.items())}"
    if there:
        return PriceError(
            f"{found} on a machine of {want.wish.gpus} GPUs {asked}, only of "
            f"{', '.join(dict.fromkeys(there))}; expected a whole machine. Set "
            f"cluster.{want.pool}.gpus_per_node to one of these, state {want.key}, or set "
            "prices.whole_machines=false"
        )
    return PriceError(
        f"{found} {asked}; expected one. State it as {want.key}, or see what there is: "
        f"spotlight prices --gpu {want.gpu_type}"
    )
