"""Exports to a place that cannot be written: our error, with the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots
from spotlight.training.lora_export import save_lora, save_merged
from spotlight_files.model_errors import ModelError


def test_a_place_that_cannot_be_written_is_reported(random_pipeline: Path, tmp_path: Path) -> None:
    family = QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "e"
    )
    slots = LoraSlots(family.transformer, LoraSpec(rank=2, alpha=2.0, targets=family.lora_targets))
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ModelError, match=r"cannot write the LoRA to .*file/lora: .* Free some space"):
        save_lora(family, file / "lora", slots.state("policy"), slots.metadata())
    with pytest.raises(ModelError, match=r"cannot write the merged pipeline to .*file/merged: .* Free some"):
        save_merged(family, file / "merged", slots.merged_state("policy"))
    assert file.read_text() == "mine"
