"""How much less of everything it takes to learn: subsets, exploration and algorithms against the baseline.

    python -m benchmarks.learning --json learning.json
    python -m benchmarks.learning --json learning.json --jobs 8 --seeds 10
    python -m benchmarks.learning --json learning.json --task placing --case subset
    python -m benchmarks.learning --json counted.json --baseline few-steps+counted --case few-steps+opsd

Trains the testbed's models by every case (``_learning_cases``) on three tasks: the demo's, a harder one on
which random seeds learn slowly, and words. First every case chooses the best of its three learning rates, on
a run seed that is not compared with afterwards. Then run seeds 0, 1, ... follow, cases taking turns in an
order that changes with the seed, so an interrupted measurement has as many of each. Each run has one thread;
``--jobs`` run at once. What is in the file is not made again: the same command goes on where it was
interrupted, and more seeds may be asked for. A file of other settings is refused.

It prints the choice of learning rates (the best run's scores, and the mean height of each curve, by which it
is made), then the strict and graded held-out scores by iteration, and what it takes to reach the task's
targets and the baseline's last scores: iterations, generated and trained samples, CPU seconds, and seconds
and dollars of a simulated cluster (the production controller in virtual time, with the testbed's cost
profile, all forwards of an algorithm's loss, and spot slots that come and go). CPU seconds are those of the
process and its rewards, without evaluations, by the case's fastest run. Exploration in idle time is emulated
in one process: its CPU seconds hold the previews, which on the cluster fill time that is paid for. So is
overlap: all of the next iteration's early half is one version stale. Gains are ratios to the baseline with
two bootstrapped 90 % intervals: of the case alone, and one that holds for all that ``--case`` may name at
once. ``figures`` in the JSON file are those that the last command printed.

Extra arguments are overrides of all runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import torch
import typer

from benchmarks._exploration_curves import areas, by_iteration
from benchmarks._exploration_figures import table_of
from benchmarks._exploration_lab import laboratory
from benchmarks._exploration_settings import STRATEGY
from benchmarks._learning_cases import BASELINE, CASES, TASKS, Case, LearningSizes
from benchmarks._learning_figures import LearningRun, best_rate, gains, target_of
from benchmarks._measure import wide_console
from benchmarks._record import Record, Tree
from spotlight.config.schema import RunConfig
from spotlight.dry_run.run_plan import count_passes
from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.profile import Figure, Profile, TrainPoint
from spotlight_plan.scenarios.profile_costs import forward_s
from spotlight_plan.scenarios.scenario_load import build_scenario

TUNING_SEED = 1000
_KINDS = ("tuned", "runs", "simulated")
_SCORES = ("strict", "graded")
_MIDDLE = 1
_EVALUATION = "seconds/evaluation"


# -- measuring ---------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """CPU seconds of this process and of those it has started."""
    spent_s = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            spent_s += sum(child.cpu_times()[:2])
    return spent_s


def measure_run(sizes: LearningSizes, task: str, case: str, rate: float, seed: int) -> Tree:
    """Train once: held-out scores by iteration, and CPU seconds of each iteration without evaluations."""
    torch.set_num_threads(1)
    started_s = cpu_s()
    with laboratory(sizes.config(task, CASES[case], rate, seed)) as lab:
        recorder = lab.train(CASES[case].explores, now_s=cpu_s)
    phases = [{k: v for k, v in row.items() if k.startswith("seconds/")} for row in recorder.rows]
    return {
        "strict": {str(at): row["strict"] for at, row in recorder.validations.items()},
        "graded": {str(at): row["graded"] for at, row in recorder.validations.items()},
        "iteration_cpu_s": [sum(row.values()) - row.get(_EVALUATION, 0.0) for row in phases],
        "grad_norm": [row.get("train/grad_norm") for row in recorder.rows],
        "cpu_s": cpu_s() - started_s,
    }


def simulate_case(sizes: LearningSizes, task: str, case: str) -> Tree:
    """The same work on reserved and spot slots in virtual time."""
    chosen = CASES[case]
    config = sizes.config(task, chosen, chosen.rates[_MIDDLE], 0)
    rollout = config.rollout
    strategy = STRATEGY[chosen.explores or "none"] + ("+gap+tcss" if chosen.overlaps else "")
    slot = {"gpus_per_node": 1, "gpu_type": "cpu"}
    tree: Tree = {
        "name": f"{case}, {sizes.reserved} reserved + {sizes.spot} spot slots",
        "cluster": {
            "reserved": {"nodes": sizes.reserved, "usd_gpu_h": config.fleet.price_usd_h, **slot},
            "spot": {"nodes": sizes.spot, "usd_gpu_h": config.fleet.spot.price_usd_h, **slot},
        },
        "trace": {
            "kind": "generated", "mean_uptime_h": 1 / 60, "mean_downtime_s": 15.0, "notice_lead_s": 10.0,
        },
        "workload": {
            "profile": "testbed-cpu", "height": rollout.height,
            "width": -(-rollout.width // 16) * 16,  # the profile's sizes are multiples of 16
            "prompts": sizes.prompts, "group_size": rollout.group_size, "steps": rollout.steps,
            "train_samples": None if chosen.trained is None else sizes.trained(chosen),
            "trained_timesteps": config.trained_timesteps,
            "updates_per_batch": config.learner.updates_per_batch,
            # A batch's first update takes the old ones from its own passes.
            "recomputes_log_probs": (
                config.algorithm.recomputes_log_probs and config.learner.updates_per_batch > 1
            ),
            "micro_batch_per_gpu": config.learner.micro_batch_size, "checkpoint_every": 1,
        },
        "rewards": {"scorers": TASKS[task].scorers},
        "strategies": [strategy],
        "run": {"iterations": sizes.iterations, "until_h": 24.0},
    }  # fmt: skip
    if config.exploration is not None:
        tree["exploration"] = {
            "seeds_per_prompt": config.exploration.seeds_per_prompt, "steps": config.exploration.steps,
        }  # fmt: skip
    prepared = prepare(build_scenario(tree, "the benchmark"), (strategy,), datetime.now(UTC))
    profile = with_all_forwards(prepared.profile, config)
    if (reward_s := TASKS[task].reward_s) is not None:
        read = Figure(value=reward_s, source="measured: benchmarks.ocr_readers, recognition alone")
        rewards = profile.rewards.model_copy(update={"s_per_sample": read})
        profile = profile.model_copy(update={"rewards": rewards})
    prepared = replace(prepared, profile=profile)
    compared = run_task(SimulationTask(prepared, strategy))
    if compared.outcome.problem is not None:
        raise RuntimeError(f"{case}: {compared.outcome.problem}")
    return {
        "iteration_ends_s": list(compared.iteration_ends_s),
        "usd_s": compared.outcome.iteration_usd / compared.outcome.iteration_s,
    }


def with_all_forwards(profile: Profile, config: RunConfig) -> Profile:
    """Its seconds of training, with the forwards of other weights that the algorithm's loss takes."""
    passes, gpu, batch = count_passes(config, 0), profile.gpus["cpu"], config.learner.micro_batch_size
    others = (passes.old + passes.reference) / passes.policy

    def longer(point: TrainPoint) -> TrainPoint:
        forward = forward_s(profile, "cpu", point.height * point.width, batch, 1) / batch
        source = f"derived: {point.source}; and {others:g} forwards of other weights"
        return point.model_copy(update={"s": point.s + others * forward, "source": source})

    costs = gpu.model_copy(update={"train": tuple(map(longer, gpu.train))})
    return profile.model_copy(update={"gpus": {**profile.gpus, "cpu": costs}})


