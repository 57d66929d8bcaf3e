"""Samples that are pictures of the training data, in the place of denoised ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.rollout.state import FinishedRollout, Recipe, SampleTensors
from spotlight.scheduler.types import Rollout
from spotlight_rewards.base.media_files import read_media
from spotlight_rewards.base.prompts import Prompt, PromptId


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """Makes a group's samples of its prompt's pictures, in their order, each equally often or nearly so."""

    family: ModelFamily
    prompts: Mapping[PromptId, Prompt]
    group_size: int

    def samples(self, rollouts: Sequence[Rollout], recipe: Recipe) -> list[FinishedRollout]:
        """Cut to the recipe's size and encoded. Raises StoreError for a file that is no picture."""
        paths = [self._path(rollout) for rollout in rollouts]
        pictures = {path: picture_of(path, recipe.size) for path in dict.fromkeys(paths)}
        stacked = np.stack(list(pictures.values()))
        latents = dict(zip(pictures, self.family.encode_pictures(stacked, recipe.size), strict=True))
        return [
            FinishedRollout(
                rollout,
                pictures[path],
                SampleTensors(latents[path].cpu(), self.family.sigmas(rollout.steps, recipe.size)),
            )
            for rollout, path in zip(rollouts, paths, strict=True)
        ]

    def _path(self, rollout: Rollout) -> Path:
        pictures = self.prompts[rollout.prompt_id].pictures
        return Path(pictures[rollout.member * len(pictures) // self.group_size])


def picture_of(path: Path, size: MediaSize) -> NDArray[np.uint8]:
    """[height, width, 3]: the middle of a picture in these proportions, scaled."""
    picture, _ = read_media(path)
    first = picture[0] if picture.ndim == 4 else picture
    cut = ImageOps.fit(Image.fromarray(first), (size.width, size.height), Image.Resampling.LANCZOS)
    return np.asarray(cut)
