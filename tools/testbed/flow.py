"""Joint pre-training of the testbed's DiT and text encoder by flow matching.

The VAE is already trained and frozen. Latents are normalised as in the pipeline. The DiT learns the velocity
v = e - x0 at x_t = (1 - t) x0 + t e, with t = sigmoid(normal), shifted like the scheduler and stratified over
the batch. One prompt in ten is replaced by " ", the pipeline's usual negative prompt, for classifier-free
guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn
from torch.nn import functional as F

from spotlight_rewards.reward import Image
from tools.testbed.architecture import PROMPT_TEMPLATE, Parts
from tools.testbed.prompts import Record
from tools.testbed.scenes import render_all
from tools.testbed.vae import Log, encode

TEMPLATE_TOKENS = 34
UNCONDITIONAL = " "


@dataclass(frozen=True, slots=True)
class FlowRecipe:
    """Training settings.

    Attributes:
        pictures: size of the pool of rendered scenes; each is seen several times, with fresh noise.
        tag_weights: share of each tag in the pool.
        learning_rate: AdamW's peak.
        unconditional: share of prompts replaced by " ".
        ema_decay: of the averaged weights, which are the result.
    """

    pictures: int = 16384
    steps: int = 5800
    batch: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    unconditional: float = 0.1
    ema_decay: float = 0.998
    tag_weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "single_object": 0.08,
            "two_object": 0.14,
            "counting": 0.44,
            "colors": 0.14,
            "position": 0.08,
            "color_attr": 0.12,
        }
    )


@dataclass(frozen=True, slots=True)
class FlowData:
    """Training data.

    Attributes:
        latents: normalised and packed, [pictures, tokens, channels].
        prompts: each image's prompt index, [pictures].
        token_ids, token_mask: tokenised prompts, [prompts + 1, tokens]; the last row is unconditional.
    """

    latents: Tensor
    prompts: Tensor
    token_ids: Tensor
    token_mask: Tensor


def make_data(parts: Parts, train: Sequence[Record], recipe: FlowRecipe, seed: int) -> FlowData:
    """Draw prompts by tag weight; render and encode one scene for each."""
    rng = np.random.default_rng(seed)
    sizes = {tag: sum(record["tag"] == tag for record in train) for tag in recipe.tag_weights}
    weights = np.array([recipe.tag_weights[record["tag"]] / sizes[record["tag"]] for record in train])
    chosen = rng.choice(len(train), size=recipe.pictures, p=weights / weights.sum())
    images = render_all([train[index] for index in chosen], seed)
    texts = [*(str(record["prompt"]) for record in train), UNCONDITIONAL]
    tokens = parts.tokenizer(
        [PROMPT_TEMPLATE.format(text) for text in texts], padding=True, return_tensors="pt"
    )
    return FlowData(
        pack_latents(parts.vae, images), torch.from_numpy(chosen), tokens.input_ids, tokens.attention_mask
    )


def pack_latents(vae: AutoencoderKLQwenImage, images: Image) -> Tensor:
    """Each image's x0: normalised and packed latents, [pictures, tokens, channels]."""
    latents = encode(vae, images)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    batch, channels, _, height, width = latents.shape
    packed: Tensor = QwenImagePipeline._pack_latents((latents - mean) / std, batch, channels, height, width)
    return packed


class JointModel(nn.Module):
    """Text encoder and DiT as one module."""

    def __init__(self, parts: Parts, rows: int, columns: int) -> None:
        super().__init__()
        self.text = parts.text_encoder.model.language_model
        self.transformer = parts.transformer
        self._shape = (1, rows, columns)

    def forward(self, latents: Tensor, t: Tensor, token_ids: Tensor, token_mask: Tensor) -> Tensor:
        """Velocities [batch, tokens, channels] at noise levels ``t: [batch]``."""
        hidden = self.text(input_ids=token_ids, attention_mask=token_mask).last_hidden_state
        mask = token_mask[:, TEMPLATE_TOKENS:].bool()
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=t,
            # The pipeline pads with zeros; padding is masked, so its values must only be finite.
            encoder_hidden_states=hidden[:, TEMPLATE_TOKENS:] * mask.unsqueeze(-1),
            encoder_hidden_states_mask=mask,
            img_shapes=[[self._shape]] * len(latents),
            return_dict=False,
        )[0]
        return velocity


