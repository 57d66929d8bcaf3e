"""The dashboard as a server, a file and a command: what it refuses, what it costs, how it ends."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import queue
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.unit.dashboard_run import (
    BEARER,
    GROUP_SIZE,
    HOSTILE,
    LONG,
    PROMPTS,
    RIGHT_TO_LEFT,
    START_S,
    ask,
    client_of,
    make_run,
    served,
)
from typer.testing import CliRunner

from spotlight.cli.main import app as cli
from spotlight.cli.runs.dashboard_beside import start_beside
from spotlight.scheduler.types import WorkerId
from spotlight.store.images import Tile, write_grid
from spotlight.store.ledger import ledger_queries
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunPaths
from spotlight_dashboard import answers as answers_module
from spotlight_dashboard import run_folders
from spotlight_dashboard.figures import Json
from spotlight_dashboard.page_files import PAGE_FILES, page_file
from spotlight_dashboard.report_pictures import PictureBudget, embedded
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.shown_runs import ShownRuns
from spotlight_dashboard.single_page import single_page
from spotlight_dashboard.views.gallery import PICTURE_BYTES_MAX
from spotlight_rewards.base.file_errors import StoreError

# -- what it refuses --


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2f..%2felsewhere/overview",
        "/api/runs/linked/overview",
        "/api/runs/wild/logfile?name=linked.log",
        "/api/runs/wild/logfile?name=../storage-token",
        "/api/runs/wild/logfile?name=..%2f..%2f..%2foutside.log",
        "/api/runs/wild/logfile?name=/etc/passwd",
        "/api/runs/wild/storage-token",
        "/api/runs/wild/picture/0/99",
        "/api/runs/wild/picture/0/0%2f..%2f..%2fstorage-token",
        "/page/..%2f..%2fpage_files.py",
        "/page/index.html",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_files_outside_the_list_are_not_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (404, 422)
    assert "secret" not in answer.text
    assert "root:" not in answer.text


def test_links_out_of_the_folder_are_no_runs(client: TestClient) -> None:
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["new", "wild"]


def test_links_out_of_a_run_are_not_followed(places: Path, empty_place: Path) -> None:
    run = empty_place / "run"
    run.mkdir()
    (run / "config.yaml").write_text("iterations: 1\n")
    for name in ("ledger.sqlite", "metrics.jsonl", "images", "attempts"):
        (run / name).symlink_to(places / "wild" / name)
    client = client_of(empty_place)
    assert ask(client, "overview", run="run")["state"] == "new"
    for what in ("accounting", "audit", "cluster", "money", "samples", "sample", "log"):
        assert client.get(f"/api/runs/run/{what}").status_code == 409, what
    assert ask(client, "metrics", run="run")["names"] == []
    assert ask(client, "evaluation", run="run", iteration=0)["pictures"] == []
    for path in ("picture/0/0", "logfile?name=001.log"):
        assert client.get(f"/api/runs/run/{path}").status_code == 404


def test_runs_of_one_name_are_told_apart(places: Path, tmp_path: Path) -> None:
    (tmp_path / "wild").mkdir()
    (tmp_path / "wild" / "config.yaml").write_text("{}")
    runs = asyncio.run(ShownRuns([places / "wild", tmp_path, places]).look())
    assert list(runs) == ["wild", "wild~2", "new"]


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs/wild/overview").status_code == 405


def test_reading_changes_nothing(client: TestClient, places: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (path for path in (places / "wild").rglob("*") if not path.name.endswith(("-shm", "-wal")))
        return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}

    before = state()
    for what in answers_module.ANSWERS:
        if what not in ("sample", "logfile"):
            ask(client, what)
    assert state() == before


@pytest.mark.parametrize(
    ("what", "query"),
    [
        ("samples", {"iteration": "-1"}),
        ("samples", {"purpose": "else"}),
        ("samples", {"fate": "'; DROP TABLE samples"}),
        ("cluster", {"page": "٣"}),
        ("evaluation", {"iteration": "9" * 30}),
    ],
)
def test_malformed_parameters_are_named(client: TestClient, what: str, query: dict[str, str]) -> None:
    answer = client.get(f"/api/runs/wild/{what}", params=query)
    assert answer.status_code == 400
    assert next(iter(query)) in answer.text
    assert "expected" in answer.text


def test_a_run_without_a_ledger_is_new_and_a_damaged_one_says_so(client: TestClient, tmp_path: Path) -> None:
    assert ask(client, "overview", run="new")["state"] == "new"
    assert ask(client, "pictures", run="new") == {"iterations": [], "training": []}
    answer = client.get("/api/runs/new/money")
    assert (answer.status_code, "no ledger here" in answer.text) == (409, True)
    paths = RunPaths(tmp_path / "damaged")
    paths.path.mkdir()
    paths.config.write_text(": not yaml :\n")
    paths.ledger.write_bytes(os.urandom(5000))
    damaged = client_of(tmp_path, tmp_path / "none")
    assert damaged.get("/api/runs").json()["runs"][0]["state"] == "unreadable"
    assert damaged.get("/api/runs/damaged/overview").status_code == 409


def test_one_bad_run_does_not_hide_the_others(empty_place: Path) -> None:
    configs = {
        b"deep": b"[" * 900,
        b"large": b"iterations: 1" + b"0" * 400,
        b"half a \xff name": b'name: "\\ud800"\nrollout: {sampler: "\\ud800"}\n',
    }
    for name, content in configs.items():
        folder = Path(os.fsdecode(os.fsencode(empty_place) + b"/" + name))
        folder.mkdir()
        (folder / "config.yaml").write_bytes(content)
    client = client_of(empty_place)
    runs = client.get("/api/runs").json()["runs"]
    assert len(runs) == len(configs)
    for run in runs:
        address = f"/api/runs/{quote(run['name'])}"
        assert client.get(f"{address}/overview").status_code == 200
        assert client.get(f"{address}/money").status_code == 409


@pytest.mark.parametrize(
    "spoil",
    [
        f"UPDATE attempts SET pid = 'x', host = '{socket.gethostname()}', ended = NULL",
        "UPDATE incidents SET subject = x'ff', detail = x'ff', at = x'ff'",
        "UPDATE outcomes SET purpose = 'odd'",
        "UPDATE gpu_seconds SET price_usd_h = 9e999, phase = 'odd', seconds = NULL",
        "UPDATE prompts SET text = x'ff', metadata = '[NaN]'",
    ],
)
def test_a_ledger_of_odd_values_hides_no_other_run_and_is_refused_in_words(
    spoil: str, empty_place: Path
) -> None:
    make_run(empty_place / "sound", 2)
    odd = make_run(empty_place / "odd", 2)
    with closing(sqlite3.connect(odd.ledger)) as ledger:
        ledger.executescript("PRAGMA foreign_keys = OFF; PRAGMA ignore_check_constraints = ON")
        for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            ledger.executescript(  # without types
                "PRAGMA legacy_alter_table = ON; DROP VIEW IF EXISTS scores; "
                f"CREATE TABLE z AS SELECT * FROM {name}; DROP TABLE {name}; ALTER TABLE z RENAME TO {name}"
            )
        ledger.executescript(spoil)
    client = client_of(empty_place)
    assert {run["name"] for run in client.get("/api/runs").json()["runs"]} == {"odd", "sound"}
    assert 'spotlight_iterations{run="sound"} 2.0' in client.get("/metrics").text
    whats = [*answers_module.ANSWERS, "audit?now=1", "evaluation?iteration=0"]
    refused = {what: client.get(f"/api/runs/odd/{what}") for what in whats}
    assert {each.status_code for each in refused.values()} <= {200, 404, 409}
    with suppress(StoreError):
        single_page(RunFolder("odd", odd.path))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"iteration": 0, "samples_trained": 1e30, "wall_s": 1, "train/loss": 1}', "curve?name=train/loss"),
        ('{"iteration": 0, "samples_trained": 0, "wall_s": 0, "a": {"validation/graded": 1}}', "overview"),
        ('{"iteration": Infinity, "samples_trained": 0, "wall_s": 0, "validation/graded": 1}', "overview"),
    ],
)
def test_a_line_of_metrics_that_no_run_writes_is_left_out(line: str, what: str, empty_place: Path) -> None:
    paths, client = make_run(empty_place / "runs" / "odd", 2), client_of(empty_place / "runs")
    before = client.get(f"/api/runs/odd/{what}").json()
    paths.metrics.write_text(f"{paths.metrics.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    assert client_of(empty_place / "runs").get(f"/api/runs/odd/{what}").json() == before


def test_rewards_beyond_all_bounds_are_an_error_that_names_the_run(empty_place: Path) -> None:
    paths = make_run(empty_place / "odd", 2)
    with paths.metrics.open("a", encoding="utf-8") as file:
        for at in range(40):
            reward = f'"train/loss": 1, "rollout/reward": {at % 2}e200'
            file.write(f'{{"iteration": {at}, "samples_trained": 9, "wall_s": 99, {reward}}}\n')
    result = CliRunner().invoke(cli, ["why", str(paths.path)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"{paths.path}: damaged, or read wrongly (OverflowError" in result.stderr


def test_a_curve_whose_name_has_no_utf_8_is_in_the_report(empty_place: Path) -> None:
    paths = make_run(empty_place / "runs" / "odd", 2)
    with paths.metrics.open("a", encoding="utf-8") as file:
        file.write('{"iteration": 2, "samples_trained": 9, "wall_s": 99, "\\ud800": 1}\n')
    assert "\\ud800" in single_page(RunFolder("odd", paths.path))


def test_the_nodes_now_are_those_with_open_workers(empty_place: Path) -> None:
    paths = RunPaths(empty_place / "run")
    paths.path.mkdir()
    paths.config.write_text("{}")
    workers = {WorkerId(name): 1.0 for name in ("local/0", "local/1", "spot-1/0", "spot-2/0")}
    with SqliteLedger(paths.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="elsewhere", workers={WorkerId("old/0"): 1.0}, now_s=START_S)
        ledger.begin_attempt(pid=1, host="elsewhere", workers=workers, now_s=START_S)
        for node in ("spot-1", "spot-2"):
            ledger.record_incident(Incident.NODE_JOINED, node, spot=True, detail="", now_s=START_S)
            ledger.record_incident(Incident.NODE_NOTICED, node, spot=True, detail="", now_s=START_S)
        ledger.stop_billing([WorkerId("spot-2/0")], START_S + 1)
    client = client_of(empty_place)
    assert ask(client, "overview", run="run")["nodes"] == {"reserved": 1, "spot": 1, "noticed": 1}


def test_the_page_runs_no_script_but_its_own(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in re.findall(r"page/[\w.]+", answer.text):
        assert client.get(f"/{name}").status_code == 200
    assert client.get("/page/plotly.min.js").text.startswith("/**")
    for name in PAGE_FILES:
        text = page_file(name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", text
        ), name
        assert "http://" not in text
        assert "https://" not in text


# -- one file --


def test_the_report_holds_the_run_and_asks_for_nothing(places: Path, tmp_path: Path) -> None:
    target = tmp_path / "made" / "wild.html"
    result = CliRunner().invoke(cli, ["report", str(places / "wild"), "--html", str(target)])
    assert result.exit_code == 0, result.output
    html = target.read_text()
    assert len(html) > 4_000_000  # with Plotly
    assert HOSTILE not in html
    ours = re.sub(r"<script>\n/\*\*\n\* plotly.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"'](?!data:)", ours)
    assert "default-src 'none'" in html
    inlined = re.search(r'id="inlined">(.*?)</script>', html, re.DOTALL)
    assert inlined is not None
    found = json.loads(inlined[1])
    assert found["answers"]["evaluation?iteration=8"]["pictures"][0]["caption"] == HOSTILE
    assert RIGHT_TO_LEFT in json.dumps(found["answers"]["samples"], ensure_ascii=False)
    assert found["answers"]["curve?name=validation%2Fgraded"]["points"] == 3
    moved = found["answers"]["samples?moved=1"]["samples"]
    assert len(moved) == 2 * 2 * GROUP_SIZE
    for each in moved:
        life = found["answers"][f"sample?id={each['id']}"]
        assert [stay["node"] for stay in life["stays"]] == each["nodes"]
    assert len(found["pictures"]) == 3 * (len(PROMPTS) * GROUP_SIZE + 4)
    assert found["answers"]["pictures"] == {"iterations": [0, 4, 8], "training": [0, 4, 8]}
    best, worst, *_ = found["answers"]["training?iteration=8"]["pictures"]
    assert (best["scores"]["judge"], worst["scores"]["judge"]) == pytest.approx((0.1, 0.9))
    assert {f"training/8/{each['index']}" for each in (best, worst)} <= found["pictures"].keys()
    assert found["answers"]["audit"]["ok"]
    assert LONG in html


def test_the_report_has_pictures_of_real_sizes(empty_place: Path) -> None:
    paths = RunPaths(empty_place / "run")
    paths.images.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (540, 300, 3), dtype=np.uint8)  # hardly compressible
    video = np.stack([noise[frame : frame + 20] for frame in range(30)])
    write_grid(paths, 8, [Tile(noise, "a", 0.5), Tile(video, "b", 0.25)] * 2, columns=2, title="evaluation")
    for tile in (paths.images / "tiles").glob("*"):
        for iteration in (0, 4):
            shutil.copy(tile, tile.with_name(f"{iteration:06d}{tile.name[6:]}"))
    run = RunFolder("run", paths.path.resolve())
    evaluation: Any = answers_module.RunAnswers().answer(run, "evaluation", {"iteration": "8"})
    uri, played = (embedded((paths.images / "tiles" / f"000008-00{at}.png").read_bytes()) for at in (0, 1))
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert (image.format, image.size) == ("WEBP", (284, 512))
    with Image.open(io.BytesIO(base64.b64decode(played.partition(",")[2]))) as image:
        assert (image.size, getattr(image, "n_frames", 1)) == ((256, 17), 24)
    budget = PictureBudget(3 * len(uri))
    for iteration, share, whole, taken in ((8, 0.5, False, 1), (0, 1.0, False, 2), (4, 1.0, True, 0)):
        asked = {"iteration": iteration, "pictures": evaluation["pictures"][::2]}
        found = budget.take(run, asked, share=share, whole=whole)
        assert (found and found["left_out"]) == (2 - taken if taken else None)
    assert sorted(budget.taken) == ["picture/0/0", "picture/0/2", "picture/8/0"]


def test_a_picture_that_is_too_large_is_refused_in_words(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 5)
    os.truncate(paths.images / "tiles" / "000004-000.png", PICTURE_BYTES_MAX + 1)
    answer = client_of(empty_place).get("/api/runs/run/picture/4/0")
    assert answer.status_code == 409
    assert "larger than" in answer.text


def test_means_of_a_ledger_that_takes_too_long_say_so(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(empty_place / "run", 5)
    client = client_of(empty_place)
    monkeypatch.setattr(run_folders, "READ_S", 1e-9)
    monkeypatch.setattr(ledger_queries, "_STEPS_BETWEEN_LOOKS", 1)
    for what in ("means?name=validation/graded&axis=usd&run=run", "runs/run/money"):
        answer = client.get(f"/api/{what}")
        assert (answer.status_code, "run does not answer" in answer.text) == (503, True)


# -- as commands --


def test_changes_of_a_live_run_are_reported(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 2)
    with (
        served(empty_place) as address,
        httpx2.stream("GET", f"{address}/api/changes", headers=BEARER, timeout=90) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        assert 'data: {"names": ["run"]}' in lines
        with closing(sqlite3.connect(paths.ledger)) as writer:  # a live writer, in the middle of its work
            writer.execute("UPDATE attempts SET seen_at = seen_at + 1")
            overview = httpx2.get(f"{address}/api/runs/run/overview", headers=BEARER, timeout=60)
            assert overview.json()["iterations"] == 2
            writer.commit()
        assert 'data: {"names": ["run"]}' in lines  # read on until it comes


@pytest.mark.slow
def test_twenty_clients_cost_what_one_costs(empty_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_run(empty_place / "run", 2)
    clients, changes, asked = 20, 3, ("overview", "cluster", "log")
    monkeypatch.setattr(answers_module, "_STALE_S", math.inf)
    monkeypatch.setattr(answers_module, "_QUICK_S", math.inf)
    computed: list[tuple[str, str]] = []

    def counted(what: str, compute: answers_module.Answer) -> answers_module.Answer:
        def answer(
            answers: answers_module.RunAnswers, run: RunFolder, query: answers_module.Query
        ) -> Json | None:
            computed.append((what, run.signature()))
            return compute(answers, run, query)

        return answer

    for what in asked:
        monkeypatch.setitem(answers_module.ANSWERS, what, counted(what, answers_module.ANSWERS[what]))
    together = threading.Barrier(clients + 1, timeout=120)

    def watch(address: str) -> None:
        with (
            httpx2.Client(base_url=address, headers=BEARER, timeout=120) as client,
            client.stream("GET", "/api/changes") as stream,
        ):
            assert stream.status_code == 200
            for _ in range(changes):
                together.wait()
                assert {client.get(f"/api/runs/run/{what}").status_code for what in asked} == {200}
                together.wait()

    with (
        closing(sqlite3.connect(paths.ledger, isolation_level=None)) as writer,
        served(empty_place) as address,
        ThreadPoolExecutor(clients) as pool,
    ):
        watching = [pool.submit(watch, address) for _ in range(clients)]
        for _ in range(changes):
            writer.execute("UPDATE attempts SET seen_at = seen_at + 1")
            together.wait()
            together.wait()
        for each in watching:
            each.result()
    assert len(computed) == len(set(computed)) == changes * len(asked)


def test_the_command_starts_light_and_ends_with_the_run(places: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listening = socket.create_server(("127.0.0.1", 0))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    beside = ["--fd", str(listening.fileno()), "--ends-with", str(run.pid)]
    dashboard = subprocess.Popen(
        [sys.executable, "-m", "spotlight.cli", "dashboard", str(places), *beside],
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
    )
    assert dashboard.stdin is not None
    with dashboard.stdin as told:
        told.write(b"told by the run")
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with httpx2.Client(base_url=address, timeout=120) as browser:  # waits in the queue of the socket
        assert browser.post("/api/session", json={"token": "told by the run"}).status_code == 200
        assert len(browser.get("/api/runs").json()["runs"]) == 2
    run.communicate(b"\n")
    assert dashboard.wait(timeout=60) == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_a_dashboard_beside_a_run_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    start_beside(tmp_path, "a run", stays=False, note=notes.put)
    assert re.match(
        r"dashboard: http://127.0.0.1:\d+/\?token=[\w-]{32}#/a%20run/overview$", notes.get(timeout=60)
    )
    failure = notes.get(timeout=60)
    assert "status 1; the run goes on" in failure
    assert "a broken installation" in failure


def test_the_command_refuses_what_it_cannot_serve_safely(places: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, words in (
        ([str(places), "--host", "0.0.0.0"], ("--host", "--token-env")),
        ([str(places), "--host", "0.0.0.0", "--token-env", "NOT_SET_ANYWHERE"], ("NOT_SET_ANYWHERE",)),
        ([str(places), "--token-env", "SHORT"], ("SHORT", "has 9 characters", "expected at least 16")),
        ([str(tmp_path / "gone")], ("RUNS_DIR", "gone")),
    ):
        result = runner.invoke(cli, ["dashboard", *arguments], env={"SHORT": "guessable"})
        assert result.exit_code == 2
        assert all(word in result.stderr for word in words), result.stderr
    result = runner.invoke(cli, ["report", str(places / "wild"), "--html", "."])
    assert (result.exit_code, "FILE: found .; expected a place for it" in result.stderr) == (2, True)
    (device := tmp_path / "device").symlink_to("/dev/null")
    result = runner.invoke(cli, ["report", str(places / "wild"), "--html", str(device)])
    assert (result.exit_code, device.is_symlink()) == (0, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = runner.invoke(cli, ["dashboard", str(places), "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "Choose another --port" in result.stderr
