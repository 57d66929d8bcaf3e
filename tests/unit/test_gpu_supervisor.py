"""The GPU suite's frame: every row ends with a verdict, and the report is whole after each."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benchmarks.gpu import supervisor
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.suite import Outcome, Report, Row, Verdict, chosen
from rich.console import Console


def row(name: str, budget_s: float = 10.0, *, speed: bool = False, tiny: bool = True) -> Row:
    return Row("A", name, "nowhere:nothing", "a title", "s", 1.0, budget_s, speed=speed, tiny=tiny)


def serve(home: Path, device: str, tiny: bool, model: str, pipe: Connection) -> None:
    """Rows that misbehave as their names say."""
    os.setpgid(0, 0)
    pipe.send({"machine": {"cpu": "made up"}})
    while True:
        try:
            asked: Row = pipe.recv()
        except EOFError:
            return
        match asked.name.partition(" ")[0]:
            case "hangs":
                time.sleep(600)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                pipe.send({"kind": "raised", "note": "ValueError: of this row", "broken": False})
            case "breaks":
                pipe.send({"kind": "raised", "note": "RuntimeError: CUDA error", "broken": True})
            case "skips":
                pipe.send({"kind": "skip", "note": "no such device"})
            case "slow":
                pipe.send({"kind": "value", "outcome": Outcome(2.0)})
            case _:
                pipe.send({"kind": "value", "outcome": Outcome(0.5, {"pid": os.getpid()})})


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(supervisor, "_serve", serve)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    return Report("A", {}, Console(file=io.StringIO(), width=200), tmp_path / "made" / "report.json")


def test_every_row_ends_with_a_verdict_whatever_its_process_does(report: Report, tmp_path: Path) -> None:
    rows = [
        *(row("fine 1"), row("raises"), row("fine 2"), row("hangs", 1.0), row("fine 3"), row("dies")),
        *(
            row("fine 4"),
            row("breaks"),
            row("fine 5"),
            row("skips"),
            row("slow speed", speed=True),
            row("slow wrong"),
        ),
    ]
    supervisor.supervise(rows, report, tmp_path, device="cpu", tiny=False, limit_s=120)
    found = {result.name: result for result in report.results}
    assert [result.name for result in report.results] == [one.name for one in rows]
    assert {name: result.verdict.value for name, result in found.items()} == {
        **{f"fine {i}": "PASS" for i in range(1, 6)},
        "raises": "FAIL",
        "hangs": "FAIL",
        "dies": "FAIL",
        "breaks": "FAIL",
        "skips": "SKIP",
        "slow speed": "SLOW",
        "slow wrong": "FAIL",
    }
    assert found["hangs"].note == "it did not end within 1 s and was stopped"
    assert found["dies"].note == "its process ended with exit code -9"
    assert found["raises"].note == "ValueError: of this row"
    pids = [found[f"fine {i}"].details["pid"] for i in range(1, 6)]
    assert pids[0] == pids[1]  # what a row raises does not cost the model
    assert len(set(pids)) == 4  # a hang, a death and a broken context do
    written = json.loads((tmp_path / "made" / "report.json").read_text())
    assert written["machine"] == {"cpu": "made up"}
    assert written["counts"] == {"PASS": 5, "SLOW": 1, "FAIL": 5, "SKIP": 1}
    report.summary()
    assert isinstance(report.console.file, io.StringIO)
    said = report.console.file.getvalue()
    assert all(said.count(f" A {one.name} ") == 2 for one in rows)


def test_a_row_that_no_longer_fits_is_skipped_and_the_report_is_whole_after_each(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    add = Report.add

    def added(self: Report, result: object) -> None:
        add(self, result)  # type: ignore[arg-type]
        written.append(len(json.loads((tmp_path / "made" / "report.json").read_text())["rows"]))

    monkeypatch.setattr(Report, "add", added)
    rows = [row("fine 1", 5.0), row("fine 2", 500.0), row("fine 3", 5.0)]
    supervisor.supervise(rows, report, tmp_path, device="cpu", tiny=False, limit_s=60)
    assert written == [1, 2, 3]
    assert [result.verdict for result in report.results] == [Verdict.PASS, Verdict.SKIP, Verdict.PASS]
    assert "it takes 500 s" in report.results[1].note


def serve_nothing(home: Path, device: str, tiny: bool, model: str, pipe: Connection) -> None:
    raise SystemExit("no torch")


def test_without_torch_or_device_all_rows_fail_at_once(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_serve", serve_nothing)
    # With so much time that a wait would end the test.
    rows = [row(str(i), 3600.0) for i in range(20)]
    supervisor.supervise(rows, report, tmp_path, device="cuda", tiny=False, limit_s=1e6)
    assert {result.verdict for result in report.results} == {Verdict.FAIL}
    assert len(report.results) == 20
    assert "does not start on 'cuda'" in report.results[0].note


def test_verdicts() -> None:
    least = Row("B", "x", "m:f", "", "", 0.5, 1, at_least=True, speed=True)
    assert [least.verdict(value, tiny=False) for value in (0.5, 0.49)] == [Verdict.PASS, Verdict.SLOW]
    assert least.verdict(0.0, tiny=True) is Verdict.PASS  # a tiny model's speed says nothing
    assert least.verdict(float("nan"), tiny=True) is Verdict.FAIL
    assert row("x").verdict(1.01, tiny=True) is Verdict.FAIL
    assert row("x", tiny=False).verdict(1.01, tiny=True) is Verdict.PASS
    assert row("x", tiny=False).verdict(1.01, tiny=False) is Verdict.FAIL


def test_every_row_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "gpu-suite.md").read_text()
    assert [one.name for one in ROWS if f"`{one.name}`" not in page] == []


def test_rows_have_names_of_their_own_and_a_part_fits_its_minutes() -> None:
    for part in ("A", "B", "C", "D"):
        rows = chosen(ROWS, part, [])
        assert len({one.name for one in rows}) == len(rows)
        # Budgets are upper bounds; with the start of the process they must not be far beyond the limit.
        assert sum(one.budget_s for one in rows) < 600, part
    with pytest.raises(ValueError, match="part B has no such row; it has matmul"):
        chosen(ROWS, "B", ["nothing"])


def test_one_nan_among_differences_is_the_result() -> None:
    from benchmarks.gpu.correct import worst

    assert worst([0.0, 0.5, 0.1]) == 0.5
    assert all(math.isnan(worst(values)) for values in ([0.0, math.nan], [math.nan, 1.0]))
