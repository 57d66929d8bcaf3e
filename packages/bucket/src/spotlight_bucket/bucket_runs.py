"""What the core asks of runs in a bucket: see :class:`spotlight.store.run_store.RunStore`."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spotlight.store.run_store import Wanted
from spotlight_bucket.bucket_objects import open_objects
from spotlight_bucket.lease import LEASE_S, claim
from spotlight_bucket.local_copies import (
    READ,
    ReadCopy,
    bring_to_work,
    folder_of,
    is_light,
    newest_checkpoint_of,
    working_copy,
)
from spotlight_bucket.replicator import Replicator
from spotlight_bucket.snapshots import CHUNK_BYTES, is_plain, newest_snapshot, take_over
from spotlight_rewards.base.file_errors import StoreError, size

PUT_USD, GB_MONTH_USD = 0.005 / 1000, 0.023
"""List prices of S3 Standard in us-east-1; other services are near them."""
_FOLDERS = {Wanted.PICTURES: ("images/", "votes/"), Wanted.LORA: ("lora/",), Wanted.ALL: ("",)}
"""Beginnings of the paths that are wanted besides light files."""
_FINISH_S = 600.0
"""How long the end of a run waits for a bucket that does not answer."""


class BucketRuns:
    """Runs below an address of a bucket."""

    @contextmanager
    def work(
        self, address: str, name: str, cache: Path, note: Callable[[str], None], cluster: str = ""
    ) -> Iterator[Path]:
        """See :class:`spotlight.store.run_store.RunStore`."""
        with working_copy(folder_of(address, cache), name) as copy:
            objects = open_objects(f"{address}/{name}")
            before = newest_snapshot(objects)
            lease = claim(objects, copy.id, note, before.epoch if before else 0, cluster)
            base = take_over(objects, lease.holder.epoch, copy.id)
            replicator = Replicator(copy, objects, base, note)
            with replicator.sender, replicator.renewing(lease):
                bring_to_work(copy, base, objects, note)
                try:
                    with replicator.running(_stop_this_run):
                        yield copy.runs_dir
                finally:
                    if replicator.fenced is not None:
                        raise replicator.fenced
                    if not isinstance(sys.exception(), KeyboardInterrupt):  # which ends at once
                        replicator.finish(_FINISH_S)
                        lease.release()

    def read(self, address: str, name: str, cache: Path, wanted: Wanted) -> Path:
        """See :class:`spotlight.store.run_store.RunStore`."""
        copy = ReadCopy(folder_of(address, cache), name, open_objects(f"{address}/{name}"))
        if copy.renew(is_light):
            folders = _FOLDERS.get(wanted, ())
            if wanted is Wanted.CHECKPOINT and (newest := newest_checkpoint_of(copy.run)):
                folders = (newest,)
            if folders:
                copy.renew(lambda path: is_light(path) or path.startswith(folders))
        return copy.run

    def read_all(
        self, address: str, cache: Path, wanted: Wanted, tell: Callable[[str], object]
    ) -> Path | None:
        """See :class:`spotlight.store.run_store.RunStore`."""
        names, refused = self.names(address), dict[str, StoreError]()
        copies = folder_of(address, cache) / READ
        gone = {each.name for each in copies.iterdir() if each.is_dir()} if copies.is_dir() else set[str]()
        for name in (*names, *(gone - {*names})):  # whose copies are dropped
            try:
                self.read(address, name, cache, wanted)
            except StoreError as error:
                refused[name] = error
        for refusal in refused.values():
            if refused.keys() >= {*names}:
                raise refusal
            tell(str(refusal))
        return copies if names else None

    def names(self, address: str) -> list[str]:
        """See :class:`spotlight.store.run_store.RunStore`."""
        return [name for name in open_objects(address).folders() if is_plain(name)]

    def costs(self, checkpoint_bytes: float, kept_bytes: float) -> Iterator[tuple[str, str, str]]:
        """See :class:`spotlight.store.run_store.RunStore`."""
        pieces, small = math.ceil(checkpoint_bytes / CHUNK_BYTES), 20
        yield (
            "a checkpoint",
            size(checkpoint_bytes),
            f"sent behind the run; {8 * checkpoint_bytes / 1e9:.1f} s at 1 Gbit/s",
        )
        dollars = (pieces + small) * PUT_USD
        yield (
            "  its requests",
            f"${dollars:.4f}",
            f"up to {pieces} x 16 MiB and some {small} small objects, at ${PUT_USD * 1000:g} per 1,000",
        )
        yield (
            "the head is lost",
            f"{LEASE_S:.0f} s",
            "then the same command on any machine goes on from the newest checkpoint here",
        )
        month = kept_bytes / 1e9 * GB_MONTH_USD
        yield (
            "kept",
            size(kept_bytes),
            f"${month:.2f} a month, at ${GB_MONTH_USD:g} per GB; within a region traffic is free",
        )


def _stop_this_run() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


BUCKET_RUNS = BucketRuns()
