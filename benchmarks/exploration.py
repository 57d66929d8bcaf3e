"""Seed exploration, measured: how well previews rank, what contrast they bring, whether learning gains, and
what it does for spot slots that would idle.

    python benchmarks/exploration.py --json exploration.json
    python benchmarks/exploration.py --json exploration.json --part curves --seeds 8
    python benchmarks/exploration.py --json sde.json --seeds-per-prompt 48 --preview-steps 10 \\
        algorithm.name=flow-grpo rollout.sampler=flow-sde learner.learning_rate=1e-3

Parts (results of those that are in the file already are not made again, so a run may be interrupted):

fidelity    After some training, pools of seeds are previewed under weights of several ages with several
            numbers of steps, and regenerated under the newest: how alike are the two rankings?
variance    From the same pools: the variance of groups as regenerated, chosen among N previews of T steps.
curves      Training without exploration, with it on the critical path, and in idle time with stale weights;
            the same prompts, group sizes and updates. Real learning; the clock and the bill are of the
            simulator (the production controller in virtual time, the testbed's cost profile), where the same
            work runs on reserved and spot slots: this machine has none to spare.
idle        From the simulator: how much of the spot slots' time is idle, without and with exploration.

Figures are means over run seeds with their standard errors. Curves are smoothed over neighbouring
evaluations. The target, unless given, is the mean last smoothed score without exploration.

Extra arguments are overrides of the demo's configuration for all parts; they, and all sizes, are written
into the file, and a file of other settings is refused.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from _exploration_curves import (
    Runs,
    areas,
    at_equal_score,
    by_iteration,
    curve_tables,
    paired,
    seconds_at,
    smoothed,
)
from _exploration_figures import Tree, fidelity_figures, spread, table_of, variance_figures
from _exploration_lab import Weights, laboratory
from _measure import machine, wide_console
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.core.plan import Explore
from spotlight.core.seeds import prompts_of_iteration
from spotlight.core.selection import SelectionPolicy
from spotlight.core.types import Purpose
from spotlight.simulation.compare import Task, run_task
from spotlight.simulation.prepare import prepare
from spotlight.simulation.scenario_load import build_scenario


class Part(StrEnum):
    """What is measured."""

    FIDELITY = "fidelity"
    VARIANCE = "variance"
    CURVES = "curves"
    IDLE = "idle"


CONDITIONS: Mapping[str, Explore | None] = {
    "none": None,
    "critical_path": Explore.CRITICAL_PATH,
    "idle": Explore.IDLE,
}
"""How curves are made, and where previews are made."""
STRATEGY = {"none": "spot_rollout_only", "critical_path": "critical_path", "idle": "spotlight"}
"""What the simulator calls them."""
SHARES = (0.5, 0.75, 1.0)
"""Of the iterations: the scores that runs without exploration have then are those to be reached."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, as the file says it.

    Attributes:
        warmup: iterations of training before pools are made.
        stale: ages of weights, in iterations.
        steps: of pools' previews, besides those of a rollout.
        pool: seeds of a pool's prompt; counts of seeds up to it are compared.
        uptime_min: of a spot slot, on the average; 0: they stay.
    """

    iterations: int
    prompts: int
    group_size: int
    evaluate_every: int
    evaluation_images: int
    seeds_per_prompt: int
    preview_steps: int
    policy: str
    warmup: int
    stale: tuple[int, ...]
    steps: tuple[int, ...]
    pool: int
    reserved: int
    spot: int
    uptime_min: float
    overrides: tuple[str, ...]

    def config(self, seed: int, iterations: int) -> RunConfig:
        """A run's configuration. Raises ConfigError."""
        return load_config(
            None,
            [
                f"run_seed={seed}",
                f"iterations={iterations}",
                f"rollout.prompts_per_iteration={self.prompts}",
                f"rollout.group_size={self.group_size}",
                f"learner.decay_iterations={max(self.iterations, self.warmup)}",
                f"learner.warmup_steps={min(5, self.iterations // 4)}",
                f"learner.micro_batch_size={self.prompts * self.group_size}",
                f"evaluation.every={self.evaluate_every}",
                f"evaluation.images_per_prompt={self.evaluation_images}",
                "evaluation.grid_images=1",
                f"exploration={{seeds_per_prompt: {self.seeds_per_prompt}, steps: {self.preview_steps}, "
                f"policy: {self.policy}}}",
                *self.overrides,
            ],
        )

    def as_json(self) -> Tree:
        """For the file."""
        tree: Tree = json.loads(json.dumps(asdict(self)))  # lists for tuples, as in the file
        return tree


