"""Fused operators on CPU tensors as the host sees them: Triton compiles for a GPU, and launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from spotlight_kernels import registered

TARGET = GPUTarget("cuda", 90, 32)


class _Driver:
    """Of a GPU that is not there, as far as Triton asks for one between an operator and a launch."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *binary: (0, 0, 32, 0, 1024),
        unload_module=lambda module: None,
    )

    @staticmethod
    def launcher_cls(*source: object) -> Any:
        return lambda *arguments: None

    @staticmethod
    def get_current_device() -> int:
        return -1  # for a real one Triton must not remember kernels that launch nothing

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0

    @staticmethod
    def get_current_target() -> GPUTarget:
        return TARGET


@contextmanager
def launches_nothing() -> Iterator[None]:
    """Results of fused operators are undefined; all that a host does for them is done."""
    with (
        patch.object(registered, "WHERE", "is_cpu"),
        patch.object(driver, "_active", _Driver()),
        patch("torch.cuda.current_device", lambda: None),  # the index of a CPU
    ):
        yield
