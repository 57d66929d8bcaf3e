"""The dashboard's answers over HTTP: what they say of a run, and what they refuse."""

from __future__ import annotations

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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient
from tests.unit.dashboard_run import (
    GROUP_SIZE,
    HOSTILE,
    LONG,
    PROMPTS,
    RESERVED,
    RIGHT_TO_LEFT,
    START_S,
    make_run,
    tile_score,
    truncated_picture,
)
from tests.unit.store_history import SCRATCH
from typer.testing import CliRunner

from spotlight.cli.main import app as cli
from spotlight.cli.runs.dashboard_command import start_beside
from spotlight.dashboard import answers as answers_module
from spotlight.dashboard.dashboard_app import dashboard_app
from spotlight.dashboard.figures import Json, thinned
from spotlight.dashboard.page_files import PAGE_FILES, page_file
from spotlight.dashboard.report_pictures import PictureBudget, embedded
from spotlight.dashboard.run_folders import RunFolder, find_runs
from spotlight.dashboard.views.findings import findings
from spotlight.scheduler.types import Phase, WorkerId
from spotlight.store.images import Tile, write_grid
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunPaths

ITERATIONS, EVERY = 12, 4
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    """A folder with the run ``wild``, another without a ledger, and files that are nobody's business."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        yield _fill(Path(scratch) / "runs")


@pytest.fixture
def empty_place() -> Iterator[Path]:
    """An empty folder where syncing costs nothing."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        yield Path(scratch)


def _fill(root: Path) -> Path:
    paths = make_run(root / "wild", ITERATIONS, every=EVERY)
    (root / "new").mkdir()
    (root / "new" / "config.yaml").write_text("name: new\niterations: 5\n")
    (paths.path / "storage-token").write_text("secret")
    (root.parent / "outside.log").write_text("secret")
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere" / "config.yaml").write_text("name: elsewhere\n")
    (root / "linked").symlink_to(root.parent / "elsewhere")
    (paths.attempts / "linked.log").symlink_to(root.parent / "outside.log")
    (paths.images / "tiles" / "000000-099.png").symlink_to(root.parent / "outside.log")
    return root


@pytest.fixture(scope="module")
def client(places: Path) -> TestClient:
    return TestClient(dashboard_app([places]), base_url="http://localhost:8170")


def ask(client: TestClient, what: str, run: str = "wild", **query: object) -> Any:
    answer = client.get(f"/api/runs/{run}/{what}", params={key: str(value) for key, value in query.items()})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


# -- what it says --


def test_the_overview_tells_progress_and_what_is_left(client: TestClient) -> None:
    found = ask(client, "overview")
    assert (found["iterations"], found["planned"], found["state"]) == (ITERATIONS, 20, "stopped")
    assert found["left"]["iterations"] == 20 - ITERATIONS
    assert found["left"]["seconds"] == pytest.approx(12.0 * (20 - ITERATIONS))
    assert found["left"]["usd"] == ask(client, "money")["forecast"]["usd_left"]
    assert (found["preemptions"], found["noticed"]) == (2, 2)
    assert [row["iteration"] for row in found["validations"]] == list(range(0, ITERATIONS, EVERY))
    assert found["row"]["iteration"] == ITERATIONS - 1


def test_every_billed_second_is_in_one_lane_and_one_phase(client: TestClient, places: Path) -> None:
    found, spent = ask(client, "cluster"), ask(client, "money")
    seconds = sum(lane["billed_s"] for lane in found["lanes"])
    assert seconds == pytest.approx(spent["worker_s"])
    assert sum(each["seconds"] for each in spent["phases"]) == pytest.approx(spent["worker_s"])
    assert sum(each["usd"] for each in spent["nodes"]) == pytest.approx(spent["usd"])
    for lane in found["lanes"]:
        drawn = lane["stretches"]
        assert sum(end - begin for begin, end, _ in drawn) == pytest.approx(lane["billed_s"])
        assert all(left[1] == pytest.approx(right[0]) for left, right in pairwise(drawn))
        assert drawn[0][0] == pytest.approx(lane["from"])
    assert found["start"] == START_S
    assert {event["kind"] for event in found["events"]} == {"node_joined", "node_noticed", "node_lost"}


