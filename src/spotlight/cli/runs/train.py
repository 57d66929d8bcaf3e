"""``spotlight train``: run or resume a configuration, or print its plan."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import typer

from spotlight.cli import fork_option
from spotlight.cli.config_command import split_arguments
from spotlight.cli.run_argument import run_named
from spotlight.cli.train_options import (
    AddressOption,
    BudgetOption,
    ConfigArgument,
    DashboardOption,
    DeadlineOption,
    DryRunOption,
    FitOption,
    ForkOption,
    IterationOption,
    KeepDashboardOption,
    NameOption,
    PlainOption,
    ProfileOption,
    RanksOption,
    SmokeOption,
    VoteOption,
)
from spotlight.config.training_stages import stage_names
from spotlight.garbage import lasting
from spotlight.testbed import TESTBEDS, lora_path
from spotlight_rewards.base.file_errors import StoreError, is_there
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_NOT_STARTED,
    EXIT_STOPPED_BY_ERROR,
    complain,
    errors_without_traceback,
    failure,
    is_explained,
)
from spotlight_rewards.commands.options import silence_loading_bars

if TYPE_CHECKING:
    from spotlight.cli.runs.progress import RunProgress
    from spotlight.config.schema import RunConfig
    from spotlight.runtime.attempt import RunResult
    from spotlight.runtime.observer import Observer


Configured: TypeAlias = "tuple[RunConfig, list[str]]"
"""With the arguments that give it."""


def train(
    arguments: ConfigArgument = None,
    dry_run: DryRunOption = False,
    smoke: SmokeOption = False,
    fit: FitOption = None,
    vote: VoteOption = False,
    ranks: RanksOption = None,
    address: AddressOption = None,
    deadline_h: DeadlineOption = None,
    budget_usd: BudgetOption = None,
    plain: PlainOption = False,
    dashboard: DashboardOption = False,
    keep_dashboard: KeepDashboardOption = False,
    profile: ProfileOption = None,
    fork: ForkOption = None,
    iteration: IterationOption = None,
    name: NameOption = None,
) -> None:
    """Train a Diffusion Transformer by reinforcement learning; the same command resumes an interrupted run.

    Ctrl-C (or SIGTERM, or closing the terminal) stops as soon as the run can resume exactly: at once before
    an iteration's first update, otherwise at the iteration's end. A second one stops at once. A command that
    names the run may change its settings from the next iteration on; the change is recorded.
    A file with stages is one run per stage, one after another; stage=NAME chooses one.
    Exit status: 0 finished, 1 stopped by an error, 2 not started, 130 interrupted.

    [bold]Examples[/bold]

      spotlight train

      spotlight train name=mine run_seed=1 iterations=20

      spotlight train qwen.yaml --smoke

      spotlight train z-image.yaml --fit 24 --dry-run

      spotlight train qwen.yaml --ranks 8

      spotlight train fleet.driver=ray fleet.spot.trace=minute

      spotlight train qwen.yaml --address auto --deadline-h 6 fleet.target.provider=kubernetes

      spotlight train examples/24gb-z-image-turbo.yaml --vote

      spotlight train --fork demo --iteration 20 --name demo-slower learner.learning_rate=1e-4
    """
    with errors_without_traceback(), lasting():
        given = [*(arguments or []), *_cluster_keys(address, deadline_h, budget_usd)]
        if fork is not None or name is not None or iteration is not None:
            given = fork_option.forked(given, fork, name, iteration, dry_run=dry_run)
        if not given and fork is not None:
            return
        configured = partial(_configured, ranks=ranks, vote=vote, fit=fit, smoke=smoke)
        stages = stage_names(*split_arguments(given))
        if stages and not dry_run:
            _train_stages(stages)
        if not stages:
            config, given = configured(given)
    if stages:
        _print_stages(stages, given, configured, ranks)
        return
    if dry_run:
        _print_plan(config, given, ranks)
        return
    if (ranks or 1) > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(_run_ranks(config, ranks or 1))
    beside = (dashboard or keep_dashboard or vote) and _is_first_rank()
    view = ("votes" if vote else "overview") if beside else None
    _conclude(_run(config, plain, view, keep_dashboard=keep_dashboard, profile=profile or 0))


def _conclude(result: RunResult) -> None:
    """Show the result; exits if the run did not come to its end."""
    if _is_first_rank():
        _print_result(result)
    if not result.finished:
        raise typer.Exit(EXIT_INTERRUPTED if result.error is None else EXIT_STOPPED_BY_ERROR)


def _cluster_keys(address: str | None, deadline_h: float | None, budget_usd: float | None) -> list[str]:
    """What the options for a cluster are short for."""
    options = {
        "fleet.address": address,
        "fleet.target.deadline_h": deadline_h,
        "fleet.target.budget_usd": budget_usd,
    }
    named = [f"{key}={value}" for key, value in options.items() if value is not None]
    return ["fleet.driver=ray", *named] if named else []


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _run_ranks(config: RunConfig, ranks: int) -> int:
    """Run this command in so many processes; the exit status."""
    from spotlight.cli.runs.rank_processes import run_ranks

    command = [sys.executable, "-m", "spotlight.cli", *sys.argv[1:]]
    with errors_without_traceback(), in_a_folder(config, partial(typer.echo, err=True)) as local:
        moved = [] if local is config else [f"runs_dir={local.runs_dir}"]
        return run_ranks(ranks, [*command, *moved])


def _train_stages(stages: Sequence[str]) -> NoReturn:
    """Each as a command of its own, which goes on with what is there."""
    from spotlight.cli.runs.rank_processes import run_in_turn

    command = [sys.executable, "-m", "spotlight.cli", *sys.argv[1:]]
    raise typer.Exit(run_in_turn([[*command, f"stage={each}"] for each in stages]))


def _print_stages(
    stages: Sequence[str],
    given: Sequence[str],
    configured: Callable[[list[str]], Configured],
    ranks: int | None,
) -> None:
    """Their plans."""
    for each in stages:
        with errors_without_traceback():
            config, arguments = configured([*given, f"stage={each}"])
            typer.echo(f"Stage {each}: the run {config.name}")
            if config.model.lora is not None and not is_there(Path(lora_path(config.model.lora))):
                typer.echo(f"It begins with {config.model.lora}, which an earlier stage makes")
                config, _ = configured([*given, f"stage={each}", "model.lora=null"])
        _print_plan(config, arguments, ranks)


def _configured(
    given: list[str], ranks: int | None, *, vote: bool, fit: str | None, smoke: bool
) -> Configured:
    """The configuration, and the arguments that give it once the options' own keys are among them."""
    config = configuration_of(given)
    _require_ranks(config, ranks, smoke)
    if vote:
        given = [*given, *_vote(config, given)]
        config = configuration_of(given)
    if fit is not None:
        given = [*given, *_fit(config, fit, ranks)]
        config = configuration_of(given)
    if smoke:
        config, given = _smoke(config, given)
    return config, given


