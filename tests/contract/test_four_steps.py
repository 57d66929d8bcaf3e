"""The embedded LoRA of four steps: of the committed recipe, small, closer to ten steps than without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tools.testbed.few_steps import DistilRecipe, make
from tools.testbed.making import recipe_hash

from spotlight.models.families.qwen_image import QwenImage
from spotlight.testbed import FOUR_STEPS, FOUR_STEPS_DIR, lora_path
from spotlight_files.lora_file import LORA_FILE, read_lora


def test_the_record_is_of_this_recipe_and_says_what_it_gains() -> None:
    record = json.loads((FOUR_STEPS_DIR / "TRAINING.json").read_text())
    assert record["recipe_sha256"] == recipe_hash(DistilRecipe())
    scores = json.loads((FOUR_STEPS_DIR / "scores.json").read_text())
    assert [scores[name]["steps"] for name in ("pipeline", "pipeline_few", "student")] == [10, 4, 4]
    ten, four, student = (
        scores[name]["scores"]["overall"] for name in ("pipeline", "pipeline_few", "student")
    )
    assert student["strict"] > four["strict"] + 3 * student["strict_stderr"]
    assert student["strict"] > ten["strict"] - 2 * student["strict_stderr"]


def test_it_is_a_lora_of_what_is_trained_by_default() -> None:
    found = read_lora("QwenImagePipeline", lora_path(FOUR_STEPS))
    assert (found.rank, found.alpha) == (DistilRecipe().rank, DistilRecipe().rank)
    layers = {name.split(".lora_")[0] for name in found.layers}
    assert all(any(name.endswith(target) for target in QwenImage.lora_targets) for name in layers)
    assert lora_path("runs/mine/lora") == "runs/mine/lora"


@pytest.mark.slow  # of the tool that made the weights
def test_the_recipe_runs_and_learns(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = DistilRecipe(paths=64, steps=40, batch=8, learning_rate=3e-3, warmup_steps=4, finer=2)
    make(tmp_path, recipe, images=6)
    losses = json.loads((tmp_path / "TRAINING.json").read_text())["losses"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert read_lora("QwenImagePipeline", str(tmp_path / LORA_FILE)).rank == recipe.rank
