"""What a GPU of a scenario costs, and on whose word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from spotlight.fleet.prices.quotes import PriceError, Quote, select
from spotlight.fleet.prices.sources import Question, load_prices
from spotlight.simulation.scenario_file import Pool, ScenarioFile, TraceFile

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
        on_demand: of a GPU that stands in a spot node's place, and stays.
        spot: None: what the trace says, at every moment; or nobody asks.
    """

    reserved: PriceTag
    on_demand: PriceTag | None
    spot: PriceTag | None


def tariff_of(scenario: ScenarioFile, *, on_demand: bool, spot: bool, now: datetime) -> Tariff:
    """Look up what the scenario does not state.

    Args:
        on_demand: spot places are also wanted on demand.
        spot: spot nodes are wanted.

    Raises:
        PriceError: the source has no such price, or cannot be read; names the key that states it instead.
    """
    cluster = scenario.cluster
    by_trace = isinstance(scenario.trace, TraceFile) and scenario.trace.use_prices
    same = cluster.spot.gpu_type == cluster.reserved.gpu_type
    asks_spot = spot and not by_trace and cluster.spot.usd_gpu_h is None
    wanted = {cluster.reserved.gpu_type} if cluster.reserved.usd_gpu_h is None else set()
    if asks_spot or (on_demand and not same):
        wanted.add(cluster.spot.gpu_type)
    quotes = quotes_of(scenario, sorted(wanted), now) if wanted else ()
    reserved = _tag(cluster.reserved, quotes, "reserved", _on_demand, scenario)
    return Tariff(
        reserved=reserved,
        on_demand=_place(cluster.spot, reserved, quotes, same, scenario) if on_demand else None,
        spot=_tag(cluster.spot, quotes, "spot", _spot, scenario) if spot and not by_trace else None,
    )


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


def _place(
    spot: Pool, reserved: PriceTag, quotes: Sequence[Quote], same: bool, scenario: ScenarioFile
) -> PriceTag:
    if same:
        return reserved
    bare = spot.model_copy(update={"usd_gpu_h": None})
    return _tag(bare, quotes, "reserved", _on_demand, scenario)


def _tag(
    pool: Pool,
    quotes: Sequence[Quote],
    name: str,
    price: Callable[[Quote], float | None],
    scenario: ScenarioFile,
) -> PriceTag:
    """The cheapest price of a pool's GPU type."""
    if pool.usd_gpu_h is not None:
        return PriceTag(pool.usd_gpu_h, STATED)
    priced = [(usd, quote) for quote in quotes if quote.gpu == pool.gpu_type and (usd := price(quote))]
    if not priced:
        wish = scenario.prices.model_dump(exclude_none=True)
        raise PriceError(
            f"prices: found no {'spot' if name == 'spot' else 'on-demand'} price of {pool.gpu_type} with "
            f"{', '.join(f'{key}={value}' for key, value in wish.items())}; expected one. State it as "
            f"cluster.{name}.usd_gpu_h, or see what there is: spotlight prices --gpu {pool.gpu_type}"
        )
    usd, quote = min(priced, key=lambda item: item[0])
    place = " ".join(filter(None, (quote.cloud, quote.zone or quote.region, quote.instance_type)))
    caveat = f"; {quote.caveat}" if quote.caveat else ""
    return PriceTag(usd, f"{place}: {quote.source}{caveat}", quote.as_of)