def configuration_of(given: list[str]) -> RunConfig:
    """Of a file and overrides, or of a run and what changes of its course. Raises ConfigError."""
    from spotlight.config.load import load_config, load_run
    from spotlight.store.run_store import stored_runs

    path, overrides = split_arguments(given)
    if path is None or (run := _run_at(path)) is None:
        return load_config(path, overrides)
    place = [] if stored_runs(path.parent) is None else [f"runs_dir={path.parent}"]
    return load_run(run, [*place, *overrides])


def _run_at(path: Path) -> Path | None:
    """The run directory that an argument names, or the copy of one in a bucket; None: it is a file."""
    from spotlight.store.run_store import Wanted, stored_run

    copy = stored_run(str(path), Wanted.LIGHT)
    return run_named(str(path)) if copy is None else copy


def _require_ranks(config: RunConfig, asked: int | None, smoke: bool) -> None:
    started = int(os.environ.get("WORLD_SIZE", asked or 1))
    if smoke and (ranks := max(started, asked or 1)) > 1:
        raise failure(
            f"--smoke on {ranks} ranks; expected one process. Leave out --smoke, or --ranks or torchrun."
        )
    if asked is None:
        return
    if config.fleet.driver == "ray":
        raise failure(
            f"--ranks is {asked} with fleet.driver=ray; expected no --ranks. Leave it out, and set "
            f"fleet.learner_ranks={asked}."
        )
    if started != asked:
        raise failure(
            f"--ranks is {asked}; expected {started}, which torchrun has started. Leave --ranks out."
        )
    from spotlight.dry_run.run_plan import rank_notes

    rank_notes(config, asked)  # before any is started: each of them would say the same


