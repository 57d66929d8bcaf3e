"""``spotlight simulate``: compare strategies on the same spot trace, at no cost."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from spotlight_rewards.base.terminal import TextConsole, progress_bar
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotlight_plan.compare import ComparedStrategy
    from spotlight_plan.pages.comparison_summary import PageNote, TableLine
    from spotlight_plan.scenarios.prepared_scenario import Prepared
    from spotlight_plan.scenarios.scenario_file import ScenarioFile
    from spotlight_plan.strategy_runs import StrategyRuns


ScenarioArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="SCENARIO", help="Name of a shipped scenario, or a YAML file."),
]
OverridesArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys in YAML syntax, as for train."),
]
StrategyOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--strategy", help="Only this one; repeatable (default: the scenario's)."),
]
TraceOption: TypeAlias = Annotated[
    Path | None, typer.Option("--trace", help="A trace file in place of the scenario's trace.")
]
PageOption: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write a page with pictures of every GPU (Plotly).")
]
AsOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--as", metavar="RUN", help="Predict this run with its own nodes, and compare with it."),
]
ProfileOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--profile", help="With --as: a cost profile (default: measured in RUN itself)."),
]
StartsOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--starts", min=1, help="In place of run.starts (default: 5)."),
]
JobsOption: TypeAlias = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Processes (default: the cores).")
]


def simulate(
    scenario: ScenarioArgument = None,
    overrides: OverridesArgument = None,
    strategy: StrategyOption = None,
    trace: TraceOption = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="In place of run.seed.")] = None,
    starts: StartsOption = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    page: PageOption = None,
    jobs: JobsOption = None,
    as_run: AsOption = None,
    profile: ProfileOption = None,
) -> None:
    """Compare time and cost of strategies on the same spot traces and seeds.

    Runs the production controller in virtual time, with durations from a cost profile and prices from a dated
    source, both named below the table. Every strategy runs from several starts, for p50, p90 and ranges.
    Without SCENARIO, lists the shipped scenarios.

    [bold]Examples[/bold]

      spotlight simulate paper-512

      spotlight simulate paper-1280 prices.cloud=gcp --html paper.html

      spotlight simulate paper-512 --trace bamboo.csv run.iterations=150 --json out.json

      spotlight simulate paper-512 --starts 20 --strategy spotlight

      spotlight simulate mine.yaml cluster.spot.nodes=16 --strategy spotlight --strategy reserved_only

      spotlight simulate --as demo

      spotlight simulate --as seed-1 --profile seed-0.yaml --json prediction.json
    """
    if as_run is not None or profile is not None:
        _predict(
            as_run, profile, as_json, others=(scenario, overrides, strategy, trace, seed, starts, page, jobs)
        )
        return
    if scenario is None:
        _list()
        return
    from spotlight_plan.compare import run_tasks
    from spotlight_plan.pages.comparison_page import require_plotly
    from spotlight_plan.scenarios.prepare import prepare
    from spotlight_plan.strategy_runs import grouped, tasks_from_starts
    from spotlight_rewards.base.output_files import require_place

    now = datetime.now(UTC)
    with errors_without_traceback():
        if page is not None:
            require_plotly()
        for wanted in filter(None, (as_json, page)):
            require_place(wanted)
        file = read_scenario(scenario, overrides or [], trace, seed, starts)
        names = chosen_strategies(file, strategy or [])
        prepared = prepare(file, names, now)
        tasks = tasks_from_starts(prepared, names, timelines=page is not None)
    with errors_without_traceback(), progress_bar(TextConsole(stderr=True)) as bar:
        shown = bar.add_task("simulating", total=len(tasks))
        compared = run_tasks(
            tasks,
            jobs or os.cpu_count() or 1,
            lambda task: bar.update(shown, advance=1, description=f"simulated {task.strategy}"),
        )
    runs = grouped([one.outcome for one in compared], file.run.starts)
    _print(prepared, runs, now)
    _write(prepared, runs, compared[:: file.run.starts], now, as_json, page)
    if all(one.outcome.iterations == 0 for one in compared):
        raise failure("no strategy finished an iteration; see above.", 1)


def _predict(run: str | None, profile: str | None, as_json: Path | None, others: Sequence[object]) -> None:
    from spotlight_plan.commands.run_prediction_table import show_prediction

    if run is None:
        raise failure("--profile is of --as RUN; in a scenario, set workload.profile=FILE.")
    if any(other is not None for other in others):
        raise failure("--as RUN takes the run's own settings: only --profile and --json go with it.")
    show_prediction(run, profile, as_json)


def _write(
    prepared: Prepared,
    runs: Sequence[StrategyRuns],
    compared: Sequence[ComparedStrategy],
    now: datetime,
    as_json: Path | None,
    page: Path | None,
) -> None:
    from spotlight_plan.pages.comparison_page import comparison_page
    from spotlight_plan.pages.comparison_summary import record_of
    from spotlight_rewards.base.output_files import write_file

    with errors_without_traceback():
        if as_json is not None:
            record = record_of(prepared, runs, now)
            write_file(as_json, json.dumps(record, indent=2) + "\n")
        if page is not None:
            write_file(page, comparison_page(prepared, runs, compared, now))
    print_written(as_json, page)


def read_scenario(
    name: str, overrides: Sequence[str], trace: Path | None, seed: int | None, starts: int | None
) -> ScenarioFile:
    """The scenario given on the command line. Raises :class:`ConfigError`."""
    from spotlight_plan.scenarios.scenario_load import load_scenario
    from spotlight_rewards.base.errors import ConfigError, Problem

    if "=" in name:
        expected = "the name of a scenario, or a file, before any key=value"
        problem = Problem("SCENARIO", repr(name), expected, "For example: spotlight simulate paper-512.")
        raise ConfigError("the command line", [problem])
    return load_scenario(name, overrides, trace=trace, seed=seed, starts=starts)


def chosen_strategies(file: ScenarioFile, wanted: Sequence[str]) -> tuple[str, ...]:
    """The requested strategies, else the scenario's. Raises :class:`ConfigError` if unknown."""
    from spotlight_plan.scenarios.strategies import UnknownStrategyError, strategy_named
    from spotlight_rewards.base.errors import ConfigError

    for name in wanted:
        try:
            strategy_named(name)
        except UnknownStrategyError as error:
            raise ConfigError("the command line", [error.problem("--strategy")]) from None
    return tuple(dict.fromkeys(wanted)) or file.strategies


