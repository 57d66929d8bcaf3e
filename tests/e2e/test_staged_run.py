"""``spotlight train FILE`` with stages: one run after another, which the same command takes up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from main_job import TINY, Job, lora, outcome
from PIL import Image

from spotlight_rewards.base.yaml_tree import parse_override, section_of


@pytest.fixture(scope="module")
def file(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    for color in ("red", "green", "gray"):
        Image.new("RGB", (16, 16), color).save(folder / f"{color}.png")
    rows = [
        {"prompt": f"a {each} circle", "pictures": [f"{each}.png", "gray.png"]} for each in ("red", "green")
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree: dict[str, object] = {}
    places = (f"runs_dir={job.root}", f"cache_dir={job.root}/cache", f"model.path={job.pipeline}")
    for override in (*TINY, *places):
        key, value = parse_override(override)
        node, leaf = section_of(tree, key)
        node[leaf] = value
    pairs = {
        "iterations": 2,
        "algorithm": {"name": "diffusion-dpo", "stored": True},
        "rollout": {"group_size": 2},
        "learner": {"micro_batch_size": 4},
        "data": {"train": str(folder / "pairs.jsonl")},
    }
    tree["stages"] = {"pairs": pairs, "rl": {"iterations": 3}}
    (folder / "chain.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder / "chain.yaml"


def started(file: Path, name: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spotlight.cli", "train", str(file), "--plain", f"name={name}", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )


def finish(file: Path, name: str) -> None:
    process = started(file, name)
    said, _ = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_stop_and_go_on_to_the_bit(job: Job, file: Path) -> None:
    finish(file, "whole")
    first, second = (job.root / f"whole-{stage}" for stage in ("pairs", "rl"))
    assert any(bool((lora(first)[name] != tensor).any()) for name, tensor in lora(second).items())
    # A kill in the first stage, a stop in the second, and on to the end.
    for moment, number in (("iteration 1/2", signal.SIGKILL), ("iteration 1/3", signal.SIGTERM)):
        process = started(file, "parts")
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if moment in line:
                process.send_signal(number)
                break
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 130), "".join(said)
    finish(file, "parts")
    for stage in ("pairs", "rl"):
        assert outcome(job.root / f"parts-{stage}") == outcome(job.root / f"whole-{stage}")
    # Another first stage: the second would go on beside a reference that it was not trained with.
    shutil.copytree(job.root / "whole-rl" / "lora", job.root / "parts-pairs" / "lora", dirs_exist_ok=True)
    process = started(file, "parts", "stage=rl", "iterations=4")
    said, _ = process.communicate()
    assert process.returncode == 2, said
    assert "holds other weights than up to the checkpoint" in said


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_command(job: Job, file: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "spotlight.cli", "train", str(file), "name=bad", "learner.lora.rank=0"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("learner.lora.rank: found 0") == 1
    assert not list(job.root.glob("bad-*"))
