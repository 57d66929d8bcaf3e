"""The dashboard in a real browser: views, hostile texts, reconnecting, long runs, small screens.

Needs Chromium of the distribution (``apt install chromium``) and Playwright.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import httpx2
import pytest
from dashboard_page import CHROMIUM, open_view, watched
from main_job import Job
from ray_job import running
from reward_functions import GATE
from tests.unit.dashboard_run import (
    BEARER,
    HOSTILE,
    LONG,
    PROMPTS,
    RIGHT_TO_LEFT,
    TOKEN,
    change_course,
    make_run,
    served,
)
from tests.unit.store_history import SCRATCH

from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.single_page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
]
PARTS = {
    "overview": ".card >> text=checks passed",
    "pictures": ".picture img",
    "curves": ".chart .main-svg",
    "cluster": ".lane canvas",
    "money": "text=The same work on demand",
    "exploration": "text=exploration is off",
    "samples": "td a",
    "log": "text=node noticed",
}
"""Of a view, what is there once its answers have come."""
VIEWS = tuple(PARTS)
FIRST_PAINT_MAX_MS = 1000
ELEMENTS_MAX = 5000
ANSWER_BYTES_MAX = 500_000
SMALL_RUN = (
    "algorithm.name=diffusion-nft",
    "algorithm.train_timesteps=2",
    "iterations=4",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "evaluation.prompts=4",
    "evaluation.grid_prompts=4",
    "evaluation.images_per_prompt=1",
    "evaluation.grid_images=1",
    "rewards=[{name: 'reward_functions:moody'}]",
    "fleet.driver=ray",
    "fleet.spot.notice_s=null",
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        make_run(Path(scratch) / "wild", 12)
        make_run(Path(scratch) / "other", 8)
        yield Path(scratch)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_shows_the_run(browser: Browser, place: Path, theme: str) -> None:
    with served(place) as address, watched(browser, color_scheme=theme) as page:
        for view in VIEWS:
            open_view(page, address, view)
            page.wait_for_selector(PARTS[view])
            assert page.locator("[role=alert]").count() == 0
        assert page.evaluate("document.documentElement.dataset.theme") == theme


def test_hostile_texts_are_shown_as_text(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        open_view(page, address, "pictures")
        page.wait_for_selector(".picture img")
        captions = page.locator(".picture .words").all_text_contents()
        assert HOSTILE in captions
        assert RIGHT_TO_LEFT in captions
        assert max(map(len, captions)) < len(LONG)
        page.click("button:text-is('Training groups')")
        page.wait_for_selector("figcaption:has-text('worst')")
        shown = page.locator(".grid .card").first
        assert HOSTILE in shown.locator("h2").inner_text()
        assert (
            re.sub(r"\s+", " ", shown.locator(".scores").first.inner_text())
            == "reward 0.9 shapes 0.9 judge 0.1"
        )
        page.wait_for_function(
            "[...document.querySelectorAll('.grid img')].every((each) => each.naturalWidth)"
        )
        assert page.get_by_role("slider").get_attribute("max") == "2"
        page.click("button:text-is('One evaluation')")
        page.wait_for_selector("figcaption:has-text('0.4')")
        open_view(page, address, "log")
        page.wait_for_selector("pre >> text=the log")
        assert HOSTILE in page.locator("pre").inner_text()
        open_view(page, address, "samples/t000000-000-000")
        page.wait_for_selector("text=optimizer step 1")
        assert page.locator("p.words").first.inner_text() == HOSTILE
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_comes_back_when_the_server_does(browser: Browser, place: Path) -> None:
    with watched(browser) as page:
        with served(place) as address:
            open_view(page, address, "overview")
            page.wait_for_selector("#connection:text-is('live')")
        page.wait_for_selector("#connection.lost")
        with served(place, int(address.rpartition(":")[2])):
            page.fill("input[type=password]", TOKEN)  # the session went with the server
            page.click("button:text-is('Open')")
            page.wait_for_selector("#connection:text-is('live')")
            page.keyboard.press("4")
            page.wait_for_selector(".lane canvas")


def test_a_row_that_is_written_is_seen_without_reloading(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        open_view(page, address, "curves", run="other")
        page.wait_for_selector(".chart .main-svg")
        with (place / "other" / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 99, "samples_trained": 999, "wall_s": 999, "brand/new": 1.5}\n')
        page.wait_for_selector("text=brand/new")


def test_curves_of_seeds_are_drawn_as_their_mean(browser: Browser, tmp_path: Path) -> None:
    for name in ("seed-0", "seed-1"):
        paths = make_run(tmp_path / name)
    change_course(paths, 8, {"name": (HOSTILE, "seed-1"), "iterations": (12, 20)})
    write_page(RunFolder("seed-1", paths.path), tmp_path / "seed-1.html")
    changed = f"rom iteration 8 on; forked from {HOSTILE}; iterations 12 to 20"
    with served(tmp_path) as address, watched(browser) as page:
        open_view(page, address, "curves", run="seed-0")
        page.get_by_role("checkbox", name="seed-1").check()
        page.get_by_role("checkbox", name="means over seeds").check()
        page.wait_for_selector("text=seed-0, seed-1. Too narrow, as of the same run_seed as another: seed-1.")
        drawn = page.evaluate("document.querySelector('.js-plotly-plot').data.map((each) => each.name)")
        assert drawn == ["seed-0 +1"]
        chart = page.locator(f".js-plotly-plot[aria-label$={json.dumps(f'. seed-1 f{changed}')}]").first
        assert chart.locator(".shapelayer path").count() == 1
        chart.locator(".annotation-text").hover()
        page.wait_for_selector(f".hoverlayer :text({json.dumps(HOSTILE)})")
        for view in ("overview", "curves"):  # of its own file, where no other run is
            open_view(page, f"file://{tmp_path}/seed-1.html", view, run="seed-1")
            page.wait_for_selector(f".js-plotly-plot[aria-label$={json.dumps(f'. F{changed}')}]")


def test_a_price_of_one_point_is_a_line_and_no_legend_covers_a_title(
    browser: Browser, tmp_path: Path
) -> None:
    paths = make_run(tmp_path / "wild")
    for name in ("a-run", "another-run", "a-third-run"):
        make_run(tmp_path / name)
    with closing(sqlite3.connect(paths.ledger)) as ledger, ledger:
        ledger.execute("UPDATE attempt_workers SET left_at = joined_at + 1 WHERE worker LIKE 'spot-%'")
    with served(tmp_path) as address, watched(browser) as page:
        open_view(page, address, "cluster")
        page.wait_for_selector(".js-plotly-plot")
        drawn = page.evaluate(
            "document.querySelector('.js-plotly-plot').data.map((each) => [each.x, each.y])"
        )
        assert all(len(x) >= 2 and x[0] != x[1] and y[0] == y[1] for x, y in drawn)
        open_view(page, address, "curves")
        for name in ("a-run", "another-run", "a-third-run"):
            page.get_by_role("checkbox", name=name, exact=True).check()
        page.locator(".js-plotly-plot .legend .traces").nth(3).wait_for()
        title = page.locator(".js-plotly-plot .gtitle").first.bounding_box()
        legend = page.locator(".js-plotly-plot .legend").first.bounding_box()
        assert title
        assert legend
        assert legend["y"] >= title["y"] + title["height"]


def test_a_token_lets_a_browser_in(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        page.goto(f"{address}/?token=wrong#/wild/log")
        page.fill("input[type=password]", "wrong, too")
        page.click("button:text-is('Open')")
        page.wait_for_selector("text=a wrong token")
        assert page.locator("#run option").count() == 0
        page.goto("about:blank")
        page.goto(f"{address}/?token={TOKEN}#/wild/log")
        page.wait_for_selector("text=node noticed")
        assert page.url == f"{address}/#/wild/log"
        assert page.evaluate("document.cookie") == ""
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert cookie["name"] == f"spotlight_session_{address.rpartition(':')[2]}"
        page.goto("about:blank")
        page.set_content(f"<a href='{address}/#/wild/money'>a chat</a>")
        page.click("a")  # the browser sends no such cookie with the page, but with what the page asks
        page.wait_for_selector(PARTS["money"])


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_scrolls_down_only(browser: Browser, place: Path, view: str) -> None:
    size = {"width": 360, "height": 740}
    with served(place) as address, watched(browser, viewport=size) as page:
        open_view(page, address, view)
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_file_shows_the_run_without_a_server(browser: Browser, place: Path, tmp_path: Path) -> None:
    write_page(RunFolder("wild", (place / "wild").resolve()), tmp_path / "wild.html")
    with watched(browser, offline=True) as page:
        for view in VIEWS:
            open_view(page, f"file://{tmp_path}/wild.html", view)
            page.wait_for_selector(".empty.error", state="detached")
        open_view(page, f"file://{tmp_path}/wild.html", "pictures")
        page.wait_for_selector(".picture img.small")  # set when a picture has come, and has few pixels
        assert page.locator(".picture").count() == len(PROMPTS) * 2
        open_view(page, f"file://{tmp_path}/wild.html", "samples")
        page.click("td a:text-is('t000008-000-000')")
        page.wait_for_selector("text=node noticed")
        assert page.locator("table:has-text('finished here') td:text-is('spot-1/0')").count() == 1
        open_view(page, f"file://{tmp_path}/wild.html", "curves")
        page.wait_for_selector(".chart .main-svg")


def test_the_skip_link_leads_to_the_content_of_the_same_view(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        open_view(page, address, "money")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "view"
        assert page.url.endswith("#/wild/money")


@pytest.fixture
def own_place() -> Iterator[Path]:
    """Of a test that changes its run."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        make_run(Path(scratch) / "wild", 12)
        yield Path(scratch)


