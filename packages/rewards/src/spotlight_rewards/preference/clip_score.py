"""The reward ``clip-score``: how well picture and prompt agree. Source: Hessel et al., arXiv 2104.08718."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reward import Image, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.preference.clip_towers import ClipTowers

MODEL = "openai/clip-vit-large-patch14"
FACTS = RewardFacts(
    runs_on="GPU",
    typical=(0.2, 0.35),
    reads=Reads.TEXT,
    weights=(MODEL,),
    licence="MIT",
    example=Example(
        "sign",
        score=(0.1, 0.5),
        prompt="a white sign with the word OPEN",
        wrong_prompt="a photo of a dog in the snow",
    ),
)
_REMEDY = f"Name {MODEL}, or a directory that `hf download` filled with it elsewhere."


@best_with(batch_size=16)
def clip_score(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    model: str = MODEL,
    device: str = "auto",
    batch_size: int = 16,
) -> dict[str, list[float]]:
    """Score the cosine of each picture's and its prompt's CLIP embeddings.

    Args:
        images: uint8 [height, width, 3].
        prompts: read up to CLIP's 77 tokens.
        metadata: ignored.
        model: hub id or directory of a CLIP with its processor.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures in a forward.

    Returns:
        ``score``, and ``truncated``: 1 if the prompt was longer.

    Raises:
        RewardSetupError: the model is missing or incomplete, or the device cannot be used.
        ValueError: the model's outputs are not finite.
    """
    found = _towers(model, device, batch_size).compare(images, prompts)
    return {"score": found["cosine"], "truncated": found["truncated"]}


def scored_by(*, model: str = MODEL, device: str = "auto", batch_size: int = 16) -> str:
    """Load the model; ``SOURCE@DIGEST`` of its weights."""
    return _towers(model, device, batch_size).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random CLIP; the params that name it."""
    from spotlight_rewards.preference.tiny_clip import save_tiny_clip

    return {"model": str(save_tiny_clip(folder / "clip")), "device": "auto"}


@lru_cache(maxsize=1)
def _towers(model: str, device: str, batch_size: int) -> ClipTowers:
    from spotlight_rewards.preference.clip_towers import load_towers

    return load_towers("clip-score", model, model, device, batch_size, remedy=_REMEDY)
