"""Fused operators compute what diffusers does: tests of ``kernels/``, in processes that interpret Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernels"


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("test_*.py")))
def test_kernels_pass_their_tests(file: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-x", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
