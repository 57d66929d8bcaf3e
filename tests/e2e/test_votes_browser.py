"""Votes on the page, in a real browser: none before its pictures are there, none twice, none lost by a kill.

Needs Chromium of the distribution (``apt install chromium``) and Playwright.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dashboard_page import CHROMIUM, open_view, watched
from main_job import NFT, At, Ended, Job, clean_audit, run_process
from PIL import Image as PILImage
from tests.unit.dashboard_run import HOSTILE, served

from spotlight_rewards.ballots import Ballot, BallotBox, picture_name

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
]
VOTED_RUN = (
    *NFT,
    "iterations=2",
    "evaluation.every=2",
    "evaluation.prompts=1",
    "rewards=[{name: vote, deadline_s: 200, retries: 0}]",
)
GROUPS = 2 * 2 + 2  # of two iterations, and two evaluations
BALLOTS = "found => found.map(each => each.dataset.ballot)"
BRIGHTNESS = """images => images.every(image => image.naturalWidth) && images.map(image => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const levels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return levels.reduce((sum, value) => sum + value, 0);
})"""


def test_a_vote_waits_for_the_pictures_and_a_double_click_is_one(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "config.yaml").write_text("rewards: [{name: vote}]\n")
    box = BallotBox(tmp_path / "asked" / "votes")
    groups = [[png(shade) for shade in shades] for shades in ((20, 200, 90), (30, 210))]
    for group in groups:
        pictures = {picture_name(each): each for each in group}
        box.open(Ballot(HOSTILE, tuple(sorted(pictures))), pictures, 500.0)
    for path in (tmp_path / "asked" / "votes" / "open").glob("*/ballot.json"):
        os.utime(path, (2 * time.time(),) * 2)  # as if somebody went on waiting
    first, second = box.awaited()
    with served(tmp_path) as address, watched(browser) as page:
        held: list[Route] = []
        page.route("**/ballots/**", lambda route: held.append(route))
        open_view(page, address, "votes", run="asked")
        page.wait_for_selector("text=/taken for another [0-9]+/")
        buttons = page.locator(".ballot button")
        assert buttons.count() == 3 + 3
        assert all(buttons.nth(each).is_disabled() for each in range(6))  # no picture is there
        for route in held:
            route.continue_()
        page.unroute("**/ballots/**")
        page.click(".ballot .picture button >> nth=1")
        page.keyboard.press("9")  # not another view, while a vote is being made
        assert (
            page.locator(".ballot .picture button >> nth=1").get_attribute("aria-label")
            == "picture 2, place 1"
        )
        page.dblclick("button:text-is('Vote')")
        page.wait_for_selector(f".ballot[data-ballot='{second.id}'] .picture button:not([disabled])")
        page.locator(".ballot .picture button >> nth=0").focus()
        page.keyboard.press("Enter")
        page.click("button:text-is('All alike')")
        page.wait_for_selector("text=Nobody is asked now")
        page.keyboard.press("1")
        page.wait_for_selector("nav a[aria-current=page]:text-is('Overview')")
    votes = [box.vote_on(each.id) for each in (first, second)]
    assert [vote and list(vote.ranking) for vote in votes] == [[first.pictures[1]], []]


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(np.full((48, 48, 3), shade, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.timeout(900)
def test_a_script_votes_on_the_page_whatever_is_restarted(browser: Browser, job: Job) -> None:
    run = job.root / "voted"
    arguments = job.arguments("voted", *VOTED_RUN)
    answer = run.with_suffix(".json")
    kill = At("work training", 2)
    with ThreadPoolExecutor(1) as beside, watched(browser) as page:
        killed = beside.submit(run_process, arguments, kill, answer=answer)
        port, first = vote_on_the_page(page, job.root, killed, at_most=2)  # then the dashboard is gone
        _, rest = vote_on_the_page(page, job.root, killed, port=port)
        assert killed.result().exit_code == -signal.SIGKILL
        resumed = beside.submit(run_process, arguments, answer=answer)
        _, last = vote_on_the_page(page, job.root, resumed, port=port)
        assert resumed.result().finished, resumed.result()
    assert (len(first), len(first | rest | last)) == (2, GROUPS)
    assert len(first) + len(rest) + len(last) == GROUPS  # none was asked twice
    votes = {path.stem: json.loads(path.read_text()) for path in (run / "votes").glob("*.json")}
    assert {ballot: vote["ranking"] for ballot, vote in votes.items()} == first | rest | last
    assert {vote["voter"] for vote in votes.values()} == {""}
    report = clean_audit(run)
    assert report.counts.trained == 2 * 2 * 3
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT rollout, value FROM rewards WHERE name = 'vote'").fetchall()
        scorers = ledger.execute("SELECT DISTINCT scored_by FROM scorers").fetchall()
    groups: dict[str, list[float]] = {}
    for rollout, value in rows:
        groups.setdefault(rollout.rpartition("-")[0], []).append(value)
    assert sorted(map(sorted, groups.values())) == [[0, 1]] * 2 + [[0.25, 0.25, 1]] * 4
    assert scorers == [("people",)]


def vote_on_the_page(
    page: Page, place: Path, run: Future[Ended], *, port: int = 0, at_most: int = GROUPS
) -> tuple[int, dict[str, list[str]]]:
    """Choose the brightest picture of every group until the run ends; the port, and the votes by ballot."""
    voted: dict[str, list[str]] = {}
    with served(place, port) as address:
        while not run.done() and not (place / "voted" / "config.yaml").exists():
            page.wait_for_timeout(100)
        page.goto("about:blank")  # the session of the dashboard before is over
        open_view(page, address, "votes", run="voted")
        while len(voted) < at_most and not run.done():
            ballot = page.locator(".ballot").first
            # At once: a ballot that is gone when it is asked for its name would be waited for.
            name = next(iter(page.locator(".ballot").evaluate_all(BALLOTS)), None)
            if name is None or name in voted:
                page.wait_for_timeout(100)
                continue
            images = ballot.locator("img")
            while not (levels := images.evaluate_all(BRIGHTNESS)):
                page.wait_for_timeout(100)
            brightest = images.nth(levels.index(max(levels)))
            source = brightest.get_attribute("src")
            assert source is not None
            brightest.click()
            page.click("button:text-is('Vote')")
            page.wait_for_selector("[role=status] >> text=Your vote is recorded")
            voted[name] = [source.rpartition("/")[2]]
        return int(address.rpartition(":")[2]), voted
