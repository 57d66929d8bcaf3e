"""``spotlight plan``: how many GPUs of which type meet a deadline or a budget."""

from __future__ import annotations

import json
import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.text import Text

from spotlight_plan.commands.simulate_command import (
    JobsOption,
    OverridesArgument,
    StartsOption,
    TraceOption,
    print_notes,
    print_table,
    print_written,
    read_scenario,
    wide_console,
)
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import EXIT_STOPPED_BY_ERROR, errors_without_traceback

if TYPE_CHECKING:
    from spotlight_plan.scenarios.prepared_scenario import Prepared
    from spotlight_plan.scenarios.scenario_file import ScenarioFile
    from spotlight_plan.search import EvaluatedCandidate, SearchResult


ScenarioArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="Name of a shipped scenario, or a YAML file.")
]
DeadlineHOption: TypeAlias = Annotated[
    float | None, typer.Option("--deadline-h", help="Reach the target in so many hours, at least cost.")
]
BudgetUsdOption: TypeAlias = Annotated[
    float | None, typer.Option("--budget-usd", help="Reach the target for so much, as fast as possible.")
]
PageOption: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write a page with the trade-off curve (Plotly).")
]
LaunchOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--launch", help="Write launch files of the answer here: SkyPilot, KubeRay, start.sh."),
]
ConfigOption: TypeAlias = Annotated[
    str, typer.Option("--config", help="With --launch: the run's configuration, in the repository.")
]


def plan(
    scenario: ScenarioArgument,
    overrides: OverridesArgument = None,
    deadline_h: DeadlineHOption = None,
    budget_usd: BudgetUsdOption = None,
    trace: TraceOption = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="In place of run.seed.")] = None,
    starts: StartsOption = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all candidates to this file.")] = None,
    page: PageOption = None,
    launch: LaunchOption = None,
    config: ConfigOption = "examples/qwen-image-nft.yaml",
    jobs: JobsOption = None,
) -> None:
    """Find how many reserved and spot GPUs of which type meet a deadline or a budget.

    Ranks whole machines of every cloud of the price source, each pool in its own place, in numbers around the
    scenario's, by a closed form. The recommendation was simulated from several starts, and meets the goal at
    p90. The scenario's section ``plan`` defines the search range. A page and JSON
    also have the verdict against the reserved GPUs alone, what each
    lever brings, and which assumption moves the answer most.
    Exit status: 0 found, 1 nothing meets the goal or the answer could not be written or explained, 2 not
    started.

    [bold]Examples[/bold]

      spotlight plan paper-512 --deadline-h 6

      spotlight plan paper-512 --budget-usd 150 --html plan.html

      spotlight plan paper-512 prices.source=skypilot --deadline-h 4 --launch launch/planned

      spotlight plan mine.yaml plan.spot_nodes=[4,8,16,32] --deadline-h 24 --json plan.json
    """
    from spotlight_plan.candidates import prepared_for
    from spotlight_plan.commands.plan_progress import PlanProgress
    from spotlight_plan.launch_files import require_launch
    from spotlight_plan.pages.comparison_page import require_plotly
    from spotlight_plan.search import Goal, search
    from spotlight_rewards.base.output_files import require_place

    now, jobs = datetime.now(UTC), jobs or os.cpu_count() or 1
    with errors_without_traceback():
        goal = Goal(deadline_h, budget_usd)
        if page is not None:
            require_plotly()
        for wanted in filter(None, (as_json, page)):
            require_place(wanted)
        file = read_scenario(scenario, overrides or [], trace, seed, starts)
        if launch is not None:
            require_launch(launch, file, config)
        with PlanProgress() as shown_progress:
            found = search(file, goal, now, jobs=jobs, progress=shown_progress.step)
    with errors_without_traceback(EXIT_STOPPED_BY_ERROR):
        shown = (found.answer or found.nearest).candidate
        prepared = prepared_for(file, shown, file.plan.iterations, now)
        given = [scenario, *(overrides or []), *_options(trace=trace, seed=seed, starts=starts)]
        _print(file, found, prepared, now, given)
        if as_json or page:
            _write(file, found, prepared, now, as_json, page)
        if launch is not None and found.answer is not None:
            _launch(launch, file, found.answer, prepared, config)
    if found.answer is None:
        raise typer.Exit(EXIT_STOPPED_BY_ERROR)


def _write(
    file: ScenarioFile,
    found: SearchResult,
    prepared: Prepared,
    now: datetime,
    as_json: Path | None,
    page: Path | None,
) -> None:
    from spotlight_plan.explanation.plan_explanation import explain
    from spotlight_plan.pages.plan_page import plan_page, plan_record
    from spotlight_rewards.base.output_files import write_file

    explained = explain(file, found.answer, now) if found.answer is not None else None
    if as_json is not None:
        write_file(as_json, json.dumps(plan_record(file, found, explained), indent=2) + "\n")
    if page is not None:
        write_file(page, plan_page(file, found, explained, prepared, now))
    print_written(as_json, page)


def _launch(
    folder: Path, file: ScenarioFile, answer: EvaluatedCandidate, prepared: Prepared, config: str
) -> None:
    from spotlight_plan.launch_files import write_launch_files

    written = write_launch_files(folder, file, answer.candidate, prepared, config)
    print_written(*written.paths)
    console = TextConsole()
    target = answer.outcome.target
    if target is not None and written.iterations != target.iterations:
        note = f"{config} (--config) trains {written.iterations} iterations; the plan is for"
        console.print(f"{note} {target.iterations}", style="yellow", soft_wrap=True)
    first = f"Replace {' and '.join(written.to_replace)} in them. " if written.to_replace else ""
    console.print(f"{first}Start it: bash {shlex.quote(str(folder / 'start.sh'))}", soft_wrap=True)


def _options(**given: object) -> list[str]:
    """As words of the command line; None: not given."""
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", f"{value}")]


def _print(
    file: ScenarioFile, found: SearchResult, prepared: Prepared, now: datetime, given: list[str]
) -> None:
    """Print the answer; ``given``: the scenario with its overrides and options, as on the command line."""
    from spotlight_plan.candidates import overrides_of
    from spotlight_plan.pages.plan_page import COLUMNS, answer_text, lines_of, plan_notes

    console = wide_console()
    console.print(
        Text(f"{file.name}: what others do not beat in time and cost", style="bold"), soft_wrap=True
    )
    print_table(console, COLUMNS, lines_of(found, every=False))
    console.print("* Pareto front at p50, by the closed form; > the answer, simulated is below", style="dim")
    print_notes(console, plan_notes(file, found, prepared, now))
    console.print()
    style = "bold green" if found.answer else "bold red"
    console.print(Text(answer_text(found), style=style), soft_wrap=True)
    if found.answer is not None:
        best = found.answer.candidate
        words = [*given, "--strategy", best.strategy, *overrides_of(file, best)]
        advice = f"Simulate it: spotlight simulate {' '.join(map(shlex.quote, words))}"
        console.print(Text(advice, style="dim"), soft_wrap=True)