# -- what is to be measured ---------------------------------------------------------------------------------


def in_turn(cases: Sequence[str], round_number: int) -> list[str]:
    """The cases, beginning with another one each time."""
    at = round_number % len(cases)
    return [*cases[at:], *cases[:at]]


def wanted_tuning(tasks: Sequence[str], cases: Sequence[str]) -> Iterator[tuple[str, str, float, int]]:
    """Task, case, rate and seed of the runs that choose learning rates."""
    for at in range(len(CASES[BASELINE].rates)):
        for task in tasks:
            for case in in_turn(cases, at):
                yield task, case, CASES[case].rates[at], TUNING_SEED


def measure(
    record: Record, kind: str, wanted: Sequence[tuple[str, str, float, int]], sizes: LearningSizes, jobs: int
) -> None:
    """Make those runs that the file lacks."""
    missing = [each for each in wanted if name_of(*each) not in record.tree[kind]]
    if jobs == 1:
        for each in missing:
            typer.echo(f"{kind}: {name_of(*each)}")
            record.once(kind, name_of(*each), partial(measure_run, sizes, *each))
        return
    # A process for each run: threads and memory of one do not touch another's.
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        under_way: dict[Future[Tree], str] = {
            pool.submit(measure_run, sizes, *each): name_of(*each) for each in missing
        }
        failed: list[Exception] = []
        for done in as_completed(under_way):
            typer.echo(f"{kind}: {under_way[done]}")
            try:
                record.once(kind, under_way[done], done.result)
            except Exception as error:  # noqa: BLE001 - the others took hours: they are recorded first
                error.add_note(f"in the run {under_way[done]}")
                failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(missing)} runs; the others are in the file", failed)


def name_of(task: str, case: str, rate: float, seed: int) -> str:
    """Of a run in the file."""
    return f"{task}/{case}/{rate:g}/{seed}"


