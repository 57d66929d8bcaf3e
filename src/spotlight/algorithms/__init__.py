"""RL algorithms by name.

A new one is a file that implements :class:`~spotlight.algorithms.algorithm.Algorithm`, its settings in
:mod:`spotlight.config.algorithm`, and one entry in :data:`ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spotlight.algorithms.algorithm import Algorithm, LossTerms, Policy, Slot, TrainBatch
from spotlight.algorithms.awm import AWM
from spotlight.algorithms.diffusion_nft import DiffusionNFT
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.algorithms.grpo_guard import GRPOGuard
from spotlight.config.algorithm import AlgorithmSection
from spotlight.diffusion.samplers import Sampler

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LossTerms",
    "Policy",
    "Slot",
    "TrainBatch",
    "build_algorithm",
]

ALGORITHMS: Mapping[str, Callable[[Any, Sampler], Algorithm]] = {
    "flow-grpo": FlowGRPO,
    "flow-grpo-fast": FlowGRPO,
    "grpo-guard": GRPOGuard,
    "diffusion-nft": DiffusionNFT,
    "awm": AWM,
}
"""Each takes its configuration section and the sampler of the train rollouts."""


def build_algorithm(config: AlgorithmSection, sampler: Sampler) -> Algorithm:
    """The algorithm that ``config`` names. Raises ValueError for a sampler that does not suit it."""
    return ALGORITHMS[config.name](config, sampler)