def _fit(config: RunConfig, asked: str, ranks: int | None) -> list[str]:
    from spotlight.dry_run.fitting import NO_FITTING, find_fitting

    if (fitting := find_fitting()) is None:
        raise failure(f"--fit needs {NO_FITTING}")
    started = int(os.environ.get("WORLD_SIZE", ranks or 1))
    return fitting.overrides(config, asked, started, TextConsole())


def _vote(config: RunConfig, given: Sequence[str]) -> list[str]:
    from spotlight.cli.runs.vote_option import vote_overrides

    replaced = vote_overrides(config, given)
    _print_replaced("People vote", replaced)
    return replaced


def _print_replaced(what: str, replaced: Sequence[str]) -> None:
    console = TextConsole()
    console.print(f"{what}, as configured except for")
    for each in replaced:
        console.print(f"  {each}", soft_wrap=True)


def _smoke(config: RunConfig, given: list[str]) -> Configured:
    import shutil

    from spotlight.cli.runs.smoke import smoke_overrides
    from spotlight.store.run_directory import RunPaths

    silence_loading_bars()
    path, overrides = split_arguments(given)
    run = None if path is None else _run_at(path)
    replaced = smoke_overrides(config, overrides)
    file = [] if path is None else [str(path if run is None else run / "config.yaml")]
    given = [*file, *overrides, *replaced]
    config = configuration_of(given)
    shutil.rmtree(RunPaths(config.runs_dir / config.name).path, ignore_errors=True)  # of an earlier smoke run
    _print_replaced(f"Smoke run {config.name}", replaced[1:])
    return config, given


def _print_plan(config: RunConfig, arguments: Sequence[str], ranks: int | None) -> None:
    from spotlight.cli.runs.plan_table import print_plan
    from spotlight.cluster.local.emulation import plan_fleet, require_learner_room
    from spotlight.dry_run.estimating import estimate_run
    from spotlight.dry_run.run_plan import make_plan
    from spotlight.report.wording import estimate_words
    from spotlight.runtime.preflight import finished_note, finished_summary, require_disk, require_startable
    from spotlight.runtime.resuming.course import planned_changes
    from spotlight.store.run_store import Wanted, stored_runs

    with errors_without_traceback(), lasting():
        kept = stored_runs(config.runs_dir)
        if kept is not None:
            copy = kept.store.read(kept.address, config.name, config.cache, Wanted.LIGHT)
            config = config.model_copy(update={"runs_dir": copy.parent})
        finished = finished_summary(config)
        if finished is None:
            require_disk(config, require_startable(config))
        plan, fleet = make_plan(config, ranks), plan_fleet(config.fleet)
        require_learner_room(config)
        notes = (
            [f"Changes {each}" for each in planned_changes(config)]
            if finished is None
            else [f"This run {finished_note(config, finished)}"]
        )
        estimate = estimate_run(config, int(os.environ.get("WORLD_SIZE", ranks or 1)))
    console = TextConsole()
    for each in notes:
        console.print(each, soft_wrap=True)
    print_plan(console, config, plan, fleet, kept)
    shown = shlex.join(["spotlight", "config", *arguments])
    console.print(f"Every key of this configuration: {shown}", soft_wrap=True)
    said = f"needs {estimate}." if isinstance(estimate, str) else estimate_words(estimate)
    console.print(f"Estimate: {said}", soft_wrap=True)


