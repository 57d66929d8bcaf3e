"""Another run that begins with a checkpoint of a run: its state, and the record up to there.

A fork holds the ledger, curves and pictures of its parent up to the checkpoint, the checkpoint, and its own
configuration; the ledger says from which iteration on it has another name and what else differs. It is made
beside its place and renamed, so that there is none or a whole one.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

from spotlight.store.checkpoints import LATEST, Checkpoint
from spotlight.store.images import drop_pictures
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import MANIFEST, sha256_of
from spotlight.store.metrics import MetricsWriter
from spotlight.store.run_directory import Leaf, RunDirectory, RunPaths
from spotlight_rewards.base.file_errors import storage_errors
from spotlight_rewards.base.files import TEMPORARY_PREFIX, fsync_path, fsync_tree, write_atomically


def make_fork(
    parent: RunPaths,
    checkpoint: Checkpoint,
    place: Path,
    config_text: str,
    changes: Mapping[str, tuple[Leaf, Leaf]],
    now_s: float,
) -> bool:
    """Make the run ``place``; False: it was there, or another process was faster, as ranks are.

    Args:
        changes: former and new value by key, ``name`` among them.

    Raises:
        StoreError: the disk is full or not writable; nothing is left of the fork.
    """
    if place.exists():
        return False
    root = place.parent
    with storage_errors("cannot make the fork", place):
        root.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".fork-{place.name[:40]}-", dir=root))
        try:
            with RunDirectory.open(root, made.name, config_text) as run:
                _fill(run, parent, checkpoint, changes, now_s)
            fsync_tree(made)
            made.chmod(parent.path.stat().st_mode & 0o777)
            try:
                made.rename(place)
            except OSError:
                if not place.exists():
                    raise
                return False
            fsync_path(root)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return True


def _fill(
    run: RunDirectory,
    parent: RunPaths,
    checkpoint: Checkpoint,
    changes: Mapping[str, tuple[Leaf, Leaf]],
    now_s: float,
) -> None:
    iteration, position = checkpoint.header.iteration, checkpoint.header.ledger_position
    with (
        closing(queries.open_readonly(parent.ledger)) as source,
        closing(sqlite3.connect(run.ledger)) as copy,
    ):
        source.backup(copy)
    with SqliteLedger(run.ledger) as ledger:
        ledger.cut_after(position)
        ledger.record_course(position, iteration, changes, now_s)
    kept = run.checkpoints / checkpoint.directory.name
    shutil.copytree(checkpoint.directory, kept, copy_function=_link)
    write_atomically(run.checkpoints / LATEST, f"{kept.name} {sha256_of(kept / MANIFEST)}\n".encode())
    if parent.metrics.exists():
        shutil.copyfile(parent.metrics, run.metrics)
    if parent.images.is_dir():
        being_written = shutil.ignore_patterns(f"{TEMPORARY_PREFIX}*")  # by the parent, which may run
        shutil.copytree(parent.images, run.images, dirs_exist_ok=True, ignore=being_written)
    with MetricsWriter(run, resume_at=iteration, sinks=()):
        drop_pictures(run, resume_at=iteration)


def _link(source: str, target: str) -> None:
    """A checkpoint's files are never changed, so that a link is a copy, where the disk has links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
