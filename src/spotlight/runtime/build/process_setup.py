"""Settings of this process that make a run faster or repeatable. Called once, before any work."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 1 << 30


def prepare_process(device: torch.device, deterministic: bool) -> None:
    """Keep freed memory for the next step on CPUs; switch on deterministic kernels when asked."""
    if device.type == "cpu":
        _keep_freed_memory()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _keep_freed_memory() -> None:
    # By default glibc returns large tensors to the kernel when they are freed, and every step page-faults
    # them in again: a third of the time of a small DiT. Elsewhere than on glibc there is nothing to set.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
