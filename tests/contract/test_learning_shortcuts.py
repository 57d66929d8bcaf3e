"""A model or a device that cannot take the shortcuts of previews is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import prepare_model
from spotlight.scheduler.types import Purpose
from spotlight_rewards.base.errors import ConfigError


def config_of(pipeline: Path, tmp_path: Path, **exploration: object) -> RunConfig:
    sections = {"model": {"path": str(pipeline)}, "cache_dir": str(tmp_path), "exploration": exploration}
    return build_config(sections, "the test")


def test_a_model_that_can_is_taken(random_pipeline: Path, tmp_path: Path) -> None:
    config = config_of(random_pipeline, tmp_path, step_cache=2, dtype="bfloat16")
    explore = prepare_model(config, torch.device("cpu")).recipes[Purpose.EXPLORE]
    assert (explore.step_cache, explore.autocast) == (2, torch.bfloat16)


def test_a_model_that_cannot_is_refused(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(random_pipeline, tmp_path, step_cache=2)
    family = build.load_family(config, torch.device("cpu"))
    blocks = family.transformer.transformer_blocks
    assert isinstance(blocks, nn.ModuleList)
    del blocks[1:]
    monkeypatch.setattr(build, "load_family", lambda config, device, **options: family)
    message = r"exploration\.step_cache: found 2; .*has 1 transformer blocks.*: leave it out"
    with pytest.raises(ConfigError, match=message):
        prepare_model(config, torch.device("cpu"))
    prepare_model(config_of(random_pipeline, tmp_path), torch.device("cpu"))
