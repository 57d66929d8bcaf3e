"""What a node reports of itself, and whether it is compatible with the head. No torch.

Facts cross package versions, so they travel as plain mappings: missing keys are unknown, new ones ignored.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import spotlight_fleet
from spotlight_rewards.base.errors import Problem

_NVIDIA_SMI_S = 20.0
"""Generous, since the first call on a machine loads the driver."""
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node, as its agent sees it.

    Attributes:
        gpus: those that Ray was started with; empty if ``nvidia-smi`` is missing, and without MIG instances.
        shm_free_bytes: free space in /dev/shm, where workers of a node share weights.
        boot_id: of the machine, shared by all Ray nodes on it.
    """

    spotlight: str
    python: str
    torch: str
    host: str
    gpus: tuple[Gpu, ...]
    shm_free_bytes: int
    boot_id: str
    agent_pid: int

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {**asdict(self), "gpus": [[gpu.name, gpu.memory_bytes] for gpu in self.gpus]}


def read_facts(values: Mapping[str, object]) -> NodeFacts:
    """Parse plain values from any version of this package."""

    def text(key: str) -> str:
        return str(values.get(key) or UNKNOWN)

    def number(key: str) -> int:
        value = values.get(key)
        return value if isinstance(value, int) else 0

    gpus = values.get("gpus")
    pairs = gpus if isinstance(gpus, list) else []
    return NodeFacts(
        text("spotlight"), text("python"), text("torch"), text("host"),
        tuple(Gpu(str(name), int(memory)) for name, memory in pairs),
        number("shm_free_bytes"), text("boot_id"), number("agent_pid"),
    )  # fmt: skip


def gather() -> NodeFacts:
    """Facts of this machine and process."""
    return NodeFacts(
        spotlight=spotlight_fleet.__version__,
        python=platform.python_version(),
        torch=_installed("torch"),
        host=socket.gethostname(),
        gpus=_gpus(),
        shm_free_bytes=_free_bytes(Path("/dev/shm")),
        boot_id=_boot_id(),
        agent_pid=os.getpid(),
    )


def incompatibility(node: str, here: NodeFacts, there: NodeFacts) -> Problem | None:
    """Why node ``there`` is incompatible with head ``here``; None if it is compatible.

    Package and torch releases must be equal, so that sequence-parallel ranks and weight formats agree to the
    bit. Ray requires equal Python minor versions.
    """
    pairs = [
        ("spotlight-rl", here.spotlight, there.spotlight),
        ("torch", here.torch.partition("+")[0], there.torch.partition("+")[0]),
        ("python", _minor(here.python), _minor(there.python)),
    ]
    differ = [(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]
    if not differ:
        return None
    found = ", ".join(f"{name} {theirs}" for name, _, theirs in differ)
    expected = ", ".join(f"{name} {mine}" for name, mine, _ in differ)
    install = " ".join(f"{name}=={mine}" for name, mine, _ in differ if name != "python")
    remedy = (
        f"Install there what the head has: pip install {install}"
        if install
        else "Use one image for all nodes"
    )
    return Problem(
        f"node {node!r}", found, f"{expected}, as on the head", f"{remedy}; the node is left out until then."
    )


def parse_nvidia_smi(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """Parse lines of ``index, UUID, name, MiB``; GPUs without a memory size are left out.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``, which nvidia-smi ignores; None: not set. Its numbers are taken as
            indices, which is CUDA's order too if GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    named = None if visible is None else [entry.strip() for entry in visible.split(",")]
    found = []
    for line in text.splitlines():
        index, uuid, name, memory = (field.strip() for field in (*line.split(",", 3), "", "", "")[:4])
        # CUDA takes beginnings of UUIDs.
        seen = named is None or any(
            each == index or (each.startswith("GPU-") and uuid.startswith(each)) for each in named
        )
        if seen and name and memory.isdecimal():
            found.append(Gpu(name, int(memory) << 20))
    return tuple(found)


def _gpus() -> tuple[Gpu, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            command, capture_output=True, timeout=_NVIDIA_SMI_S, check=False, encoding="utf-8"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return parse_nvidia_smi(asked.stdout, visible) if asked.returncode == 0 else ()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
