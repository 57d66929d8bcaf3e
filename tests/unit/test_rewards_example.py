"""The how-to's example is the file it names, and its snippet runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from spotlight.config.schema import RunConfig
from spotlight_rewards.reward_registry import parse

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rewards" / "brightness.py"
HOWTO = (ROOT / "docs" / "howto" / "own-reward.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", HOWTO, re.DOTALL)


def test_the_how_to_shows_the_example() -> None:
    assert blocks("python")[0] == EXAMPLE.read_text()


def test_the_snippet_runs() -> None:
    found = subprocess.run(
        [sys.executable, "-c", blocks("python")[1]],
        cwd=EXAMPLE.parent,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.returncode == 0, found.stderr
    noon, forest, night = found.stdout.splitlines()
    assert noon.startswith("a beach at noon ScoredSample(total=1.0, ")
    assert "total=0.5" in forest
    assert "'mean': 0.1" in night


def test_the_configuration_is_valid_and_its_rewards_exist() -> None:
    (shown,) = (block for block in blocks("yaml") if "brightness" in block)
    config = RunConfig.model_validate(yaml.safe_load(shown))
    assert [parse(reward.name).attribute for reward in config.rewards] == ["brightness", "jpeg_size"]
