"""Configuration of model and prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spotlight.config.section import Section
from spotlight.registry import FAMILIES


class ModelConfig(Section):
    """Which Diffusion Transformer is trained."""

    family: Annotated[str, AfterValidator(FAMILIES.known())] = "qwen-image"
    """Model family: prompt template, guidance, schedule, decoding and LoRA targets of its pipeline."""
    path: str = "testbed"
    """Directory or hub id of a diffusers pipeline; ``testbed`` is the built-in tiny Qwen-Image."""
    revision: str | None = None
    """Branch, tag or commit if ``path`` is a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the frozen weights. Adapters and optimizer state are always float32."""
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512
    """Longer prompts are truncated, as in the pipeline."""


class DataConfig(Section):
    """Training prompts, and held-out prompts for evaluation."""

    train: str = "testbed"
    """File of training prompts (.txt: one per line; .jsonl: GenEval metadata); ``testbed``: built in."""
    test: str = "testbed"
    """File of held-out prompts for evaluation, in the same formats."""
    tags: tuple[str, ...] = ()
    """Keep only prompts with one of these metadata tags; empty: all."""
