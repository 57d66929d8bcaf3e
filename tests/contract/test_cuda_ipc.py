"""torch's private CUDA IPC as the weights use it: that it is there, and on a GPU that it works."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from spotlight_weights import cuda_ipc, peers
from spotlight_weights.flat import as_bytes, checksum
from spotlight_weights.peers import WeightServer, fetch_from_peer
from spotlight_weights.served_weights import ServedWeights
from spotlight_weights.weight_errors import PeerLostError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = {"a.w": (4096, 4096), "a.b": (4096,), "b.w": (1000, 777), "c.w": (3,)}


def weights(device: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    types = (torch.bfloat16, torch.float32)
    return {
        name: torch.randn(shape, generator=generator).to(device, types[i % 2])
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def test_the_private_methods_are_those_that_torch_itself_uses() -> None:
    storage = torch.UntypedStorage
    assert callable(storage._share_cuda_)
    assert callable(storage._new_shared_cuda)
    order = (
        "storage_device",
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    )
    assert len(order) == len(cuda_ipc.FIELDS)
    source = inspect.getsource(reductions.rebuild_cuda_tensor)
    call = source.partition("_new_shared_cuda(")[2].partition(")")[0]
    assert tuple(part.strip() for part in call.split(",") if part.strip()) == order
    sent = inspect.getsource(reductions.reduce_tensor).partition(") = storage._share_cuda_()")[0]
    given = tuple(part.strip() for part in sent.rpartition("(")[2].split(",") if part.strip())
    assert given == ("device", "handle", *order[2:])


def test_only_a_whole_storage_is_shared() -> None:
    with pytest.raises(ValueError, match="expected a whole uint8 storage"):
        cuda_ipc.share(torch.zeros(8, dtype=torch.uint8)[:4])
    with pytest.raises(ValueError, match="expected a whole uint8 storage"):
        cuda_ipc.share(torch.zeros(8))


def serve(home: Path, device: str, pipe: Connection, pause_s: float) -> None:
    real = peers._put

    def put(pieces: list[peers.Piece], memory: list[Tensor], bucket: Tensor) -> list[list[int]]:
        time.sleep(pause_s)
        return real(pieces, memory, bucket)

    peers._put = put  # type: ignore[assignment]
    with WeightServer(home, "w0", ServedWeights(weights(device, 1), 3, "base"), bucket_bytes=2**22):
        pipe.send("ready")
        pipe.recv()


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n") / "peers"


class Peer:
    """A server in a process of its own (spawned: CUDA does not survive a fork)."""

    def __init__(self, home: Path, device: str, pause_s: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(home, device, theirs, pause_s), daemon=True)
        self.process.start()
        assert self.pipe.poll(120)
        assert self.pipe.recv() == "ready"

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("serves", "takes"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_weights_come_from_a_peer_with_a_gpu(
    home: Path, serves: str, takes: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")  # of the peer
    opened = []
    real = cuda_ipc.open_shared
    monkeypatch.setattr(cuda_ipc, "open_shared", lambda *a: opened.append(a) or real(*a))
    peer = Peer(home, serves)
    try:
        for _ in range(2):
            targets = weights(takes, 2)
            found = fetch_from_peer(home / "w0.sock", "base", targets, 3)
            assert found.tensors == len(SHAPES)
            assert all(torch.equal(targets[n], t.to(takes)) for n, t in weights("cpu", 1).items())
    finally:
        peer.kill()
    assert bool(opened) == (serves == takes == "cuda" and not expandable)


@pytest.mark.gpu
@needs_gpu
def test_a_lender_on_a_gpu_that_is_killed_is_lost_and_the_new_worker_lives_on(home: Path) -> None:
    peer = Peer(home, "cuda", pause_s=0.05)
    targets = weights("cuda", 2)
    real = peers._Transfer.take
    taken = []

    def take(self: peers._Transfer, rows: list[list[int]], bucket: Tensor) -> None:
        real(self, rows, bucket)
        taken.append(rows)
        if len(taken) == 2:
            peer.kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers._Transfer, "take", take)
        with pytest.raises(PeerLostError):
            fetch_from_peer(home / "w0.sock", "base", targets, 3, stall_s=5)
    assert float((torch.ones(1000, device="cuda") * 2).sum()) == 2000
    peer = Peer(home, "cuda")
    try:
        fetch_from_peer(home / "w0.sock", "base", targets, 3)
    finally:
        peer.kill()
    assert all(torch.equal(targets[n].cpu(), t) for n, t in weights("cpu", 1).items())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 7, 4096 * 8 + 9, 5_000_003])
def test_a_gpu_computes_the_same_checksum(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert checksum(data.cuda()).tolist() == checksum(data).tolist()
    assert checksum(as_bytes(data.double().cuda())).tolist() == checksum(as_bytes(data.double())).tolist()