def change(place: Path, statement: str, run: str = "wild") -> None:
    with closing(sqlite3.connect(place / run / "ledger.sqlite")) as ledger, ledger:
        for (trigger,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            ledger.execute(f"DROP TRIGGER {trigger}")  # which keep what is written
        ledger.execute(statement)


SEEN = "UPDATE attempts SET seen_at = seen_at + 1"


def test_the_arrow_keys_go_on_along_a_lane_that_is_redrawn(browser: Browser, own_place: Path) -> None:
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "cluster")
        page.wait_for_selector("#connection:text-is('live')")
        page.locator(".lane canvas").first.focus()
        tips = set()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
            tips.add(page.locator(".tip").inner_text())
        canvas = page.query_selector(".lane canvas")
        assert canvas is not None
        change(own_place, SEEN)
        page.wait_for_function("canvas => !canvas.isConnected", arg=canvas)
        assert page.locator(".tip").inner_text() in tips
        page.keyboard.press("ArrowRight")
        tips.add(page.locator(".tip").inner_text())
        page.keyboard.press("ArrowLeft")
        assert page.locator(".tip").inner_text() in tips
        assert len(tips) == 3


def test_what_a_reader_opened_and_focused_stays_when_the_run_writes(
    browser: Browser, own_place: Path
) -> None:
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "pictures")
        page.wait_for_selector("#connection:text-is('live')")
        summary = page.locator(".picture summary").nth(1)
        summary.focus()
        page.keyboard.press("Enter")
        picture = page.query_selector(".picture")
        assert picture is not None
        with page.expect_response("**/evaluation?*"):
            change(own_place, SEEN)
        page.wait_for_timeout(200)
        assert picture.evaluate("picture => picture.isConnected")  # nothing to draw again
        change(own_place, "UPDATE rewards SET value = 0.5 WHERE name = 'strict'")
        page.wait_for_function("picture => !picture.isConnected", arg=picture)
        assert page.locator(".picture details").nth(1).evaluate("details => details.open")
        assert summary.evaluate("summary => summary === document.activeElement")
        page.locator("nav a[aria-current=page]").focus()
        page.keyboard.press("2")
        page.keyboard.press("4")
        page.wait_for_selector(".lane canvas")
        assert page.evaluate("document.activeElement.textContent") == "Pictures"


