"""Machines of a cluster on this one, by the launch files' own commands: heads, and nodes that follow them.

A machine is all processes that carry its mark; it is lost with SIGKILL to all of them, and its disk with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from main_job import free_port

from spotlight_fleet.emulated import guard

ROOT = Path(__file__).parents[2]
START = ROOT / "launch" / "ray-start.sh"
HEAD = """
set -e
"$1" spot-head --num-cpus=1
shift
exec "$@"
"""
HIDE = "unshare", "--mount", "bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"'


def may_hide() -> bool:
    """Whether this user may mount in a namespace of its own."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@dataclass
class Machine:
    """One that was started, and what it prints."""

    name: str
    mark: str
    process: subprocess.Popen[bytes]
    arguments: Sequence[str]
    output: Path
    ray: Path

    @property
    def printed(self) -> str:
        """So far."""
        return self.output.read_text()

    def lose(self) -> None:
        """As a cloud takes it."""
        left = guard.end(self.mark)
        self.process.wait()
        assert not left, f"{self.name}: {left}"
        shutil.rmtree(self.ray, ignore_errors=True)


@dataclass
class Machines:
    """Starts them.

    Attributes:
        run: address of the run.
    """

    run: str
    folder: Path
    environment: dict[str, str]
    token: Path

    @contextmanager
    def head(self, number: int, arguments: Sequence[str]) -> Iterator[Machine]:
        """A node without slots that may be preempted, with ``spotlight train`` on it."""
        port = free_port()
        train = [sys.executable, "-m", "spotlight.cli", "train", "--plain", *arguments]
        address = f"fleet.address=127.0.0.1:{port}"
        command = ["bash", "-c", HEAD, "head", str(START), *train, address]
        with self._started(f"head-{number}", command, {"SPOTLIGHT_PORT": str(port)}) as machine:
            yield machine

    @contextmanager
    def follower(self, hidden: Path) -> Iterator[Machine]:
        """A spot node with two slots, which follows the head and does not see what is in a folder."""
        follow = [sys.executable, "-m", "spotlight_bucket.follow_head", self.run, "--"]
        command = [*HIDE, str(hidden), *follow, str(START), "spot", "{}", "--block", "--num-cpus=1"]
        with self._started("spot", command, {"SPOTLIGHT_SLOTS": "2"}) as machine:
            yield machine

    @contextmanager
    def _started(self, name: str, command: Sequence[str], more: dict[str, str]) -> Iterator[Machine]:
        ray = Path(mkdtemp(prefix="r-", dir="/tmp"))  # short: Ray's socket paths are limited
        mark, output = f"{guard.owner_of(os.getpid())}.{name}/0", self.folder / f"{name}.out"
        environment = os.environ | self.environment | more
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_AUTH_MODE": "token",
            "RAY_TMPDIR": str(ray),
            "RAY_worker_niceness": "0",
            "SPT_NOENV": "1",  # or Ray's processes overwrite their environment, by which they are found
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
            "SPOTLIGHT_IP": "127.0.0.1",
            guard.MARK: mark,
        }
        with output.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=Path(__file__).parent,
                env=environment,
                start_new_session=True,
            )
        machine = Machine(name, mark, process, command, output, ray)
        try:
            yield machine
        finally:
            machine.lose()
