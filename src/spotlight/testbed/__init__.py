"""The embedded testbeds: tiny but complete pipelines and their prompts.

Importing this package is free (no torch): it only defines paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_TEXT, _VIDEO = _HERE / "text", _HERE / "video"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """One testbed.

    Attributes:
        family: its model family.
        pipeline: a diffusers pipeline directory.
        train, test: prompts in GenEval's metadata format, disjoint.
        example: a prompt that it understands.
    """

    family: str
    pipeline: Path
    train: Path
    test: Path
    example: str


PIPELINE_DIR = _HERE / "pipeline"
"""A diffusers ``QwenImagePipeline`` directory: 32 x 32 images of coloured shapes."""

TRAIN_PROMPTS = _HERE / "data" / "train_metadata.jsonl"
TEST_PROMPTS = _HERE / "data" / "test_metadata.jsonl"

TESTBEDS: Mapping[str, EmbeddedModel] = {
    "testbed": EmbeddedModel("qwen-image", PIPELINE_DIR, TRAIN_PROMPTS, TEST_PROMPTS, "two red circles"),
    # A ``QwenImagePipeline``: 16 x 56 pictures of a word of two to five letters.
    "testbed-text": EmbeddedModel(
        "qwen-image",
        _TEXT / "pipeline",
        _TEXT / "data" / "train.jsonl",
        _TEXT / "data" / "test.jsonl",
        'the word "HEART" in red',
    ),
    # A ``WanPipeline``: 5 frames of 32 x 32, one coloured shape that moves.
    "testbed-video": EmbeddedModel(
        "wan",
        _VIDEO / "pipeline",
        _VIDEO / "data" / "train.jsonl",
        _VIDEO / "data" / "test.jsonl",
        "a red circle moving left",
    ),
}
"""By what ``model.path``, ``data.train`` and ``data.test`` may be."""


FOUR_STEPS = "testbed-four-steps"
"""What ``model.lora`` may be: the ``testbed`` distilled to four steps."""
FOUR_STEPS_DIR = _HERE / "four_steps"


def lora_path(path: str) -> str:
    """The directory of the embedded LoRA; any other ``model.lora`` as it is."""
    return str(FOUR_STEPS_DIR) if path == FOUR_STEPS else path


def pipeline_directory(path: str) -> str:
    """The directory of an embedded pipeline; any other ``model.path`` as it is."""
    return str(TESTBEDS[path].pipeline) if path in TESTBEDS else path
