"""Time, floating-point operations and kernels of a piece of work, and the device's ceilings."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._flop_counter import flop_counter
from benchmarks._measure import Clock, take_turns
from benchmarks.gpu.lab import Lab
from spotlight_kernels.measure.device_rates import copy_bytes_s, product_flop_s, timed_s
from spotlight_kernels.measure.peak_rates import bfloat16_flop_s

_ROUNDS_MAX = 7


def interleaved(lab: Lab, variants: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of every variant in every round, the variants taking turns within the row's budget.

    At least two rounds, however long they take.
    """
    once = 0.0
    for run in variants.values():  # compiles, allocates, and tells how long a round takes
        run()
        once += timed_s(lab.device, run)
    rounds = int(min(_ROUNDS_MAX, max(2, 0.7 * lab.budget_s / max(once, 1e-9) - 1)))
    if lab.tiny:
        rounds = 2
    return take_turns(variants, rounds, lab.device, Clock.WALL)


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def spread(seconds: Mapping[str, list[float]]) -> dict[str, object]:
    """Milliseconds as details: median, least and most, and how many."""
    return {
        name: {
            "median_ms": 1e3 * statistics.median(taken),
            "min_ms": 1e3 * min(taken),
            "max_ms": 1e3 * max(taken),
            "rounds": len(taken),
        }
        for name, taken in seconds.items()
    }


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of matrix products, convolutions and attention, counted by shape."""
    with flop_counter() as counter:
        run()
    return int(counter.get_total_flops())


def kernels(run: Callable[[], object], device: torch.device) -> Counter[str]:
    """Kernels launched, by name; on a CPU the operators called instead."""
    if device.type != "cuda":
        with _Operators() as counted:
            run()
        return Counter(counted.names)
    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events: list[Any] = list(profiler.events() or [])
    return Counter(
        event.name
        for event in events
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
    )


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def matmul_tflops(lab: Lab) -> float:
    """TFLOP/s of a large bfloat16 product of random matrices."""
    return 1e-12 * product_flop_s(lab.device, 256 if lab.tiny else 8192)


def copy_tb_s(lab: Lab) -> float:
    """TB/s of a large copy on the device, bytes read and written counted."""
    return 1e-12 * copy_bytes_s(lab.device, 2**16 if lab.tiny else 2**32)


def peak_tflops(lab: Lab) -> tuple[float, str]:
    """What a share is of: the datasheet's rate, or else the one measured now; and which it is."""
    if lab.device.type == "cuda":
        name = torch.cuda.get_device_name(lab.device)
        if (rate := bfloat16_flop_s(name)) is not None:
            return 1e-12 * rate, f"datasheet of {name}, dense bfloat16"
    return matmul_tflops(lab), "measured matrix product"
