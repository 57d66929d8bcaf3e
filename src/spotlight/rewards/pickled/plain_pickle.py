"""Reads pickles of numbers, text, lists, dictionaries and numpy's arrays, and of nothing that can run."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

_ALLOWED = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{package}.{module}", name)
        for package in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
}
"""Of pickles of arrays, from numpy 1 and 2: what they look up by name."""


class UnsafePickleError(ValueError):
    """A pickle names something else to be called."""


def load_plain(content: bytes) -> Any:
    """The value of a pickle, of protocol 3 or later (Python 3's own).

    Raises:
        UnsafePickleError: it holds other objects; nothing of them was called.
        ValueError: it is no pickle, or broken.
    """
    try:
        return _plain(_PlainUnpickler(io.BytesIO(content)).load())
    except UnsafePickleError:
        raise
    except Exception as error:  # noqa: BLE001 - broken pickles raise anything
        raise ValueError(f"no readable pickle ({type(error).__name__}: {error})") from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UnsafePickleError(
                f"the pickle holds a {module}.{name}; expected numbers, text, lists, dictionaries and "
                "arrays of numpy. It was not made."
            )
        return super().find_class(module, name)


def _plain(value: Any) -> Any:
    """The same with lists in the place of arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
