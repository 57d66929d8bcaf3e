"""``spotlight prices``: on-demand and spot GPU prices, each with age and source."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotlight_plan.prices.quotes import Quote
    from spotlight_plan.prices.sources import PriceQuery


GpuOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--gpu", help="Only this GPU type, such as H100; repeatable.")
]
CloudOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--cloud", help="Only this cloud, such as aws; repeatable.")
]
RegionOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--region", help="Only this region; repeatable.")
]
SourceOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        help="builtin (a dated table, the default), skypilot (its catalogues of all clouds), azure, aws, "
        "or CLOUD=FILE.csv or CLOUD=URL for a catalogue in SkyPilot's form; repeatable.",
    ),
]
MaxAgeHOption: TypeAlias = Annotated[
    float, typer.Option("--max-age-h", min=0, help="Ask servers again when answers are older than this.")
]
TimeoutSOption: TypeAlias = Annotated[
    float, typer.Option("--timeout-s", min=0.1, help="Longest silence of a server.")
]
ZonesOption: TypeAlias = Annotated[
    bool, typer.Option("--zones", help="Every zone, not only each region's cheapest.")
]

_MOST = 1e6
"""Hours or seconds: a century, or days."""


def prices(
    gpu: GpuOption = None,
    cloud: CloudOption = None,
    region: RegionOption = None,
    source: SourceOption = None,
    max_age_h: MaxAgeHOption = 6.0,
    timeout_s: TimeoutSOption = 10.0,
    zones: ZonesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List GPU prices, on demand and spot, by cloud and region, cheapest first.

    Every price is shown with its age and source. Server replies are cached in ~/.cache/spotlight/prices;
    if a server fails, its last reply is used and marked as such.

    [bold]Examples[/bold]

      spotlight prices

      spotlight prices --gpu H100 --cloud aws --source skypilot

      spotlight prices --gpu H200 --source azure --json

      spotlight prices --source gcp=vms.csv --gpu A100-80GB --zones
    """
    from spotlight_plan.prices.cache import PriceCache, default_directory
    from spotlight_plan.prices.fetch import FetchLimits
    from spotlight_plan.prices.quotes import cheapest, select
    from spotlight_plan.prices.sources import PriceQuery, load_prices

    for name, value in (("--max-age-h", max_age_h), ("--timeout-s", timeout_s)):
        if value > _MOST:
            raise failure(f"{name}: found {value:g}; expected at most {_MOST:g}. Give a smaller number.")
    question = PriceQuery(
        gpus=tuple(gpu or ()),
        clouds=tuple(cloud or ()),
        regions=tuple(region or ()),
        cache=PriceCache(default_directory(), timedelta(hours=max_age_h)),
        limits=FetchLimits(idle_s=timeout_s, total_s=max(60.0, timeout_s)),
    )
    with errors_without_traceback():
        loaded = [
            quote for name in dict.fromkeys(source or ["builtin"]) for quote in load_prices(name, question)
        ]
        found = select(loaded, gpus=question.gpus, clouds=question.clouds, regions=question.regions)
    if not found:
        raise failure(_nothing(question, loaded))
    shown = found if zones else cheapest(found)
    if as_json:
        typer.echo(json.dumps([_record(quote, question.now) for quote in shown], indent=2))
    else:
        _print(shown, question.now, source or [])
    unread = TextConsole(stderr=True)
    for name, why in question.unread.items():
        unread.print(Text(f"Not read: {name}: {why}", style="yellow"), soft_wrap=True)


def age(old: timedelta) -> str:
    """``12 min``, ``5 h``, ``173 d``."""
    if old < timedelta(hours=1):
        return f"{old.total_seconds() / 60:.0f} min"
    if old < timedelta(days=2):
        return f"{old.total_seconds() / 3600:.0f} h"
    return f"{old.days} d"


def _print(quotes: Sequence[Quote], now: datetime, sources: Sequence[str]) -> None:
    from spotlight_plan.prices.quotes import OLD

    console = TextConsole()
    table = Table(box=None, pad_edge=False)
    numeric = {"GPUs", "$/GPU-h", "spot", "saving", "age"}
    titles = ("GPU", "GPUs", "cloud", "region", "instance", "$/GPU-h", "spot", "saving", "age", "")
    for title in titles:
        table.add_column(title, justify="right" if title in numeric else "left", overflow="fold")
    notes: dict[str, int] = {}
    for quote in quotes:
        source = f"{quote.source}; {quote.caveat}" if quote.caveat else quote.source
        note = notes.setdefault(source, len(notes) + 1)
        table.add_row(
            quote.gpu,
            str(quote.gpus),
            quote.cloud,
            quote.zone or quote.region or "-",
            quote.instance_type,
            _usd(quote.on_demand_usd_gpu_h),
            _usd(quote.spot_usd_gpu_h),
            "-" if quote.saving is None else f"{quote.saving:.0%}",
            Text(age(quote.age(now)), style="yellow" if quote.caveat or quote.age(now) > OLD else ""),
            f"[{note}]",
        )
    console.print(table)
    console.print()
    for source, note in notes.items():
        console.print(f"[{note}] {source}", soft_wrap=True)
    if old := sum(quote.age(now) > OLD for quote in quotes):
        newer = "skypilot" if "skypilot" not in sources else "azure or --source aws"
        advice = f"{old} of {len(quotes)} prices are older than {OLD.days} days: try --source {newer}."
        console.print(Text(advice, style="yellow"), soft_wrap=True)


def _usd(price: float | None) -> str:
    return "-" if price is None else f"{price:.2f}"


def _record(quote: Quote, now: datetime) -> dict[str, object]:
    return {
        "gpu": quote.gpu,
        "gpus": quote.gpus,
        "cloud": quote.cloud,
        "region": quote.region,
        "zone": quote.zone,
        "instance_type": quote.instance_type,
        "on_demand_usd_h": quote.on_demand_usd_h,
        "spot_usd_h": quote.spot_usd_h,
        "on_demand_usd_gpu_h": quote.on_demand_usd_gpu_h,
        "spot_usd_gpu_h": quote.spot_usd_gpu_h,
        "saving": quote.saving,
        "as_of": quote.as_of.isoformat(),
        "age_s": round(quote.age(now).total_seconds()),
        "source": quote.source,
        "caveat": quote.caveat,
    }


def _nothing(question: PriceQuery, loaded: Sequence[Quote]) -> str:
    asked = ", ".join((*question.gpus, *question.clouds, *question.regions)) or "anything"
    kinds = sorted({f"{quote.cloud} {quote.gpu}" for quote in loaded})
    there = f"it has {', '.join(kinds[:20])}" if kinds else "it has none at all"
    return f"No price of {asked} in this source; {there}. Try --source skypilot, or see --help."
