"""What a device's error means: memory that would do in smaller pieces, or the end of the process."""

from __future__ import annotations

import os
import re
import sys
from typing import NoReturn

from spotlight_rewards.base.errors import UserError

EXIT_STATUS = 70
"""Of a process that ended itself (EX_SOFTWARE of sysexits.h)."""
# After these, "the process must be terminated and relaunched", says the reference of the CUDA runtime
# (cudaErrorIllegalAddress and others), as cudaGetErrorString words them. torch raises AcceleratorError; NCCL
# wraps them, so that they look like a lost peer.
_LOST = re.compile(
    r"cuda (?:error|failure)[^\n]*(?:illegal memory access|illegal instruction|misaligned address|"
    r"invalid program counter|shared address space|hardware stack error|device-side assert|"
    r"launch timed out|unspecified launch failure|uncorrectable (?:ecc|nvlink) error|"
    r"access of peer gpu memory)",
    re.IGNORECASE,
)
# Not all memory is from torch's allocator: libraries, kernels as they are loaded, and the CPU have their own.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: |CUDA (?:driver )?error: out of memory|Triton Error \[CUDA\]: out of memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device: smaller pieces may do. A UserError may quote one."""
    if isinstance(error, MemoryError):  # of Python and NumPy
        return True
    torch = sys.modules.get("torch")  # not imported here: none of its errors without it
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    told = isinstance(error, RuntimeError) and not isinstance(error, UserError)
    return told and _NO_MEMORY.search(str(error)) is not None


def end_if_lost(error: BaseException) -> None:
    """End this process if ``error`` says that its GPU context is lost: every later use of the GPU would fail.

    Call it wherever an error of the GPU is about to be taken for something that passes.
    """
    if (found := _LOST.search(str(error))) is not None:
        end_process(f"its GPU computes nothing any more in this process ({found.group()})")


def end_process(why: str) -> NoReturn:
    """End this process now, with a line on its standard error. Nothing is cleaned up: that may hang."""
    # Not through sys.stderr, whose lock another thread may hold.
    os.write(2, f"process {os.getpid()} ends, to be replaced: {why}\n".encode())
    os._exit(EXIT_STATUS)
