"""Checks of a pipeline's parts, whose errors name file, key, value found and value expected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spotlight.models.model_errors import ModelError


def require_equal(path: Path, facts: Mapping[str, tuple[object, object, str]]) -> None:
    """Raise :class:`ModelError` for the first of ``facts`` whose found and expected values differ.

    Components of different models load without error: fail before the first forward does.

    Args:
        path: the configuration file.
        facts: key -> (found, expected, why).
    """
    for key, (found, wanted, why) in facts.items():
        if found != wanted:
            raise ModelError(f"{path}: {key} is {found}; expected {wanted} ({why})")


def require_even_split(degree: int, tokens: int, model: str) -> None:
    """Raise :class:`ModelError` unless ``degree`` divides the tokens of a picture and its text."""
    if tokens % degree:
        raise ModelError(
            f"degrees has {degree}; expected divisors of {tokens}, the tokens of a picture and its text: "
            f"{model} takes no text mask, so nothing can be padded. Change rollout.height or width, or leave "
            "the degree out"
        )
