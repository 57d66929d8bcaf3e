"""How fast the cluster is simulated, how that grows with it, and what the pull queue does a second.

    python -m benchmarks.cluster_scale
    python -m benchmarks.cluster_scale --gpus 12 --gpus 1000 --work image --hours 1 --json out.json

Every size does the same work per GPU: nodes of eight, a fifth of the GPUs reserved, the others spot nodes
that stay eight hours on average. ``video``: HunyuanVideo at 1280x720, one rollout a quarter of an hour;
``image``: Qwen-Image at 512x512, leases of four seconds. What costs time is events, not GPUs, so both are
measured. Seconds are of this process on one core (``--clock wall`` for those on the wall).
"""

from __future__ import annotations

import gc
import json as json_format
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import STRATEGIES
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.simulation.virtual_driver import simulate
from spotlight_rewards.base.prompts import PromptId


class Clock(StrEnum):
    """What seconds are counted."""

    CPU = "cpu"
    WALL = "wall"


class Work(StrEnum):
    """What the GPUs do."""

    VIDEO = "video"
    IMAGE = "image"


CLOCKS = {Clock.CPU: time.process_time, Clock.WALL: time.perf_counter}
SCENARIOS = {Work.VIDEO: "video-1000", Work.IMAGE: "paper-512"}
SAMPLES_PER_GPU = {Work.VIDEO: 2, Work.IMAGE: 43}
"""Of an iteration: as the shipped scenarios have."""
SCORERS_PER_GPU = {Work.VIDEO: 1 / 8, Work.IMAGE: 8 / 3}
"""Likewise: with as many for every size, a thousand GPUs would wait for rewards."""


@dataclass(frozen=True, slots=True)
class Scale:
    """One simulated cluster.

    Attributes:
        day_s: seconds that a simulated day takes, at this rate.
        us_per_event: of events the controller handles; includes all of the simulation.
        rss_mib: the most memory that the process held so far.
    """

    work: str
    gpus: int
    simulated_h: float
    gpu_hours: float
    events: int
    seconds: float
    gpu_hours_per_s: float
    day_s: float
    us_per_event: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class QueueRate:
    """The pull queue with so many rollouts outstanding all the time."""

    outstanding: int
    batch: int
    operations: int
    seconds: float
    per_s: float


