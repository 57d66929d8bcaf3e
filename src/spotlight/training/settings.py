"""What the learner needs to know, as plain values: the room does not read configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from spotlight.config.algorithm import AdvantageConfig
from spotlight.models.family import Condition


class TrainingError(RuntimeError):
    """Training cannot go on: names what was found and the remedy. No optimizer step was applied."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGuidance:
    """True classifier-free guidance during training: the same as in the rollouts.

    Attributes:
        scale: above 1; every evaluation costs two forwards.
        negative: embeddings of the negative prompt.
    """

    scale: float
    negative: Condition


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How the policy is updated.

    Attributes:
        reward_weights: factor of each reward; its names are those every sample has.
        advantage: from rewards to advantages.
        learning_rate: AdamW's, after warm-up.
        betas: AdamW's.
        epsilon: AdamW's.
        weight_decay: AdamW's.
        warmup_steps: optimizer steps of linear warm-up; the first step already moves.
        decay_steps: after the warm-up the learning rate falls along half a cosine, to zero after so many
            optimizer steps from the start. None: it stays.
        max_grad_norm: gradients are scaled down to this 2-norm.
        ema_cap: largest decay of the moving average in slot ``ema``; the decay is min((1 + n)/(10 + n), cap)
            with n the optimizer steps taken (Flow-GRPO). None: no average.
        ema_every: optimizer steps between two updates of the average.
        gradient_checkpointing: recompute the blocks' activations in the backward pass.
        timesteps_per_pass: training timesteps of a micro-batch in one forward and backward, at most; "auto":
            as many as fit into memory.
        pass_memory_bytes: what a pass may take with "auto"; None: what is free.
        autocast: type of the DiT's matrix products, everything else is float32; None: no autocast.
    """

    reward_weights: Mapping[str, float]
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    decay_steps: int | None = None
    max_grad_norm: float = 1.0
    ema_cap: float | None = None
    ema_every: int = 1
    gradient_checkpointing: bool = False
    timesteps_per_pass: int | Literal["auto"] = 1
    pass_memory_bytes: int | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        for key in ("learning_rate", "epsilon", "max_grad_norm"):
            value: float = getattr(self, key)
            if not 0 < value < math.inf:
                raise ValueError(f"learner's {key} is {value}; expected a number above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"learner's warmup_steps is {self.warmup_steps}; expected at least 0")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"learner's decay_steps is {self.decay_steps}; expected more than its warmup_steps "
                f"({self.warmup_steps}), or None"
            )
        if not 0 <= (self.ema_cap or 0) < 1 or self.ema_every < 1:
            raise ValueError(
                f"learner's ema_cap is {self.ema_cap} and ema_every {self.ema_every}; "
                "expected 0 <= cap < 1 and every >= 1"
            )
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"learner's autocast is {self.autocast}; expected torch.bfloat16 or None")
        if self.timesteps_per_pass != "auto" and self.timesteps_per_pass < 1:
            raise ValueError(
                f"learner's timesteps_per_pass is {self.timesteps_per_pass}; expected at least 1, or auto"
            )
        if self.pass_memory_bytes is not None and self.pass_memory_bytes < 1:
            raise ValueError(f"learner's pass_memory_bytes is {self.pass_memory_bytes}; expected at least 1")
        if not self.reward_weights:
            raise ValueError("learner's reward_weights are empty: nothing would be learnt")

    def learning_rate_at(self, step: int) -> float:
        """Of the optimizer step that follows ``step`` steps."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        done = min((step - self.warmup_steps) / (self.decay_steps - self.warmup_steps), 1.0)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2

    def ema_decay(self, steps: int) -> float | None:
        """The average's decay after optimizer step number ``steps`` (1 is the first); None: not now."""
        if self.ema_cap is None or steps % self.ema_every:
            return None
        return min((1 + steps) / (10 + steps), self.ema_cap)
