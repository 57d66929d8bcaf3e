"""What needs two devices of one node: ``pytest -m gpus2``. The long tier runs the same on two CPUs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

CPUS, GPUS = ("cpu", "cpu"), ("cuda:0", "cuda:1")
on_two = pytest.mark.parametrize(
    "devices",
    [
        pytest.param(CPUS, marks=pytest.mark.slow, id="cpus"),
        pytest.param(
            GPUS,
            marks=[
                pytest.mark.gpus2,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
            ],
            id="gpus",
        ),
    ],
)
LIMIT_S = 20.0


@on_two
@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "follower"])
def test_two_ranks_compute_what_one_computes_and_a_killed_one_is_noticed(
    devices: tuple[str, str], killed: int, tmp_path: Path
) -> None:
    import two_devices
    from benchmarks.gpu.children import Child
    from benchmarks.gpu.lab import Lab

    from spotlight.rollout.sequence_parallel import rendezvous

    store, address = rendezvous.serve()
    labs = [Lab(tmp_path, torch.device(device), tiny=True) for device in devices]
    labs[0].pipeline(labs[0].scale.few_layers)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Child(two_devices.denoise_together, lab, address, rank, LIMIT_S))
            for rank, lab in enumerate(labs)
        ]
        assert all(rank.receive() < 1e-5 for rank in ranks)
        ranks[killed].kill()
        survivor = ranks[1 - killed]
        survivor.pipe.send("go on")
        lost_s, same_alone = survivor.receive(3 * LIMIT_S)
        assert lost_s < 2 * LIMIT_S
        assert same_alone
    del store


@on_two
def test_gradients_of_two_ranks_are_those_of_one_and_rollouts_keep_the_model(
    devices: tuple[str, str], tmp_path: Path
) -> None:
    import two_devices
    from benchmarks.gpu.children import Child
    from benchmarks.gpu.lab import Lab

    from spotlight.rollout.sequence_parallel import rendezvous

    found = []
    for world in (1, 2):
        store, address = rendezvous.serve()
        labs = [Lab(tmp_path, torch.device(device), tiny=True) for device in devices[:world]]
        labs[0].pipeline(labs[0].scale.few_layers)
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(Child(two_devices.train_together, lab, address, rank, world))
                for rank, lab in enumerate(labs)
            ]
            gradients, same = next(rank.receive() for rank in ranks)
            assert same or world == 1
            found.append(gradients)
            for rank in ranks:
                rank.pipe.send("enough")
        del store
    alone, together = found
    assert alone.keys() == together.keys()
    error = sum(float(np.square(together[name] - value).sum()) for name, value in alone.items())
    length = sum(float(np.square(value).sum()) for value in alone.values())
    assert (error / length) ** 0.5 < 1e-2


@pytest.mark.gpus2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_weights_go_from_one_gpu_to_another(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import children
    from benchmarks.gpu.lab import Lab

    from spotlight.models.skeleton import base_state, filling, modules_of
    from spotlight_weights import cuda_ipc
    from spotlight_weights.peers import fetch_from_peer

    home = tmp_path_factory.mktemp("gs")
    one, other = (Lab(home, torch.device(device), tiny=True) for device in GPUS)
    layers = one.scale.few_layers
    one.pipeline(layers)
    reaches = cuda_ipc.gpu_id(one.device) in cuda_ipc.readable(other.device)
    opened, real = [], cuda_ipc.open_shared
    monkeypatch.setattr(cuda_ipc, "open_shared", lambda *a: opened.append(a) or real(*a))
    with children.Child(children.serve_weights, one, layers, 2**20) as server:
        server.receive()
        family = other.empty(layers)
        with filling(family.transformer) as targets:
            fetch_from_peer(home / "peers" / "w0.sock", children.DIGEST, targets, modules_of(targets))
    assert bool(opened) == reaches, "else through the host's memory"
    expected = base_state(one.fresh(layers).transformer)
    found = base_state(family.transformer)
    assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in expected.items())