def scaled(work: Work, gpus: int, hours: float) -> ScenarioFile:
    """A scenario of so many GPUs, and as much work for each."""
    per_node = 8 if gpus >= 40 else 2
    reserved = max(1, round(gpus / 5 / per_node))
    spot = max(1, gpus // per_node - reserved)
    group = 16
    prompts = max(1, round(SAMPLES_PER_GPU[work] * gpus / group))
    return load_scenario(
        SCENARIOS[work],
        [
            f"cluster.reserved={{nodes: {reserved}, gpus_per_node: {per_node}}}",
            f"cluster.spot={{nodes: {spot}, gpus_per_node: {per_node}}}",
            "prices.whole_machines=false",  # small clusters have nodes of two
            "trace={kind: generated, mean_uptime_h: 8, bursts_per_h: 0.08, burst_fraction: 0.3}",
            f"workload.prompts={prompts}",
            f"rewards.scorers={max(1, round(SCORERS_PER_GPU[work] * gpus))}",
            "workload.evaluation=null",
            f"run.until_h={hours}",
            "run.iterations=1000000",
        ],
    )


def measure(work: Work, gpus: int, hours: float, now: Callable[[], float]) -> Scale:
    """Simulate Spotlight's own strategy for so many hours."""
    prepared = prepare(scaled(work, gpus, hours), ("spotlight",), datetime.now(UTC))
    scenario = scenario_of(prepared, STRATEGIES["spotlight"])
    gc.collect()
    started = now()
    result = simulate(scenario)
    taken = now() - started
    cluster = prepared.file.cluster
    present = sum(pool.nodes * pool.gpus_per_node for pool in (cluster.reserved, cluster.spot))
    return Scale(
        work=work.value,
        gpus=present,
        simulated_h=result.end_s / 3600,
        gpu_hours=result.gpu_hours,
        events=result.events,
        seconds=taken,
        gpu_hours_per_s=result.gpu_hours / taken,
        day_s=taken * 86400 / result.end_s,
        us_per_event=1e6 * taken / result.events,
        rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def queue_rate(outstanding: int, batch: int, operations: int, now: Callable[[], float]) -> QueueRate:
    """Pulls and completions, each finished rollout replaced by a new one; making rollouts is not counted.

    An operation is a pull or a completion of one rollout.
    """
    workers = [WorkerId(f"w{n}") for n in range(max(1, outstanding // batch // 10))]
    queue = PullQueue(600.0)
    epochs = {worker: queue.admit(worker) for worker in workers}
    rollouts = [_rollout(n) for n in range(outstanding + operations // 2)]
    queue.add(rollouts[:outstanding])
    spare = iter(rollouts[outstanding:])
    done, at_s, taken = 0, 0.0, 0.0
    gc.collect()
    while done < operations:
        for worker in workers:
            at_s += 0.01
            fresh = [rollout for _, rollout in zip(range(batch), spare, strict=False)]
            started = now()
            granted = queue.pull(worker, batch, at_s)
            assert granted is not None
            lease, asked = granted[0], granted[1]
            for rollout in asked:
                queue.complete(lease.id, epochs[worker], rollout.id)
            if fresh:
                queue.add(fresh)
            taken += now() - started
            done += 2 * len(asked)
            if done >= operations:
                break
        queue.forget_done()
    return QueueRate(outstanding, batch, done, taken, done / taken)


def _rollout(number: int) -> Rollout:
    name, prompt = RolloutId(f"t000000-{number:06d}"), PromptId(f"p{number % 64}")
    return Rollout(name, Purpose.TRAIN, 0, prompt, number % 16, number, 20, PolicyVersion(0))


def main(
    gpus: Annotated[list[int], typer.Option(help="Size of a cluster; repeatable.")] = [12, 1000, 10000],  # noqa: B006
    work: Annotated[list[Work], typer.Option(help="What they do; repeatable.")] = list(Work),  # noqa: B006
    hours: Annotated[
        float | None,
        typer.Option(help="Simulated (default: a day; of images less with more GPUs).", show_default=False),
    ] = None,
    operations: Annotated[int, typer.Option(help="Of the queue.")] = 100_000,
    clock: Annotated[Clock, typer.Option(help="cpu: seconds of this process; wall.")] = Clock.CPU,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Measure, and print two tables."""
    now = CLOCKS[clock]
    scales = [
        measure(kind, size, _hours(kind, size) if hours is None else hours, now)
        for kind in work
        for size in gpus
    ]
    rates = [queue_rate(10_000, batch, operations, now) for batch in (1, 4)]
    show(scales, rates)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "clock": clock.value,
            "scales": [asdict(scale) for scale in scales],
            "queue": [asdict(rate) for rate in rates],
        }
        json.write_text(json_format.dumps(content, indent=2) + "\n", encoding="utf-8")


def _hours(work: Work, gpus: int) -> float:
    """A day of video; of images as many hours as hold some iterations and are still short to simulate."""
    if work is Work.VIDEO:
        return 24.0
    return max(0.1, min(24.0, 24.0 * 12 / gpus))


def show(scales: list[Scale], rates: list[QueueRate]) -> None:
    """Print the tables."""
    console = Console() if Console().is_terminal else Console(width=120)
    table = Table(title="Simulating a cluster, one core")
    columns = (
        "work",
        "GPUs",
        "simulated h",
        "events",
        "seconds",
        "GPU-h per s",
        "a day takes, s",
        "µs/event",
        "MiB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "work" else "right")
    for one in scales:
        cells = (
            f"{one.simulated_h:.1f}",
            f"{one.events:,}",
            f"{one.seconds:.1f}",
            f"{one.gpu_hours_per_s:,.0f}",
            f"{one.day_s:,.1f}",
            f"{one.us_per_event:.0f}",
            f"{one.rss_mib:.0f}",
        )
        table.add_row(one.work, f"{one.gpus:,}", *cells)
    console.print(table)
    if not rates:
        return
    table = Table(title="The pull queue, in this process")
    for column in ("outstanding", "rollouts a lease", "pulls + completions per s"):
        table.add_column(column, justify="right")
    for rate in rates:
        table.add_row(f"{rate.outstanding:,}", str(rate.batch), f"{rate.per_s:,.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
