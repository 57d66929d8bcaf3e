"""LAION's aesthetic predictor: linear layers on CLIP ViT-L/14's unit vectors.

Dropout between the layers does nothing in inference, so the whole has no non-linearity. Imported in the
reward's own process only: it imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from spotlight_rewards.models.pretrained_model import find_file, read_tensors, tensors_digest
from spotlight_rewards.preference.clip_towers import load_towers
from spotlight_rewards.reward import Gradient, Image, RewardSetupError

WIDTHS = (768, 1024, 128, 64, 16, 1)
LAYERS = ("layers.0", "layers.2", "layers.4", "layers.6", "layers.7")
"""Names in the checkpoint, which counts dropout too."""
FILES = ("aesthetic-model.safetensors", "aesthetic-model.pth", "sac+logos+ava1-l14-linearMSE.pth")
"""In a directory or at the hub, the first that is there."""
_REMEDY = (
    "Name trl-lib/ddpo-aesthetic-predictor, or the file sac+logos+ava1-l14-linearMSE.pth of "
    "https://github.com/christophschuhmann/improved-aesthetic-predictor; and openai/clip-vit-large-patch14, "
    "or a directory that `hf download` filled with it elsewhere."
)


class AestheticModel:
    """The predictor on its CLIP.

    Raises:
        RewardSetupError: a model is missing, incomplete or another one.
    """

    def __init__(self, head: str, model: str, device: str, batch_size: int) -> None:
        key = "aesthetic reward: head"
        path = find_file(head, FILES, key=key, remedy=_REMEDY)
        tensors = read_tensors(path, key=key, remedy=_REMEDY)
        _require_head(tensors, path)
        self._towers = load_towers("aesthetic", model, model, device, batch_size, remedy=_REMEDY)
        if (width := self._towers.model.config.projection_dim) != WIDTHS[0]:
            raise RewardSetupError(
                f"aesthetic reward: model is {model!r}, whose embeddings are {width} wide; expected "
                f"{WIDTHS[0]}. {_REMEDY}"
            )
        self._tensors = {name: each.float().to(self._towers.model.device) for name, each in tensors.items()}
        self.identity = f"{head}@{tensors_digest(tensors)} {self._towers.identity}"

    @torch.inference_mode()
    def score(self, images: Sequence[Image]) -> list[float]:
        """The predictor's figure of each picture [height, width, 3]."""
        if not images:
            return []
        scores: list[float] = self._judged(self._towers.images(images)).tolist()
        return scores

    def gradients(self, images: Sequence[Image]) -> list[Gradient]:
        """Of the predictor's figures by pixels in [0, 1]; pictures of one size."""
        return self._towers.gradients(images, lambda seen, _: self._judged(seen))

    def _judged(self, seen: torch.Tensor) -> torch.Tensor:
        for layer in LAYERS:
            seen = F.linear(seen, self._tensors[f"{layer}.weight"], self._tensors[f"{layer}.bias"])
        return seen[:, 0]


def save_random_head(folder: Path) -> Path:
    """Write random weights of the predictor's shape; returns the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in _shapes().items():
        tensors[name] = 2 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    save_file(tensors, folder / FILES[0])
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (width, next_width) in zip(LAYERS, pairwise(WIDTHS), strict=True):
        shapes |= {f"{layer}.weight": (next_width, width), f"{layer}.bias": (next_width,)}
    return shapes


def _require_head(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    found = {name: tuple(each.shape) for name, each in tensors.items()}
    expected = _shapes()
    if found != expected:
        wrong = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise RewardSetupError(
            f"aesthetic reward: head is {path}, whose tensor {wrong!r} is {found.get(wrong, 'missing')}; "
            f"expected {expected.get(wrong, 'no such tensor')}. {_REMEDY}"
        )
