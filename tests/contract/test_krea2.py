"""What only Krea 2 has: guidance that counts from 0, padding in a template, layers that are tapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spotlight.config.load import build_config
from spotlight.models.families.krea2 import Krea2
from spotlight.report.loading import loading_snippet
from spotlight_files.model_errors import ModelError


def load(directory: Path, limit: int = 64) -> Krea2:
    return Krea2.load(
        directory,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=directory / f"cache-{limit}",
        max_text_tokens=limit,
    )


def test_the_loading_snippet_has_the_pipelines_guidance() -> None:
    model = {"family": "krea-2", "path": "krea/Krea-2-Raw"}
    config = build_config({"model": model, "rollout": {"true_cfg_scale": 4.5}}, "the test")
    snippet = loading_snippet(config, Path("/run/lora"), prompt="a cat")
    assert "guidance_scale=3.5" in snippet
    assert "negative_prompt=' '" in snippet


@pytest.mark.slow
def test_padding_is_no_part_of_a_condition(tmp_path: Path) -> None:
    Krea2.tiny(tmp_path, seed=0)
    short, long = (load(tmp_path, limit).encode(["a cat"])[0]["embeds"] for limit in (32, 64))
    assert short.shape[0] < 32
    torch.testing.assert_close(short, long)


@pytest.mark.slow
def test_other_layers_of_the_text_encoder_are_refused(tmp_path: Path) -> None:
    Krea2.tiny(tmp_path, seed=0)
    index = tmp_path / "model_index.json"
    settings = json.loads(index.read_text())
    index.write_text(json.dumps(settings | {"text_encoder_select_layers": list(range(12))}))
    with pytest.raises(
        ModelError, match=r"model_index\.json: text_encoder_select_layers is \[0, 1, .*expected \[2, 5"
    ):
        load(tmp_path)
