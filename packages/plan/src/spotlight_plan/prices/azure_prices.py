"""Azure retail prices: public, paged JSON, no account needed.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. Queries cover Linux
GPU instances (``spotlight_fleet.gpus``) in US dollars. Unrequested instances, other units or currencies,
and page links that leave the server or loop are errors that name page and item.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spotlight_fleet.gpus import InstanceType, instance_types
from spotlight_plan.prices.fetch import FetchLimits, get_text
from spotlight_plan.prices.quotes import PriceError, Quote, refuse

if TYPE_CHECKING:
    from spotlight_plan.prices.sources import PriceQuery

URL = "https://prices.azure.com/api/retail/prices"
NAME = "azure"
_PAGES_MAX = 200


class _BadItemError(Exception):
    """An invalid item."""


@dataclass(frozen=True, slots=True)
class _Price:
    """One meter: an on-demand or spot price in one region."""

    machine: InstanceType
    region: str
    spot: bool
    usd_h: float
    since: str


def prices(question: PriceQuery) -> tuple[Quote, ...]:
    """Prices in the requested regions, cached while fresh. Raises :class:`PriceError`."""
    return question.cache.quotes(
        f"azure {URL} {' '.join(question.regions)}",
        lambda: fetch_pages(question.regions, question.limits, URL),
        parse_pages,
        question.now,
    )


def fetch_pages(regions: Sequence[str], limits: FetchLimits, url: str = URL) -> list[str]:
    """All pages as text; empty ``regions``: all regions. Raises :class:`PriceError`."""
    pages: list[str] = []
    params: dict[str, str] | None = {"$filter": _filter(regions)}
    seen: set[str] = set()
    following = url
    while following:
        if following in seen or len(pages) >= _PAGES_MAX:
            found = f"page {len(pages) + 1} is linked twice" if following in seen else f"{_PAGES_MAX} pages"
            raise PriceError(f"{url}: {found}; expected a list of pages that ends. Try later.")
        seen.add(following)
        pages.append(get_text(following, limits, params))
        params = None  # links include the filter
        following = _next_page(pages[-1], len(pages), url)
    return pages


def parse_pages(pages: Sequence[str], as_of: datetime, source: str = NAME) -> tuple[Quote, ...]:
    """Merge on-demand and spot prices per instance type. Raises :class:`PriceError`."""
    found: dict[tuple[str, str, bool], _Price] = {}
    problems: list[str] = []
    for number, text in enumerate(pages, start=1):
        items = _page(text, number, source)["Items"]
        assert isinstance(items, list)
        for index, item in enumerate(items):
            try:
                for price in _read_item(item):
                    key = (price.machine.name, price.region, price.spot)
                    # Meters of one instance type supersede each other: the newest is billed.
                    if key not in found or found[key].since < price.since:
                        found[key] = price
            except _BadItemError as error:
                problems.append(f"page {number}, Items[{index}]: {error}")
    if problems:
        raise refuse(source, problems)
    return tuple(_quotes(found, as_of, source))


def _filter(regions: Sequence[str]) -> str:
    machines = " or ".join(f"armSkuName eq '{machine.name}'" for machine in instance_types("azure"))
    clauses = ["serviceName eq 'Virtual Machines'", "priceType eq 'Consumption'", f"({machines})"]
    if regions:
        for region in regions:
            if not region.isalnum():
                raise PriceError(f"region {region!r}; expected letters and digits, such as eastus")
        clauses.append("(" + " or ".join(f"armRegionName eq '{region}'" for region in regions) + ")")
    return " and ".join(clauses)


def _page(text: str, number: int, source: str) -> Mapping[str, object]:
    try:
        page: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PriceError(f"{source}, page {number}: no JSON ({error}); expected Items. Try later.") from None
    if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
        raise PriceError(f"{source}, page {number}: {text[:80]!r}; expected an object with a list of Items")
    count = page.get("Count", len(page["Items"]))
    if count != len(page["Items"]):
        raise PriceError(
            f"{source}, page {number}: {len(page['Items'])} Items; expected its Count, {count!r}"
        )
    return page


def _next_page(text: str, number: int, url: str) -> str:
    link = _page(text, number, url).get("NextPageLink")
    if link is None or link == "":
        return ""
    if not isinstance(link, str) or _origin(link) != _origin(url):
        raise PriceError(f"{url}: page {number} links to {link!r}; expected a page of the same server")
    return link


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", None, None


def _read_item(item: object) -> Iterator[_Price]:
    """An item's price; nothing for Windows, Low Priority, and meters that are not billed."""
    if not isinstance(item, dict):
        raise _BadItemError(f"{item!r:.80}; expected an object")
    product, meter = _text(item, "productName"), _text(item, "skuName")
    if "Windows" in product or "Low Priority" in meter or item.get("isPrimaryMeterRegion") is False:
        return
    if item.get("type", "Consumption") != "Consumption":
        return
    name = _text(item, "armSkuName")
    machine = next((known for known in instance_types("azure") if known.name == name), None)
    if machine is None:
        raise _BadItemError(f"armSkuName is {name!r}; expected one of the machines asked for")
    for key, expected in (("currencyCode", "USD"), ("unitOfMeasure", "1 Hour")):
        if _text(item, key) != expected:
            raise _BadItemError(f"{key} of {name} is {item[key]!r}; expected {expected!r}")
    usd_h = item.get("retailPrice")
    if isinstance(usd_h, bool) or not isinstance(usd_h, int | float) or not 0 < usd_h <= sys.float_info.max:
        raise _BadItemError(f"retailPrice of {name} is {usd_h!r:.80}; expected a number of $/h above 0")
    since = _text(item, "effectiveStartDate")
    try:
        datetime.fromisoformat(since)
    except ValueError:
        raise _BadItemError(f"effectiveStartDate of {name} is {since!r}; expected a date") from None
    yield _Price(machine, _text(item, "armRegionName"), meter.endswith("Spot"), float(usd_h), since)


def _text(item: Mapping[str, object], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise _BadItemError(f"{key} is {value!r}; expected a text")
    return value


def _quotes(found: Mapping[tuple[str, str, bool], _Price], as_of: datetime, source: str) -> Iterator[Quote]:
    for name, region in sorted({(name, region) for name, region, _ in found}):
        on_demand, spot = found.get((name, region, False)), found.get((name, region, True))
        machine = next(price.machine for price in (on_demand, spot) if price is not None)
        yield Quote(
            cloud="azure",
            region=region,
            zone="",
            instance_type=name,
            gpu=machine.gpu,
            gpus=machine.gpus,
            on_demand_usd_h=on_demand.usd_h if on_demand else None,
            spot_usd_h=spot.usd_h if spot else None,
            as_of=as_of,
            source=source,
        )
