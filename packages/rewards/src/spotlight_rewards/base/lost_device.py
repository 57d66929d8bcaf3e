"""Failures that a process does not survive: it ends at once, and is replaced."""

from __future__ import annotations

import os
import re
from typing import NoReturn

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