class Record:
    """The file: settings, and whatever is measured so far."""

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self.path = path
        self.tree: Tree = {"settings": sizes.as_json(), "pools": {}, "curves": {}, "simulated": {}}
        if path.exists():
            found = json.loads(path.read_text())
            differ = [key for key, value in self.tree["settings"].items() if found["settings"][key] != value]
            if differ:
                raise SystemExit(
                    f"{path} was measured with other settings ({', '.join(differ)}): name another --json file"
                )
            self.tree |= found

    def once(self, kind: str, name: str, make: Callable[[], Tree]) -> Tree:
        """What the file has under ``name``, made and written if there is nothing."""
        kept: dict[str, Tree] = self.tree[kind]
        if name not in kept:
            started_s = time.process_time()
            kept[name] = make() | {"cpu_s": time.process_time() - started_s}
            self.write()
        return kept[name]

    def write(self) -> None:
        """Whole or not at all."""
        self.tree["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.tree["machine"] = machine(torch.device("cpu"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".writing")
        beside.write_text(json.dumps(self.tree, indent=1) + "\n")
        beside.replace(self.path)


# -- measuring ---------------------------------------------------------------------------------------------


def measure_pools(sizes: Sizes, seed: int) -> Tree:
    """Rewards of the same seeds under weights of several ages, with several numbers of steps."""
    config = sizes.config(seed, sizes.warmup)
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"every": sizes.warmup})}
    )
    history: dict[int, Weights] = {}
    with laboratory(config) as lab:
        history[0] = lab.weights()
        lab.train(None, lambda iteration: history.update({iteration + 1: lab.weights()}))
        newest = max(history)
        prompts = list(
            {p.id: p for p in prompts_of_iteration(lab.prompts.train, seed, newest, sizes.prompts)}.values()
        )
        full = config.rollout.steps

        def rewards(age: int, steps: int, purpose: Purpose) -> list[list[float]]:
            return lab.scores(prompts, sizes.pool, steps, history[newest - age], purpose, newest)

        realised = rewards(0, full, Purpose.TRAIN)
        previews = [
            {"stale": age, "steps": steps, "rewards": rewards(age, steps, Purpose.EXPLORE)}
            for age in sizes.stale
            if age <= newest
            for steps in (full, *sizes.steps)
            if steps == full or age <= 1
        ]
    return {"realised": realised, "previews": previews}


def measure_curve(sizes: Sizes, condition: str, seed: int) -> Tree:
    """Validations and exploration's own metrics of a run."""
    with laboratory(sizes.config(seed, sizes.iterations)) as lab:
        book = lab.train(CONDITIONS[condition])
    explored = [
        {name: value for name, value in row.items() if name.startswith("exploration/")} for row in book.rows
    ]
    return {
        "validation": {str(at): row for at, row in book.validations.items()},
        "exploration": explored,
        "grad_norm": [row.get("train/grad_norm") for row in book.rows],
    }