def chosen_rates(
    record: Record, tasks: Sequence[str], cases: Sequence[str], *, tuned: bool
) -> dict[tuple[str, str], float]:
    """By task and case, the learning rate to compare with."""
    found = {}
    for task in tasks:
        for case in cases:
            rates = CASES[case].rates
            found[task, case] = rates[_MIDDLE]
            if tuned:
                curves = tuning_curves(record, task, case)
                found[task, case] = best_rate({rate: areas(curve) for rate, curve in curves.items()})
    return found


def tuning_curves(record: Record, task: str, case: str) -> dict[float, Mapping[int, float]]:
    """Held-out strict scores by iteration, by learning rate, of the runs that choose one."""
    runs = record.tree["tuned"]
    return {
        rate: curve_in(runs[name_of(task, case, rate, TUNING_SEED)], "strict") for rate in CASES[case].rates
    }


def rates_table(record: Record, task: str, cases: Sequence[str]) -> list[Tree]:
    """Of the runs that choose learning rates: the best one's scores, and the height of each."""
    rows = []
    for case in cases:
        curves = tuning_curves(record, task, case)
        heights = {rate: areas(curve) for rate, curve in curves.items()}
        best = best_rate(heights)
        scores = {f"at {at}": f"{score:.3f}" for at, score in curves[best].items()}
        height_cells = {
            f"height {number}": f"{heights[rate]:.3f} at {rate:g}" for number, rate in enumerate(heights, 1)
        }
        spent_s = record.tree["tuned"][name_of(task, case, best, TUNING_SEED)]["cpu_s"]
        rows.append({"case": case, "rate": f"{best:g}"} | scores | height_cells | {"CPU s": f"{spent_s:.0f}"})
    return rows


# -- figures -----------------------------------------------------------------------------------------------


def curve_in(tree: Tree, kind: str) -> dict[int, float]:
    """Held-out scores by iteration."""
    return {int(at): score for at, score in tree[kind].items()}


def iteration_cpu_s(trees: Iterable[Tree]) -> float:
    """CPU seconds of a case's iteration: the least of its runs' medians.

    What else runs on the machine adds to them, through caches and shared cores, and never takes away.
    """
    seconds: list[float] = [median(tree["iteration_cpu_s"]) for tree in trees]
    return min(seconds)


def learning_run(
    tree: Tree, kind: str, each_s: float, simulated: Tree, sizes: LearningSizes, case: Case
) -> LearningRun:
    """A run's scores of a kind, and what its iterations spend on every axis.

    ``each_s``: CPU seconds of an iteration.
    """
    numbers, made = range(1, sizes.iterations + 1), sizes.made(case)
    ends_s = simulated["iteration_ends_s"]
    spent = {
        "iterations": [float(number) for number in numbers],
        "generated": [float(number * sizes.prompts * made) for number in numbers],
        "trained": [float(number * sizes.prompts * sizes.trained(case)) for number in numbers],
        "cpu_s": [number * each_s for number in numbers],
        "cluster_s": list(ends_s),
        "cluster_usd": [end_s * simulated["usd_s"] for end_s in ends_s],
    }
    return LearningRun(curve_in(tree, kind), spent)


def figures_of(
    record: Record, sizes: LearningSizes, task: str, rates: Mapping[str, float], seeds: int
) -> Tree:
    """Curves of a task's cases, and what it takes each to reach the targets; ``rates``: by case, the first of
    which all are compared with."""
    baseline = next(iter(rates))
    trees = {
        case: {seed: record.tree["runs"][name_of(task, case, rate, seed)] for seed in range(seeds)}
        for case, rate in rates.items()
    }
    runs: dict[str, dict[str, dict[int, LearningRun]]] = {kind: {} for kind in _SCORES}
    for case, those in trees.items():
        seconds, simulated = iteration_cpu_s(those.values()), record.tree["simulated"][f"{task}/{case}"]
        for kind in _SCORES:
            runs[kind][case] = {
                seed: learning_run(tree, kind, seconds, simulated, sizes, CASES[case])
                for seed, tree in those.items()
            }
    targets: list[tuple[str, str, float | None]] = [
        *((str(target), "strict", target) for target in TASKS[task].targets),
        ("the baseline's end", "strict", None),
        ("the baseline's end, graded", "graded", None),
    ]
    return {
        "rates": dict(rates),
        "curves": {
            kind: {case: _mean_curve([*those.values()], kind) for case, those in trees.items()}
            for kind in _SCORES
        },
        "gains": {
            name: {"target": target_of(target, [*runs[kind][baseline].values()])} | {
                case: gains(target, runs[kind][baseline], those, len(CASES) - 1)
                for case, those in runs[kind].items()
            }
            for name, kind, target in targets
        },
    }  # fmt: skip


