"""A process that can neither go on nor clean up ends itself: NCCL's code over gloo, in real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from spotlight_rewards.base import device_errors
from spotlight_rewards.base.device_errors import EXIT_STATUS, end_if_lost

ABORT = "c._abort_process_group = hang; "
ILLEGAL = "CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be"
UNHANDLED = "NCCL error: unhandled cuda error\\nCuda failure 719 'unspecified launch failure'"
CASES = {  # what happens, and what is said of it; ``hang`` waits like a call of C that never returns
    "abort": (ABORT + "nccl.close()", "aborting a group of GPUs has not returned"),
    "abort by a timer": (ABORT + "timed(hang)", "aborting a group of GPUs has not returned"),
    "kernels": ("torch.cuda.synchronize = hang; timed()", "an exchange of GPUs that was aborted has not ret"),
    "context": (ABORT + f'timed(fail, torch.AcceleratorError("{ILLEGAL}"))', "illegal memory access"),
    "peer": (ABORT + f'timed(fail, dist.DistBackendError("{UNHANDLED}"))', "unspecified launch failure"),
}
PROCESS = """
import threading, torch, torch.distributed as dist
from spotlight.rollout.sequence_parallel import communicators as c
hang = lambda *_: threading.Event().wait()
torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
nccl = c.Nccl(torch.device("cuda:0"), 0.5)
c._opened("gloo", dist.HashStore(), 0, 1, 5.0)
def fail(error): raise error
def timed(do=lambda: None, *arguments):
    with nccl.bounded(0.1): do(*arguments)
{happens}
print("it lives on")
"""


def test_it_ends_with_a_line_that_says_why() -> None:
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", PROCESS.format(happens=happens)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (happens, _) in CASES.items()
    }
    for name, process in processes.items():
        out, errors = process.communicate(timeout=240)
        assert process.returncode == EXIT_STATUS, (name, out, errors)
        assert out == ""
        last = errors.splitlines()[-1]
        assert last.startswith(f"process {process.pid} ends, to be replaced: "), (name, errors)
        assert CASES[name][1] in last, (name, errors)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("an illegal memory access, says a reward"),
    ],
)
def test_what_passes_ends_no_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_errors, "end_process", pytest.fail)
    end_if_lost(error)