def simulate_strategy(sizes: Sizes, condition: str, seeds_per_prompt: int | None = None) -> Tree:
    """The same work on reserved and spot slots in virtual time; None seeds: a planner chooses."""
    config = sizes.config(0, sizes.iterations)
    rollout = config.rollout
    group = sizes.group_size
    explores: Tree = {
        "seeds_per_prompt": seeds_per_prompt or sizes.seeds_per_prompt,
        "steps": sizes.preview_steps,
        "policy": sizes.policy,
    }
    if seeds_per_prompt is None:
        counts = sorted({count for factor in (2, 3, 4, 6, 8, 12, 16) if (count := factor * group) > group})
        explores["planner"] = {"seed_counts": counts, "step_counts": [sizes.preview_steps, rollout.steps]}
    slot = {"gpus_per_node": 1, "gpu_type": "cpu"}
    trace: Tree = {"kind": "always_on"}
    if sizes.uptime_min > 0:
        trace = {
            "kind": "generated", "mean_uptime_h": sizes.uptime_min / 60, "mean_downtime_s": 15.0,
            "notice_lead_s": 10.0,
        }  # fmt: skip
    tree: Tree = {
        "name": f"testbed, {sizes.reserved} reserved + {sizes.spot} spot slots",
        "cluster": {
            "reserved": {"nodes": sizes.reserved, "usd_gpu_h": config.fleet.price_usd_h, **slot},
            "spot": {"nodes": sizes.spot, "usd_gpu_h": config.fleet.spot.price_usd_h, **slot},
        },
        "trace": trace,
        "workload": {
            "profile": "testbed-cpu", "height": rollout.height, "width": rollout.width,
            "prompts": sizes.prompts, "group_size": group, "steps": rollout.steps,
            "trained_timesteps": config.algorithm.train_timesteps or rollout.steps - 1,
            "micro_batch_per_gpu": 64, "checkpoint_every": 1,
        },
        "exploration": explores,
        "strategies": [STRATEGY[condition]],
        "run": {"iterations": sizes.iterations, "until_h": 24.0},
    }  # fmt: skip
    prepared = prepare(build_scenario(tree, "the benchmark"), (STRATEGY[condition],), datetime.now(UTC))
    compared = run_task(Task(prepared, STRATEGY[condition]))
    outcome = compared.outcome
    if outcome.problem is not None:
        raise RuntimeError(f"{condition}: {outcome.problem}")
    return {
        "iteration_ends_s": list(compared.iteration_ends_s),
        "iteration_s": outcome.iteration_s,
        "iteration_usd": outcome.iteration_usd,
        "spot_idle_share": outcome.spot_idle_share,
        "preview_share": None if math.isnan(outcome.preview_share) else outcome.preview_share,
        "preemptions": outcome.preemptions,
    }


# -- figures -----------------------------------------------------------------------------------------------


def fidelity_rows(pools: Sequence[Tree]) -> list[Tree]:
    """(a): by age of the weights and steps, over run seeds."""
    rows = []
    for age, steps in _cells(pools):
        each = [fidelity_figures(_previews(pool, age, steps), pool["realised"]) for pool in pools]
        names = dict.fromkeys(name for one in each for name in one)
        row = {name: spread(one.get(name) for one in each).as_json() for name in names}
        rows.append({"stale": age, "steps": steps, **row})
    return rows


def variance_rows(pools: Sequence[Tree], sizes: Sizes) -> list[Tree]:
    """(b): by previews and steps, of the age that idle exploration has."""
    counts = [n * sizes.group_size for n in (1.5, 2, 3, 4, 6, 8, 12) if n * sizes.group_size <= sizes.pool]
    policy, rows = SelectionPolicy(sizes.policy), []
    for age, steps in _cells(pools):
        if age > 1:
            continue
        for count in dict.fromkeys([*map(int, counts), sizes.pool]):
            each = [
                variance_figures(
                    _previews(pool, age, steps), pool["realised"], count, sizes.group_size, policy
                )
                for pool in pools
            ]
            row = {name: spread(one[name] for one in each).as_json() for name in each[0]}
            rows.append({"stale": age, "steps": steps, "seeds": count, **row})
    return rows


def _cells(pools: Sequence[Tree]) -> list[tuple[int, int]]:
    return sorted({(one["stale"], one["steps"]) for pool in pools for one in pool["previews"]})


def _previews(pool: Tree, age: int, steps: int) -> list[list[float]]:
    found: list[list[float]]
    (found,) = (one["rewards"] for one in pool["previews"] if (one["stale"], one["steps"]) == (age, steps))
    return found


