"""Which of a node's visible GPUs a worker runs on, and that its thread works there."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight.cluster.workers import worker_actor
from spotlight.cluster.workers.worker_actor import WorkerActor, WorkerOrder, gpu_index
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.types import WorkerId

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-45ef1f0a-0000-4106-c12f-20bd9faed9f6")
MIGS = ("MIG-5a1f8f38-56cd-5a55-8b5a-1d0a2f1b4a11", f"MIG-{UUIDS[0]}/2/0")
ORDER = WorkerOrder("", WorkerId("w"), 1, True, None, Address("127.0.0.1", 1), "run", "", None)


@pytest.mark.parametrize(
    ("visible", "assigned", "index"),
    [
        (None, [1], 1),
        ("4,5", ["4"], 0),
        ("4,5", ["5"], 1),
        ("5, 4", ["4"], 1),
        (",".join(UUIDS), [UUIDS[1]], 1),
        (f"{UUIDS[0]},GPU-45ef", [UUIDS[1]], 1),
        (",".join(MIGS), [MIGS[0]], 0),
        (",".join(MIGS), [MIGS[1]], 1),
    ],
)
def test_a_worker_runs_on_the_gpu_that_ray_assigned(
    visible: str | None, assigned: list[str | int], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: assigned)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert worker_actor._device(ORDER) == torch.device("cuda", index)


@given(st.lists(st.integers(0, 15), min_size=1, unique=True), st.data())
def test_an_index_is_the_place_in_the_list(numbers: list[int], data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(numbers))
    assert numbers[gpu_index(number, ",".join(map(str, numbers)))] == number


@pytest.mark.parametrize(
    ("assigned", "visible", "said"),
    [
        ("0", "4,5", "'0', which CUDA_VISIBLE_DEVICES='4,5' has 0 times"),
        (UUIDS[0], None, "CUDA_VISIBLE_DEVICES is not set here: expected a number"),
        ("GPU-8932f937", f"{UUIDS[0]},GPU-8932f937-d72c-4106-c12f-20bd9faed9f7", "has 2 times"),
        ("0", "", "has 0 times"),
    ],
)
def test_a_gpu_that_is_not_visible_is_named(assigned: str, visible: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gpu_index(assigned, visible)


def test_the_thread_that_works_has_the_gpu_as_its_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread().name))
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    device = torch.device("cuda", 1)
    for tf32, matmul, convolutions in (
        ("all", "high", True), ("none", "highest", False), ("convolutions", "highest", True),
    ):  # fmt: skip
        prepare_process(device, deterministic=False, tf32=tf32)  # type: ignore[arg-type]
        assert chosen == [(device, threading.current_thread().name)]
        chosen.clear()
        assert torch.get_float32_matmul_precision() == matmul
        assert torch.backends.cudnn.allow_tf32 is convolutions

    class Process:
        def run(self) -> None:
            assert chosen[-1] == (device, "work")
            assert torch.backends.cudnn.allow_tf32 is False

    actor = object.__new__(WorkerActor)
    actor._device, actor._precision = device, (False, "none")
    actor._process, actor._ended, actor._error = Process(), threading.Event(), None  # type: ignore[assignment]
    thread = threading.Thread(target=actor._work, name="work")
    thread.start()
    thread.join()
    assert actor._error is None


def test_the_thread_that_takes_the_model_over_has_the_gpu_as_its_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It frees what the worker's thread had there: from another GPU that would make a context on it."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(worker_actor, "LearnerRank", lambda *given: None)
    device = torch.device("cuda", 1)

    class Process:
        commands = SimpleQueue[object]()

        def hand_over(self) -> tuple[None, str]:
            assert chosen == [device]
            return None, "digest"

    actor = object.__new__(WorkerActor)
    actor._device, actor._precision = device, (False, "convolutions")
    actor._process, actor._ended, actor._error = Process(), threading.Event(), None  # type: ignore[assignment]
    actor._ended.set()
    assert actor.become_learner(None, None, 0.0) == "digest"  # type: ignore[arg-type]
