"""Shipped spot traces, by name.

``minute``: two nodes at a time for an hour; every minute the older one is preempted and replaced two seconds
later. For demonstrations: far more preemptions than on a real cloud.
"""

from __future__ import annotations

from pathlib import Path

from spotlight_fleet.traces.trace import TraceError


def shipped_names() -> list[str]:
    """Names of the shipped traces."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def find_trace(path: Path) -> Path:
    """An existing file, or the shipped trace of that name. Raises :class:`TraceError` if neither exists."""
    if path.exists():
        return path
    shipped = Path(__file__).with_name(f"{path}.csv")
    if str(path) in shipped_names():
        return shipped
    raise TraceError(f"{path}: no such file; expected one, or a shipped trace: {', '.join(shipped_names())}")
