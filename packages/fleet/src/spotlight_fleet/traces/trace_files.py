"""Readers and writers of trace files. A new format is one function and one line in :data:`READERS`.

``bamboo``: ``ms,add|remove,node`` per line, no header (the traces of Bamboo, NSDI 2023).
``skypilot``: ``{"metadata": {"gap_seconds": N}, "data": [n_available, ...]}``, optionally with ``"prices"``.
``csv``, ``jsonl``: canonical, as written by :func:`write_trace`; reading back gives an equal trace (except
for
    its ``source``). Only JSON lines hold prices.

Pure but for :func:`read_trace` and :func:`write_trace`. Nothing is sorted, skipped or repaired: bad lines
are reported by number, up to ten at once.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from spotlight_fleet.traces.trace import (
    PricePoint,
    Trace,
    TraceError,
    TraceEvent,
    TraceEventKind,
    problems_of,
    refuse,
)
from spotlight_rewards.base.files import write_atomically

TraceFormat: TypeAlias = Literal["auto", "bamboo", "skypilot", "csv", "jsonl"]

CSV_HEADER = "time_s,event,node,gpus"
CSV_COMMENT = "# spotlight trace"
JSONL_FORMAT = "spotlight-trace"
_NOT_IN_CSV = re.compile(r"[\r\n\ud800-\udfff]")

_NODES_MAX = 100_000
_GPUS_MAX = 100_000
_CHANGES_MAX = 250_000
"""Nodes that come or go in a trace of counts: two of them can say that all come and go in every interval."""
_DIGITS_MAX = 18
"""Longer numbers may be beyond what is a float, or what Python reads as a number."""


class _BadTraceLineError(Exception):
    """An invalid line."""


def read_trace(path: Path, *, format: TraceFormat = "auto", gpus_per_node: int = 1) -> Trace:
    """Read a trace file.

    Args:
        format: ``auto`` detects the format from the content.
        gpus_per_node: for formats without it (Bamboo, SkyPilot).

    Raises:
        TraceError: unreadable, empty, malformed or unsorted; names lines.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; expected a trace file") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: byte {error.start} is no text; expected a trace file in UTF-8") from None
    return parse_trace(text, str(path), format=format, gpus_per_node=gpus_per_node)


def parse_trace(text: str, source: str, *, format: TraceFormat = "auto", gpus_per_node: int = 1) -> Trace:
    """Parse a trace; see :func:`read_trace`."""
    if gpus_per_node < 1:
        raise TraceError(f"gpus_per_node is {gpus_per_node}; expected at least 1")
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise TraceError(f"{source} is empty; expected the events of a trace")
    name = _recognise(text) if format == "auto" else format
    if name not in READERS:
        raise TraceError(f"format of {source} is {name!r}; expected auto, {', '.join(READERS)}")
    return READERS[name](text, source, gpus_per_node)


def _recognise(text: str) -> str:
    first = text.lstrip().partition("\n")[0].strip()
    if JSONL_FORMAT in first and first.startswith("{"):
        return "jsonl"
    if first.startswith(("{", "[")):
        return "skypilot"
    return "csv" if first.startswith((CSV_COMMENT, CSV_HEADER)) else "bamboo"


def parse_bamboo(text: str, source: str, gpus_per_node: int = 1) -> Trace:
    """Bamboo's CSV. The horizon is the time of the last event."""

    def event(line: str) -> TraceEvent:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise _BadTraceLineError(f"{line[:60]!r} has {len(fields)} fields; expected ms,add|remove,node")
        ms, kind, node = fields
        if not ms.isdecimal() or len(ms) > _DIGITS_MAX:
            raise _BadTraceLineError(f"the time is {ms!r:.60}; expected whole milliseconds, such as 480000")
        if kind not in ("add", "remove"):
            raise _BadTraceLineError(f"the event is {kind!r}; expected add or remove")
        return TraceEvent(int(ms) / 1000, TraceEventKind(kind), node, gpus_per_node)

    events = _events(_lines(text), event, source)
    return _trace(events, events[-1].time_s, source)


def parse_skypilot(text: str, source: str, gpus_per_node: int = 1) -> Trace:
    """SkyPilot's number of available nodes per interval of ``gap_seconds``.

    Nodes are not identified: the most recent is taken to leave, the fewest changes that explain the counts.
    They are named ``spot-0``, ``spot-1`` and so on.
    """
    try:
        root: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{source}:{error.lineno}: no JSON ({error.msg} at column {error.colno}); expected "
            '{"metadata": {"gap_seconds": N}, "data": [...]}'
        ) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}: JSON that cannot be read ({error})") from None
    metadata = root.get("metadata") if isinstance(root, dict) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    gap_s = _number(gap)
    if not isinstance(root, dict) or gap_s is None or gap_s <= 0:
        raise TraceError(f"{source}: metadata.gap_seconds is {gap!r}; expected a number of seconds above 0")
    counts = _counts(root.get("data"), source)
    events = tuple(_changes(counts, gap_s, gpus_per_node))
    prices = tuple(_prices(root.get("prices"), len(counts), gap_s, source))
    return _trace(events, gap_s * len(counts), source, prices)


