"""Attacks on a real dashboard by what lies in its folders: the other runs, and the page, stay."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest
from tests.unit.dashboard_run import BEARER, TOKEN, make_run
from tests.unit.hung_mount import CAN_MOUNT, hung_mount

from spotlight.store.ledger.ledger_queries import open_readonly, ran_out_of_time
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError
from spotlight_dashboard.run_threads import RunThreads

ENDLESS = "WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless) SELECT {} FROM endless"
CLIENTS = 45


@contextmanager
def dashboard_process(place: Path) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    command = [sys.executable, "-m", "spotlight.cli", "dashboard", str(place), "--port", "0"]
    command += ["--token-env", "KEY"]  # a session is for the page alone, and not for /metrics
    given = {**os.environ, "KEY": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given) as process:
        try:
            assert process.stdout is not None
            address, _, token = process.stdout.readline().split()[0].partition("?token=")
            with httpx2.Client(base_url=address, timeout=60, headers=BEARER) as client:
                assert client.post("/api/session", json={"token": token}).status_code == 200
                yield process, client
        finally:
            process.kill()


def states(client: httpx2.Client) -> dict[str, str]:
    return {run["name"]: run["state"] for run in client.get("/api/runs").json()["runs"]}


def replaced(table: str, by: str) -> Callable[[RunPaths], None]:
    def attack(paths: RunPaths) -> None:
        with closing(sqlite3.connect(paths.ledger)) as ledger:
            ledger.executescript(f"PRAGMA foreign_keys = OFF; DROP TABLE {table}; {by}")

    return attack


def fifo(name: str) -> Callable[[RunPaths], None]:
    def attack(paths: RunPaths) -> None:
        (paths.path / name).unlink(missing_ok=True)
        os.mkfifo(paths.path / name)

    return attack


def cyclic(paths: RunPaths) -> None:
    """Rows whose joins have no end that anybody lives to see."""
    with closing(sqlite3.connect(paths.ledger)) as ledger:
        ledger.executescript(
            "PRAGMA foreign_keys = OFF; DROP TABLE optimizer_steps; "
            f"CREATE TABLE optimizer_steps AS {ENDLESS.format('1 AS iteration')} LIMIT 3; "
            "DROP TABLE incidents; CREATE VIRTUAL TABLE incidents USING fts5(id)"
        )


ATTACKS: dict[str, Callable[[RunPaths], None]] = {
    "view": replaced("attempts", f"CREATE VIEW attempts AS {ENDLESS.format('n AS number')}"),
    "trigger": replaced("attempts", f"CREATE VIEW optimizer AS {ENDLESS.format('n')}"),
    "virtual": cyclic,
    "column": replaced(
        "attempts",
        "CREATE TABLE attempts (number, pid AS (hex(zeroblob(1000000)))); INSERT INTO attempts VALUES (1)",
    ),
    "ledger": fifo("ledger.sqlite"),
    "journal": fifo("ledger.sqlite-journal"),
    "log": fifo("ledger.sqlite-wal"),
    "tile": fifo("images/tiles/000000-000.png"),
    "metrics": fifo("metrics.jsonl"),
}


@pytest.mark.slow
def test_hostile_runs_hide_no_other_and_the_dashboard_ends(empty_place: Path) -> None:
    make_run(empty_place / "sound", 2)
    for name, attack in ATTACKS.items():
        attack(make_run(empty_place / name, 2))
    with dashboard_process(empty_place) as (process, client):
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [
                pool.submit(client.get, f"/api/runs/{name}/{what}")
                for name in ATTACKS
                for what in ("overview", "evaluation?iteration=0", "log", "accounting", "metrics")
            ]
            assert len(asked) == CLIENTS
            assert client.get("/").status_code == 200
            found = states(client)
            assert client.get("/metrics").text.count("spotlight_run_readable") == 2 + 1 + len(ATTACKS)
            assert {each.result().status_code for each in asked} <= {200, 409}
        assert found.pop("sound") == "stopped"
        assert found.pop("tile") == found.pop("metrics") == "stopped"
        assert found.pop("ledger") == "new"
        assert set(found.values()) == {"unreadable"}
        pictures = client.get("/api/runs/tile/evaluation?iteration=0").json()["pictures"]
        assert [each["index"] for each in pictures] == list(range(1, 8))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MOUNT, reason="needs root and /dev/fuse")
def test_a_mount_that_hangs_is_shown_as_a_run_that_does_not_answer(empty_place: Path) -> None:
    make_run(empty_place / "sound", 2)
    late = make_run(empty_place / "late", 2)
    folders = [empty_place / "never", late.images / "tiles"]
    folders[0].mkdir()
    with dashboard_process(empty_place) as (process, client):
        assert states(client) == {"late": "stopped", "sound": "stopped"}
        with hung_mount(folders[0]), hung_mount(folders[1]), ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(client.get, "/api/runs/late/pictures") for _ in range(CLIENTS)]
            while states(client) != dict.fromkeys(("late", "never"), "does not answer") | {
                "sound": "stopped"
            }:
                pass
            assert not any(each.done() for each in asked)
            answer = client.get("/api/runs/late/pictures")
            assert (answer.status_code, "late does not answer" in answer.text) == (503, True)
            for path in ("/", "/page/main.js", "/api/runs/sound/overview"):
                assert client.get(path).status_code == 200
            assert 'readable{run="never"} 0' in client.get("/metrics").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM


def test_what_does_not_answer_is_asked_once_and_again_when_it_has_answered() -> None:
    answers, asked = threading.Event(), list[str]()

    def work(item: str) -> str:
        asked.append(item)
        if item.startswith("stuck"):
            answers.wait()
        return item.upper()

    threads = RunThreads()
    items = ["a", "stuck 1", "b", "stuck 2", "c"]
    for _ in range(2):
        found = asyncio.run(threads.each("look", items, work, 0.2))
        assert [read.get() for read in found.values()] == ["A", "B", "C"]
    assert sorted(asked) == ["a", "a", "b", "b", "c", "c", "stuck 1", "stuck 2"]
    answers.set()
    while threads._stuck:
        pass
    assert list(asyncio.run(threads.each("look", items, work))) == items


def test_a_query_ends_after_its_seconds(empty_place: Path) -> None:
    paths = make_run(empty_place / "run", 2)
    with closing(open_readonly(paths.ledger, within_s=0.05)) as ledger, pytest.raises(sqlite3.Error) as error:
        ledger.execute(ENDLESS.format("MAX(n)")).fetchone()
    assert ran_out_of_time(error.value)


@pytest.mark.parametrize("name", ["view", "virtual", "column", "journal"])
def test_a_ledger_that_computes_its_rows_is_refused(empty_place: Path, name: str) -> None:
    paths = make_run(empty_place / "run", 2)
    ATTACKS[name](paths)
    with pytest.raises(LedgerError, match="expected"):
        open_readonly(paths.ledger)
