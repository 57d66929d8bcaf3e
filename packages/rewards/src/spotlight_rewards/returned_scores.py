"""What a reward returns, checked: one number per sample and curve, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from spotlight_rewards.reward import Gradient, Image, SampleError


class RewardResultError(Exception):
    """A reward returned something other than one number per sample."""


def as_curves(found: object, samples: int) -> dict[str, list[float]]:
    """Convert a reward's return value to lists of floats by curve; non-finite numbers pass.

    In place of a :class:`SampleError` stands NaN.

    Raises:
        RewardResultError: not one number per sample; names the curve, what was found and what was expected.
    """
    if not isinstance(found, Mapping):
        return {"score": _as_floats("a result", found, samples)}
    if "score" not in found:
        keys = sorted(map(str, found))
        raise RewardResultError(f"returned a dictionary with the keys {keys}; expected 'score' among them")
    if "" in found or not all(isinstance(name, str) for name in found):
        raise RewardResultError(
            f"returned a dictionary with the keys {list(found)!r}; expected non-empty strings"
        )
    return {name: _as_floats(f"a {name!r}", values, samples) for name, values in found.items()}


def as_gradients(found: Sequence[object], images: Sequence[Image]) -> list[Gradient]:
    """In float32. Raises RewardResultError unless there is one in the shape of each image."""
    gradients = [np.asarray(each, np.float32) for each in found]
    shapes, expected = [each.shape for each in gradients], [image.shape for image in images]
    if shapes != expected:
        raise RewardResultError(f"returned gradients of shapes {shapes}; expected {expected}, as its images")
    return gradients


def sample_errors(found: object) -> dict[int, SampleError]:
    """By index, why a sample has no score; of a return value that :func:`as_curves` accepts."""
    scores = found["score"] if isinstance(found, Mapping) else found
    assert isinstance(scores, Iterable)
    return {index: each for index, each in enumerate(scores) if isinstance(each, SampleError)}


def _as_floats(what: str, found: object, samples: int) -> list[float]:
    expected = f"expected a list of {samples} numbers, one a sample"
    try:
        array = np.asarray(found)
    except Exception as error:
        raise RewardResultError(
            f"returned {what} of type {type(found).__name__!r} ({error}); {expected}"
        ) from error
    if array.ndim == 0:
        raise RewardResultError(
            f"returned {what} of type {type(found).__name__!r}, {_short(found)}; {expected}"
        )
    if array.ndim > 1:
        raise RewardResultError(f"returned {what} of shape {list(array.shape)}; {expected}")
    if len(array) != samples:
        raise RewardResultError(f"returned {what} of {len(array)} values for {samples} images; {expected}")
    if array.dtype.kind not in "fiub":
        values = found if isinstance(found, Sequence) else array.tolist()
        for index, value in enumerate(values):
            if not isinstance(value, int | float | np.integer | np.floating | np.bool_ | SampleError):
                kind = type(value).__name__
                raise RewardResultError(
                    f"returned {what} with {_short(value)} of type {kind!r} for sample {index}; {expected}"
                )
    return [math.nan if isinstance(value, SampleError) else float(value) for value in array]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
