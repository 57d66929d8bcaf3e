"""What a device really does at best: products and copies, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def product_flop_s(device: torch.device, side: int = 8192) -> float:
    """Operations a second of a bfloat16 product of two random matrices, ``side`` x ``side``."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / repeated_s(device, lambda: a @ b)


def copy_bytes_s(device: torch.device, size_bytes: int = 2**30) -> float:
    """Bytes a second of a copy on the device, those read and those written counted."""
    source = torch.ones(size_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size_bytes / repeated_s(device, lambda: target.copy_(source))


def repeated_s(device: torch.device, run: Callable[[], object], times: int = 20) -> float:
    """Median seconds of single runs, three before them not counted; on GPUs by the device's own clock."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(timed_s(device, run) for _ in range(times))
    marks: list[tuple[Any, Any]] = [(_mark(), _mark()) for _ in range(times)]
    for before, after in marks:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize(device)
    return 1e-3 * statistics.median(float(before.elapsed_time(after)) for before, after in marks)


def timed_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds from an idle device until it is idle again."""
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
