"""Price sources by name: catalogues, and the price lists of :data:`spotlight_fleet.notices.registry.CLOUDS`.

``builtin`` | ``azure`` | ``aws`` | ``skypilot`` | ``CLOUD=FILE.csv`` | ``CLOUD=https://...csv``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from spotlight_fleet.notices.registry import CLOUDS
from spotlight_plan.prices import skypilot_prices
from spotlight_plan.prices.cache import PriceCache, default_directory
from spotlight_plan.prices.catalogue import BUILT_IN, built_in, parse_catalogue
from spotlight_plan.prices.fetch import FetchLimits, get_text
from spotlight_plan.prices.quotes import PriceError, Quote
from spotlight_rewards.registry import resolve


@dataclass(frozen=True, slots=True)
class PriceQuery:
    """A price query.

    Attributes:
        gpus: empty: all. Catalogues parse only these.
        clouds: catalogues to fetch; empty: all.
        regions: empty: all; on AWS, ``aws_prices.REGIONS``.
        unread: filled by sources of several clouds: those without prices here, and why.
    """

    gpus: tuple[str, ...] = ()
    clouds: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    cache: PriceCache = field(default_factory=lambda: PriceCache(default_directory()))
    limits: FetchLimits = field(default_factory=FetchLimits)
    unread: dict[str, str] = field(default_factory=dict)


def load_prices(source: str, question: PriceQuery) -> tuple[Quote, ...]:
    """Prices of a source: at least those requested.

    Raises:
        PriceError: an unknown or unreadable source.
        UnknownGpuError: an unknown GPU type.
    """
    if source in _CATALOGUES:
        return _CATALOGUES[source](question)
    if "=" not in source and source in CLOUDS and (prices := _prices_of(source)) is not None:
        return prices(question)
    cloud, separator, place = source.partition("=")
    if separator and cloud.isidentifier() and place:
        if place.startswith(("http://", "https://")):
            return _published(cloud, place, question)
        return _file(cloud, Path(place), question)
    named = [*_CATALOGUES, *(cloud for cloud in CLOUDS if _prices_of(cloud) is not None)]
    raise PriceError(
        f"source {source!r}; expected {', '.join(named)}, or CLOUD=FILE.csv or CLOUD=URL for a catalogue "
        "in SkyPilot's form, such as aws=vms.csv"
    )


def _builtin(question: PriceQuery) -> tuple[Quote, ...]:
    return built_in()


def _prices_of(cloud: str) -> _PriceList | None:
    prices = CLOUDS.load(cloud).prices
    return resolve(prices) if isinstance(prices, str) else prices


def _published(cloud: str, url: str, question: PriceQuery) -> tuple[Quote, ...]:
    def read(texts: Sequence[str], came: datetime) -> tuple[Quote, ...]:
        return parse_catalogue(texts[0], cloud=cloud, source=url, as_of=came, gpus=question.gpus)

    key = f"catalogue {cloud} {url}"
    return question.cache.quotes(key, lambda: [get_text(url, question.limits)], read, question.now)


def _file(cloud: str, path: Path, question: PriceQuery) -> tuple[Quote, ...]:
    """A catalogue on disk, dated by the file's modification time."""
    try:
        text = path.read_text(encoding="utf-8")
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise PriceError(f"{path}: {error.strerror}; expected a CSV file of prices") from None
    except UnicodeDecodeError as error:
        raise PriceError(f"{path}: byte {error.start} is no text; expected a CSV file in UTF-8") from None
    return parse_catalogue(text, cloud=cloud, source=str(path), as_of=written, gpus=question.gpus)


_PriceList = Callable[[PriceQuery], tuple[Quote, ...]]
_CATALOGUES: Mapping[str, _PriceList] = {BUILT_IN: _builtin, skypilot_prices.NAME: skypilot_prices.prices}
