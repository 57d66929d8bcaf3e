"""Canonical traces as text: CSV for eyes and spreadsheets, JSON lines for everything. Pure but for the file.

What is written reads back as an equal trace (its ``source`` aside). Only JSON lines hold prices.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from spotlight.fleet.traces.readers import CSV_COMMENT, CSV_HEADER, JSONL_FORMAT
from spotlight.fleet.traces.trace import Trace, TraceError


def write_trace(trace: Trace, path: Path) -> None:
    """Write to a ``.csv`` or ``.jsonl`` file. Raises :class:`TraceError`: other endings, unwritable."""
    ending = path.suffix.lower()
    if ending not in (".csv", ".jsonl"):
        raise TraceError(f"{path}: the ending is {ending!r}; expected .csv or .jsonl")
    text = to_csv(trace) if ending == ".csv" else to_jsonl(trace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; expected a place to write a trace to") from None


def to_csv(trace: Trace) -> str:
    """A comment with the horizon, a header, an event a line. Raises :class:`TraceError`: it has prices."""
    if trace.prices:
        raise TraceError(f"{trace.source} has prices, and CSV has no place for them; write .jsonl")
    out = io.StringIO()
    out.write(f"{CSV_COMMENT} horizon_s={trace.horizon_s!r}\n{CSV_HEADER}\n")
    writer = csv.writer(out, lineterminator="\n")
    for event in trace.events:
        writer.writerow((repr(event.time_s), event.kind.value, event.node, event.gpus))
    return out.getvalue()


def to_jsonl(trace: Trace) -> str:
    """A head with the horizon, then events and prices, an object a line."""
    head = {"format": JSONL_FORMAT, "version": 1, "horizon_s": trace.horizon_s}
    events = (
        {"time_s": event.time_s, "event": event.kind.value, "node": event.node, "gpus": event.gpus}
        for event in trace.events
    )
    prices = ({"time_s": point.time_s, "spot_usd_h": point.usd_h} for point in trace.prices)
    return "".join(f"{json.dumps(record)}\n" for record in (head, *events, *prices))
