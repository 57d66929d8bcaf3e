"""``/metrics``: what it says of runs, its format, and the files of ``monitoring`` that rest on it."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import shutil
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dashboard_run import ITERATION_S, ITERATIONS, LEASES_EACH, ask, client_of, make_run
from tests.unit.store_history import SCRATCH

from spotlight_dashboard import answers as answers_module
from spotlight_dashboard import shown_runs as shown_module
from spotlight_dashboard.prometheus import CONTENT_TYPE, RunFigure, exposition
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.shown_runs import ShownRuns
from spotlight_dashboard.views.curves import CurveReader

PROMTOOL = shutil.which("promtool")
MONITORING = Path(__file__).parents[2] / "monitoring"
LINE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\[\\"n])*)"')
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        paths = make_run(Path(scratch) / "wild", ITERATIONS)
        with paths.metrics.open("a") as file:
            file.write(
                '{"iteration": 12, "samples_trained": 48, "wall_s": 156, "odd \\"\\ud800\\\\name": 2.5}\n'
            )
        broken = Path(scratch) / "broken"
        broken.mkdir()
        (broken / "config.yaml").write_text("iterations: 3\n")
        (broken / "ledger.sqlite").write_bytes(os.urandom(5000))
        new = Path(scratch) / "new"
        new.mkdir()
        (new / "config.yaml").write_text("iterations: 3\n")
        yield Path(scratch)


def parsed(text: str) -> Samples:
    """The samples by family and labels; each family is announced once, before its samples."""
    found: Samples = {}
    family = ""
    met: set[str] = set()
    assert text.endswith("\n") or not text
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in met
            met.add(family)
        elif line.startswith("# TYPE "):
            assert re.fullmatch(rf"# TYPE {family} (counter|gauge)", line)
            assert line.endswith("counter") == family.endswith("_total")
        else:
            matched = LINE.fullmatch(line)
            assert matched is not None, line
            assert matched[1] == family
            labels = frozenset((name, unescaped(value)) for name, value in LABEL.findall(matched[2]))
            assert (family, labels) not in found
            found[family, labels] = float(matched[3])
    return found


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


@pytest.fixture(scope="module")
def samples(place: Path) -> Samples:
    client = client_of(place)
    answer = client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    return parsed(answer.text)


def value(samples: Samples, family: str, run: str = "wild", **labels: str) -> float:
    return samples[f"spotlight_{family}", frozenset({"run": run, **labels}.items())]


def test_the_figures_are_those_of_the_page(samples: Samples, place: Path) -> None:
    client = client_of(place)
    page, money = (client.get(f"/api/runs/wild/{what}").json() for what in ("overview", "money"))
    assert value(samples, "iterations") == page["iterations"]
    assert value(samples, "iterations_planned") == page["planned"]
    assert value(samples, "policy_version") == page["iterations"]
    assert value(samples, "cost_usd_total") == pytest.approx(page["usd"])
    for each in money["phases"]:
        assert value(samples, "worker_seconds", phase=each["phase"]) == pytest.approx(each["seconds"])
    assert value(samples, "incidents_total", kind="node_lost", node="spot") == page["preemptions"]
    accounting = client.get("/api/runs/wild/accounting").json()
    assert value(samples, "rollouts_issued", purpose="train") == accounting["issued"]
    trained = value(samples, "rollouts_ended", purpose="train", outcome="trained", reason="")
    assert trained == accounting["trained"]
    late = value(samples, "rollouts_ended", purpose="train", outcome="dropped", reason="reward_error")
    assert late == 1
    assert value(samples, "rollouts_in_flight", purpose="train") == accounting["in_flight"]
    assert value(samples, "leases_granted") == LEASES_EACH * ITERATIONS
    assert value(samples, "run_state", state="stopped") == 1
    assert value(samples, "nodes", kind="spot") == 0  # the run does not run
    assert value(samples, "iteration_seconds") == pytest.approx(ITERATION_S)
    for each in client.get("/api/runs/wild/metrics").json()["names"]:
        if each["name"].isascii():
            assert value(samples, "metric", name=each["name"]) == pytest.approx(each["last"])


def test_a_run_that_cannot_be_read_says_so_and_hides_no_other(samples: Samples) -> None:
    assert [value(samples, "run_readable", run) for run in ("wild", "new", "broken")] == [1, 1, 0]
    assert value(samples, "run_state", "new", state="new") == 1
    assert value(samples, "metric", name='odd "\\ud800\\name') == 2.5


def test_figures_of_a_run_that_has_ended_are_made_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(run: RunFolder) -> tuple[RunFigure, ...]:
        made.append(run.name)
        return ()

    monkeypatch.setattr(answers_module, "run_figures", counted)
    monkeypatch.setattr(answers_module, "_STALE_S", 1e-6)  # time passes
    answers, run = answers_module.RunAnswers(), asyncio.run(ShownRuns([place]).look())["wild"]
    for _ in range(3):
        answers.figures(run)
    assert made == ["wild"]


@given(st.text(), st.dictionaries(st.text(max_size=9), st.floats(), max_size=3))
def test_whatever_runs_and_metrics_are_called_is_read_back(run: str, metrics: dict[str, float]) -> None:
    figures = [RunFigure("spotlight_metric", number, (("name", name),)) for name, number in metrics.items()]
    found = parsed(exposition({run: figures}))
    assert len(found) == len(metrics)
    for name, number in metrics.items():
        again = found["spotlight_metric", frozenset({("run", run), ("name", name)})]
        assert again == number or (math.isnan(again) and math.isnan(number))


@pytest.mark.parametrize("name", ["spotlight-alerts.yml", "grafana-dashboard.json", "alerts-test.yml"])
def test_the_files_name_families_that_there_are(name: str, samples: Samples) -> None:
    there = {family for family, _ in samples} | {"spotlight_filled_seconds"}
    named = set(re.findall(r"\bspotlight_[a-z_]+", (MONITORING / name).read_text()))
    assert named <= there
    page = (MONITORING.parent / "docs" / "howto" / "prometheus.md").read_text()
    assert there <= set(re.findall(r"spotlight_[a-z_]+", page))


@pytest.mark.skipif(PROMTOOL is None, reason="not installed: apt install prometheus")
def test_promtool_takes_the_files(tmp_path: Path) -> None:
    folder = shutil.copytree(MONITORING, tmp_path / "monitoring")
    (folder / "spotlight-token").write_text("a-token-of-this-test")
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts-test.yml"]):
        found = subprocess.run(
            [str(PROMTOOL), *command], text=True, capture_output=True, cwd=folder, check=False
        )
        assert found.returncode == 0, found.stdout + found.stderr


def test_every_panel_has_a_query_of_the_chosen_runs() -> None:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= len(board["panels"])
    assert all('run=~"$run"' in query for query in queries)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("asked", ["/api/runs", "/metrics"])
def test_nothing_is_kept_of_a_run_that_is_gone(
    asked: str, empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list[tuple[str, weakref.ref[CurveReader]]]()

    class Reader(CurveReader):
        def __init__(self, run: RunFolder) -> None:
            super().__init__(run)
            known.append((run.name, weakref.ref(self)))

    monkeypatch.setattr(answers_module, "CurveReader", Reader)
    monkeypatch.setattr(shown_module, "LOOKS_EVERY_S", 0.0)
    client = client_of(empty_place)
    for name in ("one", "two"):
        make_run(empty_place / name)
        ask(client, "metrics", run=name)
    shutil.rmtree(empty_place / "one")
    client.get(asked)
    gc.collect()
    assert [name for name, each in known if each() is not None] == ["two"]