def train_flow(
    parts: Parts, data: FlowData, recipe: FlowRecipe, seed: int, log: Log, rows: int = 8
) -> list[float]:
    """Train in place, ending with the averaged weights; returns the mean loss of each tenth of the steps.

    Args:
        rows: of tokens in a picture.
    """
    generator = torch.Generator().manual_seed(seed)
    model = JointModel(parts, rows, data.latents.shape[1] // rows).train()
    shift = scheduler_shift(parts, data.latents.shape[1])
    return train_averaged(model, recipe, lambda: flow_loss(model, data, recipe, shift, generator), log)


def flow_loss(
    model: JointModel, data: FlowData, recipe: FlowRecipe, shift: float, generator: torch.Generator
) -> Tensor:
    """Mean squared velocity error on one random batch."""
    chosen = torch.randint(len(data.latents), (recipe.batch,), generator=generator)
    clean = data.latents[chosen]
    dropped = torch.rand(recipe.batch, generator=generator) < recipe.unconditional
    prompts = torch.where(dropped, len(data.token_ids) - 1, data.prompts[chosen])
    t = stratified_times(recipe.batch, shift, generator)
    noise = torch.randn(clean.shape, generator=generator)
    noisy = torch.lerp(clean, noise, t.view(-1, 1, 1))
    velocity = model(noisy, t, data.token_ids[prompts], data.token_mask[prompts])
    return F.mse_loss(velocity, noise - clean)


def stratified_times(batch: int, shift: float, generator: torch.Generator) -> Tensor:
    """Noise levels [batch]: sigmoid(normal), shifted like the scheduler's, one from each quantile."""
    quantiles = (torch.arange(batch) + torch.rand(batch, generator=generator)) / batch
    t = torch.special.ndtri(quantiles.clamp(1e-4, 1 - 1e-4)).sigmoid()
    shifted: Tensor = shift * t / (1 + (shift - 1) * t)
    return shifted


def scheduler_shift(parts: Parts, tokens: int) -> float:
    """The factor s of the scheduler's dynamic shift t -> s t / (1 + (s - 1) t) at this image size."""
    config = parts.scheduler.config
    exponent: float = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    return math.exp(exponent)


class Schedule(Protocol):
    """What a recipe says of its learning rate."""

    @property
    def learning_rate(self) -> float:
        """The peak."""

    @property
    def warmup_steps(self) -> int:
        """Steps of linear growth."""

    @property
    def steps(self) -> int:
        """All steps."""


class AveragedTraining(Schedule, Protocol):
    """What a recipe says of training that ends with averaged weights."""

    @property
    def weight_decay(self) -> float:
        """AdamW's."""

    @property
    def ema_decay(self) -> float:
        """Of the averaged weights."""


def train_averaged(
    model: nn.Module, recipe: AveragedTraining, loss: Callable[[], Tensor], log: Log
) -> list[float]:
    """Train in place, ending with the averaged weights; returns the mean loss of each tenth of the steps.

    Args:
        loss: of the next random batch.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay
    )
    averaged = {name: value.detach().clone() for name, value in model.named_parameters()}
    tenth = max(recipe.steps // 10, 1)
    recent: list[Tensor] = []
    losses: list[float] = []
    for step in range(recipe.steps):
        step_loss = loss()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(step_loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe)
        optimizer.step()
        _average(averaged, model, min(recipe.ema_decay, (1 + step) / (10 + step)))
        recent.append(step_loss.detach())
        if (step + 1) % tenth == 0:
            losses.append(round(torch.stack(recent).mean().item(), 5))
            recent.clear()
            log(f"flow step {step + 1}/{recipe.steps} loss {losses[-1]:.4f}")
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(averaged[name])
    model.eval()
    return losses


def learning_rate(step: int, recipe: Schedule) -> float:
    """Linear warm-up, then cosine decay to zero."""
    warm = min((step + 1) / recipe.warmup_steps, 1.0)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def _average(averaged: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """Move the averaged parameters towards the model's, in place."""
    values = dict(model.named_parameters())
    kept = [averaged[name] for name in values]
    torch._foreach_lerp_(kept, [value.detach() for value in values.values()], 1 - decay)
