"""The loop in one file and the command give one curve."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from main_job import GRPO, NFT, Job

from spotlight.report.record import read_run

LOOP = Path(__file__).parents[2] / "examples" / "loop.py"
CURVES = ("rollout/reward", "train/loss", "train/grad_norm")


@pytest.fixture(scope="module")
def loop() -> Any:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150
    spec = importlib.util.spec_from_file_location("loop", LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("algorithm", [NFT, pytest.param(GRPO, marks=pytest.mark.slow)])
def test_the_loop_has_the_curve_of_the_commands_run(job: Job, loop: Any, algorithm: tuple[str, ...]) -> None:
    name = f"loop-{len(algorithm)}"
    job.train(name, *algorithm, "iterations=3")
    expected = [row.values for row in read_run(job.root / name).rows]
    found = loop.train(job.config(name, *algorithm, "iterations=3"))
    assert [[row[curve] for curve in CURVES] for row in found] == [
        [row[curve] for curve in CURVES] for row in expected
    ]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("exploration={}", "exploration"),
        ("learner={update_split: shuffled, updates_per_batch: 2}", "learner.update_split"),
        ("algorithm.train_samples=2", "algorithm.train_samples"),
        ("algorithm.silent_groups=skip", "algorithm.silent_groups"),
        ("algorithm={name: refl}", "algorithm.name"),
    ],
)
def test_the_loop_refuses_what_it_would_leave_out(job: Job, loop: Any, override: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"without {named}; use `spotlight train`"):
        loop.require_plain(job.config("refused", override), [])
    with pytest.raises(ValueError, match="without pickscore;"):
        loop.require_plain(job.config("refused"), ["pickscore"])
