"""Fair timing on a machine that does other things too: contestants take turns, ratios are of neighbours.

Every round runs each contestant once, in a random order, so that what disturbs the machine disturbs
all alike. Said are medians, and the ratio within a round: its median with a bootstrap interval, and its
quartiles. Absolute seconds hold for the machine they were measured on only.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import spotlight

_RESAMPLES = 2000
_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy")


class Clock(StrEnum):
    """What seconds are counted: those on the wall, or those this process computed."""

    WALL = "wall"
    CPU = "cpu"


_CLOCKS = {Clock.WALL: time.perf_counter, Clock.CPU: time.process_time}
CLOCK_HELP = "wall, or cpu: time this process computed, for a busy machine (CPU and one thread only)."


@dataclass(frozen=True, slots=True)
class Ratio:
    """Seconds of one contestant over those of another in the same round.

    Attributes:
        median: over the rounds.
        low: 2.5 % quantile of bootstrapped medians.
        high: 97.5 % quantile of bootstrapped medians.
        quartiles: first and third, over the rounds.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round; one round before them does not count.

    Raises:
        ValueError: fewer than two rounds.
    """
    if rounds < 2:
        raise ValueError(f"{rounds} rounds: at least 2 are needed to speak of a spread")
    order = random.Random(0)
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.freeze()  # a collection of all that was imported would fall on whoever is running
    try:
        for turn in range(rounds + 1):
            order.shuffle(names)
            for name in names:
                taken = _timed(contestants[name], device, _CLOCKS[clock])
                if turn > 0:
                    seconds[name].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def _timed(run: Callable[[], object], device: torch.device, now: Callable[[], float]) -> float:
    _wait_for(device)
    started = now()
    result = run()
    _wait_for(device)
    taken = now() - started
    del result  # freeing it is not part of the work
    return taken


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of two contestants of the same rounds."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    first, _, third = statistics.quantiles(pairs, n=4, method="inclusive")
    return Ratio(
        median=statistics.median(pairs),
        low=medians[round(0.025 * (_RESAMPLES - 1))],
        high=medians[round(0.975 * (_RESAMPLES - 1))],
        quartiles=(first, third),
        rounds=len(pairs),
    )


def wide_console() -> Console:
    """The terminal; elsewhere, room for a whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def machine(device: torch.device) -> dict[str, object]:
    """What the numbers depend on besides the code."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "spotlight": spotlight.__version__,
        **{name: version(name) for name in _LIBRARIES},
    }


def write_result(
    path: Path, benchmark: str, about: Mapping[str, object], content: Mapping[str, object]
) -> None:
    """Everything measured, as JSON.

    Args:
        about: the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "benchmark": benchmark,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(about),
    }
    path.write_text(json.dumps(header | dict(content), indent=2, default=str) + "\n", encoding="utf-8")


def report(path: Path | None, benchmark: str, **tables: Sequence[Mapping[str, object]]) -> None:
    """Print the tables that have rows, all with the same columns; write all as JSON if ``path`` is given."""
    console = wide_console()
    for name, rows in tables.items():
        if not rows:
            continue
        table = Table(title=benchmark if len(tables) == 1 else f"{benchmark}: {name.replace('_', ' ')}")
        for column in rows[0]:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_shown(value)) for value in row.values()))
        console.print(table)
    if path is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_result(path, benchmark, machine(device), tables)


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
        case: what was measured, by column.
        seconds: of every contestant in every round.
        ratios: by their column's title.
    """

    case: Mapping[str, str]
    seconds: Mapping[str, Sequence[float]]
    ratios: Mapping[str, Ratio]


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's result.

    Attributes:
        settings: what it was called with.
        unit: the number that seconds are divided by in the table, and what of: images, samples.
    """

    title: str
    device: torch.device
    settings: Mapping[str, object]
    rows: Sequence[Row]
    per: str
    counts: Sequence[int]

    def show(self, console: Console) -> None:
        """Print the table, and below it the machine."""
        table = Table(title=self.title, caption="ratios: median [95 % interval]; below 1: ours is faster")
        first = self.rows[0]
        for column in first.case:
            table.add_column(column)
        for name in first.seconds:
            table.add_column(f"{name}\nms per {self.per}", justify="right")
        for name in first.ratios:
            table.add_column(name, justify="right")
        for row, count in zip(self.rows, self.counts, strict=True):
            table.add_row(
                *row.case.values(),
                *(f"{1000 * statistics.median(taken) / count:.2f}" for taken in row.seconds.values()),
                *(str(value) for value in row.ratios.values()),
            )
        console.print(table)
        console.print(", ".join(f"{key} {value}" for key, value in machine(self.device).items()), style="dim")

    def write(self, path: Path) -> None:
        """Everything measured, as JSON."""
        rows = [{**asdict(row), "count": n} for row, n in zip(self.rows, self.counts, strict=True)]
        content = {"settings": dict(self.settings), "per": self.per, "rows": rows}
        write_result(path, self.title, machine(self.device), content)
