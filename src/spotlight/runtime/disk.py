"""Is there room for what a run will write? Asked before any work."""

from __future__ import annotations

from spotlight.config.schema import RunConfig
from spotlight.dry_run.memory_plan import checkpoint_parts
from spotlight.dry_run.model_plan import NotHere, read_transformer
from spotlight.dry_run.run_plan import parameters_trained
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import require_free_bytes


def require_disk(config: RunConfig) -> None:
    """Look at the disk of the run directory; what lies there already needs no room again.

    Raises:
        StoreError: the checkpoints and the export do not fit.
    """
    paths = RunPaths(config.runs_dir / config.name)
    model = read_transformer(config)
    trained = None if isinstance(model, NotHere) else parameters_trained(config, model)
    # Pictures and ledger are small, and could only be estimated.
    needed = sum(part.bytes for part in checkpoint_parts(config, trained))
    there = sum(file.stat().st_size for file in paths.checkpoints.rglob("*") if file.is_file())
    require_free_bytes(paths.path, max(0, int(needed) - there))
