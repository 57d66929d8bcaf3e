"""Keep a node in the cluster of a run whose head may move: the run's lease in the bucket says where it is.

    python -m spotlight_bucket.follow_head s3://BUCKET/PREFIX/RUN -- launch/ray-start.sh spot {} --block

    wait for a head that answers ─► run the command, with its address for {} ─► it ends, or is ended because
                ▲                                                               the run has another head
                └─────────────────────────────────────────────────────────────────────────┘

Exit status: 0, the run has finished; 1, it had no head for --wait-s; 143, on SIGTERM, which the command gets
too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary
from spotlight_bucket.bucket_objects import BucketError, Objects, open_objects
from spotlight_bucket.lease import holder_of
from spotlight_bucket.receiving import receive
from spotlight_bucket.snapshots import RunSnapshot, newest_snapshot
from spotlight_rewards.base.file_errors import StoreError, storage_errors

WAIT_S = 900.0
_LOOKS_EVERY_S = 5.0
_CONNECT_S = 5.0
_ENDS_S = 30.0
"""What the command is left to end in, before it is killed with its process group."""
FINISHED = "finished"
_ITERATIONS = re.compile(rb"^iterations: (\d{1,15})$", re.MULTILINE)


def head_of(objects: Objects) -> str | None:
    """Address of the cluster of the run's head; :data:`FINISHED`; None: no head has it, or it told none.

    Raises StoreError.
    """
    if (holder := holder_of(objects)) is None:
        return None
    if not holder.released:
        return holder.address or None
    newest = newest_snapshot(objects)
    return FINISHED if newest is not None and _is_finished(objects, newest) else None


def _is_finished(objects: Objects, newest: RunSnapshot) -> bool:
    """Whether its summary is of all iterations: one that had finished may go on with more, and be stopped."""
    place = Path(os.environ.get("TMPDIR", "/tmp"))
    with storage_errors("cannot bring the run's summary", place), TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        wanted = (paths.summary.name, paths.config.name)
        if not newest.files.keys() >= {*wanted}:
            return False
        receive(objects, {name: newest.files[name] for name in wanted}, paths.path)
        trained = read_summary(paths.summary).iterations
        planned = _ITERATIONS.search(paths.config.read_bytes())
    return planned is not None and trained >= int(planned[1])


def follow(
    look: Callable[[], str | None], command: Sequence[str], wait_s: float, told: threading.Event
) -> int:
    """Run the command beside each head in turn; returns the exit status.

    Args:
        look: see :func:`head_of`.
        told: to end.
    """
    since_s = time.monotonic()
    while not told.is_set():
        address = _looked(look)
        if address == FINISHED:
            _say("the run has finished")
            return 0
        if address is not None and _answers(address):
            _say(f"joining {address}")
            _beside(address, look, [part.replace("{}", address) for part in command], told)
            since_s = time.monotonic()
        elif time.monotonic() - since_s > wait_s:
            _say(f"no head for {wait_s:.0f} s")
            return 1
        told.wait(_LOOKS_EVERY_S)
    return 128 + signal.SIGTERM


def _beside(address: str, look: Callable[[], str | None], command: list[str], told: threading.Event) -> None:
    with subprocess.Popen(command, start_new_session=True) as process:
        while process.poll() is None:
            now = _looked(look)
            if told.wait(_LOOKS_EVERY_S) or now not in (address, None):  # None: it may be back at once
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDS_S)
                break
        with suppress(ProcessLookupError):  # what it started may outlive it
            os.killpg(process.pid, signal.SIGKILL)


def _looked(look: Callable[[], str | None]) -> str | None:
    try:
        return look()
    except StoreError as error:
        _say(str(error))
        return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError):
        return False
    return True


def _say(text: str) -> None:
    sys.stderr.write(f"follow_head: {text}\n")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m spotlight_bucket.follow_head")
    parser.add_argument("run", help="address of the run, such as s3://my-bucket/runs/demo")
    parser.add_argument("command", nargs="+", help="what joins a head; {} is its address")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="without a head: so long (%(default)s)")
    given = parser.parse_args()
    if shutil.which(given.command[0]) is None:
        parser.error(f"no command {given.command[0]!r} that can be run is here; expected what joins a head")
    told = threading.Event()
    try:
        objects = open_objects(given.run)
    except BucketError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    return follow(lambda: head_of(objects), given.command, given.wait_s, told)


if __name__ == "__main__":
    sys.exit(main())
