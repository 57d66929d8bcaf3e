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
def looking(key: str, path: object) -> Iterator[None]:
    """Turn a path that this user may not look at into a :class:`ModelError` that names its key."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{key} is {path}, which cannot be looked at ({error.strerror}); expected files that this user "
            "can read: correct the path, or let its owner open the folders on the way"
        ) from error


@contextmanager
def storing(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Turn a failed write into a :class:`ModelError` that names ``path`` and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {what} to {path}: {error}. {remedy}") from error
