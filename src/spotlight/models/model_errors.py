"""Model errors, importable without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from spotlight_rewards.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class ModelError(UserError, ValueError):
    """The model cannot be used as configured; names the path or key, the value and the remedy."""


def shaped_as(latents: Tensor, velocity: Tensor, family: object) -> Tensor:
    """The velocity; raises :class:`ModelError` for another shape, which would be broadcast silently."""
    shape = getattr(velocity, "shape", None)
    if shape != latents.shape:
        found = f"a {type(velocity).__name__}" if shape is None else f"a tensor of shape {list(shape)}"
        name = f"{type(family).__module__}:{type(family).__qualname__}"
        raise ModelError(
            f"model family {name}: its predict returned {found}; expected the velocity in the shape of the "
            f"latents, {list(latents.shape)}. Undo patches and leave out what is not the latents' own, such "
            "as tokens of reference pictures."
        )
    return velocity


@contextmanager
def storing(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Turn a failed write into a :class:`ModelError` that names ``path`` and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {what} to {path}: {error}. {remedy}") from error
