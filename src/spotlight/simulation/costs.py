"""What the simulator must know of a model and its hardware: the seconds that everything takes.

A profile (figures with their sources) makes one; :class:`ConstantCosts` is the smallest, for tests. Noise is
not the cost model's business: the driver multiplies durations by a seeded factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spotlight.scheduler.types import WeightKind


class CostModel(Protocol):
    """Durations without noise. ``pixels`` is height times width of the image; ``gpu_type`` names a GPU."""

    def denoise_step_s(self, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
        """One denoising step (all forwards of it, guidance too) of ``batch`` rollouts on one SP group."""
        ...

    def decode_s(self, gpu_type: str, pixels: int, batch: int) -> float:
        """Latents of finished rollouts to images, and their commit."""
        ...

    def lease_size(self, gpu_type: str, pixels: int, sp_degree: int) -> int:
        """Rollouts of one lease: what one group denoises together."""
        ...

    def reward_s(self, samples: int) -> float:
        """From handing samples to the reward pool to their scores."""
        ...

    def prepare_s(self, samples: int, ranks: int) -> float:
        """Advantages and old log-probs of a whole batch, on ``ranks`` learner GPUs."""
        ...

    def train_s(self, gpu_type: str, pixels: int, samples: int, ranks: int) -> float:
        """Forward and backward of ``samples`` (all their timesteps), divided among ``ranks`` learner GPUs."""
        ...

    def switch_s(self) -> float:
        """A GPU that trains and rolls out turns from one to the other."""
        ...

    def optimizer_s(self) -> float:
        """One optimizer step."""
        ...

    def publish_s(self, kind: WeightKind) -> float:
        """From the learner to the store."""
        ...

    def pull_s(self, kind: WeightKind, from_peer: bool) -> float:
        """From the store, or from a peer on the same node, to a worker."""
        ...

    def worker_start_s(self) -> float:
        """A worker's process: start and imports, without weights."""
        ...

    def group_setup_s(self, sp_degree: int) -> float:
        """Joining ``sp_degree`` workers into a group."""
        ...

    def checkpoint_s(self) -> float:
        """Saving the learner."""
        ...

    def restore_s(self) -> float:
        """Starting the learner from a checkpoint: processes, weights, optimizer."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Every operation takes the same time whatever its size; SP divides a step's time by its degree."""

    step_s: float = 1.0
    small_s: float = 0.5
    large_s: float = 5.0
    batch: int = 4
    scoring_s: float = 0.5
    turning_s: float = 0.0

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
        return self.scoring_s

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

    def restore_s(self) -> float:
        """See :class:`CostModel`."""
        return self.large_s
