"""What a progress commit costs, as a share of the denoising step that it follows.

    python -m benchmarks.commit_overhead
    python -m benchmarks.commit_overhead --megabytes 1.6 --batch 16 --rounds 100 --json build/commit.json

A commit is what a worker does after a step: it begins to copy what is new of each rollout; behind the next
step packs and delivers it to the store, an actor in another process, over a real Ray on this machine. At the
end of that step it must have arrived: what a step waits for is the beginning (on a GPU, `commit` of
`benchmarks.gpu`), and as much of the rest as outlasts a step. That is the share; on a CPU, where the
delivery takes cores from the step, it understates. Over a network the bytes take their time besides: 1.6 MB
are 1.3 ms at 10 Gbit/s.

Shares are of two kinds of steps:

- measured here, in the same rounds: a step of the shipped testbed on this CPU, one thread. Its own states
  (first rows) are small, and so are its steps: the share that a laptop pays.
- published: Qwen-Image (20B) on an H20, one picture a step, SP 1. A batch of n is taken to need n times as
  long, since one picture fills the GPU; the rows of batch 1 stand without that.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine, wide_console, write_result
from spotlight.cluster.blobs.blob_server import start_blob_store
from spotlight.diffusion.samplers import ODE
from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.rollout.commits import Committer
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.events import LeaseProgressed
from spotlight.scheduler.types import LeaseId, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.testbed import PIPELINE_DIR
from spotlight.worker.reports import Report, ReportedValue
from spotlight_rewards.base.prompts import PromptId

GOAL_SHARE = 0.005
PUBLISHED_MS = {"512x512": 155.0, "1024x1024": 605.0, "1536x1536": 1557.0}
"""One step of Qwen-Image (20B) with one picture on one H20: not measured here."""
LATENTS_MB = {"512x512": 0.26, "1024x1024": 1.05, "1536x1536": 2.36}
"""Of one such picture, float32; embeddings of its prompt are about 0.7 MB more."""
PROMPT = "a photo of a red circle"
RECIPE = Recipe(MediaSize(32, 32), ODE(), None, 1.0, "final")
STEPS = 100_000
"""More than any benchmark takes: every commit is of a later step."""
CHANNELS = 64
WORKER = WorkerId("worker")
KEEPER_BYTES = 1 << 30
ANSWER_S = 60.0


@dataclass(slots=True)
class Case:
    """One size and batch: its states, and what was measured.

    Attributes:
        megabytes: of one state's latents; None is the testbed's own.
        packed_bytes: of one state, packed.
    """

    megabytes: float | None
    states: list[RolloutState]
    packed_bytes: int
    begin_s: list[float] = field(default_factory=list)
    deliver_s: list[float] = field(default_factory=list)
    committer: Committer = field(default_factory=Committer)

    @property
    def commit_s(self) -> list[float]:
        """Beginning and delivering together."""
        return [begin + deliver for begin, deliver in zip(self.begin_s, self.deliver_s, strict=True)]

    def commit(self, store: Any) -> None:
        """One commit, of a step later than the last."""
        self.states = [dataclasses.replace(state, step=state.step + 1) for state in self.states]
        began = time.perf_counter()
        packing = self.committer.begin(self.states)
        begun = time.perf_counter()
        values = [ReportedValue("progress", one.rollout, one.data, one.step) for one in packing]
        event = LeaseProgressed(WORKER, LeaseId(1), 1, self.states[0].step)
        delivery = store.deliver.remote(Report(WORKER, "digest", tuple(values), (event,)))
        ray.get(delivery, timeout=ANSWER_S)
        delivered = time.perf_counter()
        self.begin_s.append(begun - began)
        self.deliver_s.append(delivered - begun)


@contextmanager
def store_process() -> Iterator[Any]:
    """A Ray of this benchmark's own, and a store in it."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))  # short: Ray makes sockets below it
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="WARNING",
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
    )
    try:
        store = start_blob_store(
            folder / "values", KEEPER_BYTES, node=ray.get_runtime_context().get_node_id()
        )
        ray.get(store.fetch.remote("sample", []), timeout=ANSWER_S)
        yield store
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def make_cases(
    testbed: Callable[[int], list[RolloutState]], megabytes: Sequence[float], batches: Sequence[int]
) -> list[Case]:
    """Every size with every batch; the testbed's own states first."""
    cases = []
    for size in (None, *megabytes):
        for batch in batches:
            states = testbed(batch)
            if size is not None:
                latents = torch.randn(max(1, round(size * 1e6 / 4 / CHANNELS)), CHANNELS)
                # The sizes a worker commits, whatever they are made of: embeddings are part of them.
                states = [
                    dataclasses.replace(
                        state,
                        latents=latents.clone(),
                        condition=Condition({"embeds": torch.zeros(1, CHANNELS)}),
                    )
                    for state in states
                ]
            named = [_named(state, f"{size}.{batch}.{i}") for i, state in enumerate(states)]
            cases.append(Case(size, named, sum(len(value.data) for value in Committer().begin(named[:1]))))
    return cases


def _named(state: RolloutState, name: str) -> RolloutState:
    return dataclasses.replace(state, rollout=dataclasses.replace(state.rollout, id=RolloutId(name)))


