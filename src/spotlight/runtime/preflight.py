"""Checks before a model is loaded: is the run already finished, can it start, and does it fit on disk?

Dry runs ask the same. :func:`finished_summary` imports no torch, so that it answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts, load_prompts
from spotlight.dry_run.memory_plan import checkpoint_parts, stored_parts
from spotlight.dry_run.model_checks import require_model, require_prompts
from spotlight.dry_run.model_plan import NotHere, read_transformer
from spotlight.dry_run.run_plan import newest_checkpoint, parameters_trained, stored_tokens
from spotlight.runtime.resuming.course import Resuming, planned_changes
from spotlight.runtime.resuming.files_read import files_read, require_same_files
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.run_directory import RunPaths, check_run_directory
from spotlight.store.run_summary import RunSummary, read_summary
from spotlight.store.sinks import check_sinks
from spotlight.store.store_errors import require_free_bytes
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompt_files import PromptFileError
from spotlight_rewards.base.prompts import PromptId
from spotlight_rewards.results import require_names


def finished_summary(config: RunConfig) -> RunSummary | None:
    """The summary of a run with no work left, else None.

    Raising ``iterations`` or removing the exported adapter leaves work.

    Raises:
        StoreError: it is in use, belongs to another configuration, cannot be written, or is not a run.
    """
    check_run_directory(config.runs_dir, config.name, dump_config(config), Resuming(config))
    paths = RunPaths(config.runs_dir / config.name)
    if config.names_run and not paths.config.exists():
        raise StoreError(
            f"runs_dir is {config.runs_dir}, which has no run {config.name!r}; expected the folder that the "
            f"run is in. Leave it out, or move the run there first."
        )
    if not (paths.summary.exists() and paths.ledger.exists()):
        return None
    with closing(queries.open_readonly(paths.ledger)) as connection:
        if queries.last_ending(connection) != Ending.FINISHED:
            return None
    summary = read_summary(paths.summary)
    if summary.lora is not None and not (paths.path / summary.lora).exists():
        return None
    return summary if summary.iterations >= config.iterations else None


def finished_note(config: RunConfig, summary: RunSummary) -> str:
    """What a command on a finished run is told: nothing that it changes takes effect."""
    note = f"finished before: {summary.iterations} iterations are trained"
    changes = " ".join(planned_changes(config))
    if not changes:
        return note
    return (
        f"{note}; nothing is changed ({changes}), since no iteration is left. To go on with it: "
        f"iterations=N, above {summary.iterations}"
    )


def require_startable(config: RunConfig) -> Prompts:
    """The run's prompts, once all is checked that can be refused before anything is loaded.

    Raises:
        ConfigError, PromptFileError, ModelError: what is configured, and files that are not there.
        RewardSetupError: a reserved name.
        StoreError: a tracker that cannot be used, or files that changed since the checkpoint.
    """
    check_sinks(config.metrics.chosen)
    require_names(config.rewards)
    prompts = load_prompts(config)
    paths = RunPaths(config.runs_dir / config.name)
    if (newest := newest_checkpoint(config)) is not None and paths.ledger.exists():
        with closing(queries.open_readonly(paths.ledger)) as connection:
            before = queries.prompts_at(connection, newest.ledger_position)
        require_same_prompts(before, prompts, config)
    require_model(config)  # late, since a family imports torch
    if newest is not None:
        require_same_files(newest.contents, files_read(config, prompts), config)
    require_prompts(config, prompts)
    return prompts


def require_same_prompts(before: Mapping[str, Sequence[PromptId]], now: Prompts, config: RunConfig) -> None:
    """Raise PromptFileError for other prompts than those up to the checkpoint, unless the run is named."""
    if config.names_run:
        return
    files = {"data.train": config.data.train, "data.test": config.data.test}
    for key, ids in now.ids.items():
        old = before.get(key, ids)
        if ids == old:
            continue
        added, removed = len(set(ids) - set(old)), len(set(old) - set(ids))
        found = f"{added} added, {removed} removed" if added or removed else "the same in another order"
        raise PromptFileError(
            f"{config.runs_dir / config.name}: {key} ({files[key]}) holds other prompts than up to the "
            f"checkpoint: {found} ({len(ids)} now); expected the same {len(old)}. Put back the file that the "
            f"run began with; or go on with these: spotlight train {config.runs_dir / config.name} "
            f"{key}={files[key]}"
        )


def require_disk(config: RunConfig, prompts: Prompts) -> None:
    """Check the run directory's disk; files already there are credited.

    Raises:
        StoreError: checkpoints, export, and on Ray the prompts' embeddings do not fit.
    """
    paths = RunPaths(config.runs_dir / config.name)
    model = read_transformer(config)
    trained = None if isinstance(model, NotHere) else parameters_trained(config, model)
    # Images and ledger are small, and could only be estimated.
    parts = checkpoint_parts(config, trained) + stored_parts(config, model, stored_tokens(config, prompts))
    needed = sum(part.bytes for part in parts)
    # What a killed run has stored is deleted when the next begins.
    kept = [file for folder in (paths.checkpoints, paths.in_flight) for file in folder.rglob("*")]
    there = sum(file.stat().st_size for file in kept if file.is_file())
    require_free_bytes(paths.path, max(0, int(needed) - there))
