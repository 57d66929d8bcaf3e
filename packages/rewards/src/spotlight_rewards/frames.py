"""Rewards for pictures applied to videos: some frames are scored, and their scores combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.returned_scores import as_curves, sample_errors
from spotlight_rewards.reward import Curves, Image, RewardFunction, SampleError

Reduction: TypeAlias = Callable[[NDArray[np.float64]], Any]


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Which frames of a video a reward for pictures sees.

    Attributes:
        count: evenly spaced frames, the first and the last among them; 1: the middle one.
        combine: of the frames' scores, curve by curve.
    """

    count: int = 4
    combine: Literal["mean", "min"] = "mean"

    def chosen(self, frames: int) -> list[int]:
        """Indices among ``frames`` frames, ascending and distinct."""
        if self.count == 1:
            return [frames // 2]
        return sorted({round(at) for at in np.linspace(0, frames - 1, min(self.count, frames))})


@dataclass(frozen=True, slots=True)
class OverFrames:
    """A reward for pictures that also scores videos. Pictures are passed on as they are.

    Attributes:
        added_curves: summed over a video's frames, whatever the rule.
    """

    function: RewardFunction
    rule: FrameRule
    added_curves: frozenset[str] = frozenset()

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[float | SampleError] | Curves:
        """Scores per picture or video; in one call of the reward, which may compare pictures.

        Raises :class:`RewardResultError` where a sample is a video.
        """
        if all(image.ndim == 3 for image in images):
            return self.function(images, prompts, metadata)
        shown = [
            [image] if image.ndim == 3 else [image[at] for at in self.rule.chosen(len(image))]
            for image in images
        ]
        owner = [index for index, frames in enumerate(shown) for _ in frames]
        found = self.function(
            [frame for frames in shown for frame in frames],
            [prompts[index] for index in owner],
            [metadata[index] for index in owner],
        )
        rule: Reduction = np.mean if self.rule.combine == "mean" else np.min
        cuts = np.cumsum([len(frames) for frames in shown])[:-1]
        combined: dict[str, list[float | SampleError]] = {}
        for curve, scores in as_curves(found, len(owner)).items():
            combine = np.sum if curve in self.added_curves else rule
            combined[curve] = [float(combine(part)) for part in np.split(np.array(scores), cuts)]
        for at, error in sample_errors(found).items():
            combined["score"][owner[at]] = error
        return combined
