"""Ranks, their collectives, and how the DiT is divided among them (``learner.shard``).

- ``all``: FSDP2 over all ranks. Least memory; every forward gathers the model from all nodes.
- ``node``: FSDP2 over the ranks of a node, which hold the model together; only gradients cross the network.
- ``none``: every rank holds the whole model. Gradients of the trained parameters are averaged once per
  optimizer step.

Gradients are averaged in each case, so a loss summed over a rank's share must be multiplied by the number
of ranks. With FSDP2, ranks must run the same sequence of forwards and backwards, in any slot, because each
gathers parameters from others.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch._utils import _take_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spotlight.models.experts import Experts, denoisers
from spotlight.models.slots import WeightSlots
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.training.device_memory import free_bytes, measured_peak
from spotlight.training.timesteps import MARGIN
from spotlight_files.pipeline_export import keeps_float32

T = TypeVar("T")
Sharding = Literal["none", "node", "all"]
"""Values of ``learner.shard``."""
_LOOPBACK = "127.0.0.1"
SHARED_BYTES = 2**31
"""Of a value that a rank shares: more than the pictures of a group, or eight videos of 81 frames, take."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; 0 <= rank < world, and a world of 1 needs no process group.

    Attributes:
        per_node: consecutive ranks on each node; empty: all on one.
    """

    rank: int = 0
    world: int = 1
    per_node: tuple[int, ...] = ()

    @staticmethod
    def current(per_node: tuple[int, ...] = ()) -> Ranks:
        """From the default process group; one rank without it."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size(), per_node)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and output."""
        return self.rank == 0

    @property
    def on_this_node(self) -> int:
        """Ranks on this one's node, itself included."""
        end = 0
        for here in self.per_node:
            end += here
            if self.rank < end:
                return here
        return self.world

    def share(self, value: T) -> list[T]:
        """All ranks' values, in rank order: values of JSON, which cannot run code as pickles can.

        Raises:
            ValueError: a rank's is larger than ``SHARED_BYTES``.
        """
        if self.world == 1:
            return [value]
        own = json.dumps(value).encode()
        lengths = [int(each) for each in self._all_gather(torch.tensor([len(own)]))]
        longest = max(lengths)
        if not 0 < min(lengths) <= longest <= SHARED_BYTES:
            raise ValueError(
                f"ranks announced values of {lengths} bytes, expected at most {SHARED_BYTES} each: smaller "
                "groups (rollout.group_size) make them smaller; numbers without sense are a stranger's, who "
                "reached the ranks' ports"
            )
        padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8)
        rows = zip(self._all_gather(padded), lengths, strict=True)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in rows]

    def _all_gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's ``values``, of one shape, on the CPU."""
        own = values.to(_exchange_device())
        everyones = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(everyones, own)
        return [each.cpu() for each in everyones]

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum ``values`` (or apply ``op``) over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op)
        return values

    def least(self, value: int, device: torch.device) -> int:
        """The minimum of all ranks' values."""
        return int(self.all_reduce(torch.tensor(value, dtype=torch.int64, device=device), dist.ReduceOp.MIN))

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """``values`` of rank ``source``; shape and type must be equal on all ranks."""
        if self.world == 1:
            return values
        shared = values.to(_exchange_device()).contiguous()
        dist.broadcast(shared, source)
        return shared.to(values.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous for ranks not started by torchrun. ``per_node``: see :class:`Ranks`."""

    store: Store
    rank: int
    world: int
    per_node: tuple[int, ...] = ()


@contextmanager
def process_group(device: torch.device, timeout_s: float, meeting: Meeting | None = None) -> Iterator[Ranks]:
    """Context with the ranks of ``--ranks`` or torchrun (WORLD_SIZE, RANK, ...), or of ``meeting``.

    Those of ``--ranks`` meet and listen on the loopback alone, as torch's own store would not.

    Args:
        device: ``cuda`` uses NCCL (and LOCAL_RANK's GPU), anything else gloo.
        timeout_s: of one collective (``fleet.learner_collective_s``). A rank that waits longer for another
            raises, or with NCCL ends.
        meeting: replaces the environment; ``device`` is then this rank's GPU.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if meeting is None else meeting.world
    if world == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if meeting is None else device)
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    # Ranks that meet on the loopback, and none of them is torchrun's, which serves the store itself.
    local = os.environ.get("MASTER_ADDR") == _LOOPBACK and "TORCHELASTIC_RUN_ID" not in os.environ
    alone = meeting is None and local
    with rendezvous.listening_only_on(_LOOPBACK) if alone else nullcontext():
        if meeting is None and not alone:
            dist.init_process_group(backend, timeout=timeout)
        else:
            rank = int(os.environ["RANK"]) if meeting is None else meeting.rank
            store = _loopback_store(rank, timeout_s) if meeting is None else meeting.store
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        try:
            yield Ranks.current(_torchrun_nodes() if meeting is None else meeting.per_node)
        finally:
            dist.destroy_process_group()


def _loopback_store(rank: int, timeout_s: float) -> Store:
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        return rendezvous.serve(_LOOPBACK, port, timeout_s)[0]
    return rendezvous.connect(rendezvous.Address(_LOOPBACK, port), timeout_s)


def _torchrun_nodes() -> tuple[int, ...]:
    ranks = Ranks.current()
    here = ranks.share(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))
    nodes: list[int] = []
    while sum(nodes) < ranks.world:
        nodes.append(here[sum(nodes)])  # ranks of a node are consecutive
    return tuple(nodes) if len(nodes) > 1 else ()


