"""One optimizer step of a LoRA, or of all weights, as a plain loop: diffusers' pipeline and torch's AdamW.

Nothing here is Spotlight's but the batch: a pipeline's own call makes each prediction, sample by sample and
noise level by noise level, and the losses are those of the papers, for their first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from spotlight.diffusion.noise import Stream, normal_batch, uniform
from spotlight.models.family import ModelFamily
from spotlight.testing.family_contract import FamilyCase, Setting

LEARNING_RATE, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-2, 1e-3, 0.1, 0.5
TRAIN_TIMESTEPS = 2
CPS_NOISE = 0.8
ADVANTAGE_MAX = 5.0


def load_lora(pipe: Any, folder: Path) -> None:
    """As the loading lines of a run do."""
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(folder)
    else:
        pipe.transformer.load_lora_adapter(folder, use_safetensors=True)


class _Predicted(Exception):  # noqa: N818 (not an error)
    def __init__(self, velocity: Tensor) -> None:
        super().__init__()
        self.velocity = velocity


class _OneLevel(FlowMatchEulerDiscreteScheduler):
    """A schedule of one noise level, whose step hands out the prediction that the pipeline made there."""

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def set_timesteps(  # type: ignore[override]
        self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        self.sigmas = torch.tensor([self.sigma, 0.0])
        self.timesteps = self.sigmas[:1] * self.config.num_train_timesteps
        self.num_inference_steps = 1

    def step(self, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Predicted(model_output)


@dataclass(frozen=True)
class PlainSample:
    """A row of the batch.

    Attributes:
        final: x0.
        path: states and noise levels of the stochastic steps, [steps + 1] each; None without.
    """

    prompt: str
    advantage: float
    seed: int
    final: Tensor
    path: tuple[Tensor, Tensor] | None


class PlainLoop:
    """A pipeline, with a LoRA loaded by diffusers.

    Args:
        pipe: loaded from the same directory as the family.
        lora: a directory for ``load_lora_weights``; None: all weights of the transformers are trained.
        setting: guidance and size of all predictions.
    """

    def __init__(
        self, case: FamilyCase, family: ModelFamily, pipe: Any, lora: Path | None, setting: Setting
    ) -> None:
        self._case, self._family, self._setting, self._with_lora = case, family, setting, lora is not None
        self._parts = {"transformer": pipe.transformer}
        if getattr(pipe, "transformer_2", None) is not None:
            self._parts["transformer_2"] = pipe.transformer_2
        if lora is not None:
            load_lora(pipe, lora)
            if len(self._parts) > 1:
                pipe.load_lora_weights(lora / "transformer_2", load_into_transformer_2=True)
        call = type(pipe).__call__.__wrapped__  # without torch.no_grad
        pipe.__class__ = type("Differentiable", (type(pipe),), {"__call__": call})
        self._pipe = pipe
        self._given: tuple[Tensor, Tensor] | None = None
        if getattr(pipe.config, "expand_timesteps", False) and hasattr(pipe, "image_processor"):
            self._remember_given()

    def _remember_given(self) -> None:
        prepare = self._pipe.prepare_latents

        def remembered(*args: Any, **kwargs: Any) -> Any:
            latents, condition, mask = prepare(*args, **kwargs)
            self._given = condition, mask
            return latents, condition, mask

        self._pipe.prepare_latents = remembered

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters, of a LoRA named as in its file; those of two transformers by component."""
        found = {}
        for part, module in self._parts.items():
            prefix = f"{part}." if len(self._parts) > 1 else ""
            for name, parameter in module.named_parameters():
                if not self._with_lora:
                    found[prefix + name] = parameter
                elif ".lora_" in name:
                    end = name.replace(".default_0.", ".").replace(".default_1.", ".")
                    found[prefix + end] = parameter
        return found

    def velocity(self, x: Tensor, sigma: float, prompt: str) -> Tensor:
        """What the pipeline predicts for one sample, guidance included."""
        self._pipe.scheduler = _OneLevel(sigma)
        setting = Setting(
            self._setting.size, 1, self._setting.scale, " ", self._setting.embedded, prompts=(prompt,)
        )
        try:
            self._case.call(self._pipe, self._family, x[None], setting)
        except _Predicted as predicted:
            velocity = predicted.velocity[0].float()
            if self._given is None:
                return velocity
            condition, mask = (
                self._given
            )  # the call puts this part in at its end, whatever was predicted there
            return torch.where(mask[0].bool(), velocity, (x - condition[0].float()) / sigma)
        raise AssertionError("the pipeline took no step")

    def step(self, samples: Sequence[PlainSample], algorithm: str) -> float:
        """One optimizer step on the mean loss; the gradient's norm before it is clipped."""
        parameters = self.trained()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=WEIGHT_DECAY
        )
        for sample in samples:
            losses = LOSSES[algorithm](self, sample)
            for loss in losses:
                (loss / (len(losses) * len(samples))).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
        optimizer.step()
        return float(norm)


