"""``spotlight traces``: statistics of spot traces, and generated traces."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from spotlight_fleet.traces.trace_files import TraceFormat
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotlight_fleet.traces.trace import Trace
    from spotlight_plan.traces.trace_statistics import TraceStatistics


@dataclass(frozen=True, slots=True)
class _Shape:
    """The nodes and hours that a trace is brought to; None: unchanged, or the default."""

    gpus_per_node: int
    nodes: int | None
    horizon_s: float | None
    notice_lead_s: float | None


FilesArgument: TypeAlias = Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Trace files.")]
GpusPerNodeOption: TypeAlias = Annotated[
    int, typer.Option("--gpus-per-node", min=1, help="Where the form does not say it, and generated.")
]
NodesOption: TypeAlias = Annotated[
    int | None, typer.Option("--nodes", min=1, help="At most so many at once; generated: 8.")
]
HorizonHOption: TypeAlias = Annotated[
    float | None, typer.Option("--horizon-h", help="Cut or repeat to so many hours; generated: 24.")
]
NoticeLeadSOption: TypeAlias = Annotated[
    float | None, typer.Option("--notice-lead-s", help="A notice so long before each removal; 0: none.")
]
MeanUptimeHOption: TypeAlias = Annotated[
    float | None, typer.Option("--mean-uptime-h", help="With --generate: of one node (default 2).")
]
MeanDowntimeSOption: TypeAlias = Annotated[
    float | None, typer.Option("--mean-downtime-s", help="With --generate, until another (default 600).")
]
BurstsPerHOption: TypeAlias = Annotated[
    float | None, typer.Option("--bursts-per-h", help="With --generate: losses together (default 0).")
]
BurstFractionOption: TypeAlias = Annotated[
    float | None, typer.Option("--burst-fraction", help="With --generate: share lost (default 0.5).")
]
ZonesOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--zones", help="With --generate: each has losses together of its own (default 1)."),
]
OutOption: TypeAlias = Annotated[
    Path | None, typer.Option("--out", help="Write the one trace, in canonical form: .csv or .jsonl.")
]
PageOption: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write a page with curves over time (Plotly).")
]


def traces(
    files: FilesArgument = None,
    format: Annotated[TraceFormat, typer.Option("--format", help="Form of the files.")] = "auto",
    gpus_per_node: GpusPerNodeOption = 1,
    nodes: NodesOption = None,
    horizon_h: HorizonHOption = None,
    notice_lead_s: NoticeLeadSOption = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make a trace instead of reading.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="With --generate (default 0).")] = None,
    mean_uptime_h: MeanUptimeHOption = None,
    mean_downtime_s: MeanDowntimeSOption = None,
    bursts_per_h: BurstsPerHOption = None,
    burst_fraction: BurstFractionOption = None,
    zones: ZonesOption = None,
    out: OutOption = None,
    page: PageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON.")] = False,
) -> None:
    """Show spot traces' availability, up-times, preemptions and bursts, or generate a trace from a seed.

    Reads Bamboo's CSV, SkyPilot's availability JSON and the canonical forms.

    [bold]Examples[/bold]

      spotlight traces trace.csv

      spotlight traces trace.csv --nodes 8 --notice-lead-s 30 --out eight.jsonl

      spotlight traces a.csv b.json --html traces.html

      spotlight traces --generate --seed 7 --nodes 16 --bursts-per-h 0.5 --out bursty.csv
    """
    given = _given(
        seed=seed,
        mean_uptime_s=None if mean_uptime_h is None else mean_uptime_h * 3600,
        mean_downtime_s=mean_downtime_s,
        bursts_per_h=bursts_per_h,
        burst_fraction=burst_fraction,
        zones=zones,
    )
    _require_sense(files or [], generate, given, out)
    shape = _Shape(gpus_per_node, nodes, None if horizon_h is None else horizon_h * 3600, notice_lead_s)
    with errors_without_traceback():
        made = (
            [_generated(given, shape)] if generate else [_read(path, format, shape) for path in files or []]
        )
        _write(made, out, page)
    if as_json:
        typer.echo(json.dumps([_record(trace) for trace in made], indent=2))
    else:
        _print(made, [path for path in (out, page) if path is not None])


def _given(**options: float | None) -> dict[str, float]:
    return {name: value for name, value in options.items() if value is not None}


def _require_sense(files: Sequence[Path], generate: bool, given: dict[str, float], out: Path | None) -> None:
    if generate and files:
        raise failure(f"--generate reads no files, and {files[0]} is one. Leave one of them out.")
    if not generate and not files:
        raise failure("no trace: expected FILE..., or --generate. See spotlight traces --help.")
    if not generate and given:
        raise failure(f"{', '.join(given)} given without --generate, which alone reads them.")
    if out is not None and len(files) > 1:
        raise failure(f"--out writes one trace, and there are {len(files)}. Name one FILE.")


def _generated(given: dict[str, float], shape: _Shape) -> Trace:
    from spotlight_plan.traces.generator import TraceSpec, generate

    return generate(
        TraceSpec(
            seed=int(given.pop("seed", 0)),
            horizon_s=24 * 3600.0 if shape.horizon_s is None else shape.horizon_s,
            nodes=8 if shape.nodes is None else shape.nodes,
            gpus_per_node=shape.gpus_per_node,
            notice_lead_s=shape.notice_lead_s or 0.0,
            zones=int(given.pop("zones", 1)),
            **given,
        )
    )


def _read(path: Path, format: TraceFormat, shape: _Shape) -> Trace:
    from spotlight_fleet.traces.trace_files import read_trace
    from spotlight_fleet.traces.transforms import limit, repeat, with_notices

    trace = read_trace(path, format=format, gpus_per_node=shape.gpus_per_node)
    if shape.nodes is not None:
        trace = limit(trace, shape.nodes)
    if shape.horizon_s is not None:
        trace = repeat(trace, shape.horizon_s)
    return trace if shape.notice_lead_s is None else with_notices(trace, shape.notice_lead_s)


def _write(traces: Sequence[Trace], out: Path | None, page: Path | None) -> None:
    from spotlight_fleet.traces.trace_files import write_trace
    from spotlight_plan.traces.picture import html
    from spotlight_rewards.base.output_files import write_file

    if out is not None:
        write_trace(traces[0], out)
    if page is not None:
        write_file(page, html(traces))


def _record(trace: Trace) -> dict[str, object]:
    from spotlight_plan.traces.trace_statistics import statistics

    numbers = asdict(statistics(trace)).items()
    # JSON has no NaN, so statistics without data are null.
    finite = {
        key: None if isinstance(value, float) and math.isnan(value) else value for key, value in numbers
    }
    return {"source": trace.source, **finite}


def _print(traces: Sequence[Trace], written: Sequence[Path]) -> None:
    from spotlight_plan.traces.picture import sparkline
    from spotlight_plan.traces.trace_statistics import statistics

    console = TextConsole()
    for trace in traces:
        numbers = statistics(trace)
        console.print(Text(trace.source, style="bold"), soft_wrap=True)
        console.print(Text(f"  {sparkline(trace)}", style="cyan"), soft_wrap=True)
        console.print(
            Text(f"  0 h to {_time(trace.horizon_s)}, at most {numbers.nodes_max} nodes", style="dim")
        )
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2))
        for label, value in _rows(numbers):
            table.add_row(f"  {label}", value)
        console.print(table)
        console.print()
    for path in written:
        console.print(f"Wrote {path}", soft_wrap=True)


def _rows(numbers: TraceStatistics) -> Sequence[tuple[str, str]]:
    percentiles = f"p5 {numbers.nodes_p5:g}, p50 {numbers.nodes_p50:g}, p95 {numbers.nodes_p95:g}"
    rows = [
        ("nodes present", f"mean {numbers.nodes_mean:.1f}, {percentiles}"),
        ("GPUs present", f"mean {numbers.gpus_mean:.1f}; none for {numbers.empty_share:.1%} of the time"),
        ("stays", f"{numbers.machines}, of those that ended: {_stay(numbers)}"),
        ("preemptions", f"{numbers.preemptions}, {_number(numbers.preemptions_per_node_h)} per node-hour"),
        (
            "bursts",
            f"{numbers.bursts} (largest {numbers.burst_largest} nodes), "
            f"{_percent(numbers.burst_share)} of the preemptions; "
            f"{_percent(numbers.burst_share_by_chance)} by chance",
        ),
        ("notices", _notices(numbers)),
    ]
    if not math.isnan(numbers.price_mean_usd_h):
        rows.append(("spot price", f"mean {numbers.price_mean_usd_h:.3f} $/h of a node"))
    return rows


def _stay(numbers: TraceStatistics) -> str:
    if math.isnan(numbers.uptime_mean_s):
        return "none"
    return f"mean {_time(numbers.uptime_mean_s)}, median {_time(numbers.uptime_p50_s)}"


def _notices(numbers: TraceStatistics) -> str:
    if not numbers.noticed:
        return "none"
    lead = f"mean {numbers.notice_lead_mean_s:.0f} s, least {numbers.notice_lead_min_s:.0f} s before"
    return f"{numbers.noticed} of {numbers.preemptions} preemptions, {lead}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"
