"""Tells of nodes that a killed attempt had started, where the run would not end them any more."""

from __future__ import annotations

from pathlib import Path

from spotlight.cluster.remote_calls import Notify


def tell_left_nodes(notes: Path, setting: str, note: Notify) -> None:
    """``notes``: where the attempts note their nodes; ``setting``: what they had, and this one has not."""
    if notes.exists() and (left := notes.read_text().strip()) not in ("", "[]"):
        note(
            f"{notes}: found {left}, nodes of an attempt that was killed; expected none without {setting}. "
            "Set it again, which ends them with the run, or end them by hand and delete the file."
        )