def test_a_window_of_time_shows_only_the_lanes_and_seconds_in_it(client: TestClient) -> None:
    found = ask(client, "cluster", last_s=30)
    assert found["end"] - found["start"] == 30
    assert {lane["worker"] for lane in found["lanes"]} == {RESERVED, "spot-2/0"}
    assert all(begin >= found["start"] for lane in found["lanes"] for begin, *_ in lane["stretches"])
    assert ask(client, "cluster", page=9)["lanes"] == []


def test_money_is_compared_with_what_was_not_lost_on_demand(client: TestClient) -> None:
    found = ask(client, "money")
    assert found["on_demand_usd"] == pytest.approx((found["worker_s"] - found["lost_s"]) / 3600)
    assert found["spot_nodes"] == 3
    last = found["curve"]["usd"]
    assert last == sorted(last)
    assert found["forecast"]["usd_left"] == pytest.approx((last[-1] - last[0]) / (len(last) - 1) * 8)


def test_a_curve_has_four_axes_error_bars_and_gaps(client: TestClient) -> None:
    names = {each["name"]: each for each in ask(client, "metrics")["names"]}
    assert names["validation/graded"]["stderr"]
    assert "validation/graded_stderr" not in names
    graded, loss = (ask(client, "curve", name=name) for name in ("validation/graded", "train/loss"))
    assert graded["stderr"] == [0.02] * 3
    assert loss["y"][3] is None
    for axis in ("iteration", "samples", "hours", "usd"):
        assert loss[axis] == sorted(loss[axis])
        assert len(loss[axis]) == ITERATIONS
    # An iteration's bill is 12 s of a reserved worker and of a spot one; an evaluation comes before it.
    assert loss["usd"] == pytest.approx([15.0 / 3600 * (row + 1) for row in range(ITERATIONS)])
    assert graded["usd"] == pytest.approx([15.0 / 3600 * row for row in range(0, ITERATIONS, EVERY)])
    assert ask(client, "curve", name="no such metric")["y"] == []


def test_curves_follow_the_file_also_when_a_resume_replaces_it(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 3)
    with TestClient(dashboard_app([empty_place]), base_url="http://localhost") as client:
        assert ask(client, "curve", run="run", name="train/loss")["points"] == 3
        whole = paths.metrics.read_bytes()
        line = b'{"iteration": 3, "samples_trained": 16, "wall_s": 48.0, "train/loss": 0.5}\n'
        with paths.metrics.open("ab") as file:
            file.write(b"not a row\n" + line + line[:20])
        found = ask(client, "curve", run="run", name="train/loss")
        assert (found["points"], found["y"][-1]) == (4, 0.5)
        assert ask(client, "metrics", run="run")["skipped"] == 1
        (empty_place / "new.jsonl").write_bytes(whole)
        (empty_place / "new.jsonl").replace(paths.metrics)
        assert ask(client, "curve", run="run", name="train/loss")["points"] == 3


def test_pictures_come_with_all_scores_of_their_sample(client: TestClient) -> None:
    assert ask(client, "pictures")["iterations"] == [0, 4, 8]
    found = ask(client, "evaluation", iteration=4)["pictures"]
    assert [each["caption"] for each in found[::GROUP_SIZE]] == list(PROMPTS)
    assert [each["tag"] for each in found[::GROUP_SIZE]] == ["hostile"] * 3 + ["plain"]
    for each in found:
        member = int(each["rollout"][-1])
        assert each["scores"] == {"reward": each["score"], "strict": 1.0}
        assert each["score"] == tile_score(4, member)
        assert isinstance(each["seed"], str)
        picture = client.get(f"/api/runs/wild/picture/4/{each['index']}")
        assert picture.content.startswith(b"\x89PNG")