class Testbed:
    """The shipped model, one step at a time."""

    def __init__(self, cache: Path) -> None:
        torch.set_num_threads(1)
        self._family = QwenImage.load(PIPELINE_DIR, device="cpu", dtype=torch.float32, embeddings_cache=cache)
        self._engine = Engine(self._family, max_batch=64)
        self._condition = self._family.encode([PROMPT])[0]

    def start(self, batch: int) -> list[RolloutState]:
        """States at step 0, of a few rollouts."""
        rollouts = [
            Rollout(RolloutId(f"r{i}"), Purpose.EVAL, 0, PromptId("p"), i, i, STEPS, PolicyVersion(0))
            for i in range(batch)
        ]
        # The noise levels of all steps are part of a state; a real one has tens.
        states = self._engine.start(rollouts, [self._condition] * batch, RECIPE)
        return [dataclasses.replace(state, sigmas=state.sigmas[:51]) for state in states]

    def time_step(self, states: list[RolloutState]) -> float:
        """Seconds of one step of all."""
        began = time.perf_counter()
        self._engine.step(self._family.transformer, states)
        return time.perf_counter() - began


def measure(
    store: Any, testbed: Testbed, megabytes: Sequence[float], batches: Sequence[int], rounds: int
) -> tuple[list[Case], dict[int, list[float]]]:
    """Commits of every case and testbed steps of every batch, in turns; the first round does not count."""
    cases = make_cases(testbed.start, megabytes, batches)
    resting = {batch: testbed.start(batch) for batch in batches}
    steps_s: dict[int, list[float]] = {batch: [] for batch in batches}
    order: list[Case | int] = [*cases, *batches]
    draw = random.Random(0)
    gc.freeze()
    for _ in range(rounds + 1):
        draw.shuffle(order)
        for one in order:
            if isinstance(one, Case):
                one.commit(store)
            else:
                steps_s[one].append(testbed.time_step(resting[one]))
        ray.get(store.take.remote(0), timeout=ANSWER_S)  # the head's part
    gc.unfreeze()
    for case in cases:
        del case.begin_s[0], case.deliver_s[0]
    return cases, {batch: seconds[1:] for batch, seconds in steps_s.items()}


def row(case: Case, steps_s: dict[int, list[float]]) -> dict[str, Any]:
    """Everything about a case, JSON-able."""
    batch = len(case.states)
    begin_s, deliver_s = statistics.median(case.begin_s), statistics.median(case.deliver_s)

    def share(step_s: float) -> float:
        return (begin_s + max(0.0, deliver_s - step_s)) / step_s

    return {
        "state": "testbed" if case.megabytes is None else f"{case.megabytes:g} MB",
        "megabytes": case.megabytes,
        "packed_bytes": case.packed_bytes,
        "batch": batch,
        "begin_ms": _spread_ms(case.begin_s),
        "deliver_ms": _spread_ms(case.deliver_s),
        "commit_ms": _spread_ms(case.commit_s),
        "testbed_step_ms": _spread_ms(steps_s[batch]),
        "share_of_testbed_step": share(statistics.median(steps_s[batch])),
        "share_of_published_step": {
            size: share(step_ms * batch / 1000) for size, step_ms in PUBLISHED_MS.items()
        },
        "seconds": {"begin": case.begin_s, "deliver": case.deliver_s},
    }


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": 1000 * median, "q1": 1000 * first, "q3": 1000 * third}


def show(console: Console, rows: Sequence[dict[str, Any]], rounds: int) -> None:
    """The table, and where the goal is met."""
    table = Table(
        title=f"A commit to the store, {rounds} rounds: median ms (quartiles), what steps wait for it",
        caption=f"goal: below {GOAL_SHARE:.0%}. 20B: published times of one picture, times the batch",
    )
    for column in ("state", "batch", "begin", "deliver", "commit", "testbed step", "share"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for size in PUBLISHED_MS:
        table.add_column(f"20B\n{size}", justify="right")
    for each in rows:
        times = [each[f"{part}_ms"] for part in ("begin", "deliver", "commit", "testbed_step")]
        shares = [each["share_of_testbed_step"], *each["share_of_published_step"].values()]
        table.add_row(
            each["state"],
            str(each["batch"]),
            f"{times[0]['median']:.2f}",
            f"{times[1]['median']:.2f}",
            *(f"{t['median']:.1f} ({t['q1']:.0f}-{t['q3']:.0f})" for t in times[2:]),
            *(f"{share:.1%}" for share in shares),
        )
    console.print(table)
    for size, needed in LATENTS_MB.items():
        made = {each["megabytes"] for each in rows} - {None}
        state = min((one for one in made if one >= needed), default=max(made))
        shares = [each["share_of_published_step"][size] for each in rows if each["megabytes"] == state]
        met = "met" if max(shares) < GOAL_SHARE else "NOT met"
        console.print(
            f"20B at {size} (latents {needed:g} MB), states of {state:g} MB: {min(shares):.1%} to "
            f"{max(shares):.1%} of a step (goal below {GOAL_SHARE:.0%}): {met}"
        )


def main(
    megabytes: Annotated[list[float], typer.Option(help="Of one state; repeatable.")] = [0.1, 0.8, 1.6],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Rollouts in a commit; repeatable.")] = [1, 8, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Commits of each size and batch; at least 2.")] = 30,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time commits of rollouts' states to the store."""
    console = wide_console()
    with tempfile.TemporaryDirectory() as cache, store_process() as store:
        cases, steps_s = measure(store, Testbed(Path(cache)), megabytes, batch, rounds)
    rows = [row(case, steps_s) for case in cases]
    show(console, rows, rounds)
    about = {**machine(torch.device("cpu")), "ray": ray.__version__}
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json is not None:
        content = {
            "goal": {"share_of_step": GOAL_SHARE},
            "published_step_ms": PUBLISHED_MS,
            "published": "Qwen-Image 20B, H20, one picture, SP 1; not measured here",
            "rows": rows,
        }
        write_result(json, "Commit overhead", about, content)


if __name__ == "__main__":
    typer.run(main)
