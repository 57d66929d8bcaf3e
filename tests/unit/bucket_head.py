"""A head whose run goes to a bucket, without its threads."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from spotlight.scheduler.types import WorkerId
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.run_directory import RunPaths
from spotlight_bucket.bucket_objects import Objects
from spotlight_bucket.lease import claim
from spotlight_bucket.local_copies import WorkingCopy
from spotlight_bucket.replicator import Replicator
from spotlight_bucket.snapshots import (
    take_over,
)

ONE, OTHER = "1" * 32, "2" * 32


def quiet(text: str) -> None:
    """No note is looked at."""


class Head:
    """A head on a machine of its own, without its threads."""

    def __init__(self, machine: Path, objects: Objects, copy: str) -> None:
        place = WorkingCopy(machine, "demo", copy)
        self.run = place.run
        self.run.mkdir(parents=True)
        self.ledger = self.run / "ledger.sqlite"
        epoch = claim(objects, copy, quiet, lease_s=0).holder.epoch
        self.base = take_over(objects, epoch, copy)
        self.replicator = Replicator(place, objects, self.base, quiet)

    def begin(self) -> None:
        (self.run / "config.yaml").write_text("name: demo\n")
        (self.run / "checkpoints").mkdir()
        with closing(SqliteLedger(self.ledger)) as ledger:
            ledger.begin_attempt(pid=1, host="here", workers={WorkerId("worker-0"): 1.0}, now_s=0)

    def checkpoint(self, iteration: int, size_bytes: int = 1000) -> None:
        store = CheckpointStore(RunPaths(self.run).checkpoints, keep=2)
        with store.writer(CheckpointHeader(iteration, 0, "digest", "0.1.0")) as folder:
            (folder / "weights").write_bytes(random.Random(iteration).randbytes(size_bytes))
