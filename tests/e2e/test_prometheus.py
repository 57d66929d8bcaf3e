"""A real Prometheus scrapes a real dashboard, and evaluates the rules; its promtool reads what is served.

Needs both of the distribution (``apt install prometheus``).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
import yaml
from test_dashboard_browser import served
from tests.unit.dashboard_run import BEARER, TOKEN, make_run
from tests.unit.store_history import SCRATCH

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None, reason="not installed: apt install prometheus"
    ),
]
MONITORING = Path(__file__).parents[2] / "monitoring"
PATIENCE_S = 120.0


def promtool(*arguments: str, given: str = "") -> str:
    found = subprocess.run(
        [str(PROMTOOL), *arguments], input=given, text=True, capture_output=True, cwd=MONITORING, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.fixture(scope="module")
def scraped() -> Iterator[httpx2.Client]:
    """A Prometheus that has the figures of a dashboard."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        make_run(Path(scratch) / "runs" / "wild", 12)
        with served(Path(scratch) / "runs") as address:
            answer = httpx2.get(f"{address}/metrics", headers=BEARER, timeout=60)
            promtool("check", "metrics", given=answer.text)
            yield from _prometheus(Path(scratch), address.removeprefix("http://"))


def _prometheus(folder: Path, target: str) -> Iterator[httpx2.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "spotlight-alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "spotlight-token").write_text(TOKEN)
    process = subprocess.Popen(
        [
            str(PROMETHEUS),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end_s = time.monotonic() + PATIENCE_S
            while not _is_scraped(client):
                assert process.poll() is None
                assert time.monotonic() < end_s
                time.sleep(0.5)
            yield client
    finally:
        process.terminate()
        process.wait()


def _is_scraped(client: httpx2.Client) -> bool:
    try:
        return bool(ask(client, "spotlight_iterations"))
    except httpx2.TransportError:
        return False


def ask(client: httpx2.Client, query: str) -> list[dict[str, object]]:
    answer = client.get("/api/v1/query", params={"query": query})
    if answer.status_code == 503:  # starting
        return []
    assert answer.status_code == 200, answer.text
    found: list[dict[str, object]] = answer.json()["data"]["result"]
    return found


def test_prometheus_has_what_was_served(scraped: httpx2.Client) -> None:
    (target,) = [
        each
        for each in scraped.get("/api/v1/targets").json()["data"]["activeTargets"]
        if each["labels"]["job"] == "spotlight"
    ]
    assert (target["health"], target["lastError"]) == ("up", "")
    (found,) = ask(scraped, 'spotlight_iterations{run="wild"}')
    assert found["value"][1] == "12"  # type: ignore[index]


def test_the_rules_are_evaluated(scraped: httpx2.Client) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        (group,) = scraped.get("/api/v1/rules").json()["data"]["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]) or time.monotonic() > end_s:
            break
        time.sleep(0.5)
    assert {(rule["health"], rule["state"]) for rule in group["rules"]} == {("ok", "inactive")}


def test_every_panel_of_the_board_asks_what_prometheus_understands(scraped: httpx2.Client) -> None:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$run", ".*").replace("$__rate_interval", "1m")
            found = ask(scraped, query)
            end_s = time.monotonic() + PATIENCE_S
            while not found and "_mfu" not in query:  # which only GPUs of a known rate have
                assert time.monotonic() < end_s, panel["title"]
                time.sleep(0.5)  # a difference needs two scrapes
                found = ask(scraped, query)
