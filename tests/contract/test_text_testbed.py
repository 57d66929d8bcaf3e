"""The testbed that writes: what ships draws, and the program that makes it writes a whole pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from tools.testbed.flow import FlowRecipe
from tools.testbed.text import architecture
from tools.testbed.text.make import TextRecipe, generate, make, read
from tools.testbed.text.pictures import HEIGHT_PX, WIDTH_PX
from tools.testbed.text.prompts import LETTERS, split
from tools.testbed.vae import VaeRecipe

from spotlight import testbed

PIPELINE = testbed.TESTBEDS["testbed-text"].pipeline


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(PIPELINE)


def test_what_ships_loads_and_draws_in_ink(pipeline: QwenImagePipeline) -> None:
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.float32
    tokens = pipeline.tokenizer.tokenize(split()[1][0]["prompt"])
    assert set(tokens[3:5]) <= set(LETTERS)  # a letter is a token
    pictures = generate(pipeline, split()[1][:2])
    assert pictures.shape == (2, HEIGHT_PX, WIDTH_PX, 3)
    assert 0.03 < (pictures < 128).any(axis=-1).mean() < 0.4


def test_all_testbeds_together_are_small() -> None:
    folder = Path(testbed.__file__).parent
    kept = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in kept) <= 15 * 2**20


@pytest.mark.slow
def test_what_ships_spells_about_half_of_the_held_out_words(pipeline: QwenImagePipeline) -> None:
    recorded = json.loads((PIPELINE / "scores.json").read_text())["scores"]
    records = split()[1] * 4
    scores = read(generate(pipeline, records), records)
    assert 0.3 < recorded["exact"] < 0.7
    assert scores["exact"] == pytest.approx(recorded["exact"], abs=0.15)


@pytest.mark.slow
def test_a_short_making_gives_a_whole_pipeline(tmp_path: Path) -> None:
    few = TextRecipe(scored=1, vae=VaeRecipe(pictures=64, steps=4, batch=8, crop_px=24))
    few = replace(few, flow=FlowRecipe(pictures=64, steps=10, batch=8, tag_weights={}))
    make(tmp_path / "made", few)
    record = json.loads((tmp_path / "made/TRAINING.json").read_text())
    assert record["recipe"]["misspelled"] == few.misspelled
    assert len(record["flow_losses"]) == 10
    made = QwenImagePipeline.from_pretrained(tmp_path / "made")
    fresh = architecture.build(seed=0)
    for name in ("text_encoder", "vae", "transformer"):
        shapes = [{key: value.shape for key, value in part.state_dict().items()}
                  for part in (getattr(fresh, name), getattr(made, name))]  # fmt: skip
        assert shapes[0] == shapes[1]
