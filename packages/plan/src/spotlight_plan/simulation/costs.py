"""Cost model of the simulator: seconds per operation, without noise.

Noise is applied by the driver, which multiplies durations by a seeded factor.
"""

from __future__ import annotations

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
