"""Which model is trained, and on which prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spotlight.config.section import Section
from spotlight.registry import FAMILIES


class ModelConfig(Section):
    """Which Diffusion Transformer is trained."""

    family: Annotated[str, AfterValidator(FAMILIES.known())] = "qwen-image"
    """Adapter that knows the pipeline: prompt template, guidance, schedule, decoding, LoRA targets."""
    path: str = "testbed"
    """Directory or hub id of a diffusers pipeline; ``testbed`` is the tiny Qwen-Image shipped here."""
    revision: str | None = None
    """Branch, tag or commit when ``path`` is a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage type of the frozen weights. Adapters and optimizer state are float32 in any case."""
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512
    """Prompts longer than this are cut, as the pipeline does."""


class DataConfig(Section):
    """Prompts to train on, and held-out prompts to judge by."""

    train: str = "testbed"
    """File of training prompts (.txt: one a line; .jsonl: GenEval metadata); ``testbed``: those shipped."""
    test: str = "testbed"
    """File of held-out prompts for evaluation, in the same formats."""
    tags: tuple[str, ...] = ()
    """Keep only prompts whose metadata tag is among these (empty: all)."""
