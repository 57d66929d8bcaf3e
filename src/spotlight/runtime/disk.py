"""Is there room for what a run will write? Asked before any work."""

from __future__ import annotations

from spotlight.config.schema import RunConfig
from spotlight.runtime.plan import make_plan
from spotlight.store.errors import require_free_bytes
from spotlight.store.run_directory import RunPaths

_EXACT = ("checkpoints", "export")
"""Parts whose size follows from the configuration; pictures and ledger are small, and only estimated."""


def require_disk(config: RunConfig) -> None:
    """Look at the disk of the run directory; what lies there already needs no room again.

    Raises:
        StoreError: the checkpoints and the export do not fit.
    """
    paths = RunPaths(config.runs_dir / config.name)
    needed = sum(part.bytes for part in make_plan(config).disk if part.part in _EXACT)
    there = sum(file.stat().st_size for file in paths.checkpoints.rglob("*") if file.is_file())
    require_free_bytes(paths.path, max(0, int(needed) - there))
