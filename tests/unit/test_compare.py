"""``spotlight compare``: seeds grouped, means and intervals, when a score is reached, and what differs."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.unit.dashboard_run import change_course, make_run
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_dashboard.comparison import (
    COLUMNS,
    DRAWN,
    RunCurve,
    Seeds,
    differences,
    grouped,
    interval,
    points,
)
from spotlight_dashboard.views.means import run_curve

VALUES = st.floats(-1e3, 1e3)


def line(name: str, slope: float, until: int = 10, **settings: object) -> RunCurve:
    x = list(range(0, until + 1, 2))
    y = [slope * each for each in x]
    return RunCurve(name, {"name": name, **settings}, [float(each) for each in x], y)


class TestCurves:
    def test_of_points_at_one_place_the_last_stays_the_last(self) -> None:
        found = {"usd": [1.0, 2.0, 2.0], "y": [0.5, 0.9, 0.3], "changes": []}
        run = run_curve("a", {}, found, "usd")
        assert (run.x, run.y, run.at(2)) == ([1.0, 2.0, 2.0], [0.5, 0.9, 0.3], 0.3)

    def test_a_score_is_reached_between_two_points(self) -> None:
        run = line("a", 0.1)
        assert run.reaches(0.5) == pytest.approx(5)
        assert run.reaches(-1) == 0
        assert run.reaches(1.01) is None
        falls = RunCurve("b", {}, [0, 1, 2, 3], [0, 1, 0, 2])
        assert falls.reaches(0.5) == pytest.approx(0.5)

    def test_a_value_holds_until_the_next(self) -> None:
        run = line("a", 0.1)
        assert [run.at(x) for x in (-1, 0, 3.9, 4, 99)] == pytest.approx([None, 0, 0.2, 0.4, 1.0])

    def test_seeds_of_one_configuration_are_grouped_and_others_are_not(self) -> None:
        runs = [
            line("a-0", 1, run_seed=0, **{"learner.learning_rate": 1e-4}),
            line("b-0", 1, run_seed=0),
            line("a-1", 2, run_seed=1, iterations=99, **{"learner.learning_rate": 1e-4}),
        ]
        groups = grouped(runs)
        assert [[run.run for run in group.runs] for group in groups] == [["a-0", "a-1"], ["b-0"]]
        assert groups[0].name == "a-0 +1"
        assert differences(groups) == {"learner.learning_rate": [1e-4, None]}

    def test_a_run_and_its_copy_are_not_two_seeds(self) -> None:
        copies = [line("a", 1, run_seed=3), line("b", 1, run_seed=4), line("c", 1, run_seed=3)]
        (group,) = grouped(copies)
        assert group.repeated == ["c"]
        assert Seeds((line("a", 1), line("a-again", 1))).repeated == ["a-again"]
        assert Seeds((line("a", 1), line("b", 1, run_seed=3))).repeated == []

    def test_points_end_where_the_shortest_run_does(self) -> None:
        groups = grouped([line("a", 1, 10), line("b", 1, 6, beta=2)])
        assert points(groups) == [1, 2, 4, 5, 6]
        assert points(grouped([line("a", 1), RunCurve("b", {"k": 1}, [], [])])) == []

    @given(st.floats(0.001, 1e3), st.sampled_from([COLUMNS, DRAWN]))
    def test_the_last_point_is_where_all_runs_have_come_to(self, last: float, count: int) -> None:
        groups = grouped([RunCurve("a", {}, [last / 3, last], [1.0, 2.0])])
        assert groups[0].at(points(groups, count)[-1]) == interval([2.0])

    def test_there_is_no_mean_of_the_seeds_that_came_far(self) -> None:
        seeds = Seeds((line("a", 0.1, 10), line("b", 0.2, 4)))
        assert seeds.at(4) == interval([0.4, 0.8])
        assert seeds.at(6) is None
        assert seeds.reaches(0.8) == interval([8, 4])
        assert seeds.reaches(0.9) is None

    @given(st.lists(VALUES, min_size=2, max_size=8))
    def test_the_interval_is_students(self, values: list[float]) -> None:
        found = interval(values)
        assert found is not None
        assert found.mean == pytest.approx(mean(values), abs=1e-9)
        # From a table of Student's t, both sides .9.
        quantile = {2: 6.3138, 3: 2.9200, 4: 2.3534, 5: 2.1318, 6: 2.0150, 7: 1.9432, 8: 1.8946}[len(values)]
        half = quantile * stdev(values) / math.sqrt(len(values))
        assert found.half == pytest.approx(half, rel=1e-3, abs=1e-9)
        assert interval([values[0]]) is not None
        assert interval([math.nan]) is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, rate, slope in (("a-0", 0, 2e-4, 0.02), ("a-1", 1, 2e-4, 0.04), ("b-0", 0, 3e-4, 0.06)):
        paths = make_run(folder / name)
        with paths.config.open("a", encoding="utf-8") as config:
            config.write(f"run_seed: {seed}\n")
        text = paths.config.read_text(encoding="utf-8")
        text = text.replace("learner: {updates_per_batch: 1}", f"learner: {{learning_rate: {rate}}}")
        paths.config.write_text(text, encoding="utf-8")
        rows = [json.loads(each) for each in paths.metrics.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            if "validation/graded" in row:
                row["validation/graded"] = row["validation/strict"] = slope * row["iteration"]
        paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    change_course(paths, 4, {"name": ("<b>'c'\x1b]", "b-0"), "iterations": (12, 20)})
    return folder


def compare(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_folders_whose_names_are_no_text_are_compared(runs: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9sultats/\xff"))
    shutil.copytree(runs / "a-0", folder)
    compare(str(folder), "--by", "usd", "--csv", str(tmp_path / "points.csv"))
    rows = list(csv.reader((tmp_path / "points.csv").read_text(encoding="utf-8").splitlines()))
    assert {row[1] for row in rows[1:]} == {"\\udcff"}


def test_texts_are_no_markup(runs: Path) -> None:
    strange = runs / "[bold]c [red]"
    shutil.copytree(runs / "b-0", strange)
    try:
        assert "[bold]c [red]" in compare(str(runs / "a-0"), str(strange))
    finally:
        shutil.rmtree(strange)


def test_a_table_says_what_was_reached_when_and_what_differs(runs: Path) -> None:
    output = compare(*(str(runs / name) for name in ("a-0", "a-1", "b-0")))
    lines = output.splitlines()
    assert lines[0] == "validation/strict by iteration; 90 % intervals over seeds"
    assert lines[2].split()[:2] == ["a-0", "+1"]
    assert lines[3].startswith("b-0")
    assert "0.24 ±0.51" in lines[2]  # .16 and .32 at 8: mean .24, 6.31 * .113 / sqrt(2)
    assert [each.split() for each in lines if each.startswith("learner.learning_rate")] == [
        ["learner.learning_rate", "0.0002", "-"]
    ]


@pytest.mark.parametrize("axis", ["iteration", "samples", "hours", "usd"])
def test_files_hold_what_the_screen_shows(runs: Path, tmp_path: Path, axis: str) -> None:
    names = [str(runs / name) for name in ("a-0", "b-0")]
    files = {kind: tmp_path / "made" / f"x.{kind}" for kind in ("json", "csv", "svg")}
    compare(
        *names, "--by", axis, "--target", "0.1",
        "--json", str(files["json"]), "--csv", str(files["csv"]), "--chart", str(files["svg"]),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(files["json"].read_text(encoding="utf-8"))
    assert (found["by"], found["target"], found["confidence"]) == (axis, 0.1, 0.9)
    a, b = found["groups"]
    assert a["repeated_seeds"] == []
    assert b["end"]["mean"] == pytest.approx(3 * a["end"]["mean"])
    assert b["reaches"]["mean"] < a["reaches"]["mean"]
    rows = list(csv.DictReader(files["csv"].open(encoding="utf-8")))
    assert {row["run"] for row in rows} == {"a-0", "b-0"}
    assert [float(row["validation/strict"]) for row in rows if row["run"] == "a-0"] == [0, 0.08, 0.16]
    drawn = ElementTree.fromstring(files["svg"].read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    (mark,) = (each for each in drawn.iter(f"{svg}line") if each.find(f"{svg}title") is not None)
    assert mark.findtext(f"{svg}title") == "b-0: forked from <b>'c'\\x1b]; iterations 12 to 20"
    # Both curves end at iteration 8, and 0 to 8 are from 74 to 660: the change is half way.
    assert axis != "iteration" or float(mark.attrib["x1"]) == pytest.approx((74 + 660) / 2, abs=0.1)


def test_a_picture_is_drawn(runs: Path, tmp_path: Path) -> None:
    png = tmp_path / "curves.png"
    compare(str(runs / "a-0"), str(runs / "a-1"), str(runs / "b-0"), "--chart", str(png))
    with Image.open(png) as picture:
        assert picture.size == (1360, 680)
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--chart", "x.pdf"], "ends with neither .svg nor .png"),
        (["--curve", "nothing/such"], "Every run needs two points of 'nothing/such', but a-0 has 0"),
        (["--by", "moons"], "'moons' is not one of"),
        (["--target", "nan"], "nan is no score"),
        (["--csv", "/dev/null/x.csv"], "FILE: found /dev/null/x.csv; expected a place for it"),
        (["--json", "/dev/null/x.json"], "FILE: found /dev/null/x.json; expected a place for it"),
        (["--chart", "/dev/null/x.svg"], "FILE: found /dev/null/x.svg; expected a place for it"),
        (["a**/b"], "'a**/b' is no run directory"),
    ],
)
def test_what_cannot_be_compared_is_said(runs: Path, arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["compare", str(runs / "a-0"), *arguments], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert expected in result.output
    assert "Traceback" not in result.output


def test_names_in_runs_may_hold_a_star(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("spotlight_dashboard.commands.compare_command", "spotlight.cli.run_argument"):
        monkeypatch.setattr(f"{module}.RUNS", runs)
    expected = compare(*(str(runs / name) for name in ("a-0", "a-1", "b-0")))
    assert compare("a-*", "b-0") == compare(str(runs / "a-*"), "b**") == expected


def test_runs_are_listed_as_json(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a-0", tmp_path / "a-0")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("iterations: none\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    a, broken = json.loads(result.stdout)
    assert (a["name"], a["state"], a["iteration"], a["iterations"]) == ("a-0", "stopped", 12, 20)
    assert (a["validation"]["strict"], a["validation_iteration"]) == (pytest.approx(0.16), 8)
    assert a["cost_usd"] > 0
    assert (broken["name"], broken["state"]) == ("broken", "unreadable")
    assert "no ledger here" in broken["error"]


def test_a_copy_is_named_wherever_a_mean_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a-0", tmp_path / "a-copy")
    found = tmp_path / "found.json"
    said = compare(str(runs / "a-0"), str(tmp_path / "a-copy"), "--json", str(found))
    assert "a-copy: the run_seed of another run of a-0 +1, so its interval is not one over seeds" in said
    (group,) = json.loads(found.read_text(encoding="utf-8"))["groups"]
    assert group["repeated_seeds"] == ["a-copy"]
