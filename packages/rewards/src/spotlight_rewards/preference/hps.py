"""The reward ``hps``: Human Preference Score 2.1, how well people would like a picture for its prompt.

Source: Wu et al., "Human Preference Score v2", arXiv 2306.09341, and https://github.com/tgxs002/HPSv2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reward import Image, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.preference.clip_towers import ClipTowers

WEIGHTS = "xswu/HPSv2"
TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
FACTS = RewardFacts(
    runs_on="GPU",
    typical=(0.25, 0.35),
    reads=Reads.TEXT,
    weights=(WEIGHTS, TOKENIZER),
    licence="Apache-2.0, MIT",
    example=Example(
        "sign",
        score=(0.1, 0.45),
        prompt="a white sign with the word OPEN",
        wrong_prompt="a photo of a dog in the snow",
    ),
)
_STRAIGHT = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


@best_with(batch_size=16)
def hps(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    weights: str = WEIGHTS,
    tokenizer: str = TOKENIZER,
    device: str = "auto",
    batch_size: int = 16,
) -> dict[str, list[float]]:
    """Score how well people would like each picture for its prompt: HPS v2.1, a cosine.

    Args:
        images: uint8 [height, width, 3].
        prompts: read up to CLIP's 77 tokens.
        metadata: ignored.
        weights: hub id, directory or file of ``HPS_v2.1_compressed.pt``.
        tokenizer: hub id or directory of the tokenizer of CLIP ViT-H-14.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures in a forward.

    Returns:
        ``score``, and ``truncated``: 1 if the prompt was longer.

    Raises:
        RewardSetupError: weights are missing or of another model, or the device cannot be used.
        ValueError: the model's outputs are not finite.
    """
    towers = _towers(weights, tokenizer, device, batch_size)
    found = towers.compare(images, [cleaned(prompt) for prompt in prompts])
    return {"score": found["cosine"], "truncated": found["truncated"]}


def cleaned(prompt: str) -> str:
    """A prompt as open_clip reads it: HTML's entities resolved, quotes straight.

    What else ftfy repairs there, such as text in a wrong encoding, stays as it is.
    """
    return unescape(unescape(prompt)).translate(_STRAIGHT)


def scored_by(
    *, weights: str = WEIGHTS, tokenizer: str = TOKENIZER, device: str = "auto", batch_size: int = 16
) -> str:
    """Load the model; ``SOURCE@DIGEST`` of its weights."""
    return _towers(weights, tokenizer, device, batch_size).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random checkpoint in open_clip's names and a tokenizer; the params that name them."""
    from spotlight_rewards.preference.tiny_clip import save_spelling_tokenizer, save_tiny_open_clip

    tokens = save_spelling_tokenizer(folder / "tokenizer")
    weights = save_tiny_open_clip(folder / "weights", tokens)
    return {"weights": str(weights), "tokenizer": str(folder / "tokenizer"), "device": "auto"}


@lru_cache(maxsize=1)
def _towers(weights: str, tokenizer: str, device: str, batch_size: int) -> ClipTowers:
    from spotlight_rewards.preference.open_clip_weights import load_hps

    return load_hps(weights, tokenizer, device, batch_size)
