"""Denoising steps and their log-probabilities: one implementation for rollout and replay.

Flow matching: x_s = (1 - s) x0 + s e with noise level s (sigma; 1 = noise) and velocity v = e - x0. A step
goes from s to s' < s, d = s - s'. ``<.>`` is the mean over all dimensions but the batch.

Invariants
    * All maths in float32, whatever the storage dtype. ``sigma`` is per sample: [batch] float32.
    * x' is rounded to its storage dtype BEFORE its log-prob is computed, so replaying stored latents with
      stored sigmas repeats the rollout's numbers: clip ranges of 1e-5 are no larger than that rounding.
    * log p is a mean, not a sum: ratios are the true ones to the power 1/(size of a sample).
    * Every rollout ends with an ODE step to sigma 0, whose result is x̂0 exactly: decode the final latents,
      whatever the sampler (this includes DanceGRPO's "decode the last x̂0").
    * ODE steps have no log p: it raises, and :func:`step` returns NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class UndefinedLogProbError(ValueError):
    """Log-prob or KL of a deterministic sampler."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The Gaussian of a step.

    Attributes:
        mean: [batch, ...] float32.
        std: [batch, 1, ...] float32; 0 where deterministic.
        kl_std: [batch, 1, ...] float32, the KL's scale: q, not q sqrt(d), because Flow-GRPO omits the step
            length.
    """

    mean: Tensor
    std: Tensor
    kl_std: Tensor


class Sampler(Protocol):
    """How a denoising step is drawn and scored. Implementations are frozen dataclasses of plain numbers."""

    @property
    def stochastic(self) -> bool:
        """Whether steps draw noise and so have a log-prob."""

    def moments(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Moments:
        """Mean and std of x' given x, v̂ [batch, ...] and the noise levels s > s' [batch]."""

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """Mean log-density [batch] of x' as stored: < -(x'-mean)²/2k² - ln k - ½ ln 2π >.

        Raises:
            UndefinedLogProbError: it is not stochastic.
        """
        _require_stochastic(self)
        squared = (x_next.float() - moments.mean).square()
        constant = torch.log(moments.std) + 0.5 * math.log(2 * math.pi)
        return _mean(-squared / (2 * moments.std.square()) - constant)

    def kl(self, moments: Moments, reference: Moments) -> Tensor:
        """KL to the reference's step, [batch]: <(mean - mean_ref)²> / 2 kl_std².

        Raises:
            UndefinedLogProbError: it is not stochastic.
        """
        _require_stochastic(self)
        squared = (moments.mean - reference.mean).square()
        return _mean(squared / (2 * moments.kl_std.square()))


@dataclass(frozen=True, slots=True)
class FlowSDE(Sampler):
    """Flow-GRPO's SDE (arXiv 2505.05470): q = a sqrt(s / (1 - s)), kick q sqrt(d).

    At s = 1, 1 - s uses the second schedule value instead. That is s', so the first kick is exactly a.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        _check_noise_level("flow-sde", self.noise_level, math.inf)

    @property
    def stochastic(self) -> bool:
        """False only at noise level 0, where the step is ODE."""
        return self.noise_level > 0

    def moments(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Moments:
        """mean = x (1 - q²d/2s) - v̂ d (1 + q²(1-s)/2s), std = q sqrt(d)."""
        one_minus = 1 - torch.where(sigma == 1, sigma_next, sigma)
        return _langevin(x, velocity, sigma, sigma_next, self.noise_level * torch.sqrt(sigma / one_minus))


@dataclass(frozen=True, slots=True)
class Dance(Sampler):
    """DanceGRPO's SDE (arXiv 2505.07818): constant q = η, score = -(x - (1-s) x̂0) / s²."""

    eta: float = 0.3

    def __post_init__(self) -> None:
        _check_noise_level("dance", self.eta, math.inf)

    @property
    def stochastic(self) -> bool:
        """False only at η = 0, where the step is ODE."""
        return self.eta > 0

    def moments(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Moments:
        """mean = x - d v̂ + ½η²d score (Flow-SDE's mean at q = η), std = η sqrt(d)."""
        return _langevin(x, velocity, sigma, sigma_next, torch.full_like(sigma, self.eta))


@dataclass(frozen=True, slots=True)
class CPS(Sampler):
    """Coefficients-preserving sampling (arXiv 2509.05952): x' has exactly the noise level s'.

    Of it n' = s' sin(aπ/2) is fresh noise. The log-prob has no normaliser, so clip ranges do not transfer
    from the other samplers.
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        _check_noise_level("cps", self.noise_level, 1.0)

    @property
    def stochastic(self) -> bool:
        """False only at noise level 0, where the step is ODE."""
        return self.noise_level > 0

    def moments(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Moments:
        """mean = (1-s') x̂0 + sqrt(s'² - n'²) x̂1, std = n'."""
        angle = self.noise_level * math.pi / 2
        sigma_next = _per_sample(sigma_next, x)
        x0, x1 = predict_x0(x, velocity, sigma), predict_noise(x, velocity, sigma)
        fresh = sigma_next * math.sin(angle)
        mean = (1 - sigma_next) * x0 + sigma_next * math.cos(angle) * x1
        return Moments(mean, fresh, fresh)

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """-<(x' - mean)²>."""
        _require_stochastic(self)
        return -_mean((x_next.float() - moments.mean).square())


@dataclass(frozen=True, slots=True)
class ODE(Sampler):
    """Euler's step, bitwise equal to diffusers' ``FlowMatchEulerDiscreteScheduler``."""

    @property
    def stochastic(self) -> bool:
        return False

    def moments(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Moments:
        """mean = x + (s' - s) v̂, std = 0."""
        mean = euler(x, velocity, sigma, sigma_next)
        zero = torch.zeros_like(_per_sample(sigma, x))
        return Moments(mean, zero, zero)


@dataclass(frozen=True, slots=True)
class Step:
    """One denoising step of a batch.

    Attributes:
        latents: x' in its storage dtype, [batch, ...].
        log_prob: [batch] float32 of x' as stored; NaN for ODE rows (never store those).
    """

    latents: Tensor
    log_prob: Tensor


def step(
    sampler: Sampler,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    noise: Tensor | None = None,
    stochastic: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Advance a batch by one step: draw, round to the storage dtype, score the rounded result.

    Args:
        sampler: of the stochastic rows; the others take the ODE step.
        x: latents as stored, [batch, ...].
        velocity: v̂, shape of ``x``.
        sigma: s, [batch] float32.
        sigma_next: s', [batch] float32.
        noise: standard normal, shape of ``x``; required if a row is stochastic.
        stochastic: rows inside their SDE window, on the host (no device synchronisation); None: all. Ignored
            by deterministic samplers.
        dtype: storage dtype of the latents.

    Raises:
        ValueError: noise is required but None, or ``stochastic`` is not one entry per row.
    """
    rows = [True] * x.shape[0] if stochastic is None else list(stochastic)
    if len(rows) != x.shape[0]:
        raise ValueError(f"stochastic has {len(rows)} entries; expected one for each of {x.shape[0]} rows")
    if not sampler.stochastic or not any(rows):
        latents = euler(x, velocity, sigma, sigma_next).to(dtype)
        return Step(latents, torch.full_like(sigma, math.nan))
    if noise is None:
        raise ValueError(f"{sampler} draws noise in {sum(rows)} of {len(rows)} rows, but noise is None")
    moments = sampler.moments(x, velocity, sigma, sigma_next)
    latents = (moments.mean + moments.std * noise.float()).to(dtype)
    log_prob = sampler.log_prob(latents, moments)
    if all(rows):
        return Step(latents, log_prob)
    mask = torch.tensor(rows, device=x.device)
    plain = euler(x, velocity, sigma, sigma_next).to(dtype)
    latents = torch.where(mask.view(_column_shape(x)), latents, plain)
    return Step(latents, torch.where(mask, log_prob, math.nan))


def euler(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x + (s' - s) v̂ in float32; sigmas: [batch]."""
    return x.float() + _per_sample(sigma_next - sigma, x) * velocity.float()


def predict_x0(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x̂0 = x - s v̂ in float32; sigma: [batch]."""
    return x.float() - _per_sample(sigma, x) * velocity.float()


def predict_noise(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x̂1 = x + (1 - s) v̂ in float32; sigma: [batch]."""
    return x.float() + (1 - _per_sample(sigma, x)) * velocity.float()


def interpolate(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_s = (1 - s) x0 + s e in float32; sigma: [batch]."""
    sigma = _per_sample(sigma, x0)
    return (1 - sigma) * x0.float() + sigma * noise.float()


_NOISY: Mapping[str, Callable[[float], Sampler]] = {"flow-sde": FlowSDE, "cps": CPS, "dance": Dance}
SAMPLERS = (*_NOISY, "ode")


def build_sampler(name: str, noise_level: float) -> Sampler:
    """A sampler by name; ``noise_level`` is a, η for ``dance``, and must be 0 for ``ode``.

    Raises:
        ValueError: unknown name, or a noise level outside the sampler's range.
    """
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; expected one of {', '.join(SAMPLERS)}")
    if name != "ode":
        return _NOISY[name](noise_level)
    if noise_level != 0:
        raise ValueError(f"noise level of sampler 'ode' is {noise_level}; it takes none: set it to 0")
    return ODE()


def _langevin(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, q: Tensor) -> Moments:
    """Euler-Maruyama of the reverse SDE with diffusion q [batch], the score expressed by x and v̂."""
    length = sigma - sigma_next
    half = q.square() * length / (2 * sigma)
    pull = length + half * (1 - sigma)
    mean = _per_sample(1 - half, x) * x.float() - _per_sample(pull, x) * velocity.float()
    return Moments(mean, _per_sample(q * torch.sqrt(length), x), _per_sample(q, x))


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def _per_sample(value: Tensor, x: Tensor) -> Tensor:
    return value.float().view(_column_shape(x))


def _column_shape(x: Tensor) -> list[int]:
    return [x.shape[0]] + [1] * (x.ndim - 1)


def _check_noise_level(sampler: str, value: float, largest: float) -> None:
    if not 0 <= value <= largest or not math.isfinite(value):
        limit = "" if math.isinf(largest) else f" and at most {largest:g}"
        raise ValueError(f"noise level of sampler {sampler!r} is {value}; expected a number >= 0{limit}")


def _require_stochastic(sampler: Sampler) -> None:
    if not sampler.stochastic:
        raise UndefinedLogProbError(
            f"{sampler} is deterministic: its steps have no log-prob and no KL; use flow-sde, cps or dance "
            "with a noise level above 0 for the steps that are trained"
        )
