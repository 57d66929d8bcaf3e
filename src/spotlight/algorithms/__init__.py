"""RL algorithms by name. A new one is a file that implements ``base.Algorithm`` plus one entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

from spotlight.algorithms.algorithm import Algorithm, LossTerms, Policy, Slot, TrainBatch
from spotlight.algorithms.awm import AWM, AWMParams
from spotlight.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTParams
from spotlight.algorithms.flow_grpo import FAST, FlowGRPO, FlowGRPOParams
from spotlight.algorithms.forward_process import OldPolicy
from spotlight.algorithms.grpo_guard import GRPOGuard, GRPOGuardParams
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


def _grpo_guard(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    return GRPOGuard(_with(GRPOGuardParams(), params, "grpo-guard"), sampler)


def _diffusion_nft(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    name, defaults = "diffusion-nft", DiffusionNFTParams()
    return DiffusionNFT(_with(defaults, _with_old(defaults.old_policy, params, name), name), sampler)


def _awm(sampler: Sampler, params: Mapping[str, object]) -> Algorithm:
    name, defaults = "awm", AWMParams()
    return AWM(_with(defaults, _with_old(defaults.old_policy, params, name), name), sampler)


ALGORITHMS: Mapping[str, Builder] = {
    "flow-grpo": _flow_grpo,
    "flow-grpo-fast": _flow_grpo_fast,
    "grpo-guard": _grpo_guard,
    "diffusion-nft": _diffusion_nft,
    "awm": _awm,
}


def _with_old(defaults: OldPolicy, params: Mapping[str, object], of: str) -> Mapping[str, object]:
    """``params`` with its plain mapping ``old_policy`` made the dataclass."""
    nested = params.get("old_policy", {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"old_policy of {of} is {nested!r}; expected a mapping of its fields")
    return {**params, "old_policy": _with(defaults, nested, f"{of}'s old_policy")}


def _with(defaults: P, params: Mapping[str, object], of: str) -> P:
    known = [field.name for field in fields(defaults)]
    unknown = [key for key in params if key not in known]
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r} of {of}; expected one of {', '.join(known)}")
    return replace(defaults, **params)
