"""Spot traces that come with the package, by name.

``minute``: two nodes at a time, for an hour; every minute the older one is taken, and another comes two
seconds later. Made for demonstrations: far more preemptions than a cloud makes.
"""

from __future__ import annotations

from pathlib import Path

from spotlight.fleet.traces.trace import TraceError


def shipped_names() -> list[str]:
    """What can be asked for."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def find_trace(path: Path) -> Path:
    """A file as named, or the shipped trace of that name.

    Raises:
        TraceError: neither is there.
    """
    if path.exists():
        return path
    shipped = Path(__file__).with_name(f"{path}.csv")
    if str(path) in shipped_names():
        return shipped
    raise TraceError(f"{path}: no such file; expected one, or a shipped trace: {', '.join(shipped_names())}")