def curve_figures(
    curves: Mapping[str, Mapping[int, Tree]], simulated: Mapping[str, Tree], sizes: Sizes
) -> Tree:
    """(c): smoothed curves, and what equal scores take."""
    runs: Runs = {name: {seed: _curve(run) for seed, run in each.items()} for name, each in curves.items()}
    figures: Tree = {"samples": sizes.prompts * sizes.group_size, "conditions": {}}
    for condition, each in curves.items():
        plain, clock = list(runs[condition].values()), simulated[condition]
        figures["conditions"][condition] = {
            "curve": {str(at): one.as_json() for at, one in by_iteration(plain, smoothed).items()},
            "wall_s": {
                str(at): seconds_at(at, clock["iteration_ends_s"]) for at in by_iteration(plain, dict)
            },
            "mean_height": spread(areas(curve) for curve in plain).as_json(),
            "height_gain": paired(runs, condition, areas).as_json(),
            "contrast": spread(_contrast(run) for run in each.values()).as_json(),
            "tau": spread(
                _mean(run, "exploration/fidelity/reward/tau_by_slope") for run in each.values()
            ).as_json(),
            "grad_norm": spread(_known_mean(run["grad_norm"]) for run in each.values()).as_json(),
            "previews_in_time": clock["preview_share"],
        }
    figures["equal_scores"] = [at_equal_score(runs, simulated, share * sizes.iterations) for share in SHARES]
    return figures


def _curve(run: Tree) -> dict[int, float]:
    """The strict score where there is one."""
    return {int(at): row.get("strict", row["graded"]) for at, row in run["validation"].items()}


def _contrast(run: Tree) -> float | None:
    """Variance of regenerated groups over that of random ones."""
    realised, random = (_mean(run, f"exploration/contrast/{name}") for name in ("realised", "random"))
    return realised / random if realised is not None and random else None


def _mean(run: Tree, name: str) -> float | None:
    return _known_mean([row.get(name) for row in run["exploration"]])


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# -- the program -------------------------------------------------------------------------------------------


def run_parts(parts: Sequence[Part], seeds: int, sizes: Sizes, record: Record) -> None:
    """Measure what is missing, and print every part."""
    console = wide_console()
    figures: Tree = record.tree.setdefault("figures", {})
    if Part.FIDELITY in parts or Part.VARIANCE in parts:
        pools = []
        for seed in range(seeds):
            console.print(f"pools, run seed {seed}", style="dim")
            pools.append(record.once("pools", str(seed), partial(measure_pools, sizes, seed)))
        if Part.FIDELITY in parts:
            figures["fidelity"] = fidelity_rows(pools)
            console.print(table_of("Previews against regenerated rewards", figures["fidelity"]))
        if Part.VARIANCE in parts:
            figures["variance"] = variance_rows(pools, sizes)
            console.print(table_of("Variance of regenerated groups", figures["variance"]))
    if Part.CURVES in parts:
        figures["curves"] = _curves(seeds, sizes, record, console)
        for table in curve_tables(figures["curves"]):
            console.print(table)
    if Part.IDLE in parts:
        figures["idle"] = _idle(sizes, record)
        console.print(table_of("Spot slots' time (simulated)", figures["idle"]))
    record.write()


def _curves(seeds: int, sizes: Sizes, record: Record, console: Console) -> Tree:
    curves: dict[str, dict[int, Tree]] = {condition: {} for condition in CONDITIONS}
    for seed in range(seeds):  # conditions take turns: an interrupted measurement has as many of each
        for condition in CONDITIONS:
            console.print(f"{condition}, run seed {seed}", style="dim")
            curves[condition][seed] = record.once(
                "curves",
                f"{condition}-{seed}",
                partial(measure_curve, sizes, condition, seed),
            )
    simulated = {condition: _simulated(sizes, record, condition) for condition in CONDITIONS}
    return curve_figures(curves, simulated, sizes)


