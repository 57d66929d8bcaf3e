"""What torch has sharded, told without importing what shards: .7 s that most processes have no use for.

What nothing has imported has sharded nothing.
"""

from __future__ import annotations

import sys
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