def parse_csv(text: str, source: str, gpus_per_node: int = 1) -> Trace:
    """Canonical CSV; ``gpus_per_node`` is ignored."""
    lines = list(_lines(text))
    horizon_s: float | None = None
    if lines and lines[0][1].startswith(CSV_COMMENT):
        number, comment = lines.pop(0)
        key, _, value = comment.rpartition(" ")[2].partition("=")
        horizon_s = _number(value) if key == "horizon_s" else None
        if horizon_s is None:
            raise TraceError(f"{source}:{number}: {comment!r}; expected '{CSV_COMMENT} horizon_s=SECONDS'")
    if not lines or lines[0][1] != CSV_HEADER:
        number, found = lines[0] if lines else (1, "nothing")
        raise TraceError(f"{source}:{number}: {found[:60]!r}; expected the header {CSV_HEADER}")

    def event(line: str) -> TraceEvent:
        try:
            (fields,) = csv.reader(io.StringIO(line), strict=True)
        except (csv.Error, ValueError) as error:
            raise _BadTraceLineError(f"{line[:60]!r} is no CSV ({error}); expected {CSV_HEADER}") from None
        if len(fields) != 4:
            raise _BadTraceLineError(f"{line[:60]!r} has {len(fields)} fields; expected {CSV_HEADER}")
        time_text, kind, node, gpus = fields
        whole = gpus.isdecimal() and len(gpus) <= _DIGITS_MAX
        return _event(_float(time_text), kind, node, int(gpus) if whole else gpus)

    events = _events(lines[1:], event, source)
    return _trace(events, events[-1].time_s if horizon_s is None else horizon_s, source)


def parse_jsonl(text: str, source: str, gpus_per_node: int = 1) -> Trace:
    """Canonical JSON lines; ``gpus_per_node`` is ignored."""
    (number, first), *rest = _lines(text)
    try:
        head = _object(first)
    except _BadTraceLineError as error:
        raise TraceError(f"{source}:{number}: {error}") from None
    horizon_s = _number(head.get("horizon_s"))
    if head.get("format") != JSONL_FORMAT or head.get("version") != 1 or horizon_s is None:
        raise TraceError(
            f"{source}:{number}: {first[:80]!r}; expected "
            f'{{"format": "{JSONL_FORMAT}", "version": 1, "horizon_s": SECONDS}}'
        )
    prices: list[PricePoint] = []
    events: list[tuple[int, str]] = []
    problems: list[tuple[str, str]] = []
    for line_number, line in rest:
        try:
            record = _object(line)
            if "spot_usd_h" not in record:
                events.append((line_number, line))
                continue
            time_s, usd_h = _number(record.get("time_s")), _number(record["spot_usd_h"])
            if time_s is None or usd_h is None or usd_h <= 0:
                raise _BadTraceLineError(f"{line[:80]!r}; expected a time_s and a spot_usd_h above 0")
            prices.append(PricePoint(time_s, usd_h))
        except _BadTraceLineError as error:
            problems.append((str(line_number), str(error)))
    if problems:
        raise refuse(source, problems)

    def event(line: str) -> TraceEvent:
        record = _object(line)
        return _event(*(record.get(key) for key in ("time_s", "event", "node", "gpus")))

    return _trace(_events(events, event, source), horizon_s, source, tuple(prices))


READERS: Mapping[str, Callable[[str, str, int], Trace]] = {
    "bamboo": parse_bamboo,
    "skypilot": parse_skypilot,
    "csv": parse_csv,
    "jsonl": parse_jsonl,
}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if stripped := line.strip():
            yield number, stripped


def _events(
    lines: Iterator[tuple[int, str]] | Sequence[tuple[int, str]],
    parse: Callable[[str], TraceEvent],
    source: str,
) -> tuple[TraceEvent, ...]:
    problems: list[tuple[int, str]] = []
    numbers: list[int] = []
    events: list[TraceEvent] = []
    for number, line in lines:
        try:
            events.append(parse(line))
            numbers.append(number)
        except _BadTraceLineError as error:
            problems.append((number, str(error)))
    # A line that could not be read makes later ones look impossible: those are reported only when all can be.
    if not problems:
        problems = [(numbers[index], text) for index, text in problems_of(events)]
    if problems:
        raise refuse(source, [(str(number), text) for number, text in problems])
    if not events:
        raise TraceError(f"{source}: there is no event; expected at least one")
    return tuple(events)


def _trace(
    events: tuple[TraceEvent, ...], horizon_s: float, source: str, prices: tuple[PricePoint, ...] = ()
) -> Trace:
    if horizon_s <= 0:
        raise TraceError(f"{source}: all events are at {horizon_s:g} s; expected some time between them")
    return Trace(events, horizon_s, source, prices)


