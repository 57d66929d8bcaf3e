"""Which GPUs and how many threads the reward processes of this machine get. Pure.

GPUs are named as in ``CUDA_VISIBLE_DEVICES``: by number, UUID or MIG instance. A process sees its own only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.reward_config import RewardConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")


@dataclass(frozen=True, slots=True)
class LocalGpus:
    """The GPUs of this machine as this process sees them.

    Attributes:
        visible: their names; ranks take the first ones, one each.
        rank, ranks: of the trainers on this machine.
        trained_on: whether ranks use GPUs at all.
    """

    visible: tuple[str, ...]
    rank: int
    ranks: int
    trained_on: bool

    @property
    def free(self) -> tuple[str, ...]:
        """Those for this rank's rewards."""
        others = self.visible[self.ranks :] if self.trained_on else self.visible
        return others[self.rank :: self.ranks]

    @property
    def of_rank(self) -> str | None:
        """The only one that rewards of this rank may find; None: whatever there is.

        Otherwise the rewards of all ranks would take the first GPU.
        """
        shared = self.trained_on and self.ranks > 1 and self.rank < len(self.visible)
        return self.visible[self.rank] if shared else None


def visible_names(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Names of the ``count`` GPUs that CUDA finds."""
    value = environment.get(VISIBLE)
    names = [str(index) for index in range(count)] if value is None else value.split(",")
    return tuple(name.strip() for name in names)[:count]


def place_on_gpus(
    rewards: Sequence[RewardConfig], workers: int, gpus: LocalGpus
) -> dict[tuple[str, int], str]:
    """The GPU of each process of a reward that wants one, by curve and replica; none for a CPU's trainer.

    Args:
        workers: processes of a reward that names no ``replicas``.

    Raises:
        ConfigError: there are not enough.
    """
    free = list(gpus.free)
    placed: dict[tuple[str, int], str] = {}
    problems = []
    for index, reward in enumerate(rewards):
        replicas = reward.replicas or workers
        if reward.device == "learner":
            if gpus.trained_on:
                placed |= {(reward.curve, each): gpus.visible[gpus.rank] for each in range(replicas)}
        elif reward.device == "cuda":
            if replicas > len(free):
                problems.append(Problem(
                    f"rewards[{index}].device", f"'cuda' for {replicas} processes",
                    f"at most {len(free)}, the GPUs that no trainer uses (of {len(gpus.visible)})",
                    "Set device: learner to share the trainer's GPU, or cpu, or lower replicas.",
                ))  # fmt: skip
                continue
            placed |= {(reward.curve, each): free.pop(0) for each in range(replicas)}
    if problems:
        raise ConfigError("the configuration", problems)
    return placed


def cpu_environment(replicas: int) -> dict[str, str]:
    """Variables of a process that uses no GPU and shares the cores with the reward's other processes."""
    threads = max(1, (os.cpu_count() or 1) // replicas)
    limits = {name: str(threads) for name in _THREADS if replicas > 1 and name not in os.environ}
    return {VISIBLE: "", **limits}
