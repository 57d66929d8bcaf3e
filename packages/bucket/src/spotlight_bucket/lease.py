"""The lease on a run in a bucket: which head works on it, as long as it renews.

    head.json     epoch, holder, working copy, address; replaced by conditional puts alone

It keeps a second head from starting while the first lives; what it fails at, the chain of snapshots catches.
Times are those of the bucket, so the clocks of machines do not matter: the age of a lease is the difference
between the bucket's times of it and of an object written now.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from spotlight.store.store_errors import RunInUseError
from spotlight_bucket.bucket_objects import BucketError, Objects, Version

HEAD = "head.json"
CLOCK = "clock"
LEASE_S = 60.0
RENEWED_EVERY_S = 15.0
_LOOKS_EVERY_S = 3.0
_BYTES_MAX = 4096
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]):[0-9]{1,5}|")


@dataclass(frozen=True, slots=True)
class Holder:
    """What the object says.

    Attributes:
        epoch: counts heads of the run.
        copy: the working copy on its machine; one process at a time has that.
        address: of the Ray cluster that the head is in, for nodes to join; empty: none that is known.
        renewals: makes each content differ from the one before.
    """

    epoch: int
    copy: str
    where: str
    renewals: int = 0
    released: bool = False
    address: str = ""


class HeadLease:
    """This process's lease. Methods raise :class:`BucketError`; threads may share one."""

    def __init__(self, objects: Objects, holder: Holder) -> None:
        self._objects, self.holder, self._lock = objects, holder, threading.Lock()

    def renew(self) -> bool:
        """Whether this head still has the run, or has let it go."""
        with self._lock:
            wanted = replace(self.holder, renewals=self.holder.renewals + 1)
            return self.holder.released or self._write(wanted)

    def release(self) -> None:
        """Let the next head start at once."""
        with self._lock:
            self._write(replace(self.holder, released=True))

    def _write(self, wanted: Holder) -> bool:
        there, version = _read(self._objects)
        if version is None:  # the bucket was emptied
            held = self._objects.create(HEAD, _render(wanted))
        elif self._is_own(there):
            held = self._objects.replace(HEAD, _render(wanted), version)
        else:
            return False
        if held:
            self.holder = wanted
        # The answer to a try that succeeded may be lost.
        return held or self._is_own(holder_of(self._objects))

    def _is_own(self, there: Holder | None) -> bool:
        return there is not None and (there.epoch, there.copy) == (self.holder.epoch, self.holder.copy)


def claim(
    objects: Objects,
    copy: str,
    note: Callable[[str], None],
    after: int = 0,
    address: str = "",
    lease_s: float = LEASE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> HeadLease:
    """Take the run, once no other head has it.

    A head that was killed holds its lease for up to ``lease_s``, which is waited for; one that renews it
    meanwhile is alive.

    Args:
        after: an epoch that was there before; the one claimed is above it.
        address: see :class:`Holder`; one that is none of a cluster is not told.

    Raises:
        RunInUseError: another head works on it.
        BucketError: the bucket.
    """
    _require_conditional_puts(objects)
    known = address if _ADDRESS.fullmatch(address) else ""  # another would be refused by whoever reads it
    where, met = f"process {os.getpid()} on {socket.gethostname()}", None
    while True:
        there, version = _read(objects)
        wanted = Holder(max(after, there.epoch if there else 0) + 1, copy, where, address=known)
        if there is None or version is None:
            if objects.create(HEAD, _render(wanted)):
                return HeadLease(objects, wanted)
            continue
        if met is not None and there != met and not there.released:
            raise RunInUseError(
                f"{objects.address}: in use by {there.where}, which has just renewed its lease. Wait for it "
                "or stop it, or start this run under another name."
            )
        # The same working copy: its lock is held here, so the process that had it is gone.
        left_s = 0.0 if there.released or there.copy == copy else lease_s - _age_s(objects, version)
        if left_s <= 0:
            if objects.replace(HEAD, _render(wanted), version):
                return HeadLease(objects, wanted)
            continue
        if met is None:
            note(f"{objects.address}: {there.where} may still work here; its lease ends in {left_s:.0f} s")
            met = there
        sleep(min(left_s, _LOOKS_EVERY_S))


def holder_of(objects: Objects) -> Holder | None:
    """Who has, or had, the run; None: nobody ever. Raises BucketError."""
    return _read(objects)[0]


def _read(objects: Objects) -> tuple[Holder, Version] | tuple[None, None]:
    found = objects.get(HEAD, _BYTES_MAX)
    return (None, None) if found is None else (_parsed(objects, found[0]), found[1])


def _require_conditional_puts(objects: Objects) -> None:
    """Two heads would write over each other where the service takes a condition and does not heed it."""
    objects.put(CLOCK, b"before")
    before = objects.get(CLOCK, _BYTES_MAX)
    objects.put(CLOCK, b"now")
    made_again = objects.create(CLOCK, b"once more")
    if made_again or (before is not None and objects.replace(CLOCK, b"of an old version", before[1])):
        what, header = (
            ("made once more", "If-None-Match") if made_again else ("replaced as an old one", "If-Match")
        )
        raise BucketError(
            f"{objects.address}: an object that is there was {what}; expected a service that heeds "
            f"{header}, as S3, Google Cloud Storage and Azure Blob Storage do. Take another service."
        )


def _age_s(objects: Objects, version: Version) -> float:
    objects.put(CLOCK, b"now")
    now = objects.get(CLOCK, _BYTES_MAX)
    return 0.0 if now is None else (now[1].modified - version.modified).total_seconds()


def _render(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _parsed(objects: Objects, content: bytes) -> Holder:
    try:
        holder = Holder(**json.loads(content))
        types = type(holder.epoch), type(holder.copy), type(holder.where), type(holder.released)
        if types != (int, str, str, bool) or not 0 <= holder.epoch < 10**6 - 1:
            raise ValueError(f"found {content[:100]!r}")
        if _ADDRESS.fullmatch(holder.address) is None:  # it gets into a command
            raise ValueError(f"its address is {holder.address!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise BucketError(
            f"{objects.address}/{HEAD}: not a lease ({error}). Remove it once no head works on the run."
        ) from error
    return replace(holder, where="".join(c for c in holder.where[:100] if c.isprintable()))
