"""Pictures of the dashboard's votes for the documentation: Chromium at a real run, on which it votes.

    python scripts/vote_pictures.py docs/img

Trains the testbed by ``spotlight train --vote`` and votes on every group, as a person would on the page, for
the picture with the most paint. Writes ``votes-ballot.webp``, ``votes-phone.webp`` and ``votes-learnt.webp``.
Needs Chromium of the distribution, Playwright, and minutes of a CPU.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROUNDS, PHONE, SCREEN = 8, {"width": 390, "height": 844}, {"width": 1180, "height": 900}
_BYTES_MAX = 150_000
_LOOK_MS = 200
RUN = (
    "name=by-votes",
    "rollout.prompts_per_iteration=8",
    "rollout.group_size=4",
    "learner.micro_batch_size=32",
    "learner.warmup_steps=1",
    f"iterations={ROUNDS + 2}",
)
LIGHT = """images => images.every(image => image.naturalWidth) && images.map(image => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height).data.reduce((sum, value) => sum + value, 0);
})"""


def main(folder: Annotated[Path, typer.Argument(help="Where the pictures go.")]) -> None:
    """Draw the pictures."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("Chromium is not installed; expected it on the PATH. apt install chromium")
    with TemporaryDirectory() as runs, voted_run(Path(runs)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport=SCREEN, color_scheme="light").new_page()
        page.set_default_timeout(300_000)
        page.goto(address)
        draw(page, folder)
        browser.close()


@contextmanager
def voted_run(runs: Path) -> Iterator[str]:
    """The testbed in training, in ``runs``, until the block ends; the address of its votes."""
    command = [sys.executable, "-m", "spotlight.cli", "train", "--vote", "--plain", *RUN, f"runs_dir={runs}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            yield next(filter(None, (re.search(r"http://127\S+/votes", line) for line in process.stdout)))[0]
        finally:
            process.kill()


def draw(page: Page, folder: Path) -> None:
    """Vote for so many rounds; pictures of a ballot, and of what was learnt."""
    vote(page)
    page.set_viewport_size(PHONE)
    choose(page, 2)
    keep(page.screenshot(), folder / "votes-phone.webp")
    page.set_viewport_size(SCREEN)
    page.keyboard.press("Backspace")
    choose(page, 2)
    keep(page.locator(".ballot").screenshot(), folder / "votes-ballot.webp")
    page.keyboard.press("Backspace")
    while not page.locator(f".learnt:has(img) h2:text('round {ROUNDS}')").count():
        vote(page)
    page.wait_for_selector(".ballot .picture button:not([disabled])")  # it moves no more
    page.wait_for_function("[...document.querySelectorAll('.learnt img')].every(image => image.naturalWidth)")
    keep(page.locator(".learnt").screenshot(), folder / "votes-learnt.webp")


def vote(page: Page) -> None:
    """For the picture with the most paint, on the next group, by keys."""
    choose(page, 1)
    voted = page.locator(".ballot").get_attribute("data-ballot")
    page.keyboard.press("Enter")
    page.wait_for_function("voted => document.querySelector('.ballot')?.dataset.ballot !== voted", arg=voted)


def choose(page: Page, count: int) -> None:
    """Press the numbers of those with the most paint."""
    page.wait_for_selector(".ballot .picture button:not([disabled])")
    while not (light := page.locator(".ballot .picture img").evaluate_all(LIGHT)):
        page.wait_for_timeout(_LOOK_MS)
    for index in sorted(range(len(light)), key=light.__getitem__)[:count]:
        page.keyboard.press(str(index + 1))


def keep(png: bytes, path: Path) -> None:
    """Write a picture small enough for a repository."""
    Image.open(io.BytesIO(png)).convert("RGB").save(path, quality=85, method=6)
    if (size := path.stat().st_size) > _BYTES_MAX:
        raise SystemExit(f"{path} has {size} bytes; expected {_BYTES_MAX} at most")


if __name__ == "__main__":
    typer.run(main)
