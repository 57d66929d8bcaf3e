"""Attacks on the dashboard's door: by other users of the machine, other sites, and who guesses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient
from tests.unit.dashboard_run import BEARER, TOKEN, served

from spotlight_dashboard.dashboard_app import dashboard_app
from spotlight_dashboard.dashboard_keys import GUESS_EVERY_S, GUESSES, DashboardKeys, Guesses

CLOSED = ("/api/runs", "/metrics", "/api/changes", "/api/runs/wild/overview", "/api/runs/wild/picture/0/0")


@pytest.fixture
def keys() -> DashboardKeys:
    return DashboardKeys(TOKEN)


def browser(places: Path, keys: DashboardKeys, **more: str) -> TestClient:
    return TestClient(dashboard_app([places], keys), base_url="http://localhost:8170", headers=more)


def entered(client: TestClient, token: str, **headers: str) -> httpx2.Response:
    return client.post("/api/session", json={"token": token}, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Cookie": "spotlight_session_8170=wrong"},
        {"Cookie": f"spotlight_session_8170={TOKEN}"},
    ],
)
def test_only_the_page_itself_is_open(places: Path, keys: DashboardKeys, headers: dict[str, str]) -> None:
    client = browser(places, keys, **headers)
    assert {client.get(path).status_code for path in CLOSED} == {401}
    assert client.post("/api/runs/wild/ballots/1", json={}).status_code == 401
    assert {client.get(path).status_code for path in ("/", "/page/main.js", "/?token=wrong")} == {200}
    assert browser(places, keys, **BEARER).get("/metrics").status_code == 200


def test_a_one_time_token_opens_one_session_whose_secret_is_another(
    places: Path, keys: DashboardKeys
) -> None:
    token = keys.one_time()
    next_tokens: list[str] = []
    keys.used = lambda: next_tokens.append(keys.one_time())
    first, second = browser(places, keys), browser(places, keys)
    cookie = entered(first, token).headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "spotlight_session_8170="))
    assert token not in cookie
    assert "path" not in cookie.lower()  # that of the request, below what a proxy puts before it
    assert "Secure" not in cookie
    assert first.get("/api/runs").status_code == 200
    assert entered(second, token).status_code == 401
    assert browser(places, keys, Authorization=f"Bearer {token}").get("/api/runs").status_code == 401
    assert entered(second, next_tokens[0], **{"X-Forwarded-Proto": "https"}).status_code == 200
    assert "Secure" in entered(second, TOKEN, **{"X-Forwarded-Proto": "https"}).headers["set-cookie"]


def test_a_session_is_of_its_port(places: Path, keys: DashboardKeys) -> None:
    session = keys.open_session(TOKEN)
    others = f'settings={{"a": [1, 2]}}; spotlight_session_81=else; a[b]=1; spotlight_session_80={session}'
    for port, status in (("80", 200), ("81", 401), ("82", 401)):
        asked = browser(places, keys).get("/api/runs", headers={"Host": f"box:{port}", "Cookie": others})
        assert asked.status_code == status


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Content-Type": "text/plain"}],
)
def test_other_sites_open_no_session(places: Path, keys: DashboardKeys, headers: dict[str, str]) -> None:
    assert entered(browser(places, keys), TOKEN, **headers).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8170", "10.0.0.5", ""])
def test_without_a_token_of_the_user_only_the_loopback_is_answered(places: Path, host: str) -> None:
    client = browser(places, DashboardKeys())
    assert client.get("/", headers={"Host": host}).status_code == 403
    assert client.get("/").status_code == 200


def test_who_guesses_is_not_listened_to_and_sessions_stay(places: Path) -> None:
    stopped = Guesses(clock=lambda: 0.0)  # a busy machine may take longer to ask than a guess is remembered
    with served(places, guesses=stopped) as address, httpx2.Client(base_url=address) as inside:
        assert inside.post("/api/session", json={"token": TOKEN}).status_code == 200
        found = [
            httpx2.post(f"{address}/api/session", json={"token": f"guess {each}"}).status_code
            if each % 2
            else httpx2.get(f"{address}/api/runs", headers={"Authorization": f"Bearer {each}"}).status_code
            for each in range(2 * GUESSES)
        ]
        assert found == [401] * GUESSES + [429] * GUESSES
        forged = {**BEARER, "X-Forwarded-For": "10.1.2.3"}
        assert httpx2.get(f"{address}/api/runs", headers=forged).status_code == 429
        assert inside.get("/api/runs").status_code == 200


def test_who_guesses_keeps_nobody_from_the_printed_address(places: Path) -> None:
    keys = DashboardKeys(TOKEN, guesses=Guesses(clock=lambda: 0.0))
    for _ in range(GUESSES):
        keys.guesses.was_wrong("testclient")
    assert entered(browser(places, keys), TOKEN).status_code == 429
    assert entered(browser(places, keys), keys.one_time()).status_code == 200


def test_what_a_proxy_asks_for_itself_is_no_guess(places: Path, keys: DashboardKeys) -> None:
    client = browser(places, keys, Authorization="Basic YTpi")
    assert {client.get("/api/runs").status_code for _ in range(2 * GUESSES)} == {401}
    assert browser(places, keys, Authorization=f"bearer {TOKEN}").get("/api/runs").status_code == 200


def test_whoever_reads_the_addresses_may_go(places: Path) -> None:
    command = [sys.executable, "-m", "spotlight.cli", "dashboard", str(places), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().split()[0].partition("?token=")
        process.stdout.close()
        with httpx2.Client(base_url=address, timeout=60) as client:
            assert client.post("/api/session", json={"token": token}).status_code == 200
            assert client.get("/api/runs").status_code == 200
        process.terminate()


def test_guesses_are_counted_by_network_and_forgiven() -> None:
    now = 0.0
    guesses = Guesses(lambda: now)
    for each in range(GUESSES):
        assert guesses.may_try("2001:db8::1")
        guesses.was_wrong(f"2001:db8::{each}")
    assert not guesses.may_try("2001:db8::ffff")
    assert guesses.may_try("2001:db8:1::1")
    assert guesses.may_try("192.0.2.1")
    now = GUESS_EVERY_S
    assert guesses.may_try("2001:db8::1")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_of_the_machine_finds_no_token(places: Path) -> None:
    command = [sys.executable, "-m", "spotlight.cli", "dashboard", str(places), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().split()[0].partition("?token=")
        script = f"""
import encodings.idna, os, pathlib, urllib.error, urllib.request
os.setgid(65534); os.setuid(65534)
assert {token!r} not in pathlib.Path('/proc/{process.pid}/cmdline').read_text()
try:
    urllib.request.urlopen('{address}api/runs')
except urllib.error.HTTPError as error:
    print(error.code)
"""
        asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        process.kill()
    assert asked.stdout == "401\n", asked.stderr
