"""The dashboard's answers over HTTP: what they say of a run, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.unit.dashboard_run import (
    EVERY,
    GROUP_SIZE,
    HOSTILE,
    ITERATIONS,
    LEFT_AT_STEP,
    PROMPTS,
    RESERVED,
    RESERVED_USD_H,
    SPOT_USD_H,
    START_S,
    ask,
    change_course,
    client_of,
    make_run,
    tile_score,
    truncated_picture,
)

from spotlight.scheduler.types import Phase, WorkerId
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.run_directory import RunPaths
from spotlight_dashboard import answers as answers_module
from spotlight_dashboard.figures import Json, thinned
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.shown_runs import ShownRuns
from spotlight_dashboard.views.findings import findings
from spotlight_dashboard.views.sample_nodes import nodes_of

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
    assert found["estimate"]["work_s"] == {"least": 200, "likely": 300, "most": 500}


def test_goals_that_spot_nodes_follow_are_reported_with_the_runs_own_forecast(empty_place: Path) -> None:
    paths = make_run(empty_place / "runs" / "held", 4)
    client = client_of(empty_place / "runs")
    assert client.get("/api/runs/held/overview").json()["target"] is None
    settings = yaml.safe_load(paths.config.read_text())
    settings["fleet"]["target"] = {"deadline_h": 2.0, "budget_usd": None}
    paths.config.write_text(yaml.safe_dump(settings))
    with MetricsWriter(paths, resume_at=4) as metrics:
        figures = {"target/nodes_asked": 4.0, "target/left_s_low": 50.0, "target/left_s_high": 70.0}
        metrics.write(MetricsRow(4, 1, 60.0, {"train/loss": 1.0, "target/reachable": 0.0, **figures}))
    with SqliteLedger(paths.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="elsewhere", workers={}, now_s=START_S + 100)
        ledger.record_incident(
            Incident.SPOT_TARGET, "fleet", spot=True, detail="4 nodes", now_s=START_S + 101
        )
        ledger.end_attempt(Ending.STOPPED, START_S + 102)
    found = client.get("/api/runs/held/overview").json()["target"]
    assert found == {
        "deadline_at": START_S + 7200.0, "budget_usd": None, "nodes": 4.0, "left_s": [50.0, 70.0],
        "left_usd": [None, None], "reachable": 0.0, "decision": {"at": START_S + 101, "words": "4 nodes"},
    }  # fmt: skip


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


def test_a_changed_course_is_marked_on_every_axis_where_the_iterations_before_end(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 5)
    change_course(paths, 2, {"name": (HOSTILE, "run"), "learner.learning_rate": (3e-4, 1e-4)})
    change_course(paths, 5, {"iterations": (5, 9)}, position=2)  # nothing is made with it yet
    fork = f"forked from {HOSTILE}"
    with client_of(empty_place) as client:
        loss = ask(client, "curve", run="run", name="train/grad_norm")
        first, last = loss["changes"]
        assert first["words"] == [fork, "learner.learning_rate 0.0003 to 0.0001"]
        assert (first["iteration"], last["iteration"]) == (2, 5)
        for axis in ("samples", "hours", "usd"):
            assert [first[axis], last[axis]] == [loss[axis][1], loss[axis][4]], axis
        asked = {"name": "train/grad_norm", "axis": "samples", "run": ["run"]}
        (group,) = client.get("/api/means", params=asked).json()["groups"]
        assert [(each["run"], each["x"]) for each in group["changes"]] == [
            ("run", loss["samples"][at]) for at in (1, 4)
        ]
        shown = ask(client, "overview", run="run")["changes"]
        assert [(each["iteration"], each["words"][0]) for each in shown] == [
            (2, fork),
            (5, "iterations 5 to 9"),
        ]
    paths.metrics.unlink()
    with client_of(empty_place) as client:
        (first, _) = ask(client, "curve", run="run", name="train/grad_norm")["changes"]
        assert (first["samples"], first["hours"]) == (0, 0)


def test_seeds_of_a_configuration_are_one_curve(empty_place: Path) -> None:
    for name in ("seed-0", "seed-1", "copy", "other"):
        make_run(empty_place / name, 3)
    for name, more in (("seed-1", "run_seed: 1\n"), ("other", "algorithm: {name: awm}\n")):
        with (empty_place / name / "config.yaml").open("a") as file:
            file.write(more)
    with client_of(empty_place) as client:
        asked = {"name": "train/grad_norm", "axis": "iteration", "run": ["seed-0", "other", "seed-1"]}
        seeds, other = client.get("/api/means", params=asked).json()["groups"]
        assert (seeds["name"], seeds["runs"], other["runs"]) == ("seed-0 +1", ["seed-0", "seed-1"], ["other"])
        values = ask(client, "curve", run="seed-0", name="train/grad_norm")
        assert seeds["y"] == pytest.approx([values["y"][values["iteration"].index(x)] for x in seeds["x"]])
        assert seeds["half"] == pytest.approx([0.0] * len(seeds["x"]))
        assert set(other["half"]) == {None}
        assert seeds["repeated_seeds"] == []
        copied = client.get("/api/means", params=asked | {"run": ["seed-0", "copy"]}).json()["groups"]
        assert [each["repeated_seeds"] for each in copied] == [["copy"]]
        assert client.get("/api/means", params=asked | {"run": "gone"}).status_code == 404


def test_curves_follow_the_file_also_when_a_resume_replaces_it(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 3)
    with client_of(empty_place) as client:
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


def test_curves_of_a_file_with_its_predecessors_number_are_read_again(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 1)

    def row(iteration: int, loss: float) -> bytes:
        row = {"iteration": iteration, "samples_trained": 4, "wall_s": loss, "train/loss": loss}
        return json.dumps(row).encode() + b"\n"

    with client_of(empty_place) as client:
        for rows in (
            [row(0, 1.0), row(1, 2.0), row(2, 3.0)],
            [row(0, 1.0), row(1, 2.5), row(2, 3.5), row(3, 4.5)],  # resumed after the first
            [row(0, 1.0), row(1, 2.5), row(2, 3.5), row(3, 4.5), row(4, 5.5)],
            [row(0, 1.0), row(1, 1.125)],
        ):
            paths.metrics.write_bytes(b"".join(rows))  # in place: the file's number stays
            found = ask(client, "curve", run="run", name="train/loss")
            assert found["y"] == [json.loads(each)["train/loss"] for each in rows]
            assert ask(client, "metrics", run="run")["skipped"] == 0


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
    client = client_of(empty_place / "run")
    found = ask(client, "evaluation", run="run", iteration=0)["pictures"]
    assert len(found) == len(PROMPTS) * GROUP_SIZE - 1


def test_a_sample_is_found_with_its_life(client: TestClient) -> None:
    (one,) = (each for each in ask(client, "samples", text="t000001-001-000")["samples"])
    found = ask(client, "sample", id=one["id"])
    assert [each["what"] for each in found["life"]] == ["issued", "finished", "refused", "scored", "trained"]
    assert [each["seq"] for each in found["life"]] == sorted(each["seq"] for each in found["life"])
    assert "worker spot-0/0 of node spot-0 " in found["life"][1]["detail"]
    assert START_S < found["life"][-1]["by"] <= START_S + 2 * 12
    assert "optimizer step 2 of the learner on reserved-0" in found["life"][-1]["detail"]
    assert [each["id"] for each in found["group"]] == ["t000001-001-001", "t000001-001-000"]
    dropped = ask(client, "samples", fate="dropped")["samples"]
    assert [each["reason"] for each in dropped] == ["reward_error"]


def test_every_node_that_a_sample_was_on_is_reported(client: TestClient) -> None:
    first, second = ask(client, "sample", id="t000004-000-000")["stays"]
    assert (first["node"], first["from_step"], first["made_it"]) == ("spot-0", 0, False)
    assert [each["what"] for each in first["then"]] == ["node_noticed", "node_lost"]
    assert (second["node"], second["from_step"], second["made_it"]) == ("spot-1", LEFT_AT_STEP, True)
    assert second["at"] - first["at"] == pytest.approx(8)
    assert second["then"] == []
    moved = ask(client, "samples", moved=1)["samples"]
    assert {each["iteration"] for each in moved} == {4, 8}
    assert {tuple(each["nodes"]) for each in moved} == {("spot-0", "spot-1"), ("spot-1", "spot-2")}
    for worker in ("spot-0", "spot-0/0"):
        held = ask(client, "samples", worker=worker, moved=1)["samples"]
        assert {each["iteration"] for each in held} == {4}


def test_nodes_are_in_the_order_of_leases_where_the_clock_was_set_back(tmp_path: Path) -> None:
    SqliteLedger(tmp_path / "ledger.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        rows = [
            ("r", 1, 1, 0, 9.0, "a/0", 0, 0),
            ("r", 1, 2, 0, 8.0, "b/0", 1, 4),
            ("r", 2, 1, 0, 7.0, "c/1", 2, 5),
        ]
        connection.executemany("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        assert nodes_of(connection, ["r"]) == {"r": ["a", "b", "c"]}


def test_a_ledger_without_leases_tells_who_finished_a_sample(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 1)
    with closing(sqlite3.connect(paths.ledger)) as connection:
        connection.executescript("DROP TABLE leases; DROP TABLE kept_previews; PRAGMA user_version = 6")
    with client_of(empty_place) as client:
        found = ask(client, "sample", run="run", id="t000000-000-000")
        assert found["stays"] is None
        assert "worker spot-0/0 of node spot-0 " in found["life"][1]["detail"]
        listed = ask(client, "samples", run="run", worker="spot-0/0")["samples"]
        assert [each["nodes"] for each in listed] == [["spot-0"]] * 4
        assert ask(client, "samples", run="run", moved=1)["samples"] == []
        assert ask(client, "audit", run="run")["ok"]


def test_prices_are_steps_with_gaps_where_no_worker_was(client: TestClient, empty_place: Path) -> None:
    found = ask(client, "cluster")["prices"]
    assert found == {"spot": [[START_S, SPOT_USD_H]], "reserved": [[START_S, RESERVED_USD_H]]}
    paths = RunPaths(empty_place / "run")
    paths.path.mkdir()
    paths.config.write_text("{}")
    with SqliteLedger(paths.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="elsewhere", workers={}, now_s=0.0)
        for node, price, since, until in (("s1", 1.0, 0, 20), ("s2", 2.0, 10, 30), ("s3", 1.5, 50, 70)):
            ledger.record_incident(Incident.NODE_JOINED, node, spot=True, detail="", now_s=since)
            ledger.start_billing({WorkerId(f"{node}/0"): price}, since)
            ledger.stop_billing([WorkerId(f"{node}/0")], until)
        ledger.end_attempt(Ending.STOPPED, 80.0)
    with client_of(empty_place) as other:
        found = ask(other, "cluster", run="run")["prices"]
    assert found == {"spot": [[0, 1.0], [10, 2.0], [30, None], [50, 1.5]], "reserved": []}


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
    runs = asyncio.run(ShownRuns([places]).look())

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

    def slow(answers: answers_module.RunAnswers, run: RunFolder, query: answers_module.Query) -> Json:
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
    monkeypatch.setattr(answers_module, "_QUICK_S", 0.0)  # slow, so that it is not made again at once
    assert answers.answer(run, "money", {}) == {"state": run.signature()}
    run.paths.metrics.write_text("still more")
    assert answers.answer(run, "money", {}) == {"state": asked[-1]}


def test_findings_name_a_remedy(places: Path) -> None:
    history = read_history(places / "wild")
    seconds = {Phase.IDLE: 900.0, Phase.LOST: 100.0, Phase.TRAINING: 100.0}
    row = {"advantage/silent_groups_share": 0.9, "train/loss": None}
    found = findings(history, seconds, [row], START_S)
    assert [each.serious for each in found] == sorted((each.serious for each in found), reverse=True)
    text = " ".join(each.finding for each in found)
    for word in ("stopped", "idle", "lost", "rewards are equal", "not a number"):
        assert word in text
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
