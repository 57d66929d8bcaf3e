"""The screen after a finished run: gain, cost, output files and how to use them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spotlight.report.loading import loading_snippet
from spotlight.report.record import RunRecord, ValidationChange
from spotlight.report.wording import count, duration, money, plural, score, span_words
from spotlight.scheduler.types import Purpose
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger.ledger_schema import Incident

_BAR_WIDTH = 16
_CURVE_ROWS_MAX = 12
_PLURALS = {"worker crash": "worker crashes", "loss of the learner": "losses of the learner"}


def print_final_screen(console: Console, run: RunRecord, card: Path | None) -> None:
    """Print the closing screen; ``card`` is the model card, if written."""
    head = (
        f"{run.config.name}: {plural(run.history.iterations, 'iteration')}, "
        f"{count(run.history.counts.trained)} samples trained, "
        f"{duration(run.wall_s)}, {money(run.history.cost_usd)}"
    )
    console.print(Panel(Text(head, style="bold"), expand=False))
    images = plural(run.config.evaluation.images_per_prompt, "picture")
    if run.validations:
        console.print(_title(f"Validation on held-out prompts, {images} each, the same seeds every time"))
        tables = [validation_table(run), Text()] if len(run.validations) > 1 else []
        console.print(*tables, curve_table(run), Text(), sep="\n")
        if said := better_before(run):
            console.print(Text(f" {said}\n", style="yellow"), soft_wrap=True)
    if said := estimated_beside(run):
        console.print(Text(f" {said}\n"), soft_wrap=True)
    spent = sum(run.history.gpu_seconds_by_phase.values())
    console.print(
        _title(f"{spent:,.1f} worker seconds at {prices(run)} an hour: {money(run.history.cost_usd)}")
    )
    console.print(spent_table(run), Text(), Padding(_samples(run), (0, 0, 0, 1)), Text(), sep="\n")
    for name, path in _places(run, card):
        # Soft wrap, so that a path or line of Python wider than the terminal can still be copied.
        console.print(Text.assemble((f" {name:<15}", "bold"), str(path)), soft_wrap=True)
    if run.weights is not None:
        console.print(Text("\n Load it in plain diffusers:\n", style="bold"))
        snippet = loading_snippet(run.config, run.weights.resolve(), prompt=run.example_prompt)
        console.print(Text(snippet + "\n", style="cyan"), soft_wrap=True)


def validation_table(run: RunRecord) -> Table:
    """Scores before and after, with standard errors and the margin in units of evaluation noise."""
    table = Table(box=None, pad_edge=True)
    for name in ("", run.since, "after", "margin", ""):
        table.add_column(name, justify="right" if name else "left")
    for curve in run.curves:
        change = run.change(curve)
        style = "green" if change.margin_in_noise > 2 else "red" if change.margin_in_noise < -2 else ""
        table.add_row(
            curve,
            score(change.before.mean, change.before.stderr),
            score(change.after.mean, change.after.stderr),
            Text(f"{change.margin:+.3f}", style=style),
            in_noise(change),
        )
    return table


def better_before(run: RunRecord) -> str:
    """That the end is worse than the best by more than noise, and where that is; empty if it is not."""
    if (best := run.best) is None:
        return ""
    curve, last = run.curves[0], run.validations[-1]
    change = ValidationChange(best.scores[curve], last.scores[curve])
    if abs(change.margin_in_noise) < 1:
        return ""
    kept = best.iteration in CheckpointStore(run.paths.checkpoints, 1).iterations
    return (
        f"The end is worse than iteration {best.iteration}: {curve} {score(change.after.mean)} instead of "
        f"{score(change.before.mean)}, {change.margin:+.3f} {in_noise(change)}. "
        + (f"spotlight export {run.paths.path} --best" if kept else "Its checkpoint was not kept.")
    )


def estimated_beside(run: RunRecord) -> str:
    """What was expected beside what the run took; empty if nothing was."""
    if (said := run.estimate) is None:
        return ""
    when = f"after {plural(said.after, 'iteration')}" if said.after else "before"
    return (
        f"Estimated {when}: {span_words(said.work_s, duration)}, {span_words(said.usd, money)}. The run took "
        f"{duration(run.wall_s)}, {money(run.history.cost_usd)}. The estimate rested on {said.rests_on}."
    )


def in_noise(change: ValidationChange) -> str:
    """The margin in words, in units of evaluation noise."""
    if not math.isfinite(change.margin_in_noise):
        return "(no spread to compare it with)"
    return f"= {change.margin_in_noise:.1f} x its noise of {change.noise:.3f}"


def curve_table(run: RunRecord) -> Table:
    """The validation curve, thinned if long."""
    table = Table(box=None, pad_edge=True)
    for name in ("iteration", "samples", "time", *run.curves):
        table.add_column(name, justify="right")
    table.add_column("")
    judged = run.curves[0]
    rows = run.validations
    every = -(-len(rows) // _CURVE_ROWS_MAX)
    shown = [row for index, row in enumerate(rows) if index % every == 0 or index == len(rows) - 1]
    values = [row.scores[judged].mean for row in shown]
    low, high = min(values), max(values)
    for row in shown:
        filled = (row.scores[judged].mean - low) / (high - low) if high > low else 1.0
        table.add_row(
            str(row.iteration),
            count(row.samples_trained),
            duration(row.wall_s),
            *(score(row.scores[curve].mean, row.scores[curve].stderr) for curve in run.curves),
            Text("▇" * max(1, round(filled * _BAR_WIDTH)), style="blue"),
        )
    return table


def spent_table(run: RunRecord) -> Table:
    """Seconds by phase, and their cost."""
    spent = {phase: seconds for phase, seconds in run.history.gpu_seconds_by_phase.items() if seconds >= 0.05}
    total = sum(run.history.gpu_seconds_by_phase.values()) or 1.0
    table = Table(box=None, pad_edge=True, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for phase, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        share = seconds / total
        bar = Text("▇" * round(share * _BAR_WIDTH), style="blue")
        table.add_row(phase.value, f"{seconds:,.1f} s", f"{share:.0%}", bar)
    return table


def filled(run: RunRecord) -> str:
    """What GPUs did in otherwise idle time; empty without overlap."""
    parts = [f"{by.words} {seconds:,.1f} s" for by, seconds in run.history.filled_s.items() if seconds]
    return f"Idle time filled by {', '.join(parts)}" if parts else ""


def throughput(run: RunRecord) -> list[str]:
    """How fast a device rolled out and trained, in the median iteration; empty if it was not measured."""
    lines = []
    for what, name in (("rollout", "Rollouts"), ("train", "Training")):
        tokens, timesteps, tflop_s, mfu = (
            _median(run, f"throughput/{what}_{unit}")
            for unit in ("tokens_s", "timesteps_s", "tflop_s", "mfu")
        )
        if tokens is None:
            continue
        parts = [f"{tokens:,.0f} tokens/s"]
        parts += [] if timesteps is None else [f"{timesteps:,.3g} picture-timesteps/s"]
        parts += [] if tflop_s is None else [f"{tflop_s:,.3g} TFLOP/s"]
        parts += [] if mfu is None else [f"MFU {mfu:.0%}"]
        lines.append(f"{name}: {', '.join(parts)} on each device")
    return lines


def _median(run: RunRecord, curve: str) -> float | None:
    found = [row.values[curve] for row in run.rows if math.isfinite(row.values.get(curve, math.nan))]
    return statistics.median(found) if found else None


def _title(text: str) -> Text:
    return Text(f" {text}", style="bold")


def _samples(run: RunRecord) -> Text:
    counts = run.history.counts
    issued = counts.issued[Purpose.TRAIN]
    parts = [f"{count(counts.trained)} trained"]
    parts += [f"{count(number)} {reason.words}" for reason, number in counts.train_dropped.items()]
    if counts.in_flight[Purpose.TRAIN]:
        parts.append(f"{count(counts.in_flight[Purpose.TRAIN])} in flight")
    text = Text.assemble(("Samples ", "bold"), f"{count(issued)} issued = {' + '.join(parts)}")
    for line in (*throughput(run), filled(run), survived(run)):
        if line:
            text.append(f"\n{line}")
    return text


def prices(run: RunRecord) -> str:
    """Price per worker-hour: one, or the lowest and highest."""
    paid = run.history.prices_usd_h or (run.config.fleet.price_usd_h,)
    return " to ".join(money(price) for price in dict.fromkeys((paid[0], paid[-1])))


def survived(run: RunRecord) -> str:
    """Preemptions, crashes and interruptions, and their cost; empty if none."""
    history = run.history
    events: list[str] = []
    if history.preemptions:
        noticed = f" ({count(history.noticed)} with notice)"
        events.append(plural(history.preemptions, "preemption") + noticed)
    for kind, word in (
        (Incident.WORKER_CRASHED, "worker crash"),
        (Incident.LEARNER_LOST, "loss of the learner"),
    ):
        if number := sum(history.incidents.get((kind, spot), 0) for spot in (True, False)):
            events.append(f"{count(number)} {word if number == 1 else _PLURALS[word]}")
    if reserved := history.incidents.get((Incident.NODE_LOST, False), 0):
        events.append(f"{plural(reserved, 'reserved node')} lost")
    if history.interruptions:
        events.append(plural(history.interruptions, "interruption"))
    if not events:
        return ""
    redone = f", {plural(history.undone, 'ledger record')} done again" if history.undone else ""
    attempts = f" in {plural(len(history.attempts), 'attempt')}" if len(history.attempts) > 1 else ""
    return f"Survived {', '.join(events)}{attempts}: {history.lost_s:,.1f} s of work lost{redone}"


def _places(run: RunRecord, card: Path | None) -> Iterator[tuple[str, Path]]:
    before_after = run.paths.images / "before-after.png"
    places = (
        ("before / after", before_after if before_after.is_file() else None),
        ("LoRA" if run.config.learner.mode == "lora" else "weights", run.weights),
        ("model card", card),
        ("run", run.paths.path),
    )
    for name, path in places:
        if path is not None:
            yield name, path
