"""The reward ``aesthetic``: how beautiful people would find a picture, whatever its prompt, about 1 to 10.

Source: LAION's second predictor, ``sac+logos+ava1-l14-linearMSE`` of
https://github.com/christophschuhmann/improved-aesthetic-predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reward import Image, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.preference.aesthetic_head import AestheticModel

HEAD = "trl-lib/ddpo-aesthetic-predictor"
"""Its ``aesthetic-model.pth`` is ``sac+logos+ava1-l14-linearMSE.pth`` under another name."""
MODEL = "openai/clip-vit-large-patch14"
FACTS = RewardFacts(
    runs_on="GPU",
    typical=(5, 6.5),
    reads=Reads.NOTHING,
    weights=(HEAD, MODEL),
    licence="Apache-2.0, MIT",
    example=Example("sign", score=(2, 7)),
)


@best_with(batch_size=16)
def aesthetic(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    head: str = HEAD,
    model: str = MODEL,
    device: str = "auto",
    batch_size: int = 16,
) -> list[float]:
    """Score how beautiful each picture is, about 1 to 10, whatever its prompt.

    Args:
        images: uint8 [height, width, 3].
        prompts: ignored.
        metadata: ignored.
        head: hub id, directory or file of the predictor's MLP, ``.safetensors`` or ``.pth``.
        model: hub id or directory of the CLIP ViT-L/14 that it was trained on.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures in a forward.

    Raises:
        RewardSetupError: a model is missing or incomplete, or the device cannot be used.
        ValueError: a model's outputs are not finite.
    """
    return _predictor(head, model, device, batch_size).score(images)


def scored_by(*, head: str = HEAD, model: str = MODEL, device: str = "auto", batch_size: int = 16) -> str:
    """Load the models; predictor and CLIP, each as ``SOURCE@DIGEST`` of its weights."""
    return _predictor(head, model, device, batch_size).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a random predictor and a small random CLIP; the params that name them."""
    from spotlight_rewards.preference.aesthetic_head import WIDTHS, save_random_head
    from spotlight_rewards.preference.tiny_clip import save_tiny_clip

    clip = save_tiny_clip(folder / "clip", width=WIDTHS[0])
    return {"head": str(save_random_head(folder / "head")), "model": str(clip), "device": "auto"}


@lru_cache(maxsize=1)
def _predictor(head: str, model: str, device: str, batch_size: int) -> AestheticModel:
    from spotlight_rewards.preference.aesthetic_head import AestheticModel

    return AestheticModel(head, model, device, batch_size)