def test_a_tag_that_another_run_lacks_hides_none_of_its_pictures(browser: Browser, own_place: Path) -> None:
    make_run(own_place / "other", 8)
    change(own_place, "UPDATE prompts SET metadata = replace(metadata, 'hostile', 'meek')", "other")
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "pictures")
        page.wait_for_selector(".picture img")
        page.select_option("select[aria-label=tag]", "hostile")
        page.wait_for_function("n => document.querySelectorAll('.picture').length === n", arg=3 * 2)
        open_view(page, address, "pictures", run="other")
        page.wait_for_function(
            "n => document.querySelectorAll('.picture').length === n", arg=len(PROMPTS) * 2
        )
        assert page.locator("select[aria-label=tag]").input_value() == ""


def test_a_score_that_the_run_had_only_later_is_no_gain(browser: Browser, own_place: Path) -> None:
    metrics = own_place / "wild" / "metrics.jsonl"
    *others, last = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    judged = {**last, "validation/graded": 0.5, "validation/strict": 0.9}
    lines = [json.dumps(row) for row in (*others, judged, last)]
    metrics.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "overview")
        card = page.locator(".card:has(.label:text-is('Validation (strict)'))")
        assert card.inner_text().split("\n")[1:] == ["0.900", f"at iteration {last['iteration']}"]


