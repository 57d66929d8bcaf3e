"""``spotlight compare``: curves of several runs side by side, seeds of one configuration together."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from spotlight.cli.run_argument import RUNS, find_run
from spotlight_dashboard.figures import Axis
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.output_files import write_file
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback

if TYPE_CHECKING:
    from spotlight_dashboard.comparison import CurveChange, Interval, RunCurve, Seeds
    from spotlight_dashboard.views.curves import CurveColumns


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or names in runs/, both also with *."),
    ],
    by: Annotated[Axis, typer.Option(help="What the curves stand over.")] = "iteration",
    curve: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The curve, as in metrics.jsonl; default: the score a run is judged by."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The score to reach; default: what the first runs end with."),
    ] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="All points, a row each.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The table.")] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of the curves: .svg or .png.")
    ] = None,
) -> None:
    """Compare runs: means and 90 % intervals over seeds, when a score is reached, and which settings differ.

    Runs whose configurations differ in name and run_seed alone are seeds of one, and are averaged. The first
    is what the others are compared with.

    [bold]Examples[/bold]

      spotlight compare 'nft-*' 'grpo-*'

      spotlight compare base subset --by usd --target 0.8

      spotlight compare base subset --curve rollout/reward --csv curves.csv --chart curves.png
    """
    from spotlight_dashboard.comparison import differences, grouped, points

    if chart is not None and chart.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"--chart: {str(chart)!r} ends with neither .svg nor .png")
    if target is not None and not math.isfinite(target):
        raise typer.BadParameter(f"--target: {target} is no score")
    with errors_without_traceback():
        directories = list(dict.fromkeys(path for each in runs for path in _named(each)))
        name = curve or _judged(directories)
        groups = grouped([_read(each, name, by) for each in directories])
        at = points(groups)
        if not at:
            raise UserError(f"Every run needs two points of {name!r}, but {_known(groups)}.")
        reference = groups[0].end
        assert reference is not None, "a group with points has an end"
        reached = reference.mean if target is None else target
        _show(groups, at, name, by, reached)
        _tell_courses(groups)
        for path, text in ((csv_path, _csv), (json_path, _json)):
            if path is not None:
                write_file(path, text(groups, at, name, by, reached))
        if chart is not None:
            _draw(groups, name, by, chart)
        if changed := differences(groups):
            _show_differences(groups, changed)


def _named(text: str) -> list[Path]:
    for place in (Path(text), RUNS / text) if "*" in text else ():
        if found := glob(str(place / "config.yaml"), recursive=True):  # noqa: PTH207 - which takes no pattern from a root
            return [Path(each).parent for each in sorted(found)]
    return [find_run(text, "light")]


def _judged(directories: Sequence[Path]) -> str:
    """The first of the judged curves that all runs have."""
    from spotlight.store.metrics import JUDGED, VALIDATION

    known = [set(_columns(each).at) for each in directories]
    for name in JUDGED:
        if all(f"{VALIDATION}{name}" in each for each in known):
            return f"{VALIDATION}{name}"
    raise UserError(
        "The runs have no validation in common yet: name another curve (--curve rollout/reward), or leave "
        "out the runs that have none."
    )


def _columns(directory: Path) -> CurveColumns:
    from spotlight_dashboard.run_folders import RunFolder
    from spotlight_dashboard.views.curves import CurveReader

    with CurveReader(RunFolder.of(directory)).columns() as columns:
        return columns


def _read(directory: Path, name: str, by: Axis) -> RunCurve:
    from spotlight.config.load import changed_keys, load_dump
    from spotlight_dashboard.run_folders import RunFolder
    from spotlight_dashboard.views.curves import ALL_POINTS, curve, read_booked
    from spotlight_dashboard.views.means import run_curve

    folder = RunFolder.of(directory)
    changed = changed_keys(load_dump(folder.paths.config, installed=False))
    settings = {key: value for key, (value, _) in changed.items()}
    with folder.values():
        booked = read_booked(folder, dollars=by == "usd")
        return run_curve(folder.name, settings, curve(_columns(directory), name, booked, ALL_POINTS), by)


def _known(groups: Sequence[Seeds]) -> str:
    return ", ".join(f"{run.run} has {len(run.x)}" for group in groups for run in group.runs)


def _show(groups: Sequence[Seeds], at: Sequence[float], name: str, by: Axis, target: float) -> None:
    console = TextConsole()
    console.print(f"{name} by {by}; 90 % intervals over seeds")
    table = Table(box=None, pad_edge=False)
    table.add_column("runs", overflow="fold")
    for header in (*map(_number, at), "end", f"reaches {target:.3g}", "of the first"):
        table.add_column(header, justify="right", overflow="fold")
    first = groups[0].reaches(target)
    for group in groups:
        when = group.reaches(target)
        share = f"{when.mean / first.mean:.2f}" if when and first and first.mean > 0 else "-"
        cells = [*(group.at(x) for x in at), group.end, when]
        table.add_row(group.name, *map(_cell, cells), share)
    console.print(table)
    for group in groups:
        if repeated := group.repeated:
            console.print(
                f"{' and '.join(repeated)}: the run_seed of another run of {group.name}, so its interval is "
                "not one over seeds. Leave out copies, or give run_seed.",
                soft_wrap=True,
            )


def _tell_courses(groups: Sequence[Seeds]) -> None:
    """A run that changed on its way is not what its configuration says from the start."""
    console = TextConsole()
    for run, change in _changes(groups):
        words = "; ".join(change.words)
        console.print(f"{run} from iteration {change.iteration} on: {words}", soft_wrap=True)


def _changes(groups: Sequence[Seeds]) -> Iterator[tuple[str, CurveChange]]:
    for group in groups:
        for run in group.runs:
            yield from ((run.run, each) for each in run.changes)


def _show_differences(groups: Sequence[Seeds], changed: dict[str, list[object]]) -> None:
    console = TextConsole()
    table = Table(box=None, pad_edge=False)
    for header in ("setting (- is the default)", *(group.name for group in groups)):
        table.add_column(header, overflow="fold")
    for key, values in changed.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    console.print()
    console.print(table)


def _csv(groups: Sequence[Seeds], at: Sequence[float], name: str, by: Axis, target: float) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["runs", "run", by, name])
    for group in groups:
        for run in group.runs:
            rows.writerows([group.name, run.run, x, y] for x, y in zip(run.x, run.y, strict=True))
    return text.getvalue()


def _json(groups: Sequence[Seeds], at: Sequence[float], name: str, by: Axis, target: float) -> str:
    from spotlight_dashboard.comparison import CONFIDENCE, differences

    found = {
        "curve": name,
        "by": by,
        "confidence": CONFIDENCE,
        "target": target,
        "groups": [
            {
                "name": group.name,
                "runs": [run.run for run in group.runs],
                "repeated_seeds": group.repeated,
                "at": [{by: x, **_fields(group.at(x))} for x in at],
                "end": _fields(group.end),
                "reaches": _fields(group.reaches(target)),
            }
            for group in groups
        ],
        "differences": differences(groups),
    }
    return json.dumps(found, indent=1) + "\n"


def _fields(found: Interval | None) -> dict[str, float | int | None]:
    if found is None:
        return {"mean": None, "half": None, "seeds": 0}
    return {
        "mean": found.mean,
        "half": None if math.isnan(found.half) else found.half,
        "seeds": found.seeds,
    }


def _draw(groups: Sequence[Seeds], name: str, by: Axis, path: Path) -> None:
    from spotlight_dashboard.comparison import DRAWN, points
    from spotlight_rewards.base.charts import Mark, Series, line_chart

    def lines() -> Iterator[Series]:
        for group in groups:
            found = list(group.line(points([group], DRAWN)))
            half = [each.half for _, each in found]
            band = None if any(map(math.isnan, half)) else half
            yield Series(group.name, [x for x, _ in found], [each.mean for _, each in found], band)

    marks = [
        Mark(change.x, f"{run}: {'; '.join(change.words)}")
        for run, change in _changes(groups)
        if change.x is not None
    ]
    y_label = name.rpartition("/")[2]
    drawn = line_chart(list(lines()), title=name, x_label=by, y_label=y_label, marks=marks)
    if path.suffix == ".svg":
        write_file(path, drawn)
        return
    import resvg_py

    write_file(path, bytes(resvg_py.svg_to_bytes(svg_string=drawn, zoom=2)))


def _cell(found: Interval | None) -> str:
    if found is None:
        return "-"
    return _number(found.mean) if math.isnan(found.half) else f"{_number(found.mean)} ±{found.half:.2g}"


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.3g}"
