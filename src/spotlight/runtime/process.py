"""Process-wide settings for speed or reproducibility, and out-of-memory errors."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Literal

import torch

from spotlight.runtime.clock import PhaseClock
from spotlight.scheduler.types import Phase
from spotlight_rewards.base.device_errors import is_out_of_memory
from spotlight_rewards.base.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 1 << 30


def prepare_process(
    device: torch.device, deterministic: bool, tf32: Literal["none", "convolutions", "all"] = "convolutions"
) -> None:
    """Make ``device`` the current GPU of this thread, or retain freed CPU memory; deterministic kernels if
    requested.

    Compiled kernels and libraries that are given no device use the current GPU.

    Args:
        tf32: ``model.tf32``; set even where it is torch's default, which libraries may have changed.
    """
    if device.type == "cpu":
        _keep_freed_memory()
    else:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high" if tf32 == "all" else "highest")
        torch.backends.cudnn.allow_tf32 = tf32 != "none"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _keep_freed_memory() -> None:
    # glibc returns large freed tensors to the kernel, and every step page-faults them in again: a third of
    # the time of a small DiT. Other libcs lack mallopt.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


# -- out of memory -----------------------------------------------------------------------------------------

_DENOISING = "Lower rollout.batch_size (or set learner.keep_gathered=false where ranks share the model)"
_ALWAYS = (
    "model.dtype=bfloat16 with learner.autocast=bfloat16 and learner.mode=lora, a smaller learner.lora.rank, "
    "or more GPUs (--ranks), which divide the model"
)
_HELPS = {
    Phase.ROLLOUT: _DENOISING,
    Phase.EXPLORATION: _DENOISING,
    Phase.EVALUATION: _DENOISING,
    Phase.TRAINING: (
        "Lower learner.micro_batch_size or learner.timesteps_per_pass, "
        "or set learner.recompute=elementwise or blocks"
    ),
}


class DeviceMemoryError(UserError, RuntimeError):
    """Too little device memory; names phase and remedies."""


@contextlib.contextmanager
def explain_out_of_memory(clock: PhaseClock) -> Iterator[None]:
    """Raise the device's error as :class:`DeviceMemoryError`, with its phase."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        phase = clock.failed_in
        what = str(error).partition("\n")[0].partition(" GPU ")[0].strip()
        helps = _HELPS.get(phase)
        remedy = f"{helps}: then the same command goes on. Or start another run with" if helps else "Use"
        raise DeviceMemoryError(
            f"out of memory on the device during {phase.value}: {what} {remedy} {_ALWAYS}. "
            "`--dry-run` estimates the memory by part; see docs/howto/several-gpus.md#memory."
        ) from error
