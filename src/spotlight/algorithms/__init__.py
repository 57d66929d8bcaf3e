"""RL algorithms by name. A new one is a file that implements ``base.Algorithm`` plus one entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

from spotlight.algorithms.base import Algorithm, LossTerms, Policy, Slot, TrainBatch
from spotlight.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTParams, OldPolicy
from spotlight.algorithms.flow_grpo import FAST, FlowGRPO, FlowGRPOParams
from spotlight.diffusion.samplers import Sampler

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    P = TypeVar("P", bound=DataclassInstance)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LossTerms",
    "Policy",
    "Slot",
    "TrainBatch",
    "build_algorithm",
]

Builder = Callable[[Sampler, Mapping[str, object]], Algorithm]


def build_algorithm(name: str, sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    """The algorithm of a configuration.

    Args:
        name: one of :data:`ALGORITHMS`.
        sampler: of the train rollouts.
        params: fields of the algorithm's parameter dataclass, plain values (nested ones as mappings).

    Raises:
        ValueError: unknown name or parameter, a value out of range, or an unsuitable sampler.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; expected one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](sampler, params)


def _flow_grpo(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    return FlowGRPO(_with(FlowGRPOParams(), params, "flow-grpo"), sampler)


def _flow_grpo_fast(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    name = "flow-grpo-fast"
    return FlowGRPO(_with(FAST, params, name), sampler, name)


def _diffusion_nft(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    name = "diffusion-nft"
    plain = dict(params)
    nested = plain.pop("old_policy", {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"old_policy of {name} is {nested!r}; expected a mapping of its fields")
    base = DiffusionNFTParams(old_policy=_with(OldPolicy(), nested, f"{name}'s old_policy"))
    return DiffusionNFT(_with(base, plain, name), sampler)


ALGORITHMS: Mapping[str, Builder] = {
    "flow-grpo": _flow_grpo,
    "flow-grpo-fast": _flow_grpo_fast,
    "diffusion-nft": _diffusion_nft,
}


def _with(defaults: P, params: Mapping[str, object], of: str) -> P:
    known = [field.name for field in fields(defaults)]
    unknown = [key for key in params if key not in known]
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r} of {of}; expected one of {', '.join(known)}")
    return replace(defaults, **params)
