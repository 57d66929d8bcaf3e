"""Commands that the user has configured: what they leave behind, how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from spotlight_fleet.providers import shell_command
from spotlight_fleet.providers.shell_command import ShellCommandError, run_shell_command


def test_what_a_command_leaves_in_the_background_is_neither_awaited_nor_ended(tmp_path: Path) -> None:
    run_shell_command("key", 'sleep 3600 & echo $! > "$PLACE"', {"PLACE": str(tmp_path / "pid")}, 1800.0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it is still there


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pid"

    class Impatient(subprocess.Popen[bytes]):
        """Its time is over once it has started what it leaves."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            while not (place.exists() and place.read_text().endswith("\n")):
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(shell_command.subprocess, "Popen", Impatient)
    command = 'sleep 3600 & echo $! > "$PLACE"; wait'
    with pytest.raises(ShellCommandError, match=r"key was ended after 1 s; expected an end within"):
        run_shell_command("key", command, {"PLACE": str(place)}, 1.0)
    status = Path("/proc") / place.read_text().strip() / "status"
    deadline_s = time.monotonic() + 60
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_failure_says_what_the_command_printed() -> None:
    with pytest.raises(ShellCommandError, match=r"status 3; expected 0.*with NODE=n1.*no such flavour"):
        run_shell_command("key", "echo no such flavour >&2; exit 3", {"NODE": "n1"}, 10.0)
