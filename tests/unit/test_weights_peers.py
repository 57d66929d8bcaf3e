"""A server and a new worker in one process: what arrives, what is compared, what is refused."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spotlight_weights import cuda_ipc, peers
from spotlight_weights.peers import PROTOCOL, FetchedWeights, WeightServer, fetch_from_peer
from spotlight_weights.served_weights import ServedWeights
from spotlight_weights.weight_errors import PeerLostError, WeightsError

SHAPES: Mapping[str, tuple[int, ...]] = {
    "a.weight": (33, 65),
    "a.bias": (33,),
    "b.scale": (),
    "b.none": (0, 4),
    "c.weight": (5, 1000),
}


def weights(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    types = (torch.float32, torch.bfloat16, torch.float64)
    return {
        name: torch.randn(shape, generator=generator).to(types[i % 3])
        for i, (name, shape) in enumerate(shapes.items())
    }


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n") / "peers"


@pytest.fixture
def server(home: Path) -> Iterator[WeightServer]:
    with WeightServer(
        home, "w0", ServedWeights(weights(1), 3, "base"), bucket_bytes=4096, stall_s=2.0
    ) as server:
        yield server


def test_everything_arrives_bit_by_bit(server: WeightServer) -> None:
    for _ in range(2):  # one new worker after the other
        targets = weights(2)
        found = fetch_from_peer(server.path, "base", targets, 3)
        assert same(targets, weights(1))
        assert found == FetchedWeights(5, 3, sum(t.nbytes for t in targets.values()))
    assert server.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("readable", "why"),
    [(["GPU-1"], "GPU GPU-1 cannot read GPU GPU-0"), (["GPU-1", "GPU-0"], "expandable_segments")],
)
def test_gpu_memory_that_cannot_be_mapped_goes_through_the_host(
    server: WeightServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    readable: list[str],
    why: str,
) -> None:
    def share(bucket: Tensor) -> dict[str, object]:
        raise RuntimeError("expandable_segments")

    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: "GPU-0")
    monkeypatch.setattr(cuda_ipc, "readable", lambda device: readable)
    monkeypatch.setattr(cuda_ipc, "share", share)
    monkeypatch.setattr(server, "_gpu_buckets", [torch.empty(1)])
    monkeypatch.setattr(server._served, "device", torch.device("cuda:0"))
    targets = weights(2)
    fetch_from_peer(server.path, "base", targets, 3)
    assert same(targets, weights(1))
    assert why in caplog.text


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    bucket=st.sampled_from([16, 48, 4096, 1 << 20]),
)
def test_any_sizes_in_any_buckets(tmp_path: Path, sizes: list[int], bucket: int) -> None:
    shapes = {f"m{i}.w": (size,) for i, size in enumerate(sizes)}
    if bucket == 16:
        shapes = {name: (min(size, 40),) for name, (size,) in shapes.items()}
    with WeightServer(
        tmp_path / "p", "w", ServedWeights(weights(1, shapes), 1, "d"), bucket_bytes=bucket
    ) as server:
        targets = weights(2, shapes)
        fetch_from_peer(server.path, "d", targets, 1)
    assert same(targets, weights(1, shapes))


def test_parameters_are_filled_in_place(server: WeightServer) -> None:
    targets = {name: torch.nn.Parameter(tensor) for name, tensor in weights(2).items()}
    fetch_from_peer(server.path, "base", targets, 3)
    assert same(targets, weights(1))
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in targets.values())


@pytest.mark.parametrize(
    ("change", "modules", "says"),
    [
        (
            lambda t: {n: t[n] for n in list(t)[1:]},
            3,
            "found 5 tensors, expected 4; 1 unknown, first 'a.weight'",
        ),
        (lambda t: {**t, "x": torch.ones(1)}, 3, "1 missing, first 'x'"),
        (lambda t: {**t, "a.bias": torch.ones(34).bfloat16()}, 3, "is [33] bfloat16, expected [34] bfloat16"),
        (lambda t: {**t, "a.bias": torch.ones(33)}, 3, "is [33] bfloat16, expected [33] float32"),
        (lambda t: t, 4, "belong to 3 modules, those here to 4"),
    ],
    ids=["unknown", "missing", "shape", "type", "modules"],
)
def test_another_model_is_an_error_before_anything_is_written(
    server: WeightServer, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], modules: int, says: str
) -> None:
    targets = change(weights(2))
    before = {name: tensor.clone() for name, tensor in targets.items()}
    with pytest.raises(WeightsError) as caught:
        fetch_from_peer(server.path, "base", targets, modules)
    assert says in str(caught.value)
    assert not isinstance(caught.value, PeerLostError)
    assert same(before, targets)
    again = weights(2)
    fetch_from_peer(server.path, "base", again, 3)  # and the server goes on
    assert same(again, weights(1))


def test_a_peer_with_other_weights_is_not_taken(server: WeightServer) -> None:
    with pytest.raises(PeerLostError, match="refuses: weights 'v2' are not here: this worker has 'base'"):
        fetch_from_peer(server.path, "v2", weights(2), 3)


@pytest.mark.parametrize("side", ["bucket", "target"])
def test_a_byte_that_changed_on_the_way_is_found(
    server: WeightServer, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, check = peers._put, peers.checksum

    def damaging_put(pieces: list[peers.Piece], memory: list[Tensor], bucket: Tensor) -> list[list[int]]:
        sums = put(pieces, memory, bucket)
        bucket[17] ^= 1
        return sums

    if side == "bucket":
        monkeypatch.setattr(peers, "_put", damaging_put)
    else:
        targets_memory: list[Tensor] = []

        def damaging_checksum(data: Tensor) -> Tensor:
            if threading.current_thread() is threading.main_thread() and not targets_memory:
                targets_memory.append(data)
                data[3] ^= 128
            return check(data)

        monkeypatch.setattr(peers, "checksum", damaging_checksum)
    with pytest.raises(WeightsError, match=r"'a.weight' from peer .* it was damaged on the way"):
        fetch_from_peer(server.path, "base", weights(2), 3)


def test_a_dead_or_silent_peer_is_lost(home: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"none.sock is gone .*; take the weights from another peer"):
        fetch_from_peer(tmp_path / "none.sock", "base", weights(2), 3)
    server = WeightServer(home, "w0", ServedWeights(weights(1), 3, "base"))
    server.close()
    assert not server.path.exists()
    with pytest.raises(PeerLostError, match="is gone"):
        fetch_from_peer(server.path, "base", weights(2), 3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s.sock"))
        silent.listen()
        with pytest.raises(PeerLostError, match="was not done before the deadline"):
            fetch_from_peer(tmp_path / "s.sock", "base", weights(2), 3, deadline_s=0.2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"\xff\xff\xff\xffjunk", "sent a message of 4294967295 bytes; expected a JSON object"),
        (struct.pack("<I", 3) + b"abc", "sent b'abc'"),
        (struct.pack("<I", 2) + b"[]", "sent []"),
        (struct.pack("<I", 2) + b"{}", "is not understood (KeyError('bucket_bytes'))"),
        (struct.pack("<I", 900) + b"{}", "is gone"),
    ],
)
def test_a_stranger_at_the_socket_is_reported_as_such(tmp_path: Path, answer: bytes, says: str) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "s.sock"))
        stranger.listen()

        def reply() -> None:
            client, _ = stranger.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(WeightsError) as caught:
            fetch_from_peer(tmp_path / "s.sock", "base", weights(2), 3, deadline_s=60)
        thread.join()
    assert says in str(caught.value)


def test_a_new_worker_that_hangs_or_babbles_does_not_keep_the_next_from_being_served(home: Path) -> None:
    with WeightServer(
        home, "w0", ServedWeights(weights(1), 3, "base"), bucket_bytes=4096, stall_s=1.0
    ) as server:
        asked = json.dumps({"protocol": PROTOCOL, "digest": "base", "gpus": []}).encode()
        for words in (
            b"",
            b"\xff\xff\xff\xff",
            struct.pack("<I", 2) + b"[]",
            struct.pack("<I", len(asked)) + asked,
        ):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(server.path))
                client.sendall(words)
                targets = weights(2)
                fetch_from_peer(server.path, "base", targets, 3, deadline_s=60)
                assert same(targets, weights(1))


def test_the_lender_says_which_protocol_it_speaks(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: peers.Channel, message: dict[str, object], real=peers.Channel.send) -> None:  # type: ignore[no-untyped-def]
        real(self, {**message, "protocol": 0} if "protocol" in message else message)

    monkeypatch.setattr(peers.Channel, "send", send)
    with pytest.raises(
        PeerLostError, match=f"protocol 0, expected {PROTOCOL}: run the same version of the package"
    ):
        fetch_from_peer(server.path, "base", weights(2), 3)


def test_what_cannot_be_lent_is_reported(home: Path) -> None:
    with pytest.raises(WeightsError, match="found 0 tensors of 1 modules on no device"):
        ServedWeights({}, 1, "d")
    with pytest.raises(WeightsError, match="found 1 tensors of 0 modules"):
        ServedWeights({"w": torch.ones(1)}, 0, "d")
    with pytest.raises(WeightsError, match=r"shape \[3, 2\] is not contiguous"):
        ServedWeights({"w": torch.ones(2, 3).T}, 1, "d")
    with pytest.raises(WeightsError, match="expected at most 107"):
        WeightServer(home, "w" * 120, ServedWeights({"w": torch.ones(1)}, 1, "d"))
    home.chmod(0o755)
    with pytest.raises(WeightsError, match="expected a directory drwx------"):
        WeightServer(home, "w", ServedWeights({"w": torch.ones(1)}, 1, "d"))