def _run(
    config: RunConfig, plain: bool, dashboard: str | None, *, keep_dashboard: bool, profile: int
) -> RunResult:
    from spotlight.cli.runs.dashboard_beside import start_beside
    from spotlight.cli.runs.progress import make_progress
    from spotlight.runtime.clock import process_age_s
    from spotlight.runtime.preflight import finished_summary, require_startable
    from spotlight.runtime.signals import ending_at_once

    if config.model.path in TESTBEDS or is_there(Path(config.model.path)):
        silence_loading_bars()  # download bars stay
    progress = make_progress(config, plain)
    progress.facts.started = time.monotonic() - process_age_s()  # imports are billed too
    try:
        with ending_at_once(), progress, in_a_folder(config, progress.note) as config:
            if dashboard is not None:
                start_beside(
                    config.runs_dir, config.name, stays=keep_dashboard, note=progress.note, view=dashboard
                )
            progress.note("loading the model, the rewards and the prompts")
            if finished_summary(config) is None:
                require_startable(config)  # again in the driver, whose import takes seconds
            run = driver_of(config, profile)
            result = run(config, progress, process_age_s())
            if result.finished and _is_first_rank():
                from spotlight.report.model_card import write_card
                from spotlight.report.record import read_run

                write_card(read_run(result.directory))  # in here: what keeps the run elsewhere takes it, too
            return result
    except KeyboardInterrupt as error:
        message = "interrupted at once; the same command goes on from the last checkpoint."
        raise failure(message, EXIT_INTERRUPTED) from error
    except Exception as error:
        if is_explained(error):
            code = EXIT_STOPPED_BY_ERROR if progress.worked else EXIT_NOT_STARTED
            raise failure(str(error) or "out of memory", code) from error
        _point_to_log(config, progress)
        raise


@contextmanager
def in_a_folder(config: RunConfig, note: Callable[[str], None]) -> Iterator[RunConfig]:
    """The configuration with a folder as ``runs_dir``: of a run that is kept elsewhere, its working copy.

    Raises StoreError.
    """
    from spotlight.store.run_store import stored_runs

    if (found := stored_runs(config.runs_dir)) is None:
        yield config
        return
    if "WORLD_SIZE" in os.environ:
        raise StoreError(
            f"runs_dir is {found.address} under torchrun; expected a folder, which its ranks share. "
            "Start the ranks with --ranks, or set runs_dir to a folder."
        )
    cluster = config.fleet.address if config.fleet.address not in (None, "auto") else ""
    with found.store.work(found.address, config.name, config.cache, note, cluster) as runs_dir:
        yield config.model_copy(update={"runs_dir": runs_dir})


def driver_of(
    config: RunConfig, profiled_steps: int = 0
) -> Callable[[RunConfig, Observer, float], RunResult]:
    """The driver of this configuration: this process (and ``torchrun``'s other ranks), or a Ray cluster.

    Args:
        profiled_steps: see :func:`spotlight.runtime.run.train`.
    """
    with lasting():
        if config.fleet.driver == "ray":
            from spotlight.cluster.cluster_run import train_on_cluster

            return partial(train_on_cluster, profiled_steps=profiled_steps)
        from spotlight.runtime.run import train as train_inline

        return partial(train_inline, profiled_steps=profiled_steps)


def _point_to_log(config: RunConfig, progress: RunProgress) -> None:
    from spotlight.store.run_directory import RunPaths

    paths = RunPaths(config.runs_dir / config.name)
    # Logs of rewards, ranks and learners lie beside those of attempts.
    attempts = [int(log.stem) for log in paths.attempts.glob("*.log") if log.stem.isdecimal()]
    if attempts and progress.worked:
        log = paths.attempt_log(max(attempts))
        typer.echo(f"The run failed; the traceback is also in {log}.", err=True)


def _print_result(result: RunResult) -> None:
    from spotlight.cli.runs.progress import RunConsole

    console = RunConsole()
    if result.error is not None:
        complain(f"the run stopped: {result.error}")
    elif result.stopped:
        console.print("Stopped; the same command resumes.")
    else:
        from spotlight.report.final_screen import print_final_screen
        from spotlight.report.model_card import CARD_FOLDER
        from spotlight.report.record import read_run

        with errors_without_traceback(EXIT_STOPPED_BY_ERROR):
            run = read_run(result.directory)
            print_final_screen(console, run, result.directory / CARD_FOLDER / "README.md")
