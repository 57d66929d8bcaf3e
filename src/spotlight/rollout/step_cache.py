"""Reuse of transformer blocks between neighbouring denoising steps, with diffusers' First Block Cache.

    with recording(model) as added:       # full forwards that also record what the blocks added
        family.velocity(model, ...)
    with reusing(model, added):           # the first block runs; the recorded residual replaces the others
        family.velocity(model, ...)

diffusers decides when to reuse by a batch mean. Then a rollout would depend on its batch mates, and ranks of
a sequence-parallel group could disagree and deadlock. Here the caller decides, with residuals per rollout.

Invariants:
- Outside the two contexts the module has no hook or attribute of ours or of the cache.
- Only residuals that the caller passes are reused.
- Guidance passes are kept apart by name (``guidance_pass`` in ``models/condition.py``); diffusers raises
  without one.

This file has all uses of diffusers' private cache interfaces; contract test:
``tests/contract/test_step_cache.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers import CacheMixin, FirstBlockCacheConfig
from diffusers import __version__ as diffusers_version
from diffusers.hooks import _common, _helpers, first_block_cache, hooks
from torch import nn

from spotlight.rollout.state import Added

_USED = (
    (_common, ("_ALL_TRANSFORMER_BLOCK_IDENTIFIERS",)),
    (_helpers, ("TransformerBlockRegistry",)),
    (first_block_cache, ("FBCSharedBlockState", "_FBC_LEADER_BLOCK_HOOK")),
    (hooks, ("StateManager",)),
)
_STATE = ("head_block_residual", "tail_block_residuals")
_REGISTRY = "_diffusers_hook"
_LEFT = frozenset({"forward", "_cache_config", _REGISTRY})
"""Attributes that diffusers leaves in modules after a cache is disabled."""


class StepCacheError(ValueError):
    """The transformer's blocks cannot be reused, or diffusers' interface changed."""


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Added]]:
    """Run full forwards; on exit the list has what the blocks added, per row.

    Raises:
        StepCacheError: see :func:`require`.
    """
    found: list[Added] = []
    with _cache(model) as states:
        yield found
        # Cloned: a view would keep the memory of the whole batch alive.
        added = {
            name: [row.clone() for row in state.tail_block_residuals[0]] for name, state in states.items()
        }
    found += [dict(zip(added, rows, strict=True)) for rows in zip(*added.values(), strict=True)]


@contextmanager
def reusing(model: nn.Module, added: Sequence[Added]) -> Iterator[None]:
    """Run the first block only and take the others' residuals from ``added``, per row.

    Raises:
        StepCacheError: see :func:`require`.
    """
    with _cache(model) as states:
        for name in added[0]:
            residual = torch.stack([row[name] for row in added])
            state = first_block_cache.FBCSharedBlockState()
            # Text tokens are not read after the last block, so their residual can be zero.
            state.tail_block_residuals = (residual, residual.new_zeros(()))
            state.head_block_residual = residual.new_ones(())  # compared with an infinite threshold
            states[name] = state
        yield


def require(model: nn.Module) -> None:
    """Raise :class:`StepCacheError` unless the blocks of ``model`` can be reused."""
    require_interface()
    kind = type(model).__name__
    if not isinstance(model, CacheMixin):
        raise StepCacheError(f"{kind} has no caches in diffusers {diffusers_version}")
    if model.is_cache_enabled:
        raise StepCacheError(f"{kind} has another cache on: call its disable_cache first")
    blocks = _blocks(model)
    if len(blocks) < 2:
        raise StepCacheError(f"{kind} has {len(blocks)} transformer blocks, of which the first always runs")
    for block in blocks:
        _introduce(type(block))


def require_interface() -> None:
    """Raise StepCacheError, naming what is missing, unless diffusers' interface is as expected."""
    gone = [
        f"{module.__name__}.{name}" for module, names in _USED for name in names if not hasattr(module, name)
    ]
    if not gone:
        state = vars(first_block_cache.FBCSharedBlockState())
        gone += [f"FBCSharedBlockState.{name}" for name in _STATE if name not in state]
        if "_state_cache" not in vars(hooks.StateManager(first_block_cache.FBCSharedBlockState)):
            gone.append("StateManager._state_cache")
        if not hasattr(_helpers.TransformerBlockRegistry, "_registry"):
            gone.append("TransformerBlockRegistry._registry")
    if gone:
        raise StepCacheError(
            f"diffusers {diffusers_version} lacks {', '.join(gone)}; expected the interface of 0.42: install "
            "diffusers>=0.42,<0.43, or adapt spotlight/rollout/step_cache.py"
        )


@contextmanager
def _cache(model: nn.Module) -> Iterator[dict[str, first_block_cache.FBCSharedBlockState]]:
    """diffusers' First Block Cache within the context; yields its (empty) states by pass."""
    require(model)
    touched = [model, *_blocks(model)]
    before = [_LEFT & vars(part).keys() for part in touched]
    config = FirstBlockCacheConfig(threshold=math.inf)
    try:
        CacheMixin.enable_cache(model, config)
        leader = getattr(touched[1], _REGISTRY).get_hook(first_block_cache._FBC_LEADER_BLOCK_HOOK)
        yield leader.state_manager._state_cache
    finally:
        vars(model)["_cache_config"] = config  # else disable_cache does nothing if enabling failed midway
        CacheMixin.disable_cache(model)
        for part, had in zip(touched, before, strict=True):
            for name in _LEFT - had:
                vars(part).pop(name, None)


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = _common._ALL_TRANSFORMER_BLOCK_IDENTIFIERS
    lists = [
        part for name, part in model.named_children() if name in names and isinstance(part, nn.ModuleList)
    ]
    return [block for part in lists for block in part]


def _introduce(kind: type[nn.Module]) -> None:
    """Register a block class by a known base: FSDP2 subclasses every block.

    Raises:
        StepCacheError: no base is known.
    """
    registry = _helpers.TransformerBlockRegistry
    for base in kind.__mro__:
        try:
            known = registry.get(base)
        except ValueError:
            continue
        if base is not kind:
            registry.register(kind, dataclasses.replace(known))
        return
    raise StepCacheError(
        f"diffusers {diffusers_version} does not know how {kind.__name__} hands on its tokens"
    )