def _mean_curve(trees: Sequence[Tree], kind: str) -> Tree:
    found = by_iteration([curve_in(tree, kind) for tree in trees], dict)
    return {str(at): each.as_json() for at, each in found.items()}


def shown(figures: Tree) -> Iterator[tuple[str, list[Tree]]]:
    """Tables: the scores by iteration, then the gains by target."""
    rates = figures["rates"]
    for kind, curves in figures["curves"].items():
        yield kind, [{"case": case, "rate": rates[case]} | curve for case, curve in curves.items()]
    for name, found in figures["gains"].items():
        rows = []
        for case in rates:
            cells = {axis: _text(each) for axis, each in found[case].items()}
            rows.append({"case": case} | cells)
        yield (
            f"cost of {name} ({found['target']:.3f}), and how many times less (90 %; of all cases at once)",
            rows,
        )


def _text(gain: Tree) -> str:
    if gain["cost"] is None:
        return "not reached"
    keys = ("ratio", "low", "high", "low_all", "high_all")
    if all(gain[key] == 1.0 for key in keys):  # the baseline itself
        return f"{gain['cost']:.4g}"
    value, *ends = ("?" if gain[key] is None else f"{gain[key]:.2f}" for key in keys)
    return f"{gain['cost']:.4g} ({value}: {ends[0]}-{ends[1]}; {ends[2]}-{ends[3]})"


# -- the program -------------------------------------------------------------------------------------------


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Results; what is there is kept.")] = Path(
        "learning.json"
    ),
    task: Annotated[list[str] | None, typer.Option(help=f"Only these of {', '.join(TASKS)}.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"Only these of {', '.join(CASES)}.")] = None,
    baseline: Annotated[str, typer.Option(help="The case that all are compared with.")] = BASELINE,
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0, 1, ...")] = 5,
    tune: Annotated[bool, typer.Option(help="Choose the best of three learning rates first.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, of one thread each.")] = 1,
    iterations: Annotated[int, typer.Option(min=2, help="Of a run.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Of an iteration.")] = 12,
    group_size: Annotated[int, typer.Option(min=4, help="Pictures of a prompt, of the baseline.")] = 16,
    rollout_steps: Annotated[int, typer.Option(min=2, help="Denoising steps of a picture.")] = 10,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Iterations.")] = 5,
    evaluation_images: Annotated[int, typer.Option(min=1, help="Of each held-out prompt.")] = 32,
    reserved: Annotated[int, typer.Option(min=1, help="Reserved slots of the simulated cluster.")] = 1,
    spot: Annotated[int, typer.Option(min=1, help="Its spot slots.")] = 4,
) -> None:
    """Compare ways to learn on the testbed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the rewards' processes, too
    tasks, cases = _known(task, TASKS, "--task"), _known(case, CASES, "--case")
    (baseline,) = _known([baseline], CASES, "--baseline")
    cases = [baseline, *(name for name in cases if name != baseline)]
    sizes = LearningSizes(
        iterations, prompts, group_size, rollout_steps, evaluate_every, evaluation_images, reserved, spot,
        tuple(overrides or ()),
    )  # fmt: skip
    for each in tasks:
        if others := [name for name in cases if not CASES[name].suits(TASKS[each])]:
            raise typer.BadParameter(
                f"{', '.join(others)}; with --task {each} expected cases without what was made for shapes "
                "alone, a network that counts or a model of few steps. Name the cases, or another task.",
                param_hint="--case",
            )
        for name in cases:  # what contradicts itself shows before anything is measured
            sizes.config(each, CASES[name], CASES[name].rates[_MIDDLE], 0)
    record = Record(json_file, sizes, _KINDS)
    if tune:
        measure(record, "tuned", [*wanted_tuning(tasks, cases)], sizes, jobs)
    rates = chosen_rates(record, tasks, cases, tuned=tune)
    wanted = [
        (each, name, rates[each, name], seed)
        for seed in range(seeds)
        for each in tasks
        for name in in_turn(cases, seed)
    ]
    measure(record, "runs", wanted, sizes, jobs)
    console, figures = wide_console(), record.tree.setdefault("figures", {})
    for each in tasks:
        for name in cases:
            record.once("simulated", f"{each}/{name}", partial(simulate_case, sizes, each, name))
        figures[each] = figures_of(record, sizes, each, {name: rates[each, name] for name in cases}, seeds)
        if tune:
            console.print(table_of(f"{each}: learning rates, one run each", rates_table(record, each, cases)))
        console.print(f"{each}, {seeds} run seeds", style="bold")
        for title, rows in shown(figures[each]):
            console.print(table_of(title, rows))
    record.write()


def _known(names: Sequence[str] | None, known: Mapping[str, object], option: str) -> list[str]:
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}; expected some of {', '.join(known)}", param_hint=option
        )
    return [*names] if names else [*known]


if __name__ == "__main__":
    typer.run(main)
