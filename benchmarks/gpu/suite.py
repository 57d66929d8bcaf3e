"""Rows, verdicts and the report. No torch: the supervising process starts at once and never touches the GPU.

Invariants:
- Every row of a part ends with one verdict, whatever happens to the process that runs it.
- The report on disk is whole after every row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

Part = Literal["A", "B", "C", "D"]
IN_MEMORY = Path("/dev/shm")
"""Where part D puts a whole model's weights, below the name of the suite's own directory."""


class Verdict(StrEnum):
    """How a row ended."""

    PASS = "PASS"
    SLOW = "SLOW"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Skip(Exception):  # noqa: N818 - no error
    """A row cannot run on this device; says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        function: ``module:function``, called with a :class:`~benchmarks.gpu.lab.Lab`.
        title: what the value is.
        threshold: the value must not exceed it, or with ``at_least`` not fall below it; None: only measured.
        budget_s: for timing loops, and for deciding whether it still fits into the part; a row is stopped
            after ``budget_s`` plus a grace period.
        speed: a missed threshold is SLOW, not FAIL, and says nothing about a tiny model.
        tiny: whether the threshold holds for the tiny model on a CPU too.
    """

    part: Part
    name: str
    function: str
    title: str
    unit: str
    threshold: float | None
    budget_s: float
    at_least: bool = False
    speed: bool = False
    tiny: bool = True

    def verdict(self, value: float, *, tiny: bool) -> Verdict:
        """Judge a value; NaN never passes."""
        limit = self.limit(tiny=tiny)
        if value != value:
            return Verdict.FAIL
        if limit is None or (value >= limit if self.at_least else value <= limit):
            return Verdict.PASS
        return Verdict.SLOW if self.speed else Verdict.FAIL

    def limit(self, *, tiny: bool) -> float | None:
        """The threshold that counts."""
        return None if tiny and (self.speed or not self.tiny) else self.threshold


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row's function returns; ``details`` are JSON types."""

    value: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """A row that ended.

    Attributes:
        value: None without one.
        note: why there is none.
    """

    part: Part
    name: str
    title: str
    unit: str
    verdict: Verdict
    value: float | None
    threshold: float | None
    at_least: bool
    seconds: float
    note: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


def result_of(
    row: Row,
    verdict: Verdict,
    seconds: float,
    *,
    tiny: bool,
    outcome: Outcome | None = None,
    note: str = "",
) -> Result:
    """A row's result."""
    return Result(
        part=row.part,
        name=row.name,
        title=row.title,
        unit=row.unit,
        verdict=verdict,
        value=None if outcome is None else outcome.value,
        threshold=row.limit(tiny=tiny),
        at_least=row.at_least,
        seconds=round(seconds, 3),
        note=note,
        details={} if outcome is None else outcome.details,
    )


@dataclass(slots=True)
class Report:
    """The results of a part so far.

    Attributes:
        settings: what the suite was called with.
        machine: what the numbers depend on besides the code; known once the first process has started.
        json: written after every row; None: not at all.
    """

    part: Part
    settings: Mapping[str, object]
    console: Console
    json: Path | None
    machine: Mapping[str, object] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Print one line, and write everything known."""
        self.results.append(result)
        self.console.print(line(result), highlight=False, soft_wrap=True)
        self.write()

    def write(self) -> None:
        """Replace the JSON file."""
        if self.json is None:
            return
        self.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": f"GPU suite, part {self.part}",
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "counts": self.counts(),
            "rows": [asdict(result) for result in self.results],
        }
        aside = self.json.with_name(f".{self.json.name}")
        aside.write_text(json.dumps(content, indent=2, default=str, allow_nan=True) + "\n", encoding="utf-8")
        aside.replace(self.json)

    def counts(self) -> dict[str, int]:
        """Rows by verdict."""
        return {v.value: sum(result.verdict is v for result in self.results) for v in Verdict}

    def summary(self) -> None:
        """All rows again, together: the end of the output is what a log keeps."""
        self.console.print(f"\nPart {self.part}", style="bold")
        for result in self.results:
            self.console.print(line(result), highlight=False, soft_wrap=True)
        self.console.print(", ".join(f"{count} {name}" for name, count in self.counts().items() if count))


_STYLES = {Verdict.PASS: "green", Verdict.SLOW: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}


def line(result: Result) -> str:
    """A result in one line of rich markup."""
    value = "-" if result.value is None else f"{result.value:.4g} {result.unit}".strip()
    sign = ">=" if result.at_least else "<="
    limit = "-" if result.threshold is None else f"{sign} {result.threshold:.4g}"
    style = _STYLES[result.verdict]
    note = escape(f"  {result.note}") if result.note else ""
    return (
        f"[{style}]{result.verdict.value}[/] {result.part} {result.name:<26} {value:>22}  {limit:<10} "
        f"{result.seconds:6.1f} s  {escape(result.title)}{note}"
    )


def chosen(rows: Sequence[Row], part: Part, only: Sequence[str]) -> list[Row]:
    """The rows of a part, or those named.

    Raises:
        ValueError: a name that the part has not.
    """
    of_part = [row for row in rows if row.part == part]
    unknown = [name for name in only if name not in {row.name for row in of_part}]
    if unknown:
        known = ", ".join(row.name for row in of_part)
        raise ValueError(f"--only {unknown[0]}: part {part} has no such row; it has {known}")
    return [row for row in of_part if not only or row.name in only]
