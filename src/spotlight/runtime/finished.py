"""A run that is there already: may this configuration continue it, and is there anything left to do?

Looks only, and imports no torch, so that what is wrong or done shows before a model is loaded.
"""

from __future__ import annotations

from contextlib import closing

from spotlight.config.load import dump_config
from spotlight.config.schema import RESUMABLE_KEYS, RunConfig
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.run_directory import RunPaths, check_run_directory
from spotlight.store.run_summary import RunSummary, read_summary


def finished_summary(config: RunConfig) -> RunSummary | None:
    """The summary of a run that has nothing left to do; None where work remains.

    A finished run whose ``iterations`` are raised has work left, and so has one whose exported adapter was
    removed.

    Raises:
        StoreError: the run directory is of another configuration, cannot be written, or is none.
    """
    check_run_directory(config.runs_dir, config.name, dump_config(config), RESUMABLE_KEYS)
    paths = RunPaths(config.runs_dir / config.name)
    if not (paths.summary.exists() and paths.ledger.exists()):
        return None
    with closing(queries.open_readonly(paths.ledger)) as connection:
        if queries.last_ending(connection) != Ending.FINISHED:
            return None
    summary = read_summary(paths.summary)
    if summary.lora is not None and not (paths.path / summary.lora).exists():
        return None
    return summary if summary.iterations >= config.iterations else None
