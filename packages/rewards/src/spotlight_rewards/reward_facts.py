"""What a reward's module says of itself beside its function, for ``spotlight rewards``.

``FACTS`` is a :class:`RewardFacts`. ``tiny``, for a reward with weights, puts small random models of the same
classes in their place (``spotlight train --smoke``):

    def tiny(folder: Path) -> dict[str, Any]:
        ...  # write them into the folder, and return the params that name them

It also gets those of the reward's parameters that its signature names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

PictureName: TypeAlias = Literal["sign", "shapes", "moving"]


class Reads(StrEnum):
    """What of a prompt a reward needs."""

    NOTHING = "nothing"
    TEXT = "text"
    METADATA = "metadata"


@dataclass(frozen=True, slots=True)
class Example:
    """A built-in picture (``example_pictures.py``) and what it should score, for ``spotlight rewards check``.

    Attributes:
        files: metadata fields that name a picture's file, each with the built-in picture to put there.
        score: lowest and highest expected score; both the same where the figure is known exactly.
        wrong_prompt: must score less than ``prompt``; empty: not compared.
    """

    picture: PictureName
    score: tuple[float, float]
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    wrong_prompt: str = ""
    files: Mapping[str, PictureName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """What users want to know of a reward before they choose it.

    Attributes:
        weights: hub ids or files that it scores with; empty: none.
        licence: of the weights.
        runs_on: where it is fast enough: ``CPU``, ``GPU``, ``a server``, or one of the last two; people:
            ``the dashboard``.
        typical: scores of ordinary pictures; None: depends on what it asks.
    """

    runs_on: Literal["CPU", "GPU", "a server", "GPU or a server", "the dashboard"]
    typical: tuple[float, float] | None
    reads: Reads
    weights: tuple[str, ...] = ()
    licence: str = "-"
    example: Example | None = None
