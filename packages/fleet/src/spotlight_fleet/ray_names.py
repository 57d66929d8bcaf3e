"""How nodes and their slots are marked in Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

SLOT = "spotlight_slot"
"""Resource that stands for a GPU on a node without one."""
KIND_RESOURCES: Mapping[str, str] = MappingProxyType(
    {"reserved": "spotlight_reserved", "spot": "spotlight_spot", "on-demand": "spotlight_on_demand"}
)
"""Resource of a kind of node, of any amount."""
SUFFIX = "~"
"""Between a node's name and what tells it apart from a living node of that name."""


def pid_file(session: Path, ray_id: str) -> Path:
    """Where the process of a node that watches for SIGTERM writes its pid.

    Args:
        session: directory of Ray's logs on the node.
    """
    return session / f"spotlight_agent_{ray_id}.pid"
