"""Model errors, importable without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from spotlight_rewards.base.errors import UserError


class ModelError(UserError, ValueError):
    """The model cannot be used as configured; names the path or key, the value and the remedy."""


@contextmanager
def storing(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Turn a failed write into a :class:`ModelError` that names ``path`` and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {what} to {path}: {error}. {remedy}") from error
