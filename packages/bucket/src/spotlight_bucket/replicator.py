"""The replicator beside a run: a thread that adds a snapshot for each checkpoint, and every minute.

The run never waits for it. A bucket that fails is told once, and tried until it answers; then what it missed
is sent. Only :meth:`Replicator.finish` waits, at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spotlight.store.run_directory import RunPaths
from spotlight_bucket.bucket_objects import BucketError, Objects
from spotlight_bucket.lease import RENEWED_EVERY_S, HeadLease
from spotlight_bucket.local_copies import WorkingCopy
from spotlight_bucket.run_files import consistent_files, pointer_of, run_bytes
from spotlight_bucket.sending import Sender
from spotlight_bucket.snapshots import CHUNKS, FencedError, RunSnapshot, append, name_of, serials
from spotlight_rewards.base.file_errors import StoreError, size

SENT_EVERY_S = 60.0
"""Curves, pictures and the ledger between two checkpoints."""
_LOOKS_EVERY_S = 0.5
_TOLD_EVERY_S = 5.0
_PATIENCE_S = (2.0, 60.0)
"""Between two tries: first, and at most."""
_KEPT = 2
"""Snapshots whose chunks stay, so that who reads one can finish while the next is added."""

log = logging.getLogger("spotlight")


class Replicator:
    """Sends one run. Methods are of one thread at a time, but for :meth:`running`'s block."""

    def __init__(
        self, copy: WorkingCopy, objects: Objects, base: RunSnapshot, note: Callable[[str], None]
    ) -> None:
        """Go on after ``base``, which this head has added; the run may not be in the copy yet."""
        self._copy, self._objects, self._note = copy, objects, note
        self.newest = base
        self.sender = Sender(objects, base.epoch)
        self.fenced: FencedError | None = None
        self._before: list[set[str]] = [base.chunks]
        self._gone = set(base.garbage)
        self._garbage = set(base.garbage)
        self._looks_again = True
        self._pointer: bytes | None = None
        self._adding: RunSnapshot | None = None
        """May be in the chain, as the answer may be lost: nothing else may have its number."""
        self._stop = _nothing

    def sync(self) -> bool:
        """Add a snapshot, if the run has changed. Raises StoreError, of the bucket or the disk."""
        copy = self._copy
        if not RunPaths(copy.run).config.is_file():
            return False
        if self._looks_again:
            self._look()
        pointer, began_s, began_cpu_s = pointer_of(copy.run), time.monotonic(), time.thread_time()
        before = dataclasses.replace(self.sender.sent)
        with consistent_files(copy.run, copy.backup) as files:
            stored = self.sender.send(files)
        if stored != self.newest.files:
            self._append(RunSnapshot(self.newest.serial + 1, self.newest.epoch, copy.id, stored))
            sent, took_s = self.sender.sent, time.monotonic() - began_s
            cpu_s = time.thread_time() - began_cpu_s + sent.cpu_s - before.cpu_s
            log.info(
                "snapshot %d: %d bytes in %d requests, %.2f s, of which %.3f s on a CPU",
                *(self.newest.serial, sent.bytes - before.bytes, sent.requests - before.requests),
                *(took_s, cpu_s),
            )
        self._pointer = pointer
        return True

    def _look(self) -> None:
        if self._adding is not None:
            self._add(self._adding)
        there = self.sender.look(self._gone)
        self._garbage |= there - self.newest.chunks  # of heads that ended before a snapshot named it
        self._looks_again = False

    def _append(self, new: RunSnapshot) -> None:
        used = new.chunks.union(*self._before)
        self._garbage -= used
        self._adding = dataclasses.replace(new, garbage=tuple(sorted(self._garbage)))
        self._add(self._adding)

    def _add(self, new: RunSnapshot) -> None:
        append(self._objects, new)
        self.newest, self._adding = new, None
        self._gone |= self._garbage
        self._before.append(new.chunks)
        self.sender.forget(new.garbage)
        old = set[str]()
        while len(self._before) > _KEPT:
            old |= self._before.pop(0)
        self._garbage = old - set[str]().union(*self._before)
        outdated = [name_of(each) for each in serials(self._objects) if each <= new.serial - _KEPT]
        self._objects.delete([*outdated, *(f"{CHUNKS}/{each}" for each in new.garbage)])

    @contextmanager
    def renewing(self, lease: HeadLease) -> Iterator[None]:
        """Renew the lease within the block: to bring a run, or to send its end, may take longer."""
        ends = threading.Event()
        threading.Thread(target=self._renew, args=(lease, ends), name="lease", daemon=True).start()
        try:
            yield
        finally:
            ends.set()

    @contextmanager
    def running(self, on_fenced: Callable[[], None]) -> Iterator[None]:
        """Replicate within the block.

        Args:
            on_fenced: called once, from a thread, when another head has taken the run over.

        Raises:
            FencedError: one has already.
        """
        self._stop = on_fenced
        if self.fenced is not None:
            raise self.fenced
        ends = threading.Event()
        thread = threading.Thread(target=self._replicate, args=(ends,), name="replicator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            if not isinstance(sys.exception(), KeyboardInterrupt):  # which ends at once
                with self._telling():
                    thread.join()
            self._stop = _nothing

    def finish(self, patience_s: float) -> None:
        """Send the final state, and say so.

        Raises:
            StoreError: the bucket did not take it within ``patience_s``.
        """
        began_s, wait_s, told = time.monotonic(), _PATIENCE_S[0], False
        while True:
            if self.fenced is not None:
                raise self.fenced
            try:
                with self._telling():
                    self.sync()
                return
            except FencedError:
                raise
            except BucketError as error:
                if time.monotonic() - began_s > patience_s:
                    raise BucketError(
                        f"{error} What the run ended with is not all in the bucket; it is in "
                        f"{self._copy.run}: the same command on this machine sends it."
                    ) from error
                if not told:
                    self._note(f"the bucket does not take the final state yet: {error}")
                    told = True
                self._looks_again = True
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _PATIENCE_S[1])

    @contextmanager
    def _telling(self) -> Iterator[None]:
        ends = threading.Event()

        def tell() -> None:
            while not ends.wait(_TOLD_EVERY_S):
                there, of = size(self.sender.sent.there), size(run_bytes(self._copy.run))
                self._note(f"sending the final state to {self._objects.address}: {there} of {of} there")

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _fence(self, error: FencedError) -> None:
        if self.fenced is None:
            self.fenced = error
            self._note(str(error))
            self._stop()

    def _replicate(self, ends: threading.Event) -> None:
        failing, wait_s, due_s, tries_after_s = False, _LOOKS_EVERY_S, 0.0, _PATIENCE_S[0]
        while self.fenced is None and not ends.wait(wait_s):
            wait_s = _LOOKS_EVERY_S
            try:
                same = not failing and pointer_of(self._copy.run) == self._pointer
                if same and time.monotonic() < due_s:
                    continue
                self.sync()
            except FencedError as error:
                self._fence(error)
            except (StoreError, OSError) as error:
                if not failing:
                    self._note(f"the run goes on without its bucket, which is tried again: {error}")
                wait_s, failing, self._looks_again = tries_after_s, True, True
                tries_after_s = min(2 * tries_after_s, _PATIENCE_S[1])
            else:
                due_s = time.monotonic() + SENT_EVERY_S
                if failing:
                    self._note(f"{self._objects.address} answers again, and holds all of the run")
                failing, tries_after_s = False, _PATIENCE_S[0]

    def _renew(self, lease: HeadLease, ends: threading.Event) -> None:
        while self.fenced is None and not ends.wait(RENEWED_EVERY_S):
            try:
                if not lease.renew():
                    self._fence(
                        FencedError(
                            f"{self._objects.address}: another head has taken this run over: its lease is of "
                            "another epoch, so this one ends."
                        )
                    )
            except BucketError as error:
                log.warning("the lease is not renewed: %s", error)


def _nothing() -> None:
    """There is no run to stop."""
