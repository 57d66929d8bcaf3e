"""How long survivors of a killed rank need to denoise on, against starting a new process.

    python -m benchmarks.regroup
    python -m benchmarks.regroup --degree 4 --rounds 100 --json build/regroup.json

Each round kills a random rank of a working group with SIGKILL, at a random moment within a step, and measures
both remedies, one after the other, on the same machine in the same minute:

- regroup: the survivors notice, destroy their communicator, receive their new groups (3 survivors: a pair and
  a single), form them, and have taken the first step; the slowest survivor counts.
- restart: one process is started again: interpreter, imports, weights, forming the full group, first step. A
  system that restarts the whole group needs at least this.

CPU processes over gloo, with the shipped testbed. A large model makes the restart longer, by loading its
weights; the regroup moves none.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine, wide_console, write_result
from benchmarks._regroup_worker import PROMPT, Lost, Ran, serve
from spotlight.models.families.qwen_image import QwenImage
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.scheduler.cluster.placement import form_groups
from spotlight.scheduler.types import WorkerId
from spotlight.testbed import PIPELINE_DIR

GOAL_P99_S, GOAL_RATIO = 1.0, 20.0
PHASES = {
    "regroup": ("detect", "destroy", "re-form", "first step", "total"),
    "restart": ("spawn, import, load", "form", "first step", "total"),
}
_ANSWER_S = 180.0
_processes = multiprocessing.get_context("spawn")
Answer = TypeVar("Answer")


@dataclass
class Fleet:
    """Worker processes of one machine, and the store where they meet."""

    cache: Path
    workers: dict[WorkerId, tuple[BaseProcess, Connection]] = field(default_factory=dict)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.store, self.address = rendezvous.serve()

    def spawn(self, name: WorkerId) -> None:
        """Start a process; it answers once when it is ready."""
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=serve, args=(name, theirs, self.address, self.cache), daemon=True)
        process.start()
        theirs.close()
        self.workers[name] = (process, ours)

    def tell(self, names: Sequence[WorkerId], command: str, *arguments: object) -> None:
        """Send a command to all of ``names``."""
        for name in names:
            self.workers[name][1].send((command, arguments))

    def receive(self, name: WorkerId, kind: type[Answer]) -> Answer:
        """The next answer of a worker."""
        pipe = self.workers[name][1]
        if not pipe.poll(_ANSWER_S):
            raise TimeoutError(f"worker {name} did not answer within {_ANSWER_S:g} s")
        answer = pipe.recv()
        assert isinstance(answer, kind)
        return answer

    def form(self, groups: Sequence[Sequence[WorkerId]]) -> float:
        """Form groups; when the last member was ready."""
        self.epoch += 1
        for members in groups:
            self.tell(members, "form", self.epoch, tuple(members))
        return max(self.receive(name, float) for members in groups for name in members)

    def step(self, names: Sequence[WorkerId]) -> float:
        """Take one step in every group; when the last member was done."""
        self.tell(names, "run", 1)
        return max(self.receive(name, Ran).at_s for name in names)

    def kill(self, name: WorkerId) -> float:
        """SIGKILL; the moment before."""
        process, pipe = self.workers.pop(name)
        assert process.pid is not None
        when = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        pipe.close()
        return when

    def close(self) -> None:
        """End all processes."""
        for name in list(self.workers):
            self.kill(name)


def measure_round(fleet: Fleet, draw: random.Random) -> dict[str, dict[str, float]]:
    """Seconds of every phase of both remedies. The fleet is one working group, before and after."""
    everybody = list(fleet.workers)
    victim = draw.choice(everybody)
    survivors = [name for name in everybody if name != victim]
    fleet.tell(everybody, "run", None)
    time.sleep(draw.uniform(0.2, 0.7))
    killed = fleet.kill(victim)
    losses = [fleet.receive(name, Lost) for name in survivors]
    noticed = max(loss.noticed_s for loss in losses)
    destroyed = max(loss.destroyed_s for loss in losses)
    degrees = [1, 2, 4]
    formed = fleet.form(form_groups(survivors, max(d for d in degrees if d <= len(survivors)), degrees))
    stepped = fleet.step(survivors)
    regroup = _phases("regroup", killed, noticed, destroyed, formed, stepped)

    began = time.monotonic()
    fleet.spawn(victim)
    ready = fleet.receive(victim, float)
    formed = fleet.form([everybody])
    stepped = fleet.step(everybody)
    return {"regroup": regroup, "restart": _phases("restart", began, ready, formed, stepped)}


def _phases(remedy: str, *moments: float) -> dict[str, float]:
    lengths = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return dict(zip(PHASES[remedy], [*lengths, moments[-1] - moments[0]], strict=True))


def measure(degree: int, rounds: int, cache: Path, seed: int) -> list[dict[str, dict[str, float]]]:
    """Rounds at one degree, after one that does not count."""
    fleet = Fleet(cache)
    draw = random.Random(seed)
    names = [WorkerId(f"w{i}") for i in range(degree)]
    try:
        for name in names:
            fleet.spawn(name)
        for name in names:
            fleet.receive(name, float)
        fleet.form([names])
        fleet.step(names)
        return [measure_round(fleet, draw) for _ in range(rounds + 1)][1:]
    finally:
        fleet.close()


def summary(rows: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median, 99 % quantile and largest of every phase, seconds."""
    return {
        remedy: {
            phase: {
                "median": float(np.median(seconds)),
                "p99": float(np.quantile(seconds, 0.99)),
                "max": max(seconds),
            }
            for phase in phases
            for seconds in [[row[remedy][phase] for row in rows]]
        }
        for remedy, phases in PHASES.items()
    }


def show(
    console: Console, degree: int, rounds: int, found: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> None:
    """The table of one degree, and whether the goal is met."""
    table = Table(title=f"SP {degree}, {rounds} rounds, ms")
    for column in ("remedy", "phase", "median", "p99", "max"):
        table.add_column(column, justify="left" if column in ("remedy", "phase") else "right")
    for remedy, phases in found.items():
        for phase, values in phases.items():
            table.add_row(remedy, phase, *(f"{1000 * value:.1f}" for value in values.values()))
    console.print(table)
    ours, theirs = found["regroup"]["total"], found["restart"]["total"]
    times = theirs["median"] / ours["median"]
    met = ours["p99"] < GOAL_P99_S and times >= GOAL_RATIO
    console.print(
        f"regroup p99 {ours['p99']:.3f} s (goal below {GOAL_P99_S:g}), {times:.0f} times faster than "
        f"a restart (goal {GOAL_RATIO:g}): {'met' if met else 'NOT met'}"
    )


def main(
    degree: Annotated[list[int], typer.Option(help="Ranks of the group; repeatable.")] = [2, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Kills at each degree.")] = 20,
    seed: Annotated[int, typer.Option(help="Of victims and moments.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Kill ranks; time the survivors' way back to work and a process's."""
    console = wide_console()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        family = QwenImage.load(PIPELINE_DIR, device="cpu", dtype=torch.float32, embeddings_cache=cache)
        family.encode([PROMPT])  # so that no process loads the text encoder
        for ranks in degree:
            rows = measure(ranks, rounds, cache, seed)
            found = summary(rows)
            show(console, ranks, rounds, found)
            results.append({"degree": ranks, "rounds": rounds, "summary": found, "seconds": rows})
    about = machine(torch.device("cpu"))
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json is not None:
        content = {
            "goal": {"regroup_p99_s": GOAL_P99_S, "ratio": GOAL_RATIO},
            "rows": results,
        }
        write_result(json, "Regroup against restart", about, content)


if __name__ == "__main__":
    typer.run(main)