def _exchange_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def is_shared(ranks: Ranks, how: Sharding) -> bool:
    """Whether :func:`shard` divides the model, so that a rank never holds the whole of it."""
    return ranks.world > 1 and how != "none"


def shard(
    slots: WeightSlots, ranks: Ranks, compute_dtype: torch.dtype | None = None, how: Sharding = "all"
) -> None:
    """Shard every module behind the slots in place, frozen ones too; no effect on one rank or with ``none``.

    Call it before building the optimizer. Parameters become DTensors with the same names; those on the meta
    device stay there.

    Args:
        compute_dtype: gather parameters in this dtype (the learner's autocast dtype); autocast alone would
            keep a full-size copy of each until the backward pass.

    Raises:
        ValueError: ``node`` with nodes of unequal numbers of ranks, which the configuration's check refuses.
    """
    if not is_shared(ranks, how):
        return
    # The DiT returns a view, which matters only if a velocity is modified in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in slots.modules().values():
        for part in denoisers(module).values():  # each is called on its own, so each is a root
            if not isinstance(part, FSDPModule):
                shard_module(part, compute_dtype, ranks.per_node if how == "node" else ())


def average_gradients(parameters: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = 64 << 20) -> None:
    """Average gradients of whole parameters over ranks, in place; no effect on sharded ones.

    A parameter without a gradient on this rank takes part if another rank has one.

    Args:
        bucket_bytes: gradients are exchanged in buffers of about this size, one at a time.
    """
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if ranks.world == 1 or not whole:
        return
    has = torch.tensor([p.grad is not None for p in whole], dtype=torch.int32, device=whole[0].device)
    somewhere = ranks.all_reduce(has, dist.ReduceOp.MAX).tolist()
    gradients = []
    for parameter in (p for p, found in zip(whole, somewhere, strict=True) if found):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    # An exchange of a small tensor takes about as long as one of a megabyte, and adapters are thousands.
    for bucket in _take_tensors(gradients, bucket_bytes):  # type: ignore[no-untyped-call]
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(ranks.world)
        ranks.all_reduce(flat)
        for gradient, mean in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def drop_idle_gradients(module: nn.Module, ranks: Ranks) -> None:
    """Set gradients to None of transformers that had no row of an update on any rank; every rank calls this.

    Where they are sharded these are zeros, by which AdamW would move the weights on old momentum, and decay
    them.
    """
    if not isinstance(module, Experts):
        return
    parts = denoisers(module)
    device = next(module.parameters()).device
    had = torch.tensor([name in module.had_rows for name in parts], dtype=torch.int32, device=device)
    module.had_rows.clear()
    for part, rows in zip(parts.values(), ranks.all_reduce(had, dist.ReduceOp.MAX).tolist(), strict=True):
        if not rows:
            part.zero_grad(set_to_none=True)