def _list() -> None:
    from spotlight_plan.scenarios.scenario_load import load_scenario, scenario_names

    console = TextConsole()
    table = Table(box=None, pad_edge=False)
    for title in ("scenario", "what it is", "strategies"):
        table.add_column(title, overflow="fold")
    for name in scenario_names():
        file = load_scenario(name)
        table.add_row(name, file.name, ", ".join(file.strategies))
    console.print(table)
    console.print("\nsimulate one: spotlight simulate paper-512. Your own: docs/howto/simulate-and-plan.md")


def _print(prepared: Prepared, runs: Sequence[StrategyRuns], now: datetime) -> None:
    from spotlight_fleet.traces.transforms import cut
    from spotlight_plan.pages.comparison_summary import notes_of, table_of
    from spotlight_plan.traces.picture import sparkline

    console = wide_console()
    console.print(Text(prepared.file.name, style="bold"), soft_wrap=True)
    print_table(console, ["", *(one.strategy for one in runs)], table_of(runs))
    shown_s = min(prepared.trace.horizon_s, 3600 * max((one.first.simulated_h for one in runs), default=0.0))
    if shown_s > 0:
        part = cut(prepared.trace, 0.0, shown_s)
        which = " from the first start" if prepared.file.run.starts > 1 else ""
        console.print(f"\nSpot nodes over the {shown_s / 3600:.1f} h simulated{which}:")
        console.print(Text(f"  {sparkline(part)}", style="cyan"), soft_wrap=True)
    print_notes(console, notes_of(prepared, runs, now))


def print_written(*paths: Path | None) -> None:
    """Name the files that were written; None: it was not asked for."""
    for path in filter(None, paths):
        TextConsole().print(f"Wrote {path}", soft_wrap=True)


def wide_console() -> TextConsole:
    """A console wide enough for a whole table, if the output is not a terminal."""
    console = TextConsole()
    return console if console.is_terminal else TextConsole(width=400)


def print_table(console: TextConsole, columns: Sequence[str], lines: Sequence[TableLine]) -> None:
    """Print a table; lines without cells are headings."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        heading = column.replace("+", "\n+")  # each part of a pipeline on its own line
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for line in lines:
        table.add_row(Text(line.label, style="" if line.cells else "dim"), *line.cells)
    console.print(table)


def print_notes(console: TextConsole, notes: Sequence[PageNote]) -> None:
    """Print the notes below a table."""
    for note in notes:
        console.print()
        console.print(Text(note.heading, style="yellow" if note.heading == "Mind" else "bold"))
        for line in note.lines:
            console.print(f"  {line}", soft_wrap=True)
