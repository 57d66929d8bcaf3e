"""Free memory of the training device, and the peak memory of a piece of work.

CUDA uses the allocator's statistics, the CPU what torch's profiler records of every allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch.autograd.profiler import profile

T = TypeVar("T")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``.

    Raises:
        RuntimeError: the system does not report it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not _MEMINFO.exists():
        raise RuntimeError(
            "learner.timesteps_per_pass or learner.recompute is auto, but "
            f"{os.uname().sysname} does not tell how much memory is free: set learner.pass_memory_gib, or "
            "other values"
        )
    rows = (line.split() for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
    available = next(1024 * int(row[1]) for row in rows if row[0] == "MemAvailable:")
    return min(available, _cgroup_bytes())


def _cgroup_bytes() -> int:
    try:
        limit, used = (
            (_CGROUP / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return 2**63
    if limit == "max":
        return 2**63
    free = int(limit) - int(used)
    # What was read of files counts as used, and is given up where memory is asked for.
    with suppress(OSError):
        parts = (_CGROUP / "memory.stat").read_text(encoding="utf-8").split()
        free += int(dict(zip(parts[::2], parts[1::2], strict=True)).get("inactive_file", 0))
    return max(free, 0)


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields what gives, afterwards, the peak bytes of a GPU above the memory held before; 0 on CPUs."""
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


def measure_peak(device: torch.device, work: Callable[[], T]) -> tuple[T, int]:
    """Run ``work``. Returns its result, and its peak bytes above the memory held before."""
    if device.type == "cuda":
        with measured_peak(device) as peak_bytes:
            return work(), peak_bytes()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr that it begins and ends
    with profile(use_kineto=True, profile_memory=True) as profiler:
        result = work()
    held = peak = 0
    # Not profiler.events(), which has what operators allocate, but not all that is freed between them.
    events = profiler.kineto_results.events()
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    return result, peak


def release(device: torch.device) -> None:
    """Release cached blocks, so that an allocation of another size may succeed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