def test_the_picture_before_is_enlarged_as_it_was(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        open_view(page, address, "pictures")
        page.click("button:text-is('Before / after')")
        for at, iteration in ((0, 0), (1, 8)):
            page.locator(".pairs .picture").first.locator("button").nth(at).click()
            assert page.locator("dialog").inner_text().count(f"Iteration {iteration} (") == 1
            source = page.locator("dialog img").get_attribute("src")
            assert source is not None
            assert f"/picture/{iteration}/" in source
            page.keyboard.press("Escape")


def test_a_chart_comes_back_after_it_was_empty_and_ends_with_its_view(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        open_view(page, address, "overview")
        page.wait_for_selector(".chart .main-svg")
        chart = page.query_selector(".chart")
        assert chart is not None
        draw = """async (chart, y) => {
            await drawCurves(chart, { title: "it", xLabel: "x", curves: [{ name: "a", x: [0, 1], y }] });
            return chart.querySelectorAll(".scatterlayer .trace").length;
        }"""
        for y, traces in (([1, 2], 1), ([], 0), ([], 0), ([2, 1], 1)):
            assert page.evaluate(f"([chart, y]) => ({draw})(chart, y)", [chart, y]) == traces
        open_view(page, address, "log")
        page.wait_for_selector(PARTS["log"])
        assert chart.evaluate("chart => chart._fullLayout === undefined")


def test_changes_are_asked_for_again_after_a_refusal(browser: Browser, place: Path) -> None:
    with served(place) as address, watched(browser) as page:
        page.route("**/api/changes", lambda route: route.fulfill(status=503), times=1)
        open_view(page, address, "overview")
        page.wait_for_selector("#connection.lost")
        page.wait_for_selector("#connection:text-is('live')")


def test_an_address_of_a_run_that_is_yet_to_come_shows_that_run_when_it_has(
    browser: Browser, own_place: Path
) -> None:
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "log", run="later")
        page.wait_for_selector("#connection:text-is('live')")
        assert page.locator("#run").input_value() == "wild"
        make_run(own_place / "unasked", 2)
        page.wait_for_selector("#run option[value=unasked]", state="attached")
        assert page.locator("#run").input_value() == "wild"
        make_run(own_place / "later", 2)
        page.wait_for_function("() => document.getElementById('run').value === 'later'")
        assert page.title() == "later: log – Spotlight"


def test_the_choice_of_runs_tells_how_each_is_now(browser: Browser, own_place: Path) -> None:
    make_run(own_place / "other", 8)
    with served(own_place) as address, watched(browser) as page:
        open_view(page, address, "log")
        page.wait_for_selector("#connection:text-is('live')")
        page.wait_for_selector("#run option:text-is('other – stopped')", state="attached")
        change(own_place, "UPDATE attempts SET ended = 'finished'", "other")
        page.wait_for_selector("#run option:text-is('other – finished')", state="attached")
        assert page.locator("#run").input_value() == "wild"


def test_the_file_tells_its_age_by_its_readers_clock(browser: Browser, place: Path, tmp_path: Path) -> None:
    write_page(RunFolder("wild", (place / "wild").resolve()), tmp_path / "wild.html")
    times = []
    for zone in ("Asia/Tokyo", "America/Bogota"):
        with watched(browser, timezone_id=zone, locale="en-GB") as page:
            open_view(page, f"file://{tmp_path}/wild.html", "log")
            text = page.locator("#connection").inner_text()
            times.append(datetime.strptime(text, "as of %d/%m/%Y, %H:%M:%S").replace(tzinfo=ZoneInfo(zone)))
    assert times[0] == times[1]
    assert abs(times[0].timestamp() - time.time()) < 600


def painted_ms(page: Page, address: str, view: str) -> float:
    page.goto("about:blank")  # or the address would differ in its fragment only
    open_view(page, address, view, run="long")
    found: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return found


def test_ten_thousand_iterations_are_painted_within_a_second(browser: Browser) -> None:
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        make_run(Path(scratch) / "long", 10_000, every=20, planned=12_000)
        with served(Path(scratch)) as address, watched(browser) as page:
            asked: set[str] = set()
            page.on("request", lambda it: asked.add(it.url))
            for view in VIEWS:
                assert any(painted_ms(page, address, view) < FIRST_PAINT_MAX_MS for _ in range(3)), view
                page.wait_for_selector(PARTS[view])
                assert page.locator("body *").count() < ELEMENTS_MAX, view
                assert page.locator("[role=alert]").count() == 0
            open_view(page, address, "overview", run="long")
            page.wait_for_selector(".cards >> text=10,000 / 12,000")
            open_view(page, address, "curves", run="long")
            page.wait_for_selector("text=of 10,000 points")
            answers = [url for url in asked if "/api/runs/long/" in url and "/picture/" not in url]
            assert len(answers) > len(VIEWS)
            for url in answers:
                assert len(httpx2.get(url, headers=BEARER, timeout=60).content) < ANSWER_BYTES_MAX, url


@pytest.mark.timeout(1500)
def test_a_node_killed_while_its_run_is_watched(
    browser: Browser, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = job.root / "all-views-are-open"
    monkeypatch.setenv(GATE, str(gate))
    trace = job.root / "watched.csv"
    trace.write_text(
        "# spotlight trace horizon_s=60.0\ntime_s,event,node,gpus\n0,add,spot-1,1\n0.1,add,spot-2,1\n"
    )
    arguments = job.arguments("watched", *SMALL_RUN, f"fleet.spot.trace={trace}")
    with running(job.root / "watched", arguments) as it:
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot", 2)
        with served(job.root) as address, watched(browser) as overview:
            open_view(overview, address, "overview", run="watched")
            with ExitStack() as others:
                pages = {view: others.enter_context(watched(browser)) for view in VIEWS[1:]}
                for view, page in pages.items():
                    open_view(page, address, view, run="watched")
                gate.touch()
                killed = str(it.wait_for("SELECT worker FROM samples WHERE worker LIKE 'spot-%'")[0][0])
                it.kill(int(killed.partition("/")[0].removeprefix("spot-")))
                for view in ("log", "cluster"):
                    pages[view].wait_for_selector("text=node lost")  # without a word to the page
                overview.wait_for_selector("text=no spot node lost", state="detached")
                for view, page in {**pages, "overview": overview}.items():
                    page.wait_for_selector("[role=alert]", state="detached")
                    assert page.locator("#view").inner_text(), view
            assert it.end() == 0, it.printed
            overview.wait_for_selector(".cards >> text=finished")
            (held, *_) = it.ask(f"SELECT rollout FROM leases WHERE worker = '{killed}' ORDER BY at DESC")
            open_view(overview, address, f"samples/{held[0]}", run="watched")
            overview.wait_for_selector(f"table:has-text('what became of it') td:text-is('{killed}')")
