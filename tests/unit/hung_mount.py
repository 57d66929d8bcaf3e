"""A file system that never answers, as a network mount whose server is gone. Needs root and ``/dev/fuse``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MNT_DETACH = 2
CAN_MOUNT = os.access("/dev/fuse", os.W_OK) and os.geteuid() == 0


@contextmanager
def hung_mount(folder: Path) -> Iterator[None]:
    """Within the block, whoever looks into ``folder`` waits; after it, what waits is told that it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR)  # nobody reads the requests
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    try:
        if libc.mount(b"hung", bytes(folder), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount", str(folder))
        try:
            yield
        finally:
            libc.umount2(bytes(folder), MNT_DETACH)
    finally:
        os.close(server)