def test_a_picture_being_written_is_left_out(empty_place: Path) -> None:
    truncated_picture(make_run(empty_place / "run", 1), 0)
    client = TestClient(dashboard_app([empty_place / "run"]), base_url="http://localhost")
    found = ask(client, "evaluation", run="run", iteration=0)["pictures"]
    assert len(found) == len(PROMPTS) * GROUP_SIZE - 1


def test_a_sample_is_found_and_its_life_told(client: TestClient) -> None:
    (one,) = (each for each in ask(client, "samples", text="t000001-001-000")["samples"])
    found = ask(client, "sample", id=one["id"])
    assert [each["what"] for each in found["life"]] == ["issued", "finished", "refused", "scored", "trained"]
    assert [each["seq"] for each in found["life"]] == sorted(each["seq"] for each in found["life"])
    assert "worker spot-0/0 of node spot-0 " in found["life"][1]["detail"]
    assert START_S < found["life"][-1]["by"] <= START_S + 2 * 12
    assert [each["id"] for each in found["group"]] == ["t000001-001-001", "t000001-001-000"]
    dropped = ask(client, "samples", fate="dropped")["samples"]
    assert [each["reason"] for each in dropped] == ["reward_error"]


def test_a_search_matches_text_literally_and_turns_pages(client: TestClient) -> None:
    assert ask(client, "samples", text="%")["samples"] == []
    assert {each["text"] for each in ask(client, "samples", text="<script>")["samples"]} == {HOSTILE}
    met: list[str] = []
    before: object = ""
    while True:
        page = ask(client, "samples", before=before)
        met += [each["id"] for each in page["samples"]]
        if not page["more"]:
            break
        before = page["samples"][-1]["seq"]
    assert len(met) == len(set(met)) == ITERATIONS * 4 + 3 * len(PROMPTS) * GROUP_SIZE


def test_the_log_has_attempts_incidents_drops_and_tails(client: TestClient) -> None:
    found = ask(client, "log")
    assert found["logs"] == ["001.log"]
    assert [each["ended"] for each in found["attempts"]] == ["stopped"]
    assert [each["reason"] for each in found["drops"]] == ["reward_error"]
    assert found["incidents"][0]["kind"] == "node_joined"
    assert HOSTILE in ask(client, "logfile", name="001.log")["text"]


def test_the_audit_passes_and_is_not_made_again_for_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ask(client, "audit")
    assert found["ok"], found["violations"]
    monkeypatch.setattr(answers_module, "verdict", pytest.fail)
    assert ask(client, "audit", now=1) == found


