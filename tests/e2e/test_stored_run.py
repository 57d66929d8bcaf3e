"""Runs on pictures that are there: they learn, stop and go on to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from main_job import Job, outcome, run_process
from PIL import Image

from spotlight.store.metrics import read_metrics

COLORS = {"red": (240, 30, 30), "green": (30, 240, 30), "blue": (30, 30, 240)}
SFT = ("algorithm.name=sft", "learner.learning_rate=5e-3")
PAIRS = ("algorithm={name: diffusion-dpo, stored: true}", "learner.learning_rate=5e-3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain picture a prompt, and a worse one."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for name, color in COLORS.items():
        Image.new("RGB", (16, 16), color).save(folder / f"{name}.png")
        Image.new("RGB", (16, 16), "gray").save(folder / "gray.png")
        lines.append(json.dumps({"prompt": f"a {name} picture", "pictures": [f"{name}.png", "gray.png"]}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def arguments(job: Job, name: str, data: Path, kind: tuple[str, ...], iterations: int) -> list[str]:
    sizes = ("rollout.prompts_per_iteration=3", "rollout.group_size=2", "learner.micro_batch_size=6")
    return job.arguments(name, *kind, *sizes, f"data.train={data}", f"iterations={iterations}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "curve", "better"), [(SFT, "matching_loss", -1), (PAIRS, "preference_margin", 1)]
)
def test_a_run_on_pictures_learns_them_and_goes_on_to_the_bit(
    job: Job, data: Path, kind: tuple[str, ...], curve: str, better: int
) -> None:
    name = curve.replace("_", "-")
    straight = run_process(arguments(job, f"{name}-straight", data, kind, 6), answer=job.root / "a.json")
    assert straight.finished, straight
    rows = [row.values for row in read_metrics(job.root / f"{name}-straight")]
    found = [row[f"train/{curve}"] for row in rows if f"train/{curve}" in row]
    assert better * (found[-1] - found[0]) > 0, found
    for iterations in (3, 6):
        part = run_process(
            arguments(job, f"{name}-parts", data, kind, iterations), answer=job.root / "b.json"
        )
        assert part.finished, part
    assert outcome(job.root / f"{name}-parts") == outcome(job.root / f"{name}-straight")
