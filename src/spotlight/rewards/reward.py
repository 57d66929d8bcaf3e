"""What a reward function is.

A reward is a plain function over a batch of images. It runs in a process of its own (see
``rewards/reward_pool.py``), so it may crash or hang without taking the run along, and it never needs torch.

    def my_reward(images, prompts, metadata, **params):
        return [float(image.mean()) / 255 for image in images]

It returns one float a sample, or a dictionary of such lists whose key ``"score"`` is the reward and
whose other keys become curves of their own (the GenEval reward returns its strict score this way).

The module that holds the function may also hold ``check``, called once with all prompts before any work:

    def check(prompts, metadata, **params):
        ...  # raise RewardInputError for a prompt that cannot be scored

``check`` is given those of the reward's parameters that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""One picture: [height, width, 3], sRGB."""


class RewardFunction(Protocol):
    """A function from a batch of pictures to their scores (see the module's docstring)."""

    def __call__(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        **params: Any,
    ) -> Sequence[float] | Mapping[str, Sequence[float]]:
        """Score every image."""


class RewardInputError(ValueError):
    """A prompt lacks what the reward needs (named, with the remedy). Raised before any work."""


class RewardSetupError(RuntimeError):
    """A reward cannot be loaded or lacks what it runs on (named, with the remedy). Raised before any work."""


@dataclass(frozen=True, slots=True)
class RewardScore:
    """The scores of one sample under one reward.

    Attributes:
        value: what training maximises.
        details: further curves, by name (``strict`` of the shapes detector).
    """

    value: float
    details: Mapping[str, float]
