"""CSV price catalogues in SkyPilot's format, and the built-in table, which adds two columns.

Pure. Column order is free. Prices that are not positive numbers, instances without any price, and unknown GPU
types are errors with line numbers. Instances with no GPU, other accelerators, or a fraction of a GPU are
skipped.

GCP lists instance and GPU prices in separate rows. They are added where the instance type has fixed GPUs
(``spotlight_fleet.gpus``); GPUs that attach to any instance (T4, V100) are skipped.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.resources import files

from spotlight_fleet.gpus import (
    GPU_TYPES,
    gpu_type,
    instance_types,
    is_other_accelerator,
    unknown_gpu,
)
from spotlight_plan.prices.quotes import PriceError, Quote, refuse

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price")
OPTIONAL_COLUMNS = ("Region", "AvailabilityZone", "SpotPrice")
"""Not in the catalogue of every cloud: some have one place, no zones, or no spot machines."""
_BUILT_IN_COLUMNS = (*COLUMNS, "Region", "SpotPrice", "Cloud", "AsOf", "Source")
BUILT_IN = "builtin"


class _BadRowError(Exception):
    """An invalid row."""


@dataclass(frozen=True, slots=True)
class _CatalogueRow:
    """A validated row; ``gpu`` is empty for an instance without one."""

    line: int
    instance_type: str
    gpu: str
    gpus: int
    region: str
    zone: str
    on_demand_usd_h: float | None
    spot_usd_h: float | None


def parse_catalogue(
    text: str,
    *,
    cloud: str,
    source: str,
    as_of: datetime,
    gpus: Collection[str] = (),
    skipped: list[str] | None = None,
) -> tuple[Quote, ...]:
    """Read one cloud's catalogue.

    Args:
        text: CSV with at least :data:`COLUMNS`; :data:`OPTIONAL_COLUMNS` are read where they are.
        cloud: ``gcp`` adds instance and GPU rows.
        source: name in messages and in every price.
        as_of: when the prices held, with time zone.
        gpus: read only rows of these types, ignoring errors in others; empty: all.
        skipped: takes the problems of malformed rows, which are then left out; None: they are errors.

    Raises:
        PriceError: missing columns, malformed rows (up to ten are listed), no price at all.
        UnknownGpuError: ``gpus`` names an unknown type.
    """
    gpus = [gpu_type(name).name for name in gpus]
    rows: list[_CatalogueRow] = []
    problems: list[str] = []
    for line, record in _records(text, source, COLUMNS):
        try:
            row = _row(line, dict.fromkeys(OPTIONAL_COLUMNS, "") | record, gpus, machines=cloud == "gcp")
        except _BadRowError as error:
            problems.append(f"{source}:{line}: {error}")
            continue
        if row is not None:
            rows.append(row)
    machines = [row for row in rows if row.gpu and row.instance_type]
    if cloud == "gcp" and (not problems or skipped is not None):
        try:
            machines += _with_their_machines(rows)
        except _BadRowError as error:
            problems.append(f"{source}:{error}")
    if problems and skipped is None:
        raise refuse(source, problems, "Correct these lines, or read only the GPU types you need.")
    if skipped is not None:
        skipped += problems
    if not machines and not gpus:
        raise PriceError(f"{source}: no row has the price of a machine with GPUs; expected at least one")
    return tuple(_quote(row, cloud, source, as_of) for row in machines)


def built_in() -> tuple[Quote, ...]:
    """The bundled table; each row has its own date and source."""
    path = files("spotlight_plan.prices").joinpath("builtin.csv")
    return parse_built_in(path.read_text(encoding="utf-8"), BUILT_IN)


def parse_built_in(text: str, source: str) -> tuple[Quote, ...]:
    """Read a catalogue with cloud, date and source in each row. Raises :class:`PriceError`."""
    quotes: list[Quote] = []
    problems: list[str] = []
    for line, record in _records(text, source, _BUILT_IN_COLUMNS):
        try:
            row = _row(line, record | {"AvailabilityZone": ""}, (), machines=False)
            if row is None:
                raise _BadRowError("no GPU; expected a machine with GPUs")
            as_of = _day(record["AsOf"])
            if not record["Cloud"] or not record["Source"]:
                raise _BadRowError("Cloud or Source is empty; expected both")
            quotes.append(_quote(row, record["Cloud"], f"{source}: {record['Source']}", as_of))
        except _BadRowError as error:
            problems.append(f"{source}:{line}: {error}")
    if problems:
        raise refuse(source, problems)
    return tuple(quotes)


def _records(text: str, source: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")), restkey="", restval=None)
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            found = ", ".join(reader.fieldnames or ()) or "an empty file"
            raise PriceError(f"{source}:1: no column {', '.join(missing)}; found {found[:200]}")
        for record in reader:
            if None in record.values() or "" in record:
                there = sum(value is not None for value in record.values())
                values = "more" if "" in record else str(there)
                expected = len(reader.fieldnames or ())
                raise PriceError(f"{source}:{reader.line_num}: {values} values; expected {expected}")
            yield reader.line_num, {key: value.strip() for key, value in record.items()}
    except csv.Error as error:
        raise PriceError(f"{source}:{reader.line_num}: no CSV ({error})") from None


def _row(line: int, record: dict[str, str], gpus: Collection[str], *, machines: bool) -> _CatalogueRow | None:
    """Validate a row; None if it is to be skipped. ``machines`` includes instances without GPUs."""
    gpu = record["AcceleratorName"]
    wanted = (not gpus or gpu in gpus) if gpu else machines
    if not wanted or is_other_accelerator(gpu):
        return None
    if gpu and gpu not in GPU_TYPES:
        raise _BadRowError(f"AcceleratorName: {unknown_gpu(gpu)}")
    count = _count(record["AcceleratorCount"]) if gpu else 0
    if count is None:
        return None
    on_demand, spot = _price(record, "Price"), _price(record, "SpotPrice")
    if on_demand is None and spot is None:
        if not gpu:  # instances that nobody requested may lack a price
            return None
        raise _BadRowError("Price and SpotPrice are both empty; expected a number of $/h in at least one")
    zone = record["AvailabilityZone"]
    place = record["Region"], "" if zone == record["Region"] else zone
    return _CatalogueRow(line, record["InstanceType"], gpu, count, *place, on_demand, spot)


def _count(text: str) -> int | None:
    """GPUs of an instance; None for a fraction of one."""
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not count > 0 or not math.isfinite(count) or (count > 1 and count != int(count)):
        raise _BadRowError(f"AcceleratorCount is {text!r}; expected a whole number of at least 1")
    return int(count) if count >= 1 else None


def _price(record: dict[str, str], column: str) -> float | None:
    text = record[column]
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise _BadRowError(f"{column} is {text!r}; expected a number of $/h above 0, or nothing")
    return price


def _day(text: str) -> datetime:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise _BadRowError(f"AsOf is {text!r}; expected a day such as 2026-06-01") from None
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _with_their_machines(rows: Sequence[_CatalogueRow]) -> Iterator[_CatalogueRow]:
    """GCP: add the instance price to each matching GPU row."""
    bare = {(row.instance_type, row.region, row.zone): row for row in rows if not row.gpu}
    for row in rows:
        if row.instance_type or not row.gpu:
            continue
        for machine in instance_types("gcp"):
            host = bare.get((machine.name, row.region, row.zone))
            if host is None or (machine.gpu, machine.gpus) != (row.gpu, row.gpus):
                continue
            on_demand = _sum(host.on_demand_usd_h, row.on_demand_usd_h)
            spot = _sum(host.spot_usd_h, row.spot_usd_h)
            if on_demand is None and spot is None:
                raise _BadRowError(
                    f"{row.line}: machine {machine.name} (line {host.line}) and its GPUs have no price of "
                    "one kind in common; expected Price or SpotPrice in both rows"
                )
            yield _CatalogueRow(
                row.line, machine.name, row.gpu, row.gpus, row.region, row.zone, on_demand, spot
            )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _quote(row: _CatalogueRow, cloud: str, source: str, as_of: datetime) -> Quote:
    return Quote(
        cloud=cloud,
        region=row.region,
        zone=row.zone,
        instance_type=row.instance_type,
        gpu=row.gpu,
        gpus=row.gpus,
        on_demand_usd_h=row.on_demand_usd_h,
        spot_usd_h=row.spot_usd_h,
        as_of=as_of,
        source=source,
    )
