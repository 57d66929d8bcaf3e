"""Ranks, their collectives, and sharding of the DiT over them (FSDP2).

FSDP2 averages gradients, so a loss summed over a rank's share must be multiplied by the number of ranks. All
ranks must run the same sequence of forwards and backwards, in any slot, because each gathers parameters from
all.
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

from spotlight.models.experts import denoisers
from spotlight.models.slots import WeightSlots

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; 0 <= rank < world, and a world of 1 needs no process group."""

    rank: int = 0
    world: int = 1

    @staticmethod
    def current() -> Ranks:
        """From the default process group; one rank without it."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and output."""
        return self.rank == 0

    def share(self, value: T) -> list[T]:
        """All ranks' values, in rank order. For small values: they are pickled."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum ``values`` (or apply ``op``) over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op)
        return values

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """``values`` of rank ``source``; shape and type must be equal on all ranks."""
        if self.world == 1:
            return values
        told = values.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(told, source)
        return told.to(values.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous for ranks not started by torchrun."""

    store: Store
    rank: int
    world: int


@contextmanager
def process_group(
    device: torch.device, timeout_s: float = 1800.0, meeting: Meeting | None = None
) -> Iterator[Ranks]:
    """Context with the ranks of torchrun (WORLD_SIZE, RANK, ...), or of ``meeting``.

    Args:
        device: ``cuda`` uses NCCL (and LOCAL_RANK's GPU), anything else gloo.
        timeout_s: of one collective.
        meeting: replaces the environment; ``device`` is then this rank's GPU.
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
    """Shard every module behind the slots in place, frozen ones too; no effect on one rank.

    Call it before building the optimizer. Parameters become DTensors with the same names.

    Args:
        compute_dtype: gather parameters in this dtype (the learner's autocast dtype); autocast alone would
            keep a full-size copy of each until the backward pass.
    """
    if ranks.world == 1:
        return
    # The DiT returns a view, which matters only if a velocity is modified in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in slots.modules().values():
        for part in denoisers(module).values():  # each is called on its own, so each is a root
            if not isinstance(part, FSDPModule):
                shard_module(part, compute_dtype)


def shard_module(module: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Shard one module in place over the default process group, even of one rank."""
    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # Reshard the root too: between calls, slots read and write the shards of its parameters.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if device == "cpu":
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot average


def _blocks(module: nn.Module) -> list[nn.Module]:
    return [block for child in module.children() if isinstance(child, nn.ModuleList) for block in child]
