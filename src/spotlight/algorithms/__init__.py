"""RL algorithms by name.

To add one, write a file with an :class:`~spotlight.config.sections.algorithm.AlgorithmSection` and an
:class:`~spotlight.algorithms.base.Algorithm`, and add a line to :data:`spotlight.registry.ALGORITHMS`.
"""

from __future__ import annotations

from typing import cast

from spotlight.algorithms.base import Algorithm, LossTerms, PolicyModel, Slot, TrainBatch
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.diffusion.samplers import Sampler
from spotlight.registry import ALGORITHMS
from spotlight_rewards.registry import RegistryError, resolve

__all__ = [
    "Algorithm",
    "LossTerms",
    "PolicyModel",
    "Slot",
    "TrainBatch",
    "build_algorithm",
]


def build_algorithm(config: AlgorithmSection, sampler: Sampler) -> Algorithm:
    """The algorithm that ``config`` names.

    Raises:
        ValueError: an unsuitable sampler.
        RegistryError: the section of another package names an implementation that cannot be imported.
    """
    name = type(config).model_fields["name"].default
    try:
        made_by = resolve(config.implementation)
    except Exception as error:
        if name in ALGORITHMS.built_in:
            raise
        raise RegistryError(
            f"algorithm.name is {name!r}, whose section {ALGORITHMS.locate(name)!r} names the implementation "
            f"{config.implementation!r}; importing that raised {type(error).__name__}: {error}. Expected the "
            "'module:attribute' of its Algorithm: repair that package or uninstall it."
        ) from error
    return cast(Algorithm, made_by(config, sampler))
