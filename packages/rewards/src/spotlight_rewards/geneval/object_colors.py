"""GenEval's colours: CLIP ViT-L/14 compares each object, cut out on grey, with ten colours of its class.

Templates, background and preprocessing: ``evaluation/evaluate_images.py`` of
https://github.com/djghosh13/geneval, with CLIP_benchmark's zero-shot classifier and open_clip's transform.
Imported in the reward's own process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image as PILImage

from spotlight_rewards.geneval.verdicts import Detection
from spotlight_rewards.geneval.vocabulary import COLORS
from spotlight_rewards.models.batches import in_batches
from spotlight_rewards.models.pretrained_model import load_pretrained, load_tokenizer
from spotlight_rewards.preference.clip_towers import MEAN, STD, UNREAD
from spotlight_rewards.reward import Image

TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
BACKGROUND = 0x99
_REMEDY = "Name openai/clip-vit-large-patch14, or a directory that `hf download` filled with it elsewhere."


class ColorClassifier:
    """Names the colour of detected objects.

    Args:
        source: hub id or directory of a CLIP model with its tokenizer.
        batch_size: objects in a forward.

    Raises:
        RewardSetupError: the weights or the tokenizer are missing or incomplete.
    """

    def __init__(self, source: str, device: torch.device, batch_size: int) -> None:
        from transformers import CLIPModel

        key = "geneval reward: clip"
        self.model, self.identity = load_pretrained(
            CLIPModel, source, key=key, remedy=_REMEDY, unread=UNREAD, device=device
        )
        self._tokenizer = load_tokenizer(source, key=key, remedy=_REMEDY)
        self._device, self._batch_size = device, batch_size
        self._directions: dict[str, torch.Tensor] = {}

    def classify(self, objects: Sequence[tuple[Image, Detection]]) -> list[str]:
        """The colour of each object, given with its picture.

        Raises:
            ValueError: the model's outputs are not finite.
        """
        return [name for part in in_batches(objects, self._batch_size) for name in self._classify(part)]

    @torch.inference_mode()
    def _classify(self, objects: Sequence[tuple[Image, Detection]]) -> Iterable[str]:
        side = self.model.config.vision_config.image_size
        pixels = torch.stack([_pixels(cut_out(image, each), side) for image, each in objects]).to(
            self._device
        )
        pooled = self.model.vision_model(pixel_values=pixels).pooler_output
        seen = F.normalize(self.model.visual_projection(pooled), dim=-1)
        directions = torch.stack([self._colors_of(each.name) for _, each in objects])
        likeness = torch.einsum("nd,ncd->nc", seen, directions)
        if not torch.isfinite(likeness).all():
            raise ValueError("GenEval's CLIP returned numbers that are not finite; its weights may be broken")
        return [COLORS[index] for index in likeness.argmax(1).tolist()]

    def _colors_of(self, name: str) -> torch.Tensor:
        """[colours, width]: for each, the mean of the templates' unit vectors, scaled to length 1."""
        if name not in self._directions:
            texts = [template.format(color=color, name=name) for color in COLORS for template in TEMPLATES]
            length = self.model.config.text_config.max_position_embeddings
            tokens = self._tokenizer(
                texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            )
            pooled = self.model.text_model(input_ids=tokens["input_ids"].to(self._device)).pooler_output
            units = F.normalize(self.model.text_projection(pooled), dim=-1)
            self._directions[name] = F.normalize(units.view(len(COLORS), len(TEMPLATES), -1).mean(1), dim=-1)
        return self._directions[name]


def cut_out(image: Image, found: Detection) -> PILImage.Image:
    """The object's box, with grey wherever its mask is not."""
    left, top, right, bottom = (round(float(side)) for side in found.box)
    inside = found.mask[top:bottom, left:right, None]
    return PILImage.fromarray(np.where(inside, image[top:bottom, left:right], np.uint8(BACKGROUND)))


def _pixels(picture: PILImage.Image, side: int) -> torch.Tensor:
    """[3, side, side]: the shorter side scaled to ``side`` (bicubic), the middle of the longer one."""
    width, height = picture.size
    shorter = min(width, height)
    size = int(side * width / shorter), int(side * height / shorter)
    picture = picture.resize(size, PILImage.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    pixels = np.asarray(picture.crop((left, top, left + side, top + side)), dtype=np.float32) / 255
    mean, std = (np.array(each, dtype=np.float32) for each in (MEAN, STD))
    return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)
