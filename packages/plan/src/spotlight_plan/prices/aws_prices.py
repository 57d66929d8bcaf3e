"""AWS spot prices via ``DescribeSpotPriceHistory``. Needs boto3 (extra ``aws``) and credentials.

The API has no on-demand prices; take them from a catalogue. Queries cover Linux GPU instances
(``spotlight_fleet.gpus``) in the given regions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from spotlight_fleet.gpus import instance_types
from spotlight_plan.prices.fetch import FetchLimits
from spotlight_plan.prices.quotes import PriceError, Quote, refuse

if TYPE_CHECKING:
    from spotlight_plan.prices.sources import PriceQuery

NAME = "aws"
REGIONS = ("us-east-1", "us-east-2", "us-west-2")
"""Default regions: one call each."""

_OPERATION = "describe_spot_price_history"
_PRODUCT = "Linux/UNIX"
_RECORDS_MAX = 100_000


class _Paginator(Protocol):
    def paginate(self, **arguments: object) -> Iterable[Mapping[str, object]]: ...


class SpotClient(Protocol):
    """The part of boto3's EC2 client that is used."""

    def get_paginator(self, operation_name: str) -> _Paginator:
        """See boto3."""
        ...


Connect = Callable[[str, FetchLimits], SpotClient]


def connect(region: str, limits: FetchLimits) -> SpotClient:
    """EC2 client of a region. Raises :class:`PriceError` without boto3."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise _without_boto3() from None
    config = Config(
        connect_timeout=limits.idle_s, read_timeout=limits.idle_s, retries={"total_max_attempts": 2}
    )
    client: SpotClient = boto3.client("ec2", region_name=region, config=config)
    return client


def _without_boto3() -> PriceError:
    return PriceError(
        "aws: boto3 is not installed; expected it for AWS's spot prices. Run: pip install 'spotlight-rl[aws]'"
    )


def prices(question: PriceQuery) -> tuple[Quote, ...]:
    """Prices in the requested regions, cached while fresh. Raises :class:`PriceError`."""
    regions = question.regions or REGIONS
    return question.cache.quotes(
        f"aws {' '.join(regions)}",
        lambda: fetch_records(regions, question.limits, question.now),
        parse_records,
        question.now,
    )


def fetch_records(
    regions: Sequence[str], limits: FetchLimits, now: datetime, client: Connect = connect
) -> list[str]:
    """Current prices, one JSON list per region. Raises :class:`PriceError`."""
    return [json.dumps({"region": region, "prices": _ask(region, limits, now, client)}) for region in regions]


def _ask(region: str, limits: FetchLimits, now: datetime, client: Connect) -> list[dict[str, str]]:
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise _without_boto3() from None
    records: list[dict[str, str]] = []
    try:
        pages = (
            client(region, limits)
            .get_paginator(_OPERATION)
            .paginate(
                InstanceTypes=[machine.name for machine in instance_types("aws")],
                ProductDescriptions=[_PRODUCT],
                StartTime=now,  # starting now returns the prices in effect
            )
        )
        for page in pages:
            found = page.get("SpotPriceHistory", [])
            assert isinstance(found, list)  # botocore validates by AWS's schema
            records += [{key: str(value) for key, value in record.items()} for record in found]
            if len(records) > _RECORDS_MAX:
                raise PriceError(f"aws, {region}: over {_RECORDS_MAX} prices; expected fewer. Try later.")
    except (BotoCoreError, ClientError) as error:
        raise PriceError(
            f"aws, {region}: {error}; expected the spot prices in effect. Check credentials, the permission "
            "ec2:DescribeSpotPriceHistory and the region's name."
        ) from None
    return records


def parse_records(texts: Sequence[str], as_of: datetime, source: str = NAME) -> tuple[Quote, ...]:
    """Latest price of each instance type and zone. Raises :class:`PriceError`."""
    machines = {machine.name: machine for machine in instance_types("aws")}
    newest: dict[tuple[str, str], tuple[datetime, Quote]] = {}
    problems: list[str] = []
    for text in texts:
        region, records = _region(text, source)
        for index, record in enumerate(records):
            where = f"{region}, SpotPriceHistory[{index}]"
            machine = machines.get(record.get("InstanceType", ""))
            usd_h, since = _number(record.get("SpotPrice")), _time(record.get("Timestamp"))
            zone = record.get("AvailabilityZone")
            if machine is None:
                found = record.get("InstanceType")
                problems.append(f"{where}: InstanceType is {found!r}; expected one that was asked for")
            elif usd_h is None:
                problems.append(f"{where}: SpotPrice is {record.get('SpotPrice')!r}; expected $/h above 0")
            elif since is None or not zone:
                problems.append(
                    f"{where}: Timestamp is {record.get('Timestamp')!r} and AvailabilityZone {zone!r}; "
                    "expected both"
                )
            elif (key := (machine.name, zone)) not in newest or newest[key][0] < since:
                quote = Quote(
                    "aws", region, zone, machine.name, machine.gpu, machine.gpus, None, usd_h, as_of, source
                )
                newest[key] = (since, quote)
    if problems:
        raise refuse(source, problems)
    return tuple(quote for _, quote in newest.values())


def _region(text: str, source: str) -> tuple[str, list[dict[str, str]]]:
    try:
        answer: object = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        region, prices = answer.get("region"), answer.get("prices")
        if isinstance(region, str) and isinstance(prices, list):
            return region, [record for record in prices if isinstance(record, dict)]
    raise PriceError(f"{source}: {text[:80]!r}; expected a region and its prices")


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None
