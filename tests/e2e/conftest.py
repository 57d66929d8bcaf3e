"""What the runs share: one model, one embeddings cache, and reference runs made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_job import ALGORITHMS, Ended, Job, Outcome, Straight, outcome, run_process


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
