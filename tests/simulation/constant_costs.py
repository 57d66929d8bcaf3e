"""A cost model whose times do not depend on sizes."""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.scheduler.types import WeightKind


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Constant times whatever the size; SP divides a step's time by its degree."""

    step_s: float = 1.0
    small_s: float = 0.5
    large_s: float = 5.0
    batch: int = 4
    answer_s: float = 0.5
    turning_s: float = 0.0
    judging_s: float = 0.0

    def denoise_step_s(self, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
        return self.step_s / sp_degree

    def decode_s(self, gpu_type: str, pixels: int, batch: int) -> float:
        return self.small_s

    def lease_size(self, gpu_type: str, pixels: int, sp_degree: int) -> int:
        return self.batch

    def reward_s(self, samples: int) -> float:
        return self.answer_s + self.scoring_s(samples)

    def scoring_s(self, samples: int) -> float:
        return samples * self.judging_s

    def prepare_s(self, samples: int, ranks: int) -> float:
        return self.small_s

    def train_s(self, gpu_type: str, pixels: int, samples: int, ranks: int) -> float:
        return self.large_s

    def switch_s(self) -> float:
        return self.turning_s

    def optimizer_s(self) -> float:
        return self.small_s

    def publish_s(self, kind: WeightKind) -> float:
        return self.small_s

    def pull_s(self, kind: WeightKind, from_peer: bool) -> float:
        return self.large_s if kind is WeightKind.FULL and not from_peer else self.small_s

    def worker_start_s(self) -> float:
        return self.large_s

    def group_setup_s(self, sp_degree: int) -> float:
        return self.small_s if sp_degree > 1 else 0.0

    def checkpoint_s(self) -> float:
        return self.small_s

    def restore_s(self, *, cold: bool = False) -> float:
        return 2 * self.large_s if cold else self.large_s