def test_nobody_waits_for_an_audit_that_another_has_asked_for(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answers_module.RunAnswers()
    runs = find_runs([places])

    def meanwhile(run: RunFolder) -> Json:
        assert answers.answer(runs["wild"], "audit", {"now": "1"}) == {"ok": None, "running": True}
        if run.name == "wild":
            assert answers.answer(runs["new"], "audit", {"now": "1"}) == {"ok": "new"}
        return {"ok": run.name}

    monkeypatch.setattr(answers_module, "verdict", meanwhile)
    assert answers.answer(runs["wild"], "audit", {}) == {"ok": "wild"}


def test_an_answer_is_computed_once_per_state_and_replaces_the_one_before(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_place / "config.yaml").write_text("{}")
    run = RunFolder("run", empty_place)
    monkeypatch.setattr(answers_module, "_STALE_S", math.inf)
    asked: list[str] = []
    both = threading.Barrier(2)

    def slow(run: RunFolder, query: answers_module.Query) -> Json:
        asked.append(run.signature())
        time.sleep(0.05)
        return {"state": run.signature()}

    def ask_too() -> None:
        both.wait()
        assert answers.answer(run, "money", {}) == {"state": run.signature()}

    monkeypatch.setitem(answers_module.ANSWERS, "money", slow)
    answers = answers_module.RunAnswers()
    for number in range(3):
        run.paths.metrics.write_text("x" * number)
        threads = [threading.Thread(target=ask_too) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(asked) == len(set(asked)) == 3
    assert len(answers._kept) == 1
    run.paths.metrics.write_text("more")
    monkeypatch.setattr(answers_module, "_QUICK_S", 0.0)  # slow, so that it is not made anew at once
    assert answers.answer(run, "money", {}) == {"state": run.signature()}
    run.paths.metrics.write_text("still more")
    assert answers.answer(run, "money", {}) == {"state": asked[-1]}


def test_findings_name_a_remedy(places: Path) -> None:
    history = read_history(places / "wild")
    seconds = {Phase.IDLE: 900.0, Phase.LOST: 100.0, Phase.TRAINING: 100.0}
    row = {"advantage/silent_groups_share": 0.9, "train/loss": None}
    found = findings(history, seconds, [row], START_S)
    assert [each.serious for each in found] == sorted((each.serious for each in found), reverse=True)
    told = " ".join(each.finding for each in found)
    for word in ("stopped", "idle", "lost", "rewards are equal", "not a number"):
        assert word in told
    assert all(each.remedy for each in found)
    assert len(findings(history, {}, [], START_S)) == 1


@given(st.lists(st.floats(), max_size=120), st.integers(4, 40))
def test_thinned_points_keep_both_ends_and_the_extremes(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 2)
    if values:
        assert kept[0] == 0
        assert kept[-1] == len(values) - 1
    if known := [value for value in values if math.isfinite(value)]:
        assert {min(known), max(known)} <= {values[index] for index in kept}


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
    client = TestClient(dashboard_app([empty_place]), base_url="http://localhost")
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
    assert list(find_runs([places / "wild", tmp_path, places])) == ["wild", "wild~2", "new"]


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs/wild/overview").status_code == 405


def test_reading_changes_nothing(client: TestClient, places: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (path for path in (places / "wild").rglob("*") if not path.name.endswith(("-shm", "-wal")))
        return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}

    before = state()
    for what in (*answers_module.ANSWERS, "accounting", "metrics"):
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
    assert ask(client, "pictures", run="new") == {"iterations": []}
    answer = client.get("/api/runs/new/money")
    assert (answer.status_code, "no ledger here" in answer.text) == (409, True)
    paths = RunPaths(tmp_path / "damaged")
    paths.path.mkdir()
    paths.config.write_text(": not yaml :\n")
    paths.ledger.write_bytes(os.urandom(5000))
    damaged = TestClient(dashboard_app([tmp_path, tmp_path / "none"]), base_url="http://localhost")
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
    client = TestClient(dashboard_app([empty_place]), base_url="http://localhost")
    runs = client.get("/api/runs").json()["runs"]
    assert len(runs) == len(configs)
    for run in runs:
        address = f"/api/runs/{quote(run['name'])}"
        assert client.get(f"{address}/overview").status_code == 200
        assert client.get(f"{address}/money").status_code == 409


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
    client = TestClient(dashboard_app([empty_place]), base_url="http://localhost")
    assert ask(client, "overview", run="run")["nodes"] == {"reserved": 1, "spot": 1, "noticed": 1}


def test_the_token_is_asked_for_everywhere(places: Path) -> None:
    guarded = dashboard_app([places], TOKEN)
    paths = ("/", "/api/runs", "/api/changes", "/api/runs/wild/overview", "/page/main.js")
    for client in (
        TestClient(guarded),
        TestClient(guarded, headers={"Authorization": "Bearer wrong"}),
        TestClient(guarded, cookies={"spotlight_token": "wrong"}),
    ):
        assert {client.get(path).status_code for path in paths} == {401}
        assert client.get("/?token=wrong").status_code == 401
    browser = TestClient(guarded)
    first = browser.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/?")
    assert re.search("httponly.*samesite=lax", first.headers["set-cookie"], re.IGNORECASE)
    assert browser.get("/api/runs").status_code == 200
    others = f'settings={{"a": [1, 2]}}; spotlight_token_81=else; a[b]=1; spotlight_token_80={TOKEN}'
    for port, status in (("80", 200), ("81", 401), ("82", 401)):
        asked = TestClient(guarded).get("/api/runs", headers={"Host": f"box:{port}", "Cookie": others})
        assert asked.status_code == status
    assert (
        TestClient(guarded, headers={"Authorization": f"Bearer {TOKEN}"}).get("/api/runs").status_code == 200
    )


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8170", "10.0.0.5", ""])
def test_without_a_token_only_the_loopback_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 403


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
    target = tmp_path / "wild.html"
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
    assert len(found["pictures"]) == 3 * len(PROMPTS) * GROUP_SIZE
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
    uri, played = (embedded(paths.images / "tiles" / f"000008-00{at}.png") for at in (0, 1))
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert (image.format, image.size) == ("WEBP", (284, 512))
    with Image.open(io.BytesIO(base64.b64decode(played.partition(",")[2]))) as image:
        assert (image.size, getattr(image, "n_frames", 1)) == ((256, 17), 24)
    budget = PictureBudget(3 * len(uri))
    for iteration, share, whole, taken in ((8, 0.5, False, 1), (0, 1.0, False, 2), (4, 1.0, True, 0)):
        asked = {"iteration": iteration, "pictures": evaluation["pictures"][::2]}
        found = budget.take(run, asked, share=share, whole=whole)
        assert (found and found["left_out"]) == (2 - taken if taken else None)
    assert sorted(budget.taken) == ["0/0", "0/2", "8/0"]


# -- as commands --


@contextmanager
def served(place: Path) -> Iterator[str]:
    """A real server on the loopback."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = dashboard_app([place])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
    app.state.ends = lambda: server.should_exit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_changes_of_a_live_run_are_told(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 2)
    with served(empty_place) as address, httpx2.stream("GET", f"{address}/api/changes", timeout=90) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        assert 'data: {"names": ["run"]}' in lines
        with closing(sqlite3.connect(paths.ledger)) as writer:  # a live writer, in the middle of its work
            writer.execute("UPDATE attempts SET seen_at = seen_at + 1")
            overview = httpx2.get(f"{address}/api/runs/run/overview", timeout=60)
            assert overview.json()["iterations"] == 2
            writer.commit()
        assert 'data: {"names": ["run"]}' in lines  # read on until it comes


def test_twenty_clients_cost_what_one_costs(empty_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_run(empty_place / "run", 2)
    clients, changes, asked = 20, 3, ("overview", "cluster", "log")
    monkeypatch.setattr(answers_module, "_STALE_S", math.inf)
    monkeypatch.setattr(answers_module, "_QUICK_S", math.inf)
    computed: list[tuple[str, str]] = []

    def counted(what: str, compute: answers_module.Answer) -> answers_module.Answer:
        def answer(run: RunFolder, query: answers_module.Query) -> Json | None:
            computed.append((what, run.signature()))
            return compute(run, query)

        return answer

    for what in asked:
        monkeypatch.setitem(answers_module.ANSWERS, what, counted(what, answers_module.ANSWERS[what]))
    together = threading.Barrier(clients + 1, timeout=120)

    def watch(address: str) -> None:
        with (
            httpx2.Client(base_url=address, timeout=120) as client,
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
    )
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/api/runs"
    assert len(httpx2.get(address, timeout=120).json()["runs"]) == 2  # waits in the queue of the socket
    run.communicate(b"\n")
    assert dashboard.wait(timeout=60) == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_a_dashboard_beside_a_run_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    start_beside(tmp_path, "a run", stays=False, tell=told.put)
    assert told.get(timeout=60).startswith("dashboard: http://127.0.0.1:")
    failure = told.get(timeout=60)
    assert "status 1; the run goes on" in failure
    assert "a broken installation" in failure


def test_the_command_refuses_what_it_cannot_serve_safely(places: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, words in (
        ([str(places), "--host", "0.0.0.0"], ("--host", "--token-env")),
        ([str(places), "--host", "0.0.0.0", "--token-env", "NOT_SET_ANYWHERE"], ("NOT_SET_ANYWHERE",)),
        ([str(tmp_path / "gone")], ("RUNS_DIR", "gone")),
    ):
        result = runner.invoke(cli, ["dashboard", *arguments])
        assert result.exit_code == 2
        assert all(word in result.stderr for word in words), result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = runner.invoke(cli, ["dashboard", str(places), "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "Choose another --port" in result.stderr
