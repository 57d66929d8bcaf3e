"""What torch has sharded, told without importing what shards: .7 s that most processes have no use for.

What nothing has imported has sharded nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank has a part of the tensor only."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def gathers(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 gathers the module's weights for its forwards."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded; every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(tensors: Mapping[str, Tensor], keep: bool = True, *, stay: bool = False) -> dict[str, Tensor]:
    """The tensors, whole and on the CPU; every rank must call this.

    Args:
        keep: False on ranks that only take part in gathering; they get an empty dictionary.
        stay: leave them on their device, and those that are not sharded where they are, uncopied.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            kept[name] = full if stay else full.to("cpu", copy=True)
    return kept


def write_whole(target: Tensor, value: Tensor) -> None:
    """Copy a value that every rank has whole, or shards like the target's, into it."""
    if is_sharded(target) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(device=target.device, dtype=target.dtype)
        # src_data_rank=None: every rank has the full value and takes its own shard; no communication.
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)
