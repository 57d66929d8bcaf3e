"""Errors of the run directory; messages name file, finding and remedy."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from spotlight_rewards.base.file_errors import StoreError, existing_parent, size


class LedgerError(StoreError):
    """Records break the ledger's accounting, or the file is not a Spotlight ledger."""


class DamagedCheckpointError(StoreError):
    """Checkpoints exist, but none is intact."""


class RunInUseError(StoreError):
    """Another process has the run directory open."""


class OtherConfigurationError(StoreError):
    """The run directory belongs to a configuration that this one cannot continue."""


class NothingToCompareError(StoreError):
    """Evaluations have no pictures of the same prompts, or theirs were lost."""


def require_free_bytes(path: Path, needed_bytes: int) -> None:
    """Raise :class:`StoreError` unless ``needed_bytes`` fit on ``path``'s file system."""
    usage = shutil.disk_usage(existing_parent(path))
    # File systems without a size (such as /sys) reveal nothing here; the first write will.
    if usage.total and usage.free < needed_bytes:
        raise StoreError(
            f"{path}: the run needs {size(needed_bytes)} of disk, {size(usage.free)} are free, "
            f"{size(needed_bytes - usage.free)} too little. "
            "Free some space, keep fewer checkpoints, or put the run on another disk."
        )


ODD_VALUES = (
    *(ValueError, json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError, AttributeError),
    *(KeyError, IndexError, OverflowError, ZeroDivisionError),
)
"""What values raise that are none of ours, as files of somebody else may hold; subclasses are refusals."""


def told_odd(path: Path, error: Exception) -> str:
    """What to say of values that no run writes; the log gets the traceback, should the fault be ours."""
    logging.getLogger(__name__).warning("%s cannot be read", path, exc_info=error)
    return (
        f"{path}: damaged, or read wrongly ({type(error).__name__}: {error}): the log says where. If others "
        "wrote to it, restore the ledger and the checkpoints from one copy of the run; else report it."
    )