def _flow_grpo(loop: PlainLoop, sample: PlainSample) -> list[Tensor]:
    """-A p / p_old of each stochastic step; CPS (arXiv 2509.05952): ln p = -<(x' - mean)²>."""
    assert sample.path is not None
    states, sigmas = sample.path
    losses = []
    for i in range(len(states) - 1):
        x, s, after = states[i], float(sigmas[i]), float(sigmas[i + 1])
        v = loop.velocity(x, s, sample.prompt)
        clean, noise = x - s * v, x + (1 - s) * v
        mean = (1 - after) * clean + after * math.cos(CPS_NOISE * math.pi / 2) * noise
        log_prob = -(states[i + 1] - mean).square().mean()
        losses.append(-sample.advantage * torch.exp(log_prob - log_prob.detach()))
    return losses


def _noised(sample: PlainSample) -> list[tuple[Tensor, float, Tensor]]:
    """(x_t, t, e) of each training timestep: with the learner's draws, which belong to the batch."""
    draws = uniform(sample.seed, Stream.TRAIN_TIMESTEPS, 0, TRAIN_TIMESTEPS)
    found = []
    for i in range(TRAIN_TIMESTEPS):
        t = float(torch.tensor((i + draws[i]) / TRAIN_TIMESTEPS, dtype=torch.float32))
        (e,) = normal_batch([sample.seed], Stream.TRAIN_NOISE, [i], sample.final.shape, torch.device("cpu"))
        found.append(((1 - t) * sample.final + t * e, t, e))
    return found


def _diffusion_nft(loop: PlainLoop, sample: PlainSample) -> list[Tensor]:
    """arXiv 2509.16117 at beta 1 without a reference; the old policy equals the trained one."""
    rho = min(max(sample.advantage / (2 * ADVANTAGE_MAX) + 0.5, 0.0), 1.0)
    losses = []
    for x, t, _ in _noised(sample):
        v = loop.velocity(x, t, sample.prompt)
        old = v.detach()
        total: Tensor | float = 0.0
        for weight, implicit in ((rho, v), (1 - rho, 2 * old - v)):
            error = x - t * implicit - sample.final
            total = total + weight * error.square().mean() / error.detach().abs().mean()
        losses.append(ADVANTAGE_MAX * total)
    return losses  # type: ignore[return-value]


def _awm(loop: PlainLoop, sample: PlainSample) -> list[Tensor]:
    """arXiv 2509.25050 with power 1/4, without anchors: they are where the policy is."""
    losses = []
    for x, t, e in _noised(sample):
        matching = (loop.velocity(x, t, sample.prompt) - (e - sample.final)).square().mean()
        log_prob = -4 * t * matching**0.25
        losses.append(-sample.advantage / 5 * torch.exp(log_prob - log_prob.detach()))
    return losses


LOSSES: Mapping[str, Callable[[PlainLoop, PlainSample], list[Tensor]]] = {
    "flow-grpo-fast": _flow_grpo,
    "diffusion-nft": _diffusion_nft,
    "awm": _awm,
}
WITHOUT_REFERENCE: Mapping[str, Mapping[str, object]] = {
    "flow-grpo-fast": {},
    "diffusion-nft": {"reference_weight": 0.0},
    "awm": {"reference_weight": 0.0},
}
"""Parameters of the algorithms as the plain losses have them."""
