"""What ranks exchange: how often, whether NCCL would take it, and how long they wait for a stopped one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.collectives import Collectives
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.communicators import Gloo, _half
from spotlight.rollout.sequence_parallel.membership import SpGroup, SpMembership
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.scheduler.types import WorkerId
from spotlight.training.sharding import Meeting, Ranks, average_gradients, process_group
from spotlight_plan.commands.gpu.random_blocks import random_adapters

_processes = multiprocessing.get_context("forkserver")
BUCKET_BYTES = 2**16


def gradients(rank: int) -> list[torch.nn.Parameter]:
    """As of many small adapters in two types; one rank or both lack some."""
    generator = torch.Generator().manual_seed(rank)
    parameters = []
    for i in range(300):
        parameter = torch.nn.Parameter(torch.zeros(3, i, dtype=(torch.float32, torch.bfloat16)[i % 5 == 0]))
        gradient = torch.randn(i, 3, generator=generator).T  # not contiguous
        if i % 7 and (i % 11 or rank):
            parameter.grad = gradient.to(parameter.dtype)
        parameters.append(parameter)
    return parameters


def exchange(rank: int, address: rendezvous.Address, pipe: Connection) -> None:
    torch.set_num_threads(1)
    meeting = Meeting(rendezvous.connect(address), rank, 2)
    with process_group(torch.device("cpu"), 5.0, meeting) as ranks:
        one_by_one, together = gradients(rank), gradients(rank)
        for parameter in one_by_one:
            found = ranks.share(parameter.grad is not None)
            if any(found):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                parameter.grad = ranks.all_reduce(grad.div_(2))
        with Collectives() as collectives:
            average_gradients(together, ranks, BUCKET_BYTES)
        count = collectives.seen["allreduce_"]
        pairs = [(a.grad, b.grad) for a, b in zip(one_by_one, together, strict=True)]
        equal = all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)
        pipe.send((count, equal, sum(b.nbytes for _, b in pairs if b is not None)))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            ranks.barrier()
        except RuntimeError as error:
            pipe.send(str(error))


def test_gradients_go_in_a_few_buffers_and_a_stopped_rank_is_given_up_in_time() -> None:
    store, address = rendezvous.serve()
    pipes, ranks = [], []
    for rank in range(2):
        ours, theirs = _processes.Pipe()
        ranks.append(_processes.Process(target=exchange, args=(rank, address, theirs), daemon=True))
        ranks[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(120)
            count, equal, total = pipe.recv()
            assert equal, "to the bit what they are one by one"
            assert 2 <= count <= 1 + 2 * (1 + total / BUCKET_BYTES) < 20
        assert pipes[0].poll(120), "it waits for the other without end"
        assert "Timed out waiting 5000ms" in pipes[0].recv()
    finally:
        for process in ranks:
            process.kill()
    del store


def listen(rank: int, port: int, pipe: Connection) -> None:
    """One of two ranks of ``--ranks``; tells where its process listens."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(torch.device("cpu"), 30.0) as ranks:
        ranks.barrier()
        open_ports = [each for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
        pipe.send([each.laddr.ip for each in open_ports])
        ranks.barrier()


def test_ranks_of_one_machine_listen_on_the_loopback_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipe, theirs = _processes.Pipe()
    ranks = [_processes.Process(target=listen, args=(rank, port, theirs), daemon=True) for rank in range(2)]
    try:
        for each in ranks:
            each.start()
        found = []
        for _ in ranks:
            assert pipe.poll(120)
            found += pipe.recv()
        assert len(found) >= 3, "the store, and gloo of each"
        assert set(found) == {"127.0.0.1"}
    finally:
        for each in ranks:
            each.kill()


class Run:
    """Leaves a file with the name of the process that unpickles it."""

    def __init__(self, folder: Path) -> None:
        self.code = f"__import__('os').mknod('{folder}/' + str(__import__('os').getpid()))"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return eval, (self.code,)


def share_with_a_stranger(
    rank: int, address: rendezvous.Address, pipe: Connection, sent: list[bytes | int] | Path
) -> None:
    with process_group(torch.device("cpu"), 5.0, Meeting(rendezvous.connect(address), rank, 2)) as ranks:
        try:
            if rank == 0:
                ranks.share({"loss": 0.5})
            elif isinstance(sent, Path):
                dist.all_gather_object([None, None], Run(sent))
            else:
                for each in sent:
                    own = torch.tensor([each] if isinstance(each, int) else list(each))
                    own = own if isinstance(each, int) else own.byte()
                    dist.all_gather([torch.empty_like(own) for _ in range(2)], own)
            pipe.send("nothing")
        except Exception as error:  # noqa: BLE001 - of gloo, JSON, or what a stranger sent
            pipe.send(str(error))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("code", ""),
        ([2**60], "ranks announced values of [13, 1152921504606846976] bytes, expected at most"),
        ([-1], "ranks announced values of [13, -1] bytes"),
        ([13, b"[" * 13], "Expecting value"),
        ([13, b"\x80\x04" + b"." * 11], "codec can't decode"),
    ],
)
def test_what_a_rank_shares_is_never_code_and_has_a_bound(
    sent: list[bytes | int] | str, told: str, tmp_path: Path
) -> None:
    store, address = rendezvous.serve()
    pipe, theirs = _processes.Pipe()
    what = tmp_path if isinstance(sent, str) else sent
    ranks = [
        _processes.Process(
            target=share_with_a_stranger,
            args=(rank, address, theirs if not rank else other, what),
            daemon=True,
        )
        for rank, other in ((0, theirs), (1, _processes.Pipe()[1]))
    ]
    try:
        for each in ranks:
            each.start()
        assert pipe.poll(120)
        assert told in pipe.recv()
        assert not (tmp_path / str(ranks[0].pid)).exists()
    finally:
        for each in ranks:
            each.kill()
    del store


