"""A dashboard in a process of its own, beside the command that trains."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import quote

_INSTALL = "pip install 'spotlight-rl[dashboard]'"
_NEEDS = ("spotlight_dashboard", "fastapi", "uvicorn", "plotly")
_SAID_BYTES = 2000
PORT = 8170
"""Of the dashboard, unless another process has it."""


def missing_package() -> tuple[str, str] | None:
    """What the dashboard needs and is not installed, and how to install it."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    return (missing[0], f"Install it: {_INSTALL}") if missing else None


def start_beside(
    runs_dir: Path, run: str, *, stays: bool, note: Callable[[str], None], view: str = "overview"
) -> None:
    """Start the dashboard beside this process, which it outlives only if it ``stays``.

    Args:
        view: that the noted address opens.
        note: gets where it is, why there is none, and from a thread why it ended if it failed. Nothing of it
            can harm the run.
    """
    if (missing := missing_package()) is not None:
        note(f"no dashboard: the package {missing[0]!r} is missing. {missing[1]}")
        return
    try:
        listening = _listen_somewhere()
    except OSError as error:
        note(f"no dashboard: {error}")
        return
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
    note(f"dashboard: {address}#/{quote(run)}/{view}")
    ends = [] if stays else ["--ends-with", str(os.getpid())]
    command = [sys.executable, "-m", "spotlight.cli", "dashboard", str(runs_dir), *ends]
    threading.Thread(target=_attend, args=(command, listening, token, note), daemon=True).start()


def _attend(
    command: Sequence[str], listening: socket.socket, token: str, note: Callable[[str], None]
) -> None:
    """Run the dashboard, which is told the token of its first browser, and note if it fails."""
    try:
        with TemporaryFile() as said:  # not a pipe, which would break when the dashboard outlives the run
            with listening:
                process = subprocess.Popen(
                    [*command, "--fd", str(listening.fileno())],
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.PIPE,  # not an argument, which every user of the machine can read
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,  # Ctrl-C is for the run, which still needs its checkpoint
                )
            process.communicate(token.encode())
            status = process.returncode
            if status != 0:
                said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_BYTES))
                words = said.read().decode(errors="replace").strip()
                note(f"the dashboard ended with status {status}; the run goes on. {words}".rstrip())
    except OSError as error:
        note(f"no dashboard: {error}")


def _listen_somewhere() -> socket.socket:
    """On the usual port of the loopback, or on any."""
    try:
        return socket.create_server(("127.0.0.1", PORT), backlog=128)
    except OSError:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
