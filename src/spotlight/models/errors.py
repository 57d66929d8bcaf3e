"""The error of this room, importable without torch."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be used as configured: names the path or key, the value and the remedy."""
