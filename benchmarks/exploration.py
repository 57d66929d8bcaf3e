"""Seed exploration, measured: how well previews rank, what contrast they bring, whether learning gains, and
what it does for spot slots that would idle.

    python -m benchmarks.exploration --json exploration.json
    python -m benchmarks.exploration --json exploration.json --part curves --seeds 8
    python -m benchmarks.exploration --json sde.json --seeds-per-prompt 48 --preview-steps 10 \\
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
evaluations, and compared at equal scores: those that runs without exploration have after a half, three
quarters and all of their iterations.

Extra arguments are overrides of the demo's configuration for all parts; they, and all sizes, are written
into the file, and a file of other settings is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks._exploration_curves import curve_figures, curve_tables
from benchmarks._exploration_figures import condition_rows, fidelity_rows, table_of, variance_rows
from benchmarks._exploration_lab import Weights, laboratory
from benchmarks._exploration_settings import CONDITIONS, KINDS, STRATEGY, Sizes
from benchmarks._measure import wide_console
from benchmarks._record import Record, Tree
from spotlight.scheduler.policies.selection import SelectionPolicy
from spotlight.scheduler.seeds import prompts_of_iteration
from spotlight.scheduler.types import Purpose
from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_load import build_scenario


class Part(StrEnum):
    """What is measured."""

    FIDELITY = "fidelity"
    VARIANCE = "variance"
    CURVES = "curves"
    IDLE = "idle"


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

        def rewards(age: int, steps: int, purpose: Purpose) -> Tree:
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
        recorder = lab.train(CONDITIONS[condition])
    explored = [
        {name: value for name, value in row.items() if name.startswith("exploration/")}
        for row in recorder.rows
    ]
    return {
        "validation": {str(at): row for at, row in recorder.validations.items()},
        "exploration": explored,
        "grad_norm": [row.get("train/grad_norm") for row in recorder.rows],
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
            "trained_timesteps": config.trained_timesteps,
            "micro_batch_per_gpu": 64, "checkpoint_every": 1,
        },
        "exploration": explores,
        "strategies": [STRATEGY[condition]],
        "run": {"iterations": sizes.iterations, "until_h": 24.0},
    }  # fmt: skip
    prepared = prepare(build_scenario(tree, "the benchmark"), (STRATEGY[condition],), datetime.now(UTC))
    compared = run_task(SimulationTask(prepared, STRATEGY[condition]))
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
            figures["variance_by_condition"] = condition_rows(pools, sizes)
            console.print(table_of("All previews, full length", figures["variance_by_condition"]))
    if Part.CURVES in parts:
        figures["curves"] = _curves(seeds, sizes, record, console)
        for kind, found in figures["curves"].items():
            console.print(f"Held-out score: {kind}", style="bold")
            for table in curve_tables(found):
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
    return {kind: curve_figures(curves, simulated, sizes, kind) for kind in KINDS}


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
    iterations: Annotated[int, typer.Option(min=1, help="Of a curve.")] = 16,
    prompts: Annotated[int, typer.Option(min=1, help="Of an iteration, and of a pool.")] = 8,
    group_size: Annotated[int, typer.Option(min=2, help="Pictures trained of a prompt.")] = 4,
    rollout_steps: Annotated[int, typer.Option(min=2, help="Denoising steps of a picture.")] = 6,
    learning_rate: Annotated[float, typer.Option(help="Of the adapter.")] = 2e-3,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Iterations.")] = 4,
    evaluation_images: Annotated[int, typer.Option(min=1, help="Of each held-out prompt.")] = 8,
    seeds_per_prompt: Annotated[int, typer.Option(min=2, help="Previews of a prompt.")] = 16,
    preview_steps: Annotated[int, typer.Option(min=1, help="Denoising steps of a preview.")] = 6,
    policy: Annotated[SelectionPolicy, typer.Option(help="Which previews are chosen.")] = (
        SelectionPolicy.MAX_VARIANCE
    ),
    warmup: Annotated[int, typer.Option(min=1, help="Iterations trained before pools are made.")] = 6,
    stale: Annotated[list[int] | None, typer.Option(help="Ages of weights (0, 1, 2, 4).")] = None,
    steps: Annotated[list[int] | None, typer.Option(help="Steps of pools' previews (3, 4, 5).")] = None,
    pool: Annotated[int, typer.Option(min=2, help="Seeds of a pool's prompt.")] = 32,
    reserved: Annotated[int, typer.Option(min=1, help="Reserved slots of the emulated cluster.")] = 1,
    spot: Annotated[int, typer.Option(min=1, help="Its spot slots.")] = 4,
    uptime_min: Annotated[float, typer.Option(min=0, help="Of a spot slot; 0: they stay.")] = 1.0,
) -> None:
    """Measure exploration on the testbed."""
    sizes = Sizes(
        iterations=iterations,
        prompts=prompts,
        group_size=group_size,
        rollout_steps=rollout_steps,
        learning_rate=learning_rate,
        evaluate_every=evaluate_every,
        evaluation_images=evaluation_images,
        seeds_per_prompt=seeds_per_prompt,
        preview_steps=preview_steps,
        policy=policy.value,
        warmup=warmup,
        stale=tuple(stale or (0, 1, 2, 4)),
        steps=tuple(steps or (3, 4, 5)),
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
