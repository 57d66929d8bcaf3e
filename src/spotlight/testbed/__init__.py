"""The embedded default: a tiny but complete Qwen-Image pipeline and its prompts.

Importing this package is free (no torch): it only defines paths.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

PIPELINE_DIR = _HERE / "pipeline"
"""A diffusers ``QwenImagePipeline`` directory: 32 x 32 images of coloured shapes."""

TRAIN_PROMPTS = _HERE / "data" / "train_metadata.jsonl"
TEST_PROMPTS = _HERE / "data" / "test_metadata.jsonl"
"""Prompts in GenEval's metadata format, disjoint from the training file."""
