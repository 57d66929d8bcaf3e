"""Analytic policies for the algorithms' tests: one linear layer a weight slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spotlight.algorithms.base import Slot, TrainBatch
from spotlight.diffusion.noise import INITIAL, noise_batch
from spotlight.diffusion.samplers import Sampler, step

TOKENS, CHANNELS = 5, 4


class TinyPolicy:
    """v̂ = x W + s b + c; every slot starts with the same weights."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = 0.4 * torch.randn(CHANNELS + 2, CHANNELS, generator=generator, dtype=torch.float64)
        slots: tuple[Slot, ...] = ("policy", "reference", "old", "ema")
        self.weights = {slot: nn.Parameter(start.to(dtype), requires_grad=slot == "policy") for slot in slots}
        self.calls: list[Slot] = []

    @property
    def weight(self) -> nn.Parameter:
        return self.weights["policy"]

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        self.calls.append(slot)
        weight = self.weights[slot]
        level = sigma.to(weight.dtype).view(-1, 1, 1).expand(-1, latents.shape[1], 1)
        inputs = torch.cat([latents.to(weight.dtype), level, torch.ones_like(level)], dim=2)
        return inputs @ weight

    def nudge(self, size: float, slot: Slot = "policy", seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.weights[slot] += size * torch.randn(self.weights[slot].shape, generator=generator)

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.weight, retain_graph=True)
        return gradient

    def descend(self, loss: Tensor, length: float) -> None:
        gradient = self.gradient(loss)
        with torch.no_grad():
            self.weight.sub_(length * gradient / gradient.norm())


def schedule(steps: int, shift: float = 3.0) -> Tensor:
    s = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * s / (1 + (shift - 1) * s)).float()


def rollout(
    policy: TinyPolicy,
    sampler: Sampler,
    *,
    batch: int = 6,
    steps: int = 6,
    window: range | None = None,
    dtype: torch.dtype = torch.float32,
    slot: Slot = "policy",
) -> TrainBatch:
    """A plain denoising loop that keeps the window's trajectory, as a rollout engine would."""
    window = range(steps - 1) if window is None else window
    seeds = tuple(range(100, 100 + batch))
    sigmas = schedule(steps)
    x = noise_batch(seeds, [INITIAL] * batch, (TOKENS, CHANNELS)).to(dtype)
    states, log_probs = [x], []
    for index in range(steps):
        sigma, sigma_next = sigmas[index].expand(batch), sigmas[index + 1].expand(batch)
        with torch.no_grad():
            velocity = policy.velocity(x.float(), sigma, slot)
        kick = noise_batch(seeds, [index] * batch, (TOKENS, CHANNELS))
        mask = [index in window] * batch
        result = step(sampler, x, velocity, sigma, sigma_next, noise=kick, stochastic=mask, dtype=dtype)
        x = result.latents
        states.append(x)
        log_probs.append(result.log_prob)
    keeps = sampler.stochastic
    around = slice(window.start, window.stop + 1)
    return TrainBatch(
        final=x.float(),
        latents=torch.stack(states[around], 1).float() if keeps else None,
        sigmas=(sigmas[around] if keeps else sigmas).repeat(batch, 1),
        rollout_log_probs=torch.stack(log_probs[window.start : window.stop], 1) if keeps else None,
        old_log_probs=None,
        advantages=torch.linspace(-1.5, 2.0, batch),
        seeds=seeds,
        versions=(3,) * batch,
    )
