"""Fused operators compute what diffusers does: tests of ``kernels/``, in a process that interprets Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernels"


@pytest.mark.timeout(1200)  # of all together; each has the usual 300 s
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_pass_their_tests(tier: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", tier, "-x", str(HERE)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
