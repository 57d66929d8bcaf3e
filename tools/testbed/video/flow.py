"""Joint pre-training of the video testbed's DiT and text encoder by flow matching.

As for pictures (``tools/testbed/flow.py``), with one difference: captions say the shape and the colour
reliably and the direction only sometimes, as captions of videos on the web do. So the model moves what it
draws, and whether it moves as asked is left to reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.nn import functional as F

from spotlight_rewards.motion import DIRECTIONS
from spotlight_rewards.reward import Image
from tools.testbed.flow import stratified_times, train_averaged
from tools.testbed.prompts import Record
from tools.testbed.vae import Log
from tools.testbed.video.architecture import TEXT_TOKENS, Parts
from tools.testbed.video.clips import render_all
from tools.testbed.video.prompts import record
from tools.testbed.video.vae import encode

UNCONDITIONAL = ""


@dataclass(frozen=True, slots=True)
class VideoFlowRecipe:
    """Training settings.

    Attributes:
        clips: size of the pool of rendered clips; each is seen several times, with fresh noise.
        random_direction: share of clips that move in a random direction, whatever their caption says.
        learning_rate: AdamW's peak.
        unconditional: share of captions replaced by "".
        ema_decay: of the averaged weights, which are the result.
    """

    clips: int = 4096
    random_direction: float = 0.4
    steps: int = 3000
    batch: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    unconditional: float = 0.1
    ema_decay: float = 0.998


@dataclass(frozen=True, slots=True)
class VideoFlowData:
    """Training data.

    Attributes:
        latents: normalised, [clips, channels, latent frames, height, width].
        captions: each clip's caption as an index, [clips].
        token_ids, token_mask: tokenised captions, [captions + 1, tokens]; the last row is unconditional.
    """

    latents: Tensor
    captions: Tensor
    token_ids: Tensor
    token_mask: Tensor


def make_data(parts: Parts, train: Sequence[Record], recipe: VideoFlowRecipe, seed: int) -> VideoFlowData:
    """Draw captions evenly; render and encode one clip for each, some of which move elsewhere."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(train), size=recipe.clips)
    elsewhere = rng.random(recipe.clips) < recipe.random_direction
    directions = rng.choice(list(DIRECTIONS), size=recipe.clips)
    shown = []
    for index, moved, direction in zip(chosen, elsewhere, directions, strict=True):
        (thing,) = train[index]["include"]
        shown.append(record(thing["class"], thing["color"], str(direction)) if moved else train[index])
    texts = [*(str(each["prompt"]) for each in train), UNCONDITIONAL]
    tokens = parts.tokenizer(texts, padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt")
    return VideoFlowData(
        normalised(parts.vae, render_all(shown, seed)),
        torch.from_numpy(chosen),
        tokens.input_ids,
        tokens.attention_mask,
    )


def normalised(vae: AutoencoderKLWan, videos: Image) -> Tensor:
    """Each video's x0, as in the pipeline."""
    mean, std = (
        torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    return (encode(vae, videos) - mean) / std


class JointVideoModel(nn.Module):
    """Text encoder and DiT as one module."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.text = parts.text_encoder
        self.transformer = parts.transformer

    def forward(self, latents: Tensor, t: Tensor, token_ids: Tensor, token_mask: Tensor) -> Tensor:
        """Velocities like ``latents`` at noise levels ``t: [batch]``."""
        hidden = self.text(input_ids=token_ids, attention_mask=token_mask).last_hidden_state
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=1000 * t,
            # The pipeline pads with zeros, to which the DiT attends.
            encoder_hidden_states=hidden * token_mask.unsqueeze(-1),
            return_dict=False,
        )[0]
        return velocity


def train_flow(
    parts: Parts, data: VideoFlowData, recipe: VideoFlowRecipe, seed: int, log: Log
) -> list[float]:
    """Train in place, ending with the averaged weights; returns the mean loss of each tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)
    model = JointVideoModel(parts).train()
    shift = parts.scheduler.config.flow_shift
    return train_averaged(model, recipe, lambda: flow_loss(model, data, recipe, shift, generator), log)


def flow_loss(
    model: JointVideoModel,
    data: VideoFlowData,
    recipe: VideoFlowRecipe,
    shift: float,
    generator: torch.Generator,
) -> Tensor:
    """Mean squared velocity error on one random batch."""
    chosen = torch.randint(len(data.latents), (recipe.batch,), generator=generator)
    clean = data.latents[chosen]
    dropped = torch.rand(recipe.batch, generator=generator) < recipe.unconditional
    captions = torch.where(dropped, len(data.token_ids) - 1, data.captions[chosen])
    t = stratified_times(recipe.batch, shift, generator)
    noise = torch.randn(clean.shape, generator=generator)
    noisy = torch.lerp(clean, noise, t.view(-1, 1, 1, 1, 1))
    velocity = model(noisy, t, data.token_ids[captions], data.token_mask[captions])
    return F.mse_loss(velocity, noise - clean)
