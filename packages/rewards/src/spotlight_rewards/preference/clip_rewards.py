"""The rewards of CLIP's embeddings: what people prefer, and how well picture and text agree.

``pickscore``: Kirstain et al., "Pick-a-Pic", arXiv 2305.01569, scaled as Flow-GRPO does. ``hps``: Wu et al.,
"Human Preference Score v2", arXiv 2306.09341, https://github.com/tgxs002/HPSv2. ``clip-score``: Hessel et
al., arXiv 2104.08718. ``aesthetic``: LAION's second predictor, ``sac+logos+ava1-l14-linearMSE`` of
https://github.com/christophschuhmann/improved-aesthetic-predictor. Starts without torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from spotlight_rewards.reward import Curves, Gradient, Image, Reward, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.preference.aesthetic_head import AestheticModel
    from spotlight_rewards.preference.clip_towers import ClipTowers

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PICKSCORE = "yuvalkirstain/PickScore_v1"
HPS = "xswu/HPSv2"
AESTHETIC_HEAD = "trl-lib/ddpo-aesthetic-predictor"
"""Its ``aesthetic-model.pth`` is ``sac+logos+ava1-l14-linearMSE.pth`` under another name."""
_PICKSCORE_UNIT = 26.0
"""Brings ordinary scores near 1."""


def _sign(low: float, high: float) -> Example:
    """The built-in sign with a prompt that suits it and one that does not."""
    right, wrong = "a white sign with the word OPEN", "a photo of a dog in the snow"
    return Example("sign", score=(low, high), prompt=right, wrong_prompt=wrong)


@dataclass(frozen=True, kw_only=True)
class ClipReward(Reward):
    """A reward of one CLIP, whose weights are hub ids or paths.

    Prompts are read up to CLIP's 77 tokens; the curve ``truncated`` is 1 where one was longer. Scoring raises
    ValueError if the model's outputs are not finite.

    Attributes:
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures in a forward.
    """

    device: str = "auto"
    batch_size: int = 16

    @property
    @abstractmethod
    def scorer(self) -> ClipTowers | AestheticModel:
        """The model, loaded once. Raises RewardSetupError."""

    def scored_by(self) -> str:
        """Load the model; ``SOURCE@DIGEST`` of its weights."""
        return self.scorer.identity


@dataclass(frozen=True, kw_only=True)
class ClipComparison(ClipReward):
    """A reward that compares pictures with their prompts."""

    @property
    @abstractmethod
    def scorer(self) -> ClipTowers:
        """See :attr:`ClipReward.scorer`."""

    @property
    def factor(self) -> float:
        """Of the cosine."""
        return 1.0

    def read(self, prompt: str) -> str:
        """A prompt as the model was trained to see it."""
        return prompt

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        return self.scorer.compare(images, [*map(self.read, prompts)], self.factor)

    def gradient(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Gradient]:
        return self.scorer.compared_gradients(images, [*map(self.read, prompts)], self.factor)


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class PickScore(ClipComparison):
    """Score how well people would like each picture for its prompt: PickScore / 26.

    ``score`` is exp(logit_scale) x cosine / 26.

    Attributes:
        model: hub id or directory of PickScore's CLIP.
        processor: hub id or directory of its tokenizer and image processor.
    """

    model: str = PICKSCORE
    processor: str = CLIP_H

    facts: ClassVar = RewardFacts(
        runs_on="GPU", typical=(0.8, 0.9), reads=Reads.TEXT, weights=(PICKSCORE, CLIP_H), licence="MIT",
        example=_sign(0.5, 1.1),
    )  # fmt: skip

    @cached_property
    def scorer(self) -> ClipTowers:
        from spotlight_rewards.preference.clip_towers import load_towers

        remedy = f"Name {PICKSCORE} and {CLIP_H}, or directories that `hf download` filled with them."
        return load_towers(
            "pickscore", self.model, self.processor, self.device, self.batch_size, remedy=remedy
        )

    @property
    def factor(self) -> float:
        return self.scorer.logit_scale / _PICKSCORE_UNIT

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.preference.tiny_clip import save_tiny_clip

        clip = str(save_tiny_clip(folder / "clip"))
        return {"model": clip, "processor": clip, "device": "auto"}


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class Hps(ClipComparison):
    """Score how well people would like each picture for its prompt: HPS v2.1, a cosine.

    Attributes:
        weights: hub id, directory or file of ``HPS_v2.1_compressed.pt``.
        tokenizer: hub id or directory of the tokenizer of CLIP ViT-H-14.
    """

    weights: str = HPS
    tokenizer: str = CLIP_H

    facts: ClassVar = RewardFacts(
        runs_on="GPU", typical=(0.25, 0.35), reads=Reads.TEXT, weights=(HPS, CLIP_H),
        licence="Apache-2.0, MIT", example=_sign(0.1, 0.45),
    )  # fmt: skip

    @cached_property
    def scorer(self) -> ClipTowers:
        from spotlight_rewards.preference.open_clip_weights import load_hps

        return load_hps(self.weights, self.tokenizer, self.device, self.batch_size)

    def read(self, prompt: str) -> str:
        return cleaned(prompt)

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.preference.tiny_clip import save_spelling_tokenizer, save_tiny_open_clip

        tokens = save_spelling_tokenizer(folder / "tokenizer")
        weights = save_tiny_open_clip(folder / "weights", tokens)
        return {"weights": str(weights), "tokenizer": str(folder / "tokenizer"), "device": "auto"}


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class ClipScore(ClipComparison):
    """Score the cosine of each picture's and its prompt's CLIP embeddings.

    Attributes:
        model: hub id or directory of a CLIP with its processor.
    """

    model: str = CLIP_L

    facts: ClassVar = RewardFacts(
        runs_on="GPU", typical=(0.2, 0.35), reads=Reads.TEXT, weights=(CLIP_L,), licence="MIT",
        example=_sign(0.1, 0.5),
    )  # fmt: skip

    @cached_property
    def scorer(self) -> ClipTowers:
        from spotlight_rewards.preference.clip_towers import load_towers

        remedy = f"Name {CLIP_L}, or a directory that `hf download` filled with it elsewhere."
        return load_towers("clip-score", self.model, self.model, self.device, self.batch_size, remedy=remedy)

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.preference.tiny_clip import save_tiny_clip

        return {"model": str(save_tiny_clip(folder / "clip")), "device": "auto"}


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class Aesthetic(ClipReward):
    """Score how beautiful each picture is, about 1 to 10, whatever its prompt.

    Attributes:
        head: hub id, directory or file of the predictor's MLP, ``.safetensors`` or ``.pth``.
        model: hub id or directory of the CLIP ViT-L/14 that it was trained on.
    """

    head: str = AESTHETIC_HEAD
    model: str = CLIP_L

    facts: ClassVar = RewardFacts(
        runs_on="GPU", typical=(5, 6.5), reads=Reads.NOTHING, weights=(AESTHETIC_HEAD, CLIP_L),
        licence="Apache-2.0, MIT", example=Example("sign", score=(2, 7)),
    )  # fmt: skip

    @cached_property
    def scorer(self) -> AestheticModel:
        from spotlight_rewards.preference.aesthetic_head import AestheticModel

        return AestheticModel(self.head, self.model, self.device, self.batch_size)

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        return self.scorer.score(images)

    def gradient(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Gradient]:
        return self.scorer.gradients(images)

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.preference.aesthetic_head import WIDTHS, save_random_head
        from spotlight_rewards.preference.tiny_clip import save_tiny_clip

        clip = save_tiny_clip(folder / "clip", width=WIDTHS[0])
        return {"head": str(save_random_head(folder / "head")), "model": str(clip), "device": "auto"}


def cleaned(prompt: str) -> str:
    """A prompt as open_clip reads it."""
    from ftfy import fix_text

    return unescape(unescape(fix_text(prompt))).strip()
