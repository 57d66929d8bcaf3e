"""Print a report of ``spotlight doctor --gpu``. Pure but for the console."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spotlight.report.wording import plural, size
from spotlight_plan.commands.gpu.gpu_report import (
    ROWS_MAX,
    CardRates,
    FittingBatch,
    GpuReport,
    Link,
    WholePass,
    named,
)


def print_report(report: GpuReport, console: Console) -> None:
    """Cards, the model's passes, kernels and what fits."""
    console.print()
    _print(console, "Cards", [_card(index, card) for index, card in enumerate(report.cards)])
    if report.link is not None:
        _print(console, "Between cards", [_link(report.link)])
    _print(console, _model(report), [_pass(each) for each in report.passes])
    console.print(_extrapolated(report), style="dim", markup=False, soft_wrap=True)
    console.print()
    _print(console, "Kernels", _kernels(report))
    memory = size(report.cards[0].memory_bytes)
    what = f"Batches that fit {memory}, by the memory plan of --dry-run (training: one timestep a pass)"
    _print(console, what, list(map(_fit, report.fits)))


def _print(console: Console, title: str, rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(
        box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold"
    )
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _card(index: int, card: CardRates) -> tuple[str, ...]:
    product = f"{1e-12 * card.product_flop_s:,.0f} TFLOP/s bfloat16 products"
    if card.peak_flop_s is None:
        product += " (the card's rate is not known: no MFU)"
    else:
        product += f" ({card.product_flop_s / card.peak_flop_s:.2f} of its data sheet)"
    memory = f"{size(card.free_bytes)} of {size(card.memory_bytes)} free"
    return f"{index}: {card.name}", memory, product, f"{1e-12 * card.copy_bytes_s:.2f} TB/s copies"


def _link(link: Link) -> tuple[str, ...]:
    what = f"all-reduce of {size(link.size_bytes)} between {link.cards}"
    if link.bus_bytes_s is None:
        return what, f"failed: {link.trouble}"
    return what, f"{1e-9 * link.bus_bytes_s:.1f} GB/s (bus bandwidth)"


def _model(report: GpuReport) -> str:
    return (
        f"{report.family} ({report.model}), {named(report.depth)}: {report.size}, "
        f"{report.text_tokens} text tokens, bfloat16, LoRA of rank {report.lora_rank}"
    )


def _pass(each: WholePass) -> tuple[str, ...]:
    if each.seconds is None:
        return each.name, plural(each.rows, "sample"), "unknown: out of memory, or too little to time", ""
    a_row = f"{1e3 * each.seconds / each.rows:,.1f} ms a sample"
    share = "" if each.mfu is None else f"MFU {each.mfu:.3f}"
    return each.name, f"{plural(each.rows, 'sample')}: {1e3 * each.seconds:,.0f} ms", a_row, share


def _extrapolated(report: GpuReport) -> str:
    depths = "; ".join(named(few.depth) for few in report.measured)
    return (
        f"Extrapolated to the whole depth from models of random weights with {depths}. An update is a "
        "forward and its backward of one timestep, without the optimizer's step."
    )


def _kernels(report: GpuReport) -> list[tuple[str, ...]]:
    first = report.measured[-1]
    rows: list[tuple[str, ...]] = [(name, "fused operators") for name in first.fused]
    rows += [(name, f"diffusers' operators: {why}") for name, why in first.reference.items()]
    return [*rows, ("attention", f"{', '.join(report.attention)} (model.attention)")]


def _fit(fit: FittingBatch) -> tuple[str, ...]:
    if not fit.rows:
        return fit.what, "does not fit", f"one sample takes {size(fit.peak_bytes)}: see learner.shard"
    more = " or more" if fit.rows == ROWS_MAX else ""
    return fit.what, plural(fit.rows, "sample") + more, f"peak {size(fit.peak_bytes)}"
