"""RL algorithms by name.

To add one, write a file with an :class:`~spotlight.config.sections.algorithm.AlgorithmSection` and an
:class:`~spotlight.algorithms.base.Algorithm`, and add a line to :data:`spotlight.registry.ALGORITHMS`.
"""

from __future__ import annotations

from typing import cast

from spotlight.algorithms.base import Algorithm, LossTerms, Policy, Slot, TrainBatch
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.diffusion.samplers import Sampler
from spotlight.registry import resolve

__all__ = [
    "Algorithm",
    "LossTerms",
    "Policy",
    "Slot",
    "TrainBatch",
    "build_algorithm",
]


def build_algorithm(config: AlgorithmSection, sampler: Sampler) -> Algorithm:
    """The algorithm that ``config`` names. Raises ValueError for an unsuitable sampler."""
    return cast(Algorithm, resolve(config.implementation)(config, sampler))
