"""Fused operators compute what diffusers does: tests of ``kernels/``, in processes that interpret Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernels"


FILES = [
    pytest.param(path.name, marks=pytest.mark.slow if path.name == "test_fused_ranks.py" else ())
    for path in sorted(HERE.glob("test_*.py"))
]


@pytest.mark.parametrize("file", FILES)
def test_kernels_pass_their_tests(file: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    tier = request.config.getoption("markexpr")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", tier, "-x", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
