"""A pipeline's scores on held-out prompts, using plain diffusers rather than Spotlight's rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from diffusers import QwenImagePipeline

from spotlight_rewards.reward import Image
from spotlight_rewards.shapes import shapes
from tools.testbed.prompts import TAGS, Record
from tools.testbed.scenes import IMAGE_SIDE_PX

NEGATIVE_PROMPT = " "


@dataclass(frozen=True, slots=True)
class TagScore:
    """Mean scores of one tag, with standard errors over images."""

    strict: float
    strict_stderr: float
    graded: float
    graded_stderr: float
    images: int


@dataclass(frozen=True, slots=True)
class ScoreRecipe:
    """Scoring settings.

    Attributes:
        images_per_tag: minimum; each prompt of a tag gets the same number.
        guidance: true CFG scale; 1 means without.
    """

    images_per_tag: int = 192
    steps: int = 10
    guidance: float = 1.0
    batch: int = 64
    seed: int = 0


def score_pipeline(
    pipeline: QwenImagePipeline, records: Sequence[Record], recipe: ScoreRecipe
) -> dict[str, TagScore]:
    """Scores by tag, and ``overall``: the unweighted mean over tags, as in GenEval."""
    scores: dict[str, TagScore] = {}
    for index, tag in enumerate(TAGS):
        own = [record for record in records if record["tag"] == tag]
        own *= -(-recipe.images_per_tag // len(own))
        images = generate(pipeline, [str(record["prompt"]) for record in own], recipe, recipe.seed + index)
        result = shapes(list(images), [str(record["prompt"]) for record in own], own)
        strict, graded = np.array(result["strict"]), np.array(result["graded"])
        scores[tag] = TagScore(*_mean_and_error(strict), *_mean_and_error(graded), len(own))
    scores["overall"] = _overall(list(scores.values()))
    return scores


def generate(pipeline: QwenImagePipeline, prompts: Sequence[str], recipe: ScoreRecipe, seed: int) -> Image:
    """One image per prompt, deterministic given the seed: uint8 [prompts, 32, 32, 3]."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    pictures = []
    for start in range(0, len(prompts), recipe.batch):
        batch = list(prompts[start : start + recipe.batch])
        guided = {"negative_prompt": [NEGATIVE_PROMPT] * len(batch)} if recipe.guidance > 1 else {}
        output = pipeline(
            prompt=batch,
            true_cfg_scale=recipe.guidance,
            num_inference_steps=recipe.steps,
            height=IMAGE_SIDE_PX,
            width=IMAGE_SIDE_PX,
            generator=generator,
            output_type="np",
            **guided,
        )
        pictures.append((output.images * 255).round().astype(np.uint8))
    return np.concatenate(pictures)


def as_json(scores: dict[str, TagScore]) -> dict[str, dict[str, float]]:
    """Scores as numbers rounded to four digits."""
    return {tag: {key: round(value, 4) for key, value in asdict(s).items()} for tag, s in scores.items()}


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _overall(scores: Sequence[TagScore]) -> TagScore:
    def error(values: list[float]) -> float:
        return math.sqrt(sum(value**2 for value in values)) / len(values)

    return TagScore(
        float(np.mean([s.strict for s in scores])),
        error([s.strict_stderr for s in scores]),
        float(np.mean([s.graded for s in scores])),
        error([s.graded_stderr for s in scores]),
        sum(s.images for s in scores),
    )