class OnlyWhatNcclTakes(Collectives):
    """Fails where a tensor that NCCL would refuse is handed to a collective."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def check(self, name: str, arguments: object) -> None:
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == self._device, f"{name} of one on {tensor.device}"
                assert tensor.is_contiguous(), f"{name} of strides {tensor.stride()}"


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Of the first of eight ranks, whose collectives do nothing; as under NCCL, if it is a GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def first_of_eight() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shard", ["none", "node", "all"])
def test_a_learner_of_eight_ranks_hands_over_only_what_nccl_takes(
    shard: str, device: torch.device, first_of_eight: None, tmp_path: Path
) -> None:
    from benchmarks.gpu import lab as model

    lab = model.Lab(tmp_path, device, tiny=True)
    family, shape = lab.fresh(lab.scale.few_layers), replace(lab.scale.train_small, batch=8)
    slots = random_adapters(family, lab.scale.rank)
    samples = lab.samples(family, slots, shape, 3)
    ranks = Ranks(0, 8, (4, 4) if shard == "node" else ())
    with OnlyWhatNcclTakes(device.type) as collectives:
        learner = lab.learner(family, slots, shape, ranks=ranks, shard=shard)
        model.accumulate(learner, model.dealt(samples, 0, 8))
        learner.step(1)  # nobody else's are added
        learner.finish_batch()
        ranks.broadcast(torch.ones(2, 2).T, 0)
    assert collectives.seen["allreduce_"]
    assert collectives.seen["broadcast_"]
    assert (collectives.seen["_allgather_base_"] > 0) == (shard != "none")


class Opened(Gloo):
    """The group that there is already."""

    def open(self, store: object, rank: int, degree: int) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def half(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        return _half(group, 60.0)

    def bounded(self, limit_s: float | None = None) -> Any:
        return nullcontext()

    def close(self) -> None:
        """It stays open."""


def test_a_group_of_eight_workers_hands_over_only_what_nccl_takes(
    device: torch.device, first_of_eight: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu.lab import Lab

    lab = Lab(tmp_path, device, tiny=True)
    family, shape = lab.fresh(lab.scale.few_layers), lab.scale.small
    members = tuple(WorkerId(f"w{i}") for i in range(8))
    store, link = dist.HashStore(), Opened(60.0)
    link.device = device
    for member in members:
        dist.PrefixStore(f"sp/1/{'+'.join(members)}", store).set(member, "here")
    parallel = SequenceParallel([family.transformer], guidance=True)
    member = SpMembership(members[0], store, link, parallel, form_s=60.0)
    monkeypatch.setattr(member, "_verify", lambda group, rank, batch: batch)  # nobody answers
    with OnlyWhatNcclTakes(device.type) as collectives:
        member.form(SpGroup(1, members))
        member.broadcast(b"an order")
        with member.exchange(1.0):
            both = member.passes(*[lambda: lab.velocity(family, family.transformer, shape)] * 2)
    assert both[0].shape == both[1].shape
    assert {"broadcast_", "all_to_all_single", "allgather_"} <= collectives.seen.keys()
    member.part()
