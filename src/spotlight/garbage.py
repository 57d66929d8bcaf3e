"""Garbage collection, paused where it would look at many lasting objects for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection of reference cycles within; everything else is freed as always.

    For code that makes hundreds of thousands of objects that stay, such as the import of large packages, and
    no cycles: each full collection looks at all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def lasting() -> Iterator[None]:
    """:func:`collection_paused`, after which no collection looks at what is there: it stays for good.

    For the start of a process. Later, cycles that nothing uses any more would stay, too.
    """
    with collection_paused():
        yield
        gc.freeze()
