"""Errors of the run directory; messages name file, finding and remedy."""

from __future__ import annotations

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
