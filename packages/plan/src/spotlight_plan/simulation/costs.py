"""Cost model of the simulator: seconds per operation, without noise.

Noise is applied by the driver, which multiplies durations by a seeded factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spotlight.scheduler.types import WeightKind


class CostModel(Protocol):
    """Durations without noise. ``pixels``: image height times width."""

    def denoise_step_s(self, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
        """One denoising step (all forwards, including guidance) of ``batch`` rollouts on one SP group."""
        ...

    def decode_s(self, gpu_type: str, pixels: int, batch: int) -> float:
        """Decoding finished latents and committing the images."""
        ...

    def lease_size(self, gpu_type: str, pixels: int, sp_degree: int) -> int:
        """Rollouts per lease, denoised together by one group."""
        ...

    def reward_s(self, samples: int) -> float:
        """From submission to scores, where no other request waits."""
        ...

    def scoring_s(self, samples: int) -> float:
        """The part of it in which all scorers are busy with these samples, and others wait."""
        ...

    def prepare_s(self, samples: int, ranks: int) -> float:
        """Advantages and old log-probs of a whole batch, on ``ranks`` learner GPUs."""
        ...

    def train_s(self, gpu_type: str, pixels: int, samples: int, ranks: int) -> float:
        """Forward and backward of ``samples`` at all their timesteps, split over ``ranks`` learner GPUs."""
        ...

    def switch_s(self) -> float:
        """A GPU's switch between training and rollout."""
        ...

    def optimizer_s(self) -> float:
        """One optimizer step."""
        ...

    def publish_s(self, kind: WeightKind) -> float:
        """Learner to store."""
        ...

    def pull_s(self, kind: WeightKind, from_peer: bool) -> float:
        """Store, or peer on the same node, to worker."""
        ...

    def worker_start_s(self) -> float:
        """Process start and imports, without weights."""
        ...

    def group_setup_s(self, sp_degree: int) -> float:
        """Joining ``sp_degree`` workers into a group."""
        ...

    def checkpoint_s(self) -> float:
        """Saving the learner."""
        ...

    def restore_s(self, *, cold: bool = False) -> float:
        """Starting the learner from a checkpoint: processes, weights, optimizer.

        Args:
            cold: a node of it does not have the model's files.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Constant times whatever the size; SP divides a step's time by its degree. For tests."""

    step_s: float = 1.0
    small_s: float = 0.5
    large_s: float = 5.0
    batch: int = 4
    answer_s: float = 0.5
    turning_s: float = 0.0
    judging_s: float = 0.0

    def denoise_step_s(self, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
        """See :class:`CostModel`."""
        return self.step_s / sp_degree

    def decode_s(self, gpu_type: str, pixels: int, batch: int) -> float:
        """See :class:`CostModel`."""
        return self.small_s

    def lease_size(self, gpu_type: str, pixels: int, sp_degree: int) -> int:
        """See :class:`CostModel`."""
        return self.batch

    def reward_s(self, samples: int) -> float:
        """See :class:`CostModel`."""
        return self.answer_s + self.scoring_s(samples)

    def scoring_s(self, samples: int) -> float:
        """See :class:`CostModel`."""
        return samples * self.judging_s

    def prepare_s(self, samples: int, ranks: int) -> float:
        """See :class:`CostModel`."""
        return self.small_s

    def train_s(self, gpu_type: str, pixels: int, samples: int, ranks: int) -> float:
        """See :class:`CostModel`."""
        return self.large_s

    def switch_s(self) -> float:
        """See :class:`CostModel`."""
        return self.turning_s

    def optimizer_s(self) -> float:
        """See :class:`CostModel`."""
        return self.small_s

    def publish_s(self, kind: WeightKind) -> float:
        """See :class:`CostModel`."""
        return self.small_s

    def pull_s(self, kind: WeightKind, from_peer: bool) -> float:
        """See :class:`CostModel`."""
        return self.large_s if kind is WeightKind.FULL and not from_peer else self.small_s

    def worker_start_s(self) -> float:
        """See :class:`CostModel`."""
        return self.large_s

    def group_setup_s(self, sp_degree: int) -> float:
        """See :class:`CostModel`."""
        return self.small_s if sp_degree > 1 else 0.0

    def checkpoint_s(self) -> float:
        """See :class:`CostModel`."""
        return self.small_s

    def restore_s(self, *, cold: bool = False) -> float:
        """See :class:`CostModel`."""
        return 2 * self.large_s if cold else self.large_s
