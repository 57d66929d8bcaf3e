"""Runs a command that the user has configured."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping

_OUTPUT = 500
"""Characters of a failed command that are shown."""


class ShellCommandError(Exception):
    """A command failed or took too long; says what it printed."""


def run_shell_command(key: str, command: str, variables: Mapping[str, str], timeout_s: float) -> None:
    """Run it to its end, with ``variables`` in its environment. What it leaves in the background goes on,
    and should write to a file of its own.

    Args:
        key: of the configuration, for messages.

    Raises:
        ShellCommandError: another status than 0; or it, and what it had started, was ended after the time.
    """
    # Into a file, since a pipe ends only with all that the command has left in the background.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, shell=True, env=os.environ | dict(variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what the shell has started, too
            process.wait()
            raise ShellCommandError(
                f"{key} was ended after {timeout_s:g} s; expected an end within fleet.start_s: let it return "
                "sooner, or raise that"
            ) from None
        if process.returncode:
            output.seek(0)
            said = output.read().decode(errors="replace")
            by_hand = " ".join(f"{name}={value}" for name, value in variables.items())
            raise ShellCommandError(
                f"{key} ended with status {process.returncode}; expected 0. Try it by hand with {by_hand}. "
                f"It said: {said[-_OUTPUT:].strip()}"
            )
