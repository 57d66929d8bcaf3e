"""No parser of bytes that others made raises, takes or needs more than it says, whatever they are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.unit.fuzz_targets import TARGETS


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_are_read_or_refused_within_bounds(target: str) -> None:
    command = [sys.executable, "-m", "tests.unit.fuzz_targets", target]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