def shard_module(
    module: nn.Module, compute_dtype: torch.dtype | None, per_node: tuple[int, ...] = ()
) -> None:
    """Shard one module in place over the default process group, even of one rank.

    Weights that diffusers keeps in float32 (Wan's scale tables) are gathered in float32.

    Args:
        per_node: shard over the ranks of each node, and replicate over nodes; empty: shard over all ranks.

    Raises:
        ValueError: nodes have unequal numbers of ranks.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # parameters may be on the meta device
    mesh = _mesh(device, per_node)

    def split(part: nn.Module, dtype: torch.dtype | None) -> None:
        precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # Reshard the root too: between calls, slots read and write the shards of its parameters.
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    for part in (*blocks_of(module), module):
        castable = [] if compute_dtype is None else _castable(part, type(module))
        if castable == [part]:
            split(part, compute_dtype)
            continue
        for each in castable:  # gathered on their own, so that the rest stays float32
            split(each, compute_dtype)
        split(part, None)
    if device == "cpu":
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot average


def _castable(part: nn.Module, kind: type[nn.Module], prefix: str = "") -> list[nn.Module]:
    """The largest modules, ``part`` or within it, without a weight that diffusers keeps in float32.

    Parts that are sharded already do not count.

    Args:
        kind: diffusers' class of the whole model.
        prefix: of the part's weights in it.
    """
    names = list(_unsharded(part, prefix))
    if not names:
        return []
    container = isinstance(part, nn.ModuleList | nn.ModuleDict)  # without a forward before which to gather
    if not container and not any(keeps_float32(kind, name) for name in names):
        return [part]
    children = part.named_children()
    return [each for name, child in children for each in _castable(child, kind, f"{prefix}{name}.")]


def _unsharded(part: nn.Module, prefix: str) -> Iterator[str]:
    yield from (prefix + name for name, _ in part.named_parameters(recurse=False))
    for name, child in part.named_children():
        if not isinstance(child, FSDPModule):
            yield from _unsharded(child, f"{prefix}{name}.")


def _mesh(device: str, per_node: tuple[int, ...]) -> DeviceMesh:
    if len(per_node) < 2:
        return init_device_mesh(device, (dist.get_world_size(),))
    if len(set(per_node)) > 1:
        raise ValueError(f"learner.shard is 'node', and nodes have {per_node} ranks")
    return init_device_mesh(device, (len(per_node), per_node[0]), mesh_dim_names=("node", "rank"))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Its direct children's, in order."""
    return [block for child in module.children() if isinstance(child, nn.ModuleList) for block in child]


class RolloutGathering:
    """Keeps a sharded model's parameters gathered while this process rolls out: later forwards gather none.

    With ``auto``, forwards of the first rollouts gather block by block, and are measured. The whole is kept
    once it fits, beside the largest peak so far, on the fullest rank's GPU; never on CPUs.

    Args:
        setting: ``learner.keep_gathered``.
        compute_dtype: as of :func:`shard`.
    """

    def __init__(
        self,
        setting: bool | Literal["auto"],
        ranks: Ranks,
        device: torch.device,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self._setting, self._ranks, self._device = setting, ranks, device
        self._compute_dtype = compute_dtype
        self._peak_bytes: int | None = None

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Of rollouts without gradient. Collective, and all ranks make equal forwards, if it is sharded."""
        parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
        auto = self._setting == "auto" and self._device.type == "cuda"
        if not parts or not (auto or self._setting is True):
            yield
            return
        whole = sum(map(self._gathered_bytes, model.parameters()))
        keeps = bool(self._ranks.least(self._fits(whole), self._device)) if auto else True
        with gathered(parts) if keeps else nullcontext(), measured_peak(self._device) as peak:
            yield
        mine = peak() - (whole if keeps else 0)
        self._peak_bytes = mine if self._peak_bytes is None else max(mine, self._peak_bytes)

    def _fits(self, whole_bytes: int) -> bool:
        free = MARGIN * free_bytes(self._device)
        return self._peak_bytes is not None and whole_bytes + self._peak_bytes <= free

    def _gathered_bytes(self, parameter: Tensor) -> int:
        dtype = self._compute_dtype or parameter.dtype
        return parameter.numel() * min(dtype.itemsize, parameter.dtype.itemsize)


@contextmanager
def gathered(parts: Sequence[FSDPModule]) -> Iterator[None]:
    """What a forward without gradient gathers of the parts stays until the end."""
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
