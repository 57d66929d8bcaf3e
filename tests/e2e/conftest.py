"""What the runs share: one model, one embeddings cache, and reference runs made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from main_job import ALGORITHMS, Ended, Job, Outcome, Straight, outcome, run_process

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # A machine with a GPU and without a dashboard's packages runs this folder's tests of GPUs.
    from dashboard_page import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, random_pipeline: Path) -> Job:
    return Job(tmp_path_factory.mktemp("runs"), random_pipeline)


@pytest.fixture(scope="session")
def straight(job: Job) -> Straight:
    """The uninterrupted run of an algorithm, by its name."""
    made: dict[str, tuple[Path, Outcome, Ended]] = {}

    def make(algorithm: str) -> tuple[Path, Outcome, Ended]:
        if algorithm not in made:
            name = f"straight-{len(made)}"
            arguments = job.arguments(name, *ALGORITHMS[algorithm])
            ended = run_process(arguments, answer=job.root / f"{name}.json")
            assert ended.finished, ended
            made[algorithm] = (job.root / name, outcome(job.root / name), ended)
        return made[algorithm]

    return make
