"""Several ranks: who they are, what they exchange, and how the DiT is sharded over them (FSDP2).

FSDP2 averages gradients over ranks, so a loss summed over a rank's share must be multiplied by the number
of ranks to give the gradient of the sum over all. Every rank must make the same sequence of forwards and
backwards, whichever weight slot they use: each gathers parameters from all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from spotlight.models.slots import WeightSlots

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together.

    Attributes:
        rank: this process, 0 <= rank < world.
        world: number of processes; 1 needs no process group.
    """

    rank: int = 0
    world: int = 1

    @staticmethod
    def current() -> Ranks:
        """Those of the default process group, or one rank where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and talks to people."""
        return self.rank == 0

    def share(self, value: T) -> list[T]:
        """The ranks' values, in order of rank, the same on all. For small values: they are pickled."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """``values`` summed (or ``op``) over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op)
        return values

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """The ``values`` of rank ``source``; all ranks must give a tensor of that shape and type."""
        if self.world == 1:
            return values
        told = values.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(told, source)
        return told.to(values.device)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks meet that torchrun did not start: this rank, their number, and a store they share."""

    store: Store
    rank: int
    world: int


@contextmanager
def process_group(
    device: torch.device, timeout_s: float = 1800.0, meeting: Meeting | None = None
) -> Iterator[Ranks]:
    """The ranks that torchrun started (WORLD_SIZE, RANK, ...), as long as the context lasts.

    Args:
        device: ``cuda`` uses NCCL (and LOCAL_RANK's GPU), anything else gloo.
        timeout_s: how long a rank waits for the others in one exchange.
        meeting: the ranks are these, and ``device`` is this rank's GPU; the environment is not asked.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if meeting is None else meeting.world
    if world == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if meeting is None else device)
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if meeting is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=meeting.store, rank=meeting.rank, world_size=world
        )
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


def shard(slots: WeightSlots, ranks: Ranks, compute_dtype: torch.dtype | None = None) -> None:
    """Shard every module behind the slots in place, frozen ones too; nothing to do on one rank.

    Must come before the optimizer is built. Parameters are DTensors afterwards, by the same names.

    Args:
        compute_dtype: gather parameters in this type (the learner's autocast type): autocast alone would
            keep a full-size copy of every gathered weight alive until the backward pass.
    """
    if ranks.world == 1:
        return
    # The DiT returns a view; it would matter only if somebody wrote into a velocity in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in slots.modules().values():
        if not isinstance(module, FSDPModule):
            _shard_module(module, compute_dtype)


def _shard_module(module: nn.Module, compute_dtype: torch.dtype | None) -> None:
    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # Reshard the root too: between two calls its parameters must be the shards that slots read and write.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if device == "cpu":
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot average


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The DiT's repeated blocks: the members of its module lists."""
    return [block for child in module.children() if isinstance(child, nn.ModuleList) for block in child]