def _simulated(sizes: Sizes, record: Record, condition: str, seeds: int | None = -1) -> Tree:
    """Args: seeds: previews of a prompt; -1: as the curves; None: a planner chooses."""
    count = sizes.seeds_per_prompt if seeds == -1 else seeds
    name = condition if condition == "none" else f"{condition}-{count or 'planned'}"
    return record.once("simulated", name, lambda: simulate_strategy(sizes, condition, count))


def _idle(sizes: Sizes, record: Record) -> list[Tree]:
    """(d): without exploration, on the critical path, and in idle time with more and more seeds."""
    group = sizes.group_size
    counts = sorted({sizes.seeds_per_prompt, *(factor * group for factor in (2, 4, 8, 12, 16))})
    cases: list[tuple[str, str, int | None]] = [("none", "none", -1), ("critical_path", "critical_path", -1)]
    cases += [(f"idle, {count} seeds", "idle", count) for count in counts]
    cases.append(("idle, planned", "idle", None))
    rows = []
    for name, condition, count in cases:
        found = _simulated(sizes, record, condition, count)
        shown = ("spot_idle_share", "iteration_s", "iteration_usd", "preview_share", "preemptions")
        rows.append({"exploration": name, **{key: found[key] for key in shown}})
    return rows


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Results; what is there is kept.")] = Path(
        "exploration.json"
    ),
    part: Annotated[list[Part] | None, typer.Option(help="Only these parts.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0, 1, ...")] = 5,
    iterations: Annotated[int, typer.Option(min=1, help="Of a curve.")] = 20,
    prompts: Annotated[int, typer.Option(min=1, help="Of an iteration, and of a pool.")] = 8,
    group_size: Annotated[int, typer.Option(min=2, help="Pictures trained of a prompt.")] = 8,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Iterations.")] = 4,
    evaluation_images: Annotated[int, typer.Option(min=1, help="Of each held-out prompt.")] = 16,
    seeds_per_prompt: Annotated[int, typer.Option(min=2, help="Previews of a prompt.")] = 32,
    preview_steps: Annotated[int, typer.Option(min=1, help="Denoising steps of a preview.")] = 8,
    policy: Annotated[SelectionPolicy, typer.Option(help="Which previews are chosen.")] = (
        SelectionPolicy.MAX_VARIANCE
    ),
    warmup: Annotated[int, typer.Option(min=1, help="Iterations trained before pools are made.")] = 6,
    stale: Annotated[list[int] | None, typer.Option(help="Ages of weights (0, 1, 2, 4).")] = None,
    steps: Annotated[list[int] | None, typer.Option(help="Steps of pools' previews (4, 5, 6, 8).")] = None,
    pool: Annotated[int, typer.Option(min=2, help="Seeds of a pool's prompt.")] = 32,
    reserved: Annotated[int, typer.Option(min=1, help="Reserved slots of the emulated cluster.")] = 1,
    spot: Annotated[int, typer.Option(min=1, help="Its spot slots.")] = 4,
    uptime_min: Annotated[float, typer.Option(min=0, help="Of a spot slot; 0: they stay.")] = 6.0,
) -> None:
    """Measure exploration on the testbed."""
    sizes = Sizes(
        iterations=iterations,
        prompts=prompts,
        group_size=group_size,
        evaluate_every=evaluate_every,
        evaluation_images=evaluation_images,
        seeds_per_prompt=seeds_per_prompt,
        preview_steps=preview_steps,
        policy=policy.value,
        warmup=warmup,
        stale=tuple(stale or (0, 1, 2, 4)),
        steps=tuple(steps or (4, 5, 6, 8)),
        pool=pool,
        reserved=reserved,
        spot=spot,
        uptime_min=uptime_min,
        overrides=tuple(overrides or ()),
    )
    sizes.config(0, iterations)  # what contradicts itself shows before anything is measured
    run_parts(list(part or Part), seeds, sizes, Record(json_file, sizes))


if __name__ == "__main__":
    typer.run(main)
