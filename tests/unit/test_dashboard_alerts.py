"""Alerts of running runs: sent once when they come and once when they are over, to a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store_history import SCRATCH
from typer.testing import CliRunner

from spotlight.cli.main import app as cli
from spotlight.scheduler.types import DropReason, Phase, Purpose, WorkerId
from spotlight.store.ledger.history import History, read_history
from spotlight.store.ledger.ledger_queries import LedgerCounts, open_readonly, preemptions
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight.store.run_directory import RunPaths
from spotlight_dashboard import alerts
from spotlight_dashboard import answers as answers_module
from spotlight_dashboard.alerts import Alert, AlertWatch, post_alert, watch_runs
from spotlight_dashboard.answers import RunAnswers
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.shown_runs import ShownRuns
from spotlight_dashboard.views.findings import RunLimits, RunOutlook, findings
from spotlight_dashboard.views.money import money
from spotlight_dashboard.views.overview import history_and_findings, nodes_now, spot_gone_at

WORKER = WorkerId("reserved-0/0")
NO_HISTORY = History(
    attempts=(),
    undone=0,
    gpu_seconds_by_phase={},
    iterations=0,
    counts=LedgerCounts(
        prompts=0,
        issued={},
        in_flight={},
        finished=0,
        trained=0,
        evaluated=0,
        explored=0,
        dropped={},
        train_dropped={},
        optimizer_steps=0,
        versions=0,
        rejected=0,
        kept=0,
    ),
    cost_usd=0.0,
    preemptions=0,
    noticed=0,
    prices_usd_h=(),
    filled_s={},
    incidents={},
    course=(),
)
ALERT = Alert("a run", "idle", True, "It idles.", "Do this.", False, 1.0)


SLOW_HEADERS, ENDLESS_BODY = b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\n\r\n"


class Receiver(BaseHTTPRequestHandler):
    """Answers with the next status, 200 after the last; None: not at all; bytes: these, and ever more."""

    statuses: ClassVar[list[int | bytes | None]]
    taken: ClassVar[list[dict[str, Any]]]
    ends: ClassVar[threading.Event]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.statuses.pop(0) if self.statuses else 200
        if status is None:
            self.ends.wait(60)
            return
        if isinstance(status, bytes):
            with suppress(OSError):
                self.wfile.write(status)
                while not self.ends.wait(0.02):
                    self.wfile.write(b"x")
            return
        self.taken.append({"path": self.path, **json.loads(body)})
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def receiving(*statuses: int | bytes | None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    members = {"statuses": list(statuses), "taken": [], "ends": threading.Event()}
    handler: Any = type("Told", (Receiver,), members)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/services/a-secret-key", handler.taken
    finally:
        handler.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        yield Path(scratch)


@contextmanager
def live(place: Path) -> Iterator[tuple[SqliteLedger, dict[str, RunFolder]]]:
    """A run of this process that has just begun."""
    paths = RunPaths(place / "mine")
    paths.path.mkdir()
    paths.config.write_text("iterations: 3\n")
    with SqliteLedger(paths.ledger) as ledger:
        begin(ledger)
        bill(ledger, Phase.TRAINING, 700)
        yield ledger, asyncio.run(ShownRuns([place]).look())


def begin(ledger: SqliteLedger) -> None:
    now_s = time.time() - 2000
    ledger.begin_attempt(pid=os.getpid(), host=socket.gethostname(), workers={WORKER: 1.0}, now_s=now_s)


def bill(ledger: SqliteLedger, phase: Phase, seconds: float) -> None:
    ledger.spend([GpuSpend(WORKER, phase, seconds, 1.0)], time.time())


def names(alerts_sent: Sequence[Alert]) -> list[tuple[str, bool]]:
    return [(alert.name, alert.firing) for alert in alerts_sent]


def test_a_finding_is_reported_once_when_it_comes_and_once_when_it_is_over(place: Path) -> None:
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        assert watch.look(runs) == []
        bill(ledger, Phase.IDLE, 600)
        assert names(watch.look(runs)) == [("idle", True)]
        assert watch.look(runs) == []
        bill(ledger, Phase.TRAINING, 700)
        (over,) = watch.look(runs)
        assert (over.name, over.firing, over.text.startswith("mine: over: ")) == ("idle", False, True)
        ledger.end_attempt(Ending.FAILED)
        assert names(watch.look(runs)) == [("ended", True)]
        assert watch.look(runs) == []
        assert AlertWatch(RunAnswers()).look(runs) == []  # it ended before that watch began


def test_an_ending_ends_what_stood_and_is_over_when_the_run_goes_on(place: Path) -> None:
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        bill(ledger, Phase.IDLE, 600)
        assert names(watch.look(runs)) == [("idle", True)]
        ledger.end_attempt(Ending.FAILED)
        assert names(watch.look(runs)) == [("ended", True), ("idle", False)]
        assert watch.look(runs) == []
        begin(ledger)
        assert names(watch.look(runs)) == [("idle", True), ("ended", False)]
        ledger.end_attempt(Ending.FINISHED)
        assert names(watch.look(runs)) == [("idle", False)]
        assert watch.look(runs) == []


def test_an_ending_is_reported_also_where_answers_are_slow(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "_QUICK_S", 0.0)
    monkeypatch.setattr(answers_module, "_REST", 5.0)
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        assert watch.look(runs) == []
        ledger.end_attempt(Ending.KILLED)
        end_s = time.monotonic() + 60
        while not (sent := watch.look(runs)) and time.monotonic() < end_s:
            time.sleep(0.02)
        assert names(sent) == [("ended", True)]


def test_a_run_without_its_spot_nodes_and_beyond_its_limits_is_reported(place: Path) -> None:
    limits = RunLimits(budget_usd=0.1, deadline_h=0.1, no_spot_min=19)
    watch, patient = (AlertWatch(RunAnswers(each)) for each in (limits, RunLimits(no_spot_min=21)))
    with live(place) as (ledger, runs):
        at_s = time.time() - 1200
        for kind in (Incident.NODE_JOINED, Incident.NODE_LOST):
            ledger.record_incident(kind, "spot-1", spot=True, detail="", now_s=at_s)
        sent = watch.look(runs)
        assert {alert.name for alert in sent if alert.firing} == {
            "budget",
            "deadline",
            "no_spot_node",
            "unnoticed",
        }
        assert names(patient.look(runs)) == [("unnoticed", True)]
        ledger.start_billing({WorkerId("spot-2/0"): 0.2}, time.time())
        ledger.record_incident(Incident.NODE_JOINED, "spot-2", spot=True, detail="", now_s=time.time())
        assert names(watch.look(runs)) == [("no_spot_node", False)]


def test_a_learner_that_waits_for_its_first_spot_node_is_reported(place: Path) -> None:
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        at_s = time.time() - 1200
        ledger.record_incident(Incident.LEARNER_WAITS, "learner", spot=True, detail="", now_s=at_s)
        assert names(watch.look(runs)) == [("no_spot_node", True)]


def test_alerts_of_a_run_that_is_gone_are_over_and_a_later_one_of_its_name_has_its_own(place: Path) -> None:
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        bill(ledger, Phase.IDLE, 600)
        assert names(watch.look(runs)) == [("idle", True)]
        elsewhere = place / "elsewhere"
        elsewhere.mkdir()
        shutil.copytree(runs["mine"].path, elsewhere / "mine")
        moved = asyncio.run(ShownRuns([elsewhere]).look())
        assert names(watch.look(moved)) == [("idle", False), ("idle", True)]
        assert names(watch.look({})) == [("idle", False)]
        assert watch.look({}) == []
        assert names(watch.look(runs)) == [("idle", True)]


def test_a_run_that_does_not_answer_keeps_its_alerts_and_says_the_others_later(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, answering = RunAnswers(), threading.Event()
    answered, watch = answers.answer, AlertWatch(answers)

    def answer_late(self: RunAnswers, *asked: Any) -> Any:
        answering.wait(60)
        return answered(*asked)

    with live(place) as (ledger, runs):
        bill(ledger, Phase.IDLE, 600)
        assert names(watch.look(runs)) == [("idle", True)]
        ledger.end_attempt(Ending.FAILED)
        monkeypatch.setattr(alerts, "ASKED_S", 0.05)
        monkeypatch.setattr(RunAnswers, "answer", answer_late)
        assert watch.look(runs) == watch.look(runs) == []
        answering.set()
        monkeypatch.setattr(alerts, "ASKED_S", 60.0)
        end_s = time.monotonic() + 60
        while not (sent := watch.look(runs)) and time.monotonic() < end_s:
            time.sleep(0.02)
        assert names(sent) == [("ended", True), ("idle", False)]


def test_a_run_that_cannot_be_read_does_not_end_the_watch(place: Path) -> None:
    broken = RunPaths(place / "broken")
    broken.path.mkdir()
    broken.config.write_text("[")
    broken.ledger.write_bytes(os.urandom(4000))
    watch = AlertWatch(RunAnswers())
    with live(place) as (ledger, runs):
        watch.look(runs)
        bill(ledger, Phase.IDLE, 600)
        assert names(watch.look(runs)) == [("idle", True)]


@given(st.lists(st.floats(0.6, 1), min_size=10, max_size=30), st.floats(0, 0.2))
def test_a_reward_that_falls_by_half_is_a_collapse(rewards: list[float], low: float) -> None:
    for shown, collapsed in ((rewards, False), ([*rewards, *[low] * 5], True)):
        rows = [{"rollout/reward": reward} for reward in shown]
        names_found = {each.name for each in findings(NO_HISTORY, {}, rows, time.time())}
        assert ("reward_collapse" in names_found) == collapsed


def findings_in(
    history: History, rows: Sequence[Mapping[str, float | None]], now_s: float | None = None
) -> set[str]:
    return {each.name for each in findings(history, {}, rows, time.time() if now_s is None else now_s)}


def test_damaged_lines_of_the_metrics_are_counted_and_a_cut_end_is_not(place: Path) -> None:
    with live(place) as (_, runs):
        run = runs["mine"]
        run.paths.metrics.write_bytes(
            b'{"iteration": 0, "samples_trained": 1, "wall_s": 1.0}\n{"iter\n[]\n\0\0\n{"it'
        )
        _, found = history_and_findings(run, RunLimits())
        (damage,) = (each for each in found if each.name == "damaged_metrics")
        assert damage.serious
        assert "2 lines of metrics.jsonl are no rows: 2, 3." in damage.finding


def test_a_run_is_silent_after_two_of_its_iterations(place: Path) -> None:
    with live(place) as (_, runs):
        history = read_history(runs["mine"].path)
    seen_at = history.attempts[-1].seen_at
    for iteration_s, expected in ((10.0, {"silent_run"}), (500.0, set())):
        rows = [{"wall_s": iteration_s * number} for number in range(3)]
        assert findings_in(history, rows, seen_at + 900) == expected
    for before in ([], [{"wall_s": 10.0}]):  # how long an iteration takes is not known yet
        assert findings_in(history, before, seen_at + 900) == set()
        assert findings_in(history, before, seen_at + 4000) == {"silent_run"}


@pytest.mark.parametrize(
    ("issued", "trained", "dropped", "found"),
    [
        (96, 0, 96, False),
        (192, 0, 192, True),
        (192, 0, 1, False),
        (192, 0, 12, True),
        (60, 40, 20, False),
        (200, 94, 6, True),
        (1000, 960, 40, False),
    ],
)
def test_dropped_samples_are_reported_once_their_share_says_something(
    issued: int, trained: int, dropped: int, found: bool
) -> None:
    counts = replace(
        NO_HISTORY.counts,
        issued={Purpose.TRAIN: issued},
        trained=trained,
        train_dropped={DropReason.REWARD_ERROR: dropped},
    )
    history = replace(NO_HISTORY, counts=counts)
    assert findings_in(history, []) == ({"dropped"} if found else set())


@pytest.mark.parametrize(
    ("name", "metric"),
    [("silent_groups", "advantage/silent_groups_share"), ("clipped", "train/clip_fraction")],
)
def test_one_iteration_alone_is_not_reported(name: str, metric: str) -> None:
    assert findings_in(NO_HISTORY, [{metric: share} for share in (0.1, 0.1, 0.1, 0.1, 0.9)]) == set()
    assert findings_in(NO_HISTORY, [{metric: share} for share in (0.9, 0.7, 0.4, 0.7, 0.4)]) == {name}


@pytest.mark.parametrize(
    ("name", "metric"),
    [("rollouts_wait", "throughput/rollout_mfu"), ("training_waits", "throughput/train_mfu")],
)
def test_a_gpu_that_waits_in_all_of_the_newest_iterations_is_reported(name: str, metric: str) -> None:
    assert findings_in(NO_HISTORY, [{metric: share} for share in (0.2, 0.2, 0.31, 0.2, 0.2)]) == set()
    assert findings_in(NO_HISTORY, [{metric: share} for share in (0.5, 0.2, 0.2, 0.2, 0.2, 0.29)]) == {name}
    assert findings_in(NO_HISTORY, [{metric: 0.2}] * 4) == set()  # the first waits for the compiler
    assert findings_in(NO_HISTORY, [{"rollout/reward": 0.5}] * 5) == set()  # on CPUs it is not known


def test_limits_that_are_kept_are_not_reported(place: Path) -> None:
    with live(place) as (_, runs):
        history = read_history(runs["mine"].path)
    for outlook in (RunOutlook(9.0, 1.0), RunOutlook(None, None)):
        assert findings(history, {}, [], time.time(), None, outlook, RunLimits(10.0, 1.0)) == []


def test_alerts_go_to_the_webhook_without_prompts_or_configuration(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "LOOKS_EVERY_S", 0.02)
    monkeypatch.setattr(alerts, "PAUSES_S", ())
    ends = threading.Event()
    with receiving(503) as (url, taken), live(place) as (ledger, runs):
        looks = iter([KeyError("a-secret-key")])

        def look() -> Mapping[str, RunFolder]:
            for failure in looks:
                raise failure
            return runs

        arguments = (look, AlertWatch(RunAnswers()), url, ends)
        thread = threading.Thread(target=watch_runs, args=arguments)
        thread.start()
        bill(ledger, Phase.IDLE, 700)
        end_s = time.monotonic() + 60
        while len(taken) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        ends.set()
        thread.join()
    message, again = taken  # once more after the next look
    assert message == again
    assert "looked at now (KeyError)" in caplog.text
    assert "a-secret-key" not in caplog.text
    assert set(message) == {
        "path", "text", "run", "alert", "state", "finding", "remedy", "serious", "at"
    }  # fmt: skip
    assert (message["run"], message["alert"], message["state"]) == ("mine", "idle", "firing")
    assert message["text"] in caplog.text


@pytest.mark.parametrize(
    ("statuses", "tries", "over", "logged"),
    [
        ((200,), 1, True, False),
        ((503, 429, 204), 3, True, False),
        ((500, 500, 500, 200), 3, False, True),
        ((404, 200), 1, True, True),
    ],
)
def test_a_webhook_that_fails_is_tried_again(
    statuses: tuple[int, ...], tries: int, over: bool, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    paused: list[float] = []
    with receiving(*statuses) as (url, met):
        assert post_alert(url, ALERT, paused.append) is over
    assert len(met) == tries
    assert paused == [0.0, *alerts.PAUSES_S][:tries]
    assert "a-secret-key" not in caplog.text
    assert ("did not take an alert" in caplog.text) is logged


def test_a_webhook_that_hangs_or_is_gone_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.2)
    caplog.set_level(logging.WARNING)
    with receiving(None, None, SLOW_HEADERS) as (url, _):
        assert not post_alert(url, ALERT, lambda _: None)
    assert not post_alert(url, ALERT, lambda _: None)
    assert "TimeoutError" in caplog.text
    assert "ConnectError" in caplog.text
    assert "a-secret-key" not in caplog.text


def test_the_body_of_an_answer_is_not_read() -> None:
    with receiving(ENDLESS_BODY) as (url, _):
        assert post_alert(url, ALERT, lambda _: None)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "hooks.example.com/a-secret-key",
        "https:///a-secret-key",
        "https://[x/a-secret-key",
        "https://h:p/",
    ],
)
def test_a_webhook_that_is_none_is_refused_unseen(
    place: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ALERTS_URL", value)
    result = CliRunner().invoke(cli, ["dashboard", str(place), "--webhook-env", "ALERTS_URL"])
    assert result.exit_code == 2
    for word in ("--webhook-env", "ALERTS_URL", "expected https://", "Export"):
        assert word in result.stderr
    assert "a-secret-key" not in result.output


def test_the_parts_of_a_machine_that_the_learner_shares_are_one_spot_node(place: Path) -> None:
    parts = ("spot-1/learner", "spot-1/rollout")
    with live(place) as (ledger, runs):
        before = ledger.cost_usd()
        ledger.record_incident(Incident.NODE_JOINED, "spot-1", spot=True, detail="", now_s=time.time())
        ledger.start_billing({WorkerId(f"{part}/0"): 3600.0 for part in parts}, time.time())
        bills = [GpuSpend(WorkerId(f"{part}/0"), Phase.ROLLOUT, 1.0, 3600.0) for part in parts]
        ledger.spend(bills, time.time())
        with closing(open_readonly(runs["mine"].ledger())) as connection:
            now = nodes_now(connection)
            assert (now.spot, spot_gone_at(connection)) == (1, None)
            assert preemptions(connection) == (0, 0)
        shown = money(runs["mine"])
        assert (shown["spot_usd"], shown["spot_nodes"]) == (pytest.approx(ledger.cost_usd() - before), 1)
        assert [each["node"] for each in shown["nodes"] if each["spot"]] == ["spot-1"]
        for part in parts:
            ledger.record_incident(Incident.NODE_NOTICED, part, spot=True, detail="", now_s=time.time())
        for part in parts:
            ledger.record_incident(Incident.NODE_LOST, part, spot=True, detail="", now_s=time.time())
        with closing(open_readonly(runs["mine"].ledger())) as connection:
            assert preemptions(connection) == (1, 1)
