"""Samples that are pictures of the training data, in the place of denoised ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.rollout.state import FinishedRollout, Recipe, SampleTensors
from spotlight.scheduler.types import Rollout
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.media_files import read_media
from spotlight_rewards.base.prompt_files import PromptFileError
from spotlight_rewards.base.prompts import Prompt, PromptId

_DAMAGED_SHOWN, _TEXT_SHOWN = 10, 60


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
        latents = dict(zip(pictures, self._encoded(list(pictures.values()), recipe.size), strict=True))
        return [
            FinishedRollout(
                rollout,
                pictures[path],
                SampleTensors(latents[path], self.family.sigmas(rollout.steps, recipe.size)),
            )
            for rollout, path in zip(rollouts, paths, strict=True)
        ]

    @torch.no_grad()
    def _encoded(self, pictures: Sequence[NDArray[np.uint8]], size: MediaSize) -> Iterator[Tensor]:
        """Latents on the CPU; an encoder needs as much memory per pixel as a decoder."""
        together = size.decoded_together(len(pictures))
        for start in range(0, len(pictures), together):
            stacked = torch.from_numpy(np.stack(pictures[start : start + together])).to(self.family.device)
            frames = stacked.permute(0, 3, 1, 2).unsqueeze(2)
            yield from self.family.encode_frames(frames.float() / 127.5 - 1, size).cpu()

    def _path(self, rollout: Rollout) -> Path:
        pictures = self.prompts[rollout.prompt_id].pictures
        return Path(pictures[rollout.member * len(pictures) // self.group_size])


def require_readable(prompts: Iterable[Prompt]) -> None:
    """Decode all pictures, which rows of a data set may name that are damaged. Raises PromptFileError."""
    damaged = []
    for prompt in prompts:
        for path in prompt.pictures:
            try:
                read_media(Path(path))
            except StoreError as error:
                damaged.append(f"  {prompt.text[:_TEXT_SHOWN]!r}: {error}")
    if damaged:
        shown = [*damaged[:_DAMAGED_SHOWN], *["  ..."] * (len(damaged) > _DAMAGED_SHOWN)]
        raise PromptFileError(
            "\n".join([f"data.train: {len(damaged)} pictures cannot be read; leave out their rows:", *shown])
        )


def picture_of(path: Path, size: MediaSize) -> NDArray[np.uint8]:
    """[height, width, 3]: the middle of a picture in these proportions, scaled."""
    picture, _ = read_media(path)
    first = picture[0] if picture.ndim == 4 else picture
    cut = ImageOps.fit(Image.fromarray(first), (size.width, size.height), Image.Resampling.LANCZOS)
    return np.asarray(cut)
