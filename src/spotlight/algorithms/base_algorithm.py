"""What most algorithms answer, by their section; each overrides what it answers otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spotlight.algorithms.base import Keeps, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.diffusion.samplers import Sampler


@dataclass(frozen=True, slots=True)
class BaseAlgorithm:
    """An :class:`Algorithm` but for its loss, by its section, on final latents and samples of any version."""

    config: AlgorithmSection
    sampler: Sampler

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def keeps(self) -> Keeps:
        return "final"

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        used: dict[Slot, bool] = {"old": self.config.uses_old_policy, "reference": self.config.uses_reference}
        return tuple(slot for slot, on in used.items() if on)

    @property
    def rollout_slot(self) -> Slot:
        return "policy"

    @property
    def takes_stale(self) -> bool:
        return True

    def timesteps(self, kept_steps: int) -> int:
        return self.config.train_timesteps or kept_steps

    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor | None:
        return None

    def old_decay(self, n: float) -> float | None:
        """As the section's ``old_policy`` says; 0 without one: the old policy is the one before the batch."""
        if not self.config.uses_old_policy:
            return None
        return 0.0 if self.config.follows is None else self.config.follows.decay(n)
