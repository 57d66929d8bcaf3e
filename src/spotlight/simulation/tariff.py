"""What a GPU of a scenario costs, and on whose word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from spotlight.fleet.prices.quotes import PriceError, Quote, select
from spotlight.fleet.prices.sources import Question, load_prices
from spotlight.simulation.scenario_file import ScenarioFile, TraceFile

STATED = "stated in the scenario"


@dataclass(frozen=True, slots=True)
class PriceTag:
    """The price of one GPU.

    Attributes:
        source: whose figure it is, and of which machine.
        as_of: when it held; None where the scenario states it.
    """

    usd_gpu_h: float
    source: str
    as_of: datetime | None = None


@dataclass(frozen=True, slots=True)
class Tariff:
    """All prices of a scenario.

    Attributes:
        reserved: of a reserved GPU.
        on_demand: of a GPU that stands in a spot node's place, and stays; None: nobody asks.
        spot: None: what the trace says, at every moment; or nobody asks.
    """

    reserved: PriceTag
    on_demand: PriceTag | None
    spot: PriceTag | None


@dataclass(frozen=True, slots=True)
class _Want:
    """One price that is wanted.

    Attributes:
        key: of the scenario, that states it.
        stated: what that key says.
        kind: as an error calls it.
        price: it, of a quote.
    """

    key: str
    stated: float | None
    gpu_type: str
    kind: str
    price: Callable[[Quote], float | None]


def tariff_of(scenario: ScenarioFile, *, on_demand: bool, spot: bool, now: datetime) -> Tariff:
    """Look up what the scenario does not state.

    Args:
        on_demand: spot places are also wanted on demand. A price stated for reserved GPUs is not theirs,
            even if the types are equal: it may be a committed rate.
        spot: spot nodes are wanted.

    Raises:
        PriceError: the source has no such price, or cannot be read; names the key that states it instead.
    """
    fixed, coming = scenario.cluster.reserved, scenario.cluster.spot
    by_trace = isinstance(scenario.trace, TraceFile) and scenario.trace.use_prices
    wants = {
        "reserved": _Want(
            "cluster.reserved.usd_gpu_h", fixed.usd_gpu_h, fixed.gpu_type, "on-demand", _on_demand
        )
    }
    if on_demand:
        key = "cluster.spot.usd_gpu_h_on_demand"
        wants["on_demand"] = _Want(key, coming.usd_gpu_h_on_demand, coming.gpu_type, "on-demand", _on_demand)
    if spot and not by_trace:
        wants["spot"] = _Want("cluster.spot.usd_gpu_h", coming.usd_gpu_h, coming.gpu_type, "spot", _spot)
    asked = sorted({want.gpu_type for want in wants.values() if want.stated is None})
    quotes = quotes_of(scenario, asked, now) if asked else ()
    tags = {name: _tag(want, quotes, scenario) for name, want in wants.items()}
    return Tariff(tags["reserved"], tags.get("on_demand"), tags.get("spot"))


def quotes_of(scenario: ScenarioFile, gpus: Sequence[str], now: datetime) -> tuple[Quote, ...]:
    """Quotes of GPU types by the scenario's section ``prices``. Raises :class:`PriceError`."""
    wish = scenario.prices
    clouds = () if wish.cloud is None else (wish.cloud,)
    regions = () if wish.region is None else (wish.region,)
    question = Question(gpus=tuple(gpus), clouds=clouds, regions=regions, now=now)
    found = select(load_prices(wish.source, question), gpus=gpus, clouds=clouds, regions=regions)
    return tuple(quote for quote in found if wish.instance_type in {None, quote.instance_type})


def _on_demand(quote: Quote) -> float | None:
    return quote.on_demand_usd_gpu_h


def _spot(quote: Quote) -> float | None:
    return quote.spot_usd_gpu_h


def _tag(want: _Want, quotes: Sequence[Quote], scenario: ScenarioFile) -> PriceTag:
    """What the scenario states, else the cheapest quote."""
    if want.stated is not None:
        return PriceTag(want.stated, STATED)
    priced = _priced(want, quotes)
    if not priced:
        wish = scenario.prices.model_dump(exclude_none=True)
        raise PriceError(
            f"prices: found no {want.kind} price of {want.gpu_type} with "
            f"{', '.join(f'{key}={value}' for key, value in wish.items())}; expected one. State it as "
            f"{want.key}, or see what there is: spotlight prices --gpu {want.gpu_type}"
        )
    usd, quote = min(priced, key=lambda item: item[0])
    place = " ".join(filter(None, (quote.cloud, quote.zone or quote.region, quote.instance_type)))
    caveat = f"; {quote.caveat}" if quote.caveat else ""
    return PriceTag(usd, f"{place}: {quote.source}{caveat}", quote.as_of)


def _priced(want: _Want, quotes: Sequence[Quote]) -> list[tuple[float, Quote]]:
    """Quotes that answer a want, with their price."""
    return [(usd, quote) for quote in quotes if quote.gpu == want.gpu_type and (usd := want.price(quote))]
