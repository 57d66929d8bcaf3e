"""Loans between real processes: a server that works meanwhile, that is killed, that is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weights_children import Child

from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.skeleton import base_state, filling, modules_of
from spotlight.models.slots import LoraSlots
from spotlight_weights import peers
from spotlight_weights.peers import WeightServer, fetch_from_peer
from spotlight_weights.served_weights import ServedWeights
from spotlight_weights.weight_errors import PeerLostError

Say = Callable[[str], None]
NUMBERS = 4_000_000


def serve(home: Path, slow_s: float = 0.0) -> Callable[[Say], str]:
    """A process that serves 16 MB in buckets of 256 KiB, and says after each that it is filled."""

    def work(say: Say) -> str:
        real = peers._put

        def put(pieces: list[peers.Piece], memory: list[Tensor], bucket: Tensor) -> list[list[int]]:
            sums = real(pieces, memory, bucket)
            say("filled")
            time.sleep(slow_s)
            return sums

        peers._put = put  # type: ignore[assignment]
        served = ServedWeights({"m.w": torch.arange(NUMBERS, dtype=torch.float32)}, 1, "base")
        with WeightServer(home, "w0", served, bucket_bytes=2**18):
            say("ready")
            time.sleep(60)
        return ""

    return work


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n") / "peers"


def test_weights_come_from_another_process(home: Path) -> None:
    with Child(serve(home)) as server:
        assert server.receive() == "ready"
        target = torch.empty(NUMBERS)
        found = fetch_from_peer(home / "w0.sock", "base", {"m.w": target}, 1)
        assert found.bytes == 4 * NUMBERS
        assert torch.equal(target, torch.arange(NUMBERS, dtype=torch.float32))


@pytest.mark.parametrize(
    ("how", "bucket"),
    [
        pytest.param(how, bucket, marks=() if bucket in first else pytest.mark.slow)
        for how, first in ((signal.SIGKILL, (0, 30)), (signal.SIGSTOP, (1, 60)))
        for bucket in (0, 1, 2, 30, 60)
    ],
)
def test_a_lender_lost_in_the_middle_is_reported_in_time(
    home: Path, bucket: int, how: signal.Signals
) -> None:
    with Child(serve(home, slow_s=0.002)) as server:
        assert server.receive() == "ready"
        real = peers._Transfer.take
        taken = []

        def take(self: peers._Transfer, rows: list[list[int]], memory: Tensor) -> None:
            if len(taken) == bucket:
                server.signal(how)
                time.sleep(0.01)
            taken.append(rows)
            real(self, rows, memory)

        target = torch.empty(NUMBERS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers._Transfer, "take", take)
            with pytest.raises(PeerLostError, match=r"w0.sock (is gone|did not answer for 0.2 s)"):
                fetch_from_peer(home / "w0.sock", "base", {"m.w": target}, 1, stall_s=0.2)
        assert bucket <= len(taken) <= 62
    assert not list(home.glob("*.tmp"))
    # Another worker of the node serves under the dead one's name.
    with Child(serve(home)) as server:
        assert server.receive() == "ready"
        fetch_from_peer(home / "w0.sock", "base", {"m.w": target}, 1)
        assert torch.equal(target, torch.arange(NUMBERS, dtype=torch.float32))


def test_a_new_worker_that_is_killed_does_not_harm_its_server(home: Path) -> None:
    served = ServedWeights({"m.w": torch.arange(NUMBERS, dtype=torch.float32)}, 1, "base")

    def new_worker(say: Say) -> str:
        real = peers._Transfer.take

        def take(self: peers._Transfer, rows: list[list[int]], memory: Tensor) -> None:
            say("taking")
            time.sleep(0.01)
            real(self, rows, memory)

        peers._Transfer.take = take  # type: ignore[method-assign]
        fetch_from_peer(home / "w0.sock", "base", {"m.w": torch.empty(NUMBERS)}, 1)
        return "fetched"

    with WeightServer(home, "w0", served, bucket_bytes=2**18, stall_s=0.3):
        for how in (signal.SIGKILL, signal.SIGSTOP):
            with Child(new_worker) as child:
                assert child.receive() == "taking"
                assert child.receive() == "taking"
                child.signal(how)
                target = torch.empty(NUMBERS)
                fetch_from_peer(home / "w0.sock", "base", {"m.w": target}, 1, deadline_s=120)
                assert torch.equal(target, torch.arange(NUMBERS, dtype=torch.float32))


def test_a_new_workers_model_is_its_peers_while_the_peer_denoises(
    random_pipeline: Path, home: Path, tmp_path: Path
) -> None:
    """A worker runs rollouts on merged weights without a pause; what it serves is the base under them."""

    def load(read: bool) -> QwenImage:
        return QwenImage.load(
            random_pipeline,
            device="cpu",
            dtype=torch.float32,
            embeddings_cache=tmp_path,
            read_transformer=read,
        )

    def work(say: Say) -> str:
        family = load(True)
        base = base_state(family.transformer)
        slots = LoraSlots(family.transformer, LoraSpec(rank=4, alpha=8.0, targets=("to_q", "net.2"), seed=1))
        for parameter in slots.trainable_parameters().values():
            parameter.data.normal_()
        served = ServedWeights(base, modules_of(base), "base")
        with WeightServer(home, "w0", served, bucket_bytes=2**16), slots.use("policy", merged=True):
            say("denoising")
            time.sleep(60)
        return ""

    plain = base_state(load(True).transformer)
    with Child(work) as worker:
        assert worker.receive() == "denoising"
        new_worker = load(False)
        with filling(new_worker.transformer) as targets:
            found = fetch_from_peer(home / "w0.sock", "base", targets, modules_of(targets))
    assert found.tensors == len(plain)
    assert found.modules == modules_of(plain) > 0
    filled = base_state(new_worker.transformer)
    assert all(torch.equal(filled[name], plain[name]) for name in plain)
