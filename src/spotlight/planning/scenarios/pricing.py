"""GPU prices of a scenario, with their sources.

Looked-up prices are all of one cloud and region, since rollouts do not cross clouds: the place where all GPUs
together cost least. If none has them all, each price is the lowest anywhere and :attr:`Pricing.caveat` says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from spotlight.planning.prices.quotes import PriceError, Quote, select
from spotlight.planning.prices.sources import PriceQuery, load_prices
from spotlight.planning.scenarios.scenario_file import ClusterSection, ScenarioFile, TraceFile

STATED = "stated in the scenario"


@dataclass(frozen=True, slots=True)
class PriceTag:
    """The price of one GPU.

    Attributes:
        source: origin of the figure, and the instance type.
        as_of: when it held; None if the scenario states it.
        place: cloud and region (empty: unknown); None if the scenario states the price.
    """

    usd_gpu_h: float
    source: str
    as_of: datetime | None = None
    place: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Pricing:
    """All prices of a scenario.

    Attributes:
        on_demand: for GPUs that replace spot nodes; None: not needed.
        spot: None: the trace's price over time, or not needed.
        caveat: warning for the reader; empty: none.
    """

    reserved: PriceTag
    on_demand: PriceTag | None
    spot: PriceTag | None
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class _PriceRequest:
    key: str
    stated: float | None
    gpu_type: str
    gpus: int
    kind: str
    price: Callable[[Quote], float | None]


def pricing_of(scenario: ScenarioFile, *, on_demand: bool, spot: bool, now: datetime) -> Pricing:
    """Look up the prices that the scenario does not state.

    Args:
        on_demand: whether spot places need on-demand prices. The stated reserved price does not apply even
            for equal types: it may be a committed rate.
        spot: whether spot prices are needed.

    Raises:
        PriceError: the source lacks a price or cannot be read; names the key that states it instead.
    """
    by_trace = isinstance(scenario.trace, TraceFile) and scenario.trace.use_prices
    wants = _wants(scenario.cluster, on_demand=on_demand, spot=spot and not by_trace)
    asked = [want for want in wants.values() if want.stated is None]
    quotes = quotes_of(scenario, sorted({want.gpu_type for want in asked}), now) if asked else ()
    for want in asked:
        if not _priced(want, quotes):
            raise _missing(want, scenario)
    together = _place(asked, quotes)
    tags = {name: _tag(want, together or quotes) for name, want in wants.items()}
    caveat = ""
    if not together and len({tag.place for tag in tags.values() if tag.place}) > 1:
        places = ", ".join(
            f"{name.replace('_', ' ')} in {' '.join(filter(None, tag.place))}"
            for name, tag in tags.items()
            if tag.place
        )
        caveat = (
            f"no cloud and region has all prices, so they are of different ones ({places}): set prices.cloud "
            "and prices.region, or state prices in cluster"
        )
    return Pricing(tags["reserved"], tags.get("on_demand"), tags.get("spot"), caveat)


def _wants(cluster: ClusterSection, *, on_demand: bool, spot: bool) -> dict[str, _PriceRequest]:
    fixed, coming = cluster.reserved, cluster.spot
    rented, places = fixed.nodes * fixed.gpus_per_node, coming.nodes * coming.gpus_per_node
    key = "cluster.reserved.usd_gpu_h"
    wants = {"reserved": _PriceRequest(key, fixed.usd_gpu_h, fixed.gpu_type, rented, "on-demand", _on_demand)}
    if on_demand:
        key, stated = "cluster.spot.usd_gpu_h_on_demand", coming.usd_gpu_h_on_demand
        wants["on_demand"] = _PriceRequest(key, stated, coming.gpu_type, places, "on-demand", _on_demand)
    if spot:
        key = "cluster.spot.usd_gpu_h"
        wants["spot"] = _PriceRequest(key, coming.usd_gpu_h, coming.gpu_type, places, "spot", _spot)
    return wants


def quotes_of(scenario: ScenarioFile, gpus: Sequence[str], now: datetime) -> tuple[Quote, ...]:
    """Quotes of these GPU types from the scenario's price source. Raises :class:`PriceError`."""
    wish = scenario.prices
    clouds = () if wish.cloud is None else (wish.cloud,)
    regions = () if wish.region is None else (wish.region,)
    question = PriceQuery(gpus=tuple(gpus), clouds=clouds, regions=regions, now=now)
    found = select(load_prices(wish.source, question), gpus=gpus, clouds=clouds, regions=regions)
    return tuple(quote for quote in found if wish.instance_type in {None, quote.instance_type})


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
    if want.stated is not None:
        return PriceTag(want.stated, STATED)
    usd, quote = min(_priced(want, quotes), key=lambda item: item[0])
    where = " ".join(filter(None, (quote.cloud, quote.zone or quote.region, quote.instance_type)))
    caveat = f"; {quote.caveat}" if quote.caveat else ""
    return PriceTag(usd, f"{where}: {quote.source}{caveat}", quote.as_of, (quote.cloud, quote.region))


def _priced(want: _PriceRequest, quotes: Sequence[Quote]) -> list[tuple[float, Quote]]:
    return [(usd, quote) for quote in quotes if quote.gpu == want.gpu_type and (usd := want.price(quote))]


def _missing(want: _PriceRequest, scenario: ScenarioFile) -> PriceError:
    wish = scenario.prices.model_dump(exclude_none=True)
    return PriceError(
        f"prices: found no {want.kind} price of {want.gpu_type} with "
        f"{', '.join(f'{key}={value}' for key, value in wish.items())}; expected one. State it as "
        f"{want.key}, or see what there is: spotlight prices --gpu {want.gpu_type}"
    )
