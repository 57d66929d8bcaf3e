"""The reward ``pickscore``: which of two pictures for a prompt people would pick.

Source: Kirstain et al., "Pick-a-Pic", arXiv 2305.01569; scaled as Flow-GRPO does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reward import Image, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.preference.clip_towers import ClipTowers

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
FACTS = RewardFacts(
    runs_on="GPU",
    typical=(0.8, 0.9),
    reads=Reads.TEXT,
    weights=(MODEL, PROCESSOR),
    licence="MIT",
    example=Example(
        "sign",
        score=(0.5, 1.1),
        prompt="a white sign with the word OPEN",
        wrong_prompt="a photo of a dog in the snow",
    ),
)
_UNIT = 26.0
"""Brings ordinary scores near 1."""
_REMEDY = f"Name {MODEL} and the processor {PROCESSOR}, or directories that `hf download` filled with them."


@best_with(batch_size=16)
def pickscore(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    model: str = MODEL,
    processor: str = PROCESSOR,
    device: str = "auto",
    batch_size: int = 16,
) -> dict[str, list[float]]:
    """Score how well people would like each picture for its prompt: PickScore / 26.

    Args:
        images: uint8 [height, width, 3].
        prompts: read up to CLIP's 77 tokens.
        metadata: ignored.
        model: hub id or directory of PickScore's CLIP.
        processor: hub id or directory of its tokenizer and image processor.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures in a forward.

    Returns:
        ``score``, exp(logit_scale) x cosine / 26, and ``truncated``: 1 if the prompt was longer.

    Raises:
        RewardSetupError: a model is missing or incomplete, or the device cannot be used.
        ValueError: the model's outputs are not finite.
    """
    towers = _towers(model, processor, device, batch_size)
    found, factor = towers.compare(images, prompts), towers.logit_scale / _UNIT
    return {"score": [factor * each for each in found["cosine"]], "truncated": found["truncated"]}


def scored_by(
    *, model: str = MODEL, processor: str = PROCESSOR, device: str = "auto", batch_size: int = 16
) -> str:
    """Load the model; ``SOURCE@DIGEST`` of its weights."""
    return _towers(model, processor, device, batch_size).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random CLIP with its processor; the params that name them."""
    from spotlight_rewards.preference.tiny_clip import save_tiny_clip

    clip = str(save_tiny_clip(folder / "clip"))
    return {"model": clip, "processor": clip, "device": "auto"}


@lru_cache(maxsize=1)
def _towers(model: str, processor: str, device: str, batch_size: int) -> ClipTowers:
    from spotlight_rewards.preference.clip_towers import load_towers

    return load_towers("pickscore", model, processor, device, batch_size, remedy=_REMEDY)
