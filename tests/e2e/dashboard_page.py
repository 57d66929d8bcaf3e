"""A page of a real browser that watches the dashboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.unit.dashboard_run import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def watched(browser: Browser, **options: object) -> Iterator[Page]:
    """A page on which no script fails, none but ours runs, and nothing is fetched from elsewhere."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(240_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None
    )
    page.on("request", lambda request: None if is_ours(request.url) else wrong.append(request.url))
    yield page
    assert page.evaluate("window.hacked") is None
    assert not wrong
    context.close()


def is_ours(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "file:", "blob:"))


def open_view(page: Page, address: str, view: str, run: str = "wild") -> None:
    is_open = page.url.startswith(f"{address}/") or address.startswith("file:")
    enters = "" if is_open else f"/?token={TOKEN}"
    page.goto(f"{address}{enters}#/{run}/{view}")
    page.wait_for_selector(f"nav a[aria-current=page]:text-is('{view.partition('/')[0].capitalize()}')")
    page.wait_for_selector("#view > p:text('Reading')", state="detached")
