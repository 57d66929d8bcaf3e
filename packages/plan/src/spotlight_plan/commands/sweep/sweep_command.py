"""``spotlight sweep``: run a grid, or what Optuna asks for, and compare."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotlight.cli.config_command import split_arguments
from spotlight.cli.run_argument import find_run
from spotlight_plan.sweep_file import (
    FINISHED,
    NOT_BEGUN,
    SweepFile,
    SweepRun,
    corners,
    grid_runs,
    read_sweep,
)
from spotlight_rewards.base.errors import ConfigError, Problem, UserError
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_BY_ERROR,
    errors_without_traceback,
)

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig
    from spotlight_plan.commands.sweep.sweep_processes import Ended, SideBySide
    from spotlight_plan.commands.sweep.sweep_search import Search


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What varies; see below.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and what is left of them costs; do nothing.")
    ] = False,
    together: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs at a time on this machine; default: as in FILE."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Processes of each run, one per GPU, as of spotlight train --ranks."
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Estimate from this run instead of those of the sweep."),
    ] = None,
) -> None:
    """Run a configuration with several settings, and compare them; the same command goes on after a stop.

    FILE names the configuration and what varies, by dotted key: a grid, of which every combination is a run,
    or a search, in which Optuna chooses (pip install 'spotlight-rl\\[sweep]'). Runs are named by
    their settings. The same command on another head of a cluster takes the runs that are not begun, if both
    see the same runs_dir. Ctrl-C stops all runs where they can go on.
    Exit status: 0 finished, 1 a run failed, 2 not started, 130 interrupted.

    [bold]A grid[/bold]: 12 runs

      config: qwen.yaml

      set: {iterations: 60}

      grid: {learner.learning_rate: \\[1e-4, 3e-4], algorithm.beta: \\[0.1, 1], run_seed: \\[0, 1, 2]}

    [bold]A search[/bold]

      config: qwen.yaml

      search: {trials: 20, space: {learner.learning_rate: {low: 1e-5, high: 1e-3, log: true}}}

    [bold]Examples[/bold]

      spotlight sweep rates.yaml --dry-run

      spotlight sweep rates.yaml

      spotlight sweep rates.yaml --together 2 --ranks 4
    """
    from spotlight_plan.commands.sweep.sweep_processes import SideBySide
    from spotlight_plan.commands.sweep.sweep_search import Search, require_optuna

    with errors_without_traceback():
        read = read_sweep(file)
        configs = _checked(read)
        runs_dir = next(iter(configs.values())).runs_dir
        places = _places(together or read.together, ranks or 1, next(iter(configs.values())))
        if read.search is not None:
            require_optuna()
        if dry_run:
            _print_plan(read, configs, runs_dir, len(places), measured)
            return
        search = None if read.search is None else Search(read, runs_dir)
        states, stopped = _run(read, search, SideBySide(runs_dir, places, _say(), ranks or 1))
        known = [(run, NOT_BEGUN) for run in grid_runs(read)] if search is None else search.known()
        _conclude([(run, states.get(run.name, state)) for run, state in known], runs_dir)
    if stopped or (others := {*states.values()} - {FINISHED}):
        raise typer.Exit(EXIT_INTERRUPTED if stopped or others == {"stopped"} else EXIT_STOPPED_BY_ERROR)


def _checked(sweep: SweepFile) -> dict[str, RunConfig]:
    """Configurations by run.

    Raises:
        ConfigError: every problem of the first that has one.
        OtherConfigurationError: a run of this name was begun with other settings.
    """
    from spotlight.config.load import load_config
    from spotlight.store.run_store import stored_runs

    runs = list(corners(sweep)) if sweep.search else grid_runs(sweep)
    configs = {run.name: load_config(*split_arguments(run.arguments)) for run in runs}
    places = {config.runs_dir for config in configs.values()}
    source = f"the sweep {sweep.name}"
    if len(places) > 1:
        raise ConfigError(source, [Problem("runs_dir", "several", "one for all runs", "Set it in set.")])
    if (kept := stored_runs(next(iter(places)))) is not None:
        remedy = "Set runs_dir in set to a folder; several heads need one that all see."
        raise ConfigError(
            source, [Problem("runs_dir", kept.address, "a folder, whose locks say who has a run", remedy)]
        )
    for config in configs.values():
        is_finished(config)
    return configs


def is_finished(config: RunConfig) -> bool:
    """Whether nothing is left to do. Raises OtherConfigurationError, or StoreError for what is no run."""
    from spotlight.runtime.preflight import finished_summary
    from spotlight.store.store_errors import RunInUseError

    try:
        return finished_summary(config) is not None
    except RunInUseError:
        return False


def _places(together: int, ranks: int, config: RunConfig) -> list[Mapping[str, str]]:
    """The environment of each run at a time: its GPUs, or its share of the processors. Raises ConfigError."""
    if ranks > 1 and config.fleet.driver == "ray":
        remedy = f"Leave it out, and set fleet.learner_ranks: {ranks}."
        raise ConfigError("the sweep", [Problem("--ranks", str(ranks), "none with fleet.driver=ray", remedy)])
    if together == 1:
        return [{}]
    expected = ""
    if config.fleet.address is not None:
        expected = "1 with fleet.address, as a run takes all nodes of its cluster"
        remedy = "Give the same command on the head of another cluster, with the same runs_dir."
    elif gpus := _gpus():
        shares = [gpus[place::together] for place in range(together)]
        if len(shares[-1]) >= ranks:
            return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
        of_each = f" by {ranks} ranks" if ranks > 1 else ""
        expected, remedy = f"at most {len(gpus) // ranks}: {len(gpus)} GPUs are here{of_each}", "Lower it."
    if expected:
        raise ConfigError("the sweep", [Problem("together", str(together), expected, remedy)])
    threads = str(max(1, (os.cpu_count() or 1) // (together * ranks)))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}] * together


def _gpus() -> list[str]:
    from spotlight_fleet.facts import gather

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(gather().gpus)
    return (visible.split(",") if visible else [str(index) for index in range(found)]) if found else []


def _say() -> Callable[[str], None]:
    from spotlight.cli.runs.progress import RunConsole

    console = RunConsole()
    return lambda line: console.print(line, soft_wrap=True)


def _run(sweep: SweepFile, search: Search | None, side_by_side: SideBySide) -> tuple[dict[str, str], bool]:
    """States by run, and whether the sweep was stopped."""
    from spotlight_plan.commands.sweep.sweep_processes import outcome

    wanted = iter(grid_runs(sweep)) if search is None else search.runs()
    states: dict[str, str] = {}
    runs_dir = side_by_side.runs_dir
    for ended in side_by_side.ended(_not_finished(wanted, states, search, sweep, runs_dir)):
        states[ended.run.name] = outcome(ended.code)
        _tell(search, sweep, ended, runs_dir)
    return states, side_by_side.stopped


def _not_finished(
    runs: Iterator[SweepRun],
    states: dict[str, str],
    search: Search | None,
    sweep: SweepFile,
    runs_dir: Path,
) -> Iterator[SweepRun]:
    """Without those that have been finished before."""
    from spotlight.config.load import load_config
    from spotlight_plan.commands.sweep.sweep_processes import Ended

    for run in runs:
        try:
            finished = is_finished(load_config(*split_arguments(run.arguments)))
        except UserError:
            finished = False  # its own process says why, and others go on
        if finished:
            states[run.name] = FINISHED
            _tell(search, sweep, Ended(run, 0), runs_dir)
        else:
            yield run


def _tell(search: Search | None, sweep: SweepFile, ended: Ended, runs_dir: Path) -> None:
    from spotlight_plan.commands.sweep.sweep_search import score_of

    if search is None or sweep.search is None or ended.code == EXIT_INTERRUPTED:
        return
    search.tell(ended.run, score_of(sweep.search, runs_dir / ended.run.name) if ended.code == 0 else None)


def _print_plan(
    sweep: SweepFile, configs: Mapping[str, RunConfig], runs_dir: Path, together: int, measured: str | None
) -> None:
    from spotlight.dry_run.run_plan import make_plan
    from spotlight_plan.commands.sweep.sweep_tables import measured_speed, print_runs

    console = TextConsole()
    runs = list(corners(sweep)) if sweep.search else grid_runs(sweep)
    planned = [(run, configs[run.name], make_plan(configs[run.name])) for run in runs]
    begun = sorted(runs_dir.glob(f"{sweep.name}-*")) if measured is None else [find_run(measured)]
    speed = next((found for each in begun if (found := measured_speed(each)) is not None), None)
    if speed is None and measured is not None:
        expected = "a run of which three iterations or more were measured"
        raise ConfigError("--measured", [Problem("RUN", measured, expected, "Name another, or none.")])
    if sweep.search is not None:
        console.print(f"{sweep.search.trials} runs, chosen by Optuna; at the ends of its ranges:")
    print_runs(console, planned, speed, together)


def _conclude(runs: Sequence[tuple[SweepRun, str]], runs_dir: Path) -> None:
    from spotlight.cli.runs.progress import RunConsole
    from spotlight_plan.commands.sweep.sweep_tables import print_outcomes

    console = RunConsole()
    console.print()
    print_outcomes(console, runs, runs_dir)
    finished = [str(runs_dir / run.name) for run, state in runs if state == FINISHED]
    if len(finished) > 1:
        console.print(f"\n{shlex.join(['spotlight', 'compare', *finished])}", soft_wrap=True)
        subprocess.run([sys.executable, "-m", "spotlight.cli", "compare", *finished], check=False)
