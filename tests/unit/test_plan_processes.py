"""Simulations in several processes end with the command that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotlight_plan.processes import in_processes

LONG_S = 600.0
WORK = f"""
import os, time
from pathlib import Path

def work(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep({LONG_S})
"""
PROGRAM = """
import signal, sys
from work import work
from spotlight_plan.processes import in_processes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    list(in_processes(work, [sys.argv[1]] * 5, 2))
"""


def squared(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    return x * x


def test_results_are_in_order_and_the_first_error_is_raised() -> None:
    assert list(in_processes(squared, [2, 1, 4, 0], 2)) == [4, 1, 16, 0]
    with pytest.raises(ValueError, match="three"):
        list(in_processes(squared, [2, 3, *range(4, 40)], 2))


@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "this process"])
def test_ctrl_c_ends_all_processes_without_a_word_of_theirs(to_all: bool, tmp_path: Path) -> None:
    """A terminal sends it to all; ``kill`` to the command alone."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "program.py").write_text(PROGRAM)
    (begun := tmp_path / "begun").mkdir()
    command = [sys.executable, str(tmp_path / "program.py"), str(begun)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(begun.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=LONG_S / 5)[1]
    assert process.returncode == -signal.SIGINT
    assert printed.count("Traceback") == 1, printed
    for pid in begun.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)
