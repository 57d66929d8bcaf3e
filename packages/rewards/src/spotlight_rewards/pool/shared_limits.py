"""A limit of a whole reward, such as requests under way at a server, divided among its processes."""

from __future__ import annotations

_share = (0, 1)


def share_limits(replica: int, replicas: int) -> None:
    """Tell this process which of the reward's ``replicas`` processes it is."""
    global _share  # a fact about the process
    _share = replica, replicas


def replicas() -> int:
    """How many processes share the limits."""
    return _share[1]


def share_of_limit(limit: int) -> int:
    """This process's part of ``limit``; the parts of all processes add up to it if it is large enough."""
    replica, number = _share
    return max(1, limit // number + (replica < limit % number))
