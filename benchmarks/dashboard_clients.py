"""What clients of the dashboard cost a run beside it: an iteration with 20 of them over one with none.

    python -m benchmarks.dashboard_clients
    python -m benchmarks.dashboard_clients --blocks 60 --pin --json build/clients.json

A real run (`spotlight train`, the testbed, one thread) and a real dashboard beside it, as `--dashboard`
starts it. Clients come and go every few iterations of the same run, so that each block with them has a
neighbour without; the first iteration of a block does not count. A client does what the page does: it
follows the stream of changes, and asks again for what its view shows at most every 2.5 s; a quarter of them
watch each of four views.

Two ratios, each the median of the pairs with a 95 % bootstrap interval: of seconds on the wall, and of those
that the run's process computed, which other load on the machine disturbs less. On a machine without an idle
core the dashboard takes its seconds from the run besides: at most the share of a core that is printed, of all
cores. The clients run here, too, which real ones do not: their share is printed. With ``--pin`` the run has
the first core and the others are for dashboard and clients, as on a machine with idle cores; what is left is
what they cost the run besides processor time, with less noise.
"""

from __future__ import annotations

import json as jsonlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks._measure import Ratio, machine, ratio, wide_console

RUN = (
    "name=watched",
    "device=cpu",
    "iterations=100000",
    "learner.decay_iterations=null",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=8",
    "evaluation.every=100000",
    "evaluation.prompts=4",
    "evaluation.images_per_prompt=2",
)
START_S = 1200.0
TOKEN_ENV = "BENCHMARK_DASHBOARD_TOKEN"
VISITORS = str(Path(__file__).with_name("_dashboard_visitors.py"))
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Block:
    """Some iterations of the run, with clients or without; seconds are means per iteration."""

    watched: bool
    wall_s: float
    cpu_s: float
    dashboard_s: float
    clients_s: float


def main(
    clients: Annotated[int, typer.Option(min=1)] = 20,
    blocks: Annotated[int, typer.Option(min=4, help="With and without clients, together.")] = 40,
    iterations: Annotated[int, typer.Option(min=1, help="Counted per block.")] = 3,
    pin: Annotated[bool, typer.Option(help="Give the run a core of its own.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """Measure what clients of the dashboard cost the run that they watch."""
    cores = sorted(os.sched_getaffinity(0))
    if pin and len(cores) < 2:
        raise typer.BadParameter("this process may use one core; expected two or more", param_hint="--pin")
    mine, theirs = (cores[:1], cores[1:]) if pin else (cores, cores)
    os.sched_setaffinity(0, theirs)  # of what is started from here: the clients and, first, the dashboard
    with tempfile.TemporaryDirectory() as place, started(Path(place), mine) as (run, dashboard, address):
        done = list(alternate(Path(place), run, dashboard, address, clients, blocks, iterations))
    pairs = list(zip(done[::2], done[1::2], strict=False))
    ratios = {
        clock: ratio([getattr(on, clock) for _, on in pairs], [getattr(off, clock) for off, _ in pairs])
        for clock in ("wall_s", "cpu_s")
    }
    _print(done, ratios, clients)
    if json is not None:
        result = {
            "clients": clients,
            "pinned": pin,
            "machine": machine(torch.device("cpu")),
            "blocks": [{name: getattr(block, name) for name in Block.__slots__} for block in done],
            "ratios": {clock: [each.low, each.median, each.high] for clock, each in ratios.items()},
        }
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(result, indent=1), encoding="utf-8")


@contextmanager
def started(place: Path, cores: Sequence[int]) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """A run on those cores and a dashboard; process ids, and where the dashboard listens."""
    os.environ[TOKEN_ENV] = secrets.token_urlsafe(24)  # of dashboard and visitors
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    spotlight = (sys.executable, "-m", "spotlight.cli")
    with (place / "output").open("wb") as output:
        run = subprocess.Popen(
            [
                "taskset", "-c", ",".join(map(str, cores)),
                *spotlight, "train", *RUN, f"runs_dir={place}", f"cache_dir={place}/cache",
            ],
            stdout=output, stderr=output, env=environment,
        )  # fmt: skip
        dashboard = subprocess.Popen(
            ["nice", "-n", "5", *spotlight, "dashboard", str(place), "--port", "0", "--token-env", TOKEN_ENV],
            stdout=subprocess.PIPE, stderr=output, encoding="utf-8",
        )  # fmt: skip
        try:
            assert dashboard.stdout is not None
            host, _, port = dashboard.stdout.readline().partition("//")[2].partition("/")[0].partition(":")
            _wait_for_rows(place, run, 2)
            yield run.pid, dashboard.pid, (host, int(port))
        finally:
            for process in (run, dashboard):
                process.kill()
                process.wait()


def alternate(
    place: Path, run: int, dashboard: int, address: tuple[str, int], clients: int, blocks: int, each: int
) -> Iterator[Block]:
    """Blocks of ``each`` counted iterations: without clients, with them, and so on."""
    for number in range(blocks):
        watched = number % 2 == 1
        visitors = None
        if watched:
            visitors = subprocess.Popen([sys.executable, VISITORS, *map(str, (*address, clients))])
        try:
            _skip(place, 1)
            before = _clocks(run, dashboard, visitors)
            _skip(place, each)
            after = _clocks(run, dashboard, visitors)
        finally:
            if visitors is not None:
                visitors.kill()
                visitors.wait()
        wall_s, *used = [(late - early) / each for early, late in zip(before, after, strict=True)]
        yield Block(watched, wall_s, *used)


def _clocks(run: int, dashboard: int, visitors: subprocess.Popen[bytes] | None) -> list[float]:
    return [time.monotonic(), cpu_s(run), cpu_s(dashboard), cpu_s(visitors.pid) if visitors else 0.0]


def cpu_s(pid: int) -> float:
    """That a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _rows(place: Path) -> int:
    path = place / "watched" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _skip(place: Path, iterations: int) -> None:
    until = _rows(place) + iterations
    while _rows(place) < until:
        time.sleep(0.02)


def _wait_for_rows(place: Path, run: subprocess.Popen[bytes], rows: int) -> None:
    end_s = time.monotonic() + START_S
    while _rows(place) < rows:
        if run.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError((place / "output").read_text(encoding="utf-8")[-4000:])
        time.sleep(0.1)


def _print(blocks: Sequence[Block], ratios: dict[str, Ratio], clients: int) -> None:
    console = wide_console()
    for watched in (False, True):
        mine = [block for block in blocks if block.watched == watched]
        wall_s = statistics.fmean(block.wall_s for block in mine)
        shares = [
            f"{statistics.fmean(getattr(block, name) for block in mine) / wall_s:.1%}"
            for name in ("dashboard_s", "clients_s")
        ]
        console.print(
            f"{clients if watched else 0:3} clients: {wall_s:.3f} s an iteration; of a core the dashboard "
            f"took {shares[0]}, the clients {shares[1]}"
        )
    console.print(f"an iteration with clients / without: wall {ratios['wall_s']}, computed {ratios['cpu_s']}")


if __name__ == "__main__":
    typer.run(main)
