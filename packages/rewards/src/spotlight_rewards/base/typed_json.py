"""Reads parsed JSON into types; what does not fit is refused by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
_SECTION: TypeAdapter[Mapping[str, object]] = TypeAdapter(Mapping[str, object])


def typed(kind: TypeAdapter[T], value: object, name: str) -> T:
    """``value`` as ``kind``. Raises ValueError with its first wrong key, what is expected and what is found.

    Args:
        name: of ``value``, before its keys.
    """
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join([name, *map(str, first["loc"])])
        raise ValueError(f"{key}: {first['msg']}, found {first['input']!r:.200}") from None


def section(state: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A mapping within another. Raises ValueError if it is not one."""
    return typed(_SECTION, state.get(key), key)