def _event(time_s: object, kind: object, node: object, gpus: object) -> TraceEvent:
    number = _number(time_s)
    if number is None or number < 0:
        raise _BadTraceLineError(f"time_s is {time_s!r:.60}; expected a number of at least 0")
    if not isinstance(kind, str) or kind not in {known.value for known in TraceEventKind}:
        raise _BadTraceLineError(f"event is {kind!r:.60}; expected add, notice or remove")
    if not isinstance(node, str) or not node:
        raise _BadTraceLineError(f"node is {node!r:.60}; expected a name")
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= _GPUS_MAX:
        raise _BadTraceLineError(f"gpus is {gpus!r:.60}; expected a whole number from 1 to {_GPUS_MAX}")
    return TraceEvent(number, TraceEventKind(kind), node, gpus)


def _counts(data: object, source: str) -> list[int]:
    if not isinstance(data, list) or not data:
        raise TraceError(f"{source}: data is {data!r:.60}; expected a list of numbers of available nodes")
    bad = [
        (f"data[{index}]", f"{value!r:.60}; expected a whole number of nodes from 0 to {_NODES_MAX}")
        for index, value in enumerate(data)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NODES_MAX
    ]
    if bad:
        raise refuse(source, bad)
    changes = sum(abs(count - before) for before, count in zip([0, *data], data, strict=False))
    if changes > _CHANGES_MAX:
        raise TraceError(
            f"{source}: {changes} nodes come or go by data; expected at most {_CHANGES_MAX}: cut the trace, "
            "or take a larger gap_seconds"
        )
    return data


def _changes(counts: Sequence[int], gap_s: float, gpus: int) -> Iterator[TraceEvent]:
    before = 0
    for index, count in enumerate(counts):
        for node in range(before - 1, count - 1, -1):
            yield TraceEvent(index * gap_s, TraceEventKind.REMOVE, f"spot-{node}", gpus)
        for node in range(before, count):
            yield TraceEvent(index * gap_s, TraceEventKind.ADD, f"spot-{node}", gpus)
        before = count


def _prices(prices: object, intervals: int, gap_s: float, source: str) -> Iterator[PricePoint]:
    if prices is None:
        return
    if not isinstance(prices, list) or len(prices) != intervals:
        found = len(prices) if isinstance(prices, list) else prices
        raise TraceError(f"{source}: prices holds {found!r:.60}; expected {intervals}, as many as data")
    last: float | None = None
    for index, value in enumerate(prices):
        usd_h = _number(value)
        if usd_h is None or usd_h <= 0:
            raise TraceError(f"{source}: prices[{index}] is {value!r:.60}; expected $/h above 0")
        if usd_h != last:
            yield PricePoint(index * gap_s, usd_h)
        last = usd_h


def _object(line: str) -> dict[str, object]:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadTraceLineError(f"{line[:60]!r} is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise _BadTraceLineError(f"{line[:60]!r}; expected a JSON object")
    return record


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _number(value: object) -> float | None:
    """A finite number, also from text; None for anything else."""
    if isinstance(value, str):
        value = _float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def write_trace(trace: Trace, path: Path) -> None:
    """Replace a ``.csv`` or ``.jsonl`` file, whole or not at all.

    Raises:
        TraceError: another suffix, or a place that cannot be written to.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".jsonl"):
        raise TraceError(f"{path}: the ending is {ending!r}; expected .csv or .jsonl")
    text = to_csv(trace) if ending == ".csv" else to_jsonl(trace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.resolve(), text.encode())  # of a link, what it leads to
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; expected a place to write a trace to") from None


def to_csv(trace: Trace) -> str:
    """Canonical CSV with the horizon in a comment. Raises :class:`TraceError` for what it cannot hold."""
    if trace.prices:
        raise TraceError(f"{trace.source} has prices, and CSV has no place for them; write .jsonl")
    if odd := next((event.node for event in trace.events if _NOT_IN_CSV.search(event.node)), None):
        raise TraceError(f"{trace.source} has a node {odd!a}; expected a name on one line; write .jsonl")
    out = io.StringIO()
    out.write(f"{CSV_COMMENT} horizon_s={trace.horizon_s!r}\n{CSV_HEADER}\n")
    writer = csv.writer(out, lineterminator="\n")
    for event in trace.events:
        writer.writerow((repr(event.time_s), event.kind.value, event.node, event.gpus))
    return out.getvalue()


def to_jsonl(trace: Trace) -> str:
    """Canonical JSON lines: a header with the horizon, then events and prices."""
    head = {"format": JSONL_FORMAT, "version": 1, "horizon_s": trace.horizon_s}
    events = (
        {"time_s": event.time_s, "event": event.kind.value, "node": event.node, "gpus": event.gpus}
        for event in trace.events
    )
    prices = ({"time_s": point.time_s, "spot_usd_h": point.usd_h} for point in trace.prices)
    return "".join(f"{json.dumps(record)}\n" for record in (head, *events, *prices))
