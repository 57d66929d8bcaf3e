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
from voted_run import voted_run

from spotlight.store.ledger.ledger_audit import AuditLimits
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
        about = png(250)
        ballot = Ballot(HOSTILE, tuple(sorted(pictures)), references=(picture_name(about),))
        box.open(ballot, {**pictures, picture_name(about): about}, 500.0)
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
        page.wait_for_function("() => document.querySelector('.ballot .references img').naturalWidth === 48")
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


@pytest.mark.timeout(600)
def test_pairs_are_voted_on_by_keys_and_on_a_phone_and_every_round_says_what_was_learnt(
    browser: Browser, job: Job
) -> None:
    with voted_run(job, "pairs", "rollout.group_size=2", "iterations=3") as (run, printed):
        with watched(browser, viewport={"width": 1180, "height": 900}) as screen:
            screen.goto(printed[0])
            learnt = screen.locator(".learnt")
            ask_pair(screen)
            assert learnt.inner_text() == ""
            better = by_keys(screen)
            press_on(screen, "0")  # all alike
            ask_pair(screen)
            learnt.get_by_role("heading", name="What was learnt in round 1", exact=True).wait_for()
            said = learnt.inner_text()
            assert (
                "updated with 2 of 2 groups, of which 1 all alike, from which nothing is learnt: 1 pair of "
                "pictures with a better one, in " in said
            )
            assert "Its pictures come with the votes of the next." in said
        phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
        with served(job.root) as address, watched(browser, **phone) as hand:
            open_view(hand, address, "votes", run="pairs")
            tapped = [by_thumb(hand) for _ in range(2)]
            ask_pair(hand)
            learnt = hand.locator(".learnt")
            learnt.locator("img").first.wait_for()
            assert learnt.get_by_role("heading").first.inner_text() == "What was learnt in round 1"
            assert learnt.locator("figcaption").all_inner_texts() == ["at the start", "after"]
            assert "Round 2 is learnt, too" in learnt.inner_text()
            rows = [row.split("\t") for row in learnt.locator("tbody").inner_text().split("\n")]
            assert [row[:4] for row in rows] == [
                ["2", "2 of 2", "2", "updated"],
                ["1", "2 of 2", "1", "updated"],
            ]
            assert hand.evaluate("document.documentElement.scrollWidth") <= 390
            by_thumb(hand)
            by_thumb(hand)
        assert run.wait(300) == 0
    votes = {path.stem: json.loads(path.read_text()) for path in (job.root / "pairs/votes").glob("*.json")}
    assert [votes[ballot]["ranking"] for ballot, _ in (better, *tapped)] == [
        [votes[ballot]["pictures"][place]] for ballot, place in (better, *tapped)
    ]
    assert sorted(len(vote["ranking"]) for vote in votes.values()) == [0, 1, 1, 1, 1, 1]
    assert clean_audit(job.root / "pairs", AuditLimits(group_size=2)).counts.trained >= 5 * 2


def ask_pair(page: Page) -> str:
    """Wait until a pair can be voted on, all of which can be seen; its ballot."""
    page.wait_for_selector(".ballot .picture button:not([disabled])")
    assert page.locator(".ballot .picture").count() == 2
    return str(page.locator(".ballot").get_attribute("data-ballot"))


def press_on(page: Page, *keys: str) -> None:
    """Press keys, of which the last votes."""
    voted = ask_pair(page)
    for key in keys:
        page.keyboard.press(key)
    page.wait_for_function("voted => document.querySelector('.ballot')?.dataset.ballot !== voted", arg=voted)


def by_keys(page: Page) -> tuple[str, int]:
    """Vote for the second, after changes of mind; ballot and place of the picture."""
    ballot, pictures = ask_pair(page), page.locator(".ballot .picture button")
    labels = "buttons => buttons.map(each => each.getAttribute('aria-label'))"
    for key, expected in (
        ("2", ["picture 1", "picture 2, place 1"]),
        ("1", ["picture 1, place 2", "picture 2, place 1"]),
        ("2", ["picture 1, place 1", "picture 2"]),
        ("3", ["picture 1, place 1", "picture 2"]),
        ("Backspace", ["picture 1", "picture 2"]),
        ("Enter", ["picture 1", "picture 2"]),  # nothing is chosen
    ):
        page.keyboard.press(key)
        assert pictures.evaluate_all(labels) == expected, key
    press_on(page, "2", "Enter")
    return ballot, 1


def by_thumb(page: Page) -> tuple[str, int]:
    """Tap the first and vote, both of which are there without scrolling; ballot and place of the picture."""
    ballot = ask_pair(page)
    for box in page.locator(".ballot button").all():
        place = box.bounding_box()
        assert place is not None
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390
        assert min(place["width"], place["height"]) >= 44  # of a thumb
    page.locator(".ballot .picture button").first.tap()
    page.locator("button:text-is('Vote')").tap()
    page.wait_for_function("voted => document.querySelector('.ballot')?.dataset.ballot !== voted", arg=ballot)
    return ballot, 0
