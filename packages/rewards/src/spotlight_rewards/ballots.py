"""Ballots: groups of pictures on which a person votes, in the folder ``votes`` of a run directory.

    votes/open/ID/ballot.json   a ballot, beside its pictures NAME.png; touched while its vote is awaited
    votes/ID.json               the vote, for good
    votes/clock/                where the file system is asked for its time

The reward ``vote`` opens and closes ballots, the dashboard writes votes. Names are digests of the pictures,
and an id is the digest of prompt and names: a reward that asks again after a restart finds the vote. Each
file, and each open ballot with its pictures, appears whole. Times are those of the file system, which reward
and dashboard share: the clocks of their machines may differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import Any
from uuid import uuid4

from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import (
    TEMPORARY_PREFIX,
    discard,
    fsync_path,
    fsync_tree,
    read_regular,
)

VOTES_FOLDER, OPEN_FOLDER = "votes", "open"
TOUCHED_EVERY_S = 2.0
AWAITED_FOR_S = 15.0
"""Since it was touched: then the reward that asked has gone, or asks about something else."""
VOTER_MAX = 200
_STALE_S = 60.0
_ID = re.compile(r"[0-9a-f]{32}")
_BALLOT = "ballot.json"
_BALLOT_BYTES_MAX = 1 << 20
_CLOCK_FOLDER = "clock"
_NONSENSE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
_TOO_LATE = "This group is voted on already, or its vote is not awaited any more."


class NoSuchBallotError(StoreError):
    """A ballot on which nobody can vote, now or at all; says why."""


class DamagedVoteError(StoreError):
    """A file that is no vote; names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """A question: which of these pictures of a prompt are better?

    Attributes:
        pictures: their names, see :func:`picture_name`; distinct, ascending.
        asks_name: whether the vote is to say who voted.
        references: names of the pictures that the prompt is about, which are shown beside them.
        asked_at, ends_at: seconds since the epoch, set by :meth:`BallotBox.open`; then a vote is too late.
    """

    prompt: str
    pictures: tuple[str, ...]
    asks_name: bool = False
    asked_at: float = 0.0
    ends_at: float = 0.0
    references: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Digest of the prompt and the pictures."""
        return hashlib.sha256("\n".join((*self.pictures, self.prompt)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Vote:
    """An answer to a :class:`Ballot`.

    Attributes:
        ranking: names of pictures, the best first; those not named come after them, all alike.
        took_s: from the question to the answer.
        voter: empty unless the ballot asked.
    """

    ranking: tuple[str, ...]
    took_s: float
    voter: str = ""


def picture_name(png: bytes) -> str:
    """Of a picture's file."""
    return hashlib.sha256(png).hexdigest()[:32]


class BallotBox:
    """The ballots of one run.

    Args:
        folder: ``votes`` of its run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, folder / OPEN_FOLDER

    # -- who asks --

    def open(self, ballot: Ballot, pictures: Mapping[str, bytes], within_s: float) -> None:
        """Put the question, with PNG files by name, for so long. Raises OSError.

        One that is awaited already keeps the time at which it was asked, and gets a new end.
        """
        self._open.mkdir(parents=True, exist_ok=True)
        now_s, before = self.now_s(), self._read(ballot.id)
        awaited = before is not None and self._is_fresh(ballot.id, now_s)
        asked_at = before.asked_at if before is not None and awaited else now_s
        content = json.dumps(asdict(replace(ballot, asked_at=asked_at, ends_at=now_s + within_s)))
        folder = self._open / ballot.id
        if before is not None:
            temporary = folder / f"{TEMPORARY_PREFIX}{uuid4().hex}"
            with suppress(FileNotFoundError):  # another process has just had its vote: it is put again
                temporary.write_text(content, encoding="utf-8")
                temporary.replace(folder / _BALLOT)
                return
        scratch = Path(mkdtemp(prefix=TEMPORARY_PREFIX, dir=self._open))
        for name, picture in pictures.items():
            (scratch / f"{name}.png").write_bytes(picture)
        (scratch / _BALLOT).write_text(content, encoding="utf-8")
        fsync_tree(scratch)  # a question that is put again keeps its pictures
        scratch.chmod(0o755)  # of mkdtemp's, which only its owner may read
        self.close(ballot.id)  # what is left of it, if its removal was interrupted
        try:
            scratch.rename(folder)
        except OSError:
            shutil.rmtree(scratch)
            if not self.touch(ballot.id):  # else another process asks the same
                raise
        self._remove_stale(folder / _BALLOT)

    def touch(self, ballot: str) -> bool:
        """Say that its vote is still awaited; False if it is not open."""
        try:
            os.utime(self._open / ballot / _BALLOT)
        except OSError:
            return False
        return True

    def vote_on(self, ballot: str) -> Vote | None:
        """The vote, if there is one. Raises :class:`DamagedVoteError`."""
        path = self._vote(ballot)
        try:
            found = json.loads(read_regular(path, _BALLOT_BYTES_MAX))
            return Vote(tuple(map(str, found["ranking"])), _time(found["took_s"]), str(found["voter"]))
        except FileNotFoundError:
            return None
        except _NONSENSE as error:
            raise DamagedVoteError(f"{path}: not a vote ({error!r}). Delete it to be asked again.") from error

    def close(self, ballot: str) -> None:
        """Remove the question with its pictures; the vote stays."""
        shutil.rmtree(self._open / ballot, ignore_errors=True)

    # -- who is asked --

    def awaited(self) -> list[Ballot]:
        """The ballots whose votes are awaited now, the oldest first."""
        names = list(self._names())
        now_s = self.now_s() if names else 0.0
        found = [ballot for name in names if (ballot := self._awaited(name, now_s)) is not None]
        return sorted(found, key=lambda each: (each.asked_at, each.id))

    def picture(self, ballot: str, name: str) -> Path | None:
        """Where a picture of an open ballot is; None for names that are none."""
        named = _ID.fullmatch(ballot) and _ID.fullmatch(name)
        return self._open / ballot / f"{name}.png" if named else None

    def vote(self, ballot: str, ranking: Sequence[str], voter: str = "") -> None:
        """Vote on a ballot that is awaited. Of several votes the first counts, from whatever processes.

        Args:
            voter: kept only if the ballot asks for it.

        Raises:
            NoSuchBallotError: it is not awaited, its time is over, or it has a vote.
            ValueError: the ranking names other pictures, or one twice; or a name is asked for and missing.
            OSError: it cannot be written.
        """
        now_s = self.now_s()
        found = self._awaited(ballot, now_s) if _ID.fullmatch(ballot) else None
        if found is None:
            raise NoSuchBallotError(_TOO_LATE)
        if len(set(ranking)) != len(ranking) or not set(ranking) <= set(found.pictures):
            raise ValueError("ranking is not a list of different pictures of this ballot; expected that.")
        voter = voter.strip()[:VOTER_MAX] if found.asks_name else ""
        if found.asks_name and not voter:
            raise ValueError("voter is missing; this run asks who votes (params.ask_name of its reward).")
        vote = Vote(tuple(ranking), max(0.0, now_s - found.asked_at), voter)
        self._write_first(self._vote(ballot), json.dumps({**asdict(found), **asdict(vote)}).encode())

    def now_s(self) -> float:
        """Seconds since the epoch, by the clock that files are marked with."""
        try:
            # Not among the votes, which are watched: on NFS the file has a name for a moment.
            clock = self._folder / _CLOCK_FOLDER
            clock.mkdir(exist_ok=True)
            with TemporaryFile(dir=clock) as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:  # who may not write here cannot vote, but may look
            return time.time()

    def _awaited(self, ballot: str, now_s: float) -> Ballot | None:
        found = self._read(ballot)
        if found is None or now_s >= found.ends_at or self._vote(ballot).exists():
            return None
        return found if self._is_fresh(ballot, now_s) else None

    def _is_fresh(self, ballot: str, now_s: float) -> bool:
        try:
            return now_s - (self._open / ballot / _BALLOT).stat().st_mtime <= AWAITED_FOR_S
        except OSError:  # closed meanwhile
            return False

    def _read(self, ballot: str) -> Ballot | None:
        path = self._open / ballot / _BALLOT
        if path.parent.is_symlink() or path.is_symlink():
            return None
        try:
            found = json.loads(read_regular(path, _BALLOT_BYTES_MAX))
            names = tuple(str(name) for name in found["pictures"] if _ID.fullmatch(str(name)))
            about = tuple(str(name) for name in found.get("references", ()) if _ID.fullmatch(str(name)))
            times = _time(found["asked_at"]), _time(found["ends_at"])
            return Ballot(str(found["prompt"]), names, found["asks_name"] is True, *times, about)
        except (OSError, *_NONSENSE):  # closed meanwhile, or not ours
            return None

    def _write_first(self, path: Path, content: bytes) -> None:
        """Write a file, whole, unless it exists. Raises NoSuchBallotError if it does, and OSError."""
        temporary = self._folder / f"{TEMPORARY_PREFIX}{uuid4().hex}"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            raise NoSuchBallotError(_TOO_LATE) from None
        finally:
            discard(temporary)
        fsync_path(self._folder)

    def _names(self) -> Iterator[str]:
        with suppress(OSError):
            yield from (each.name for each in self._open.iterdir() if _ID.fullmatch(each.name))

    def _vote(self, ballot: str) -> Path:
        return self._folder / f"{ballot}.json"

    def _remove_stale(self, newest: Path) -> None:
        """What processes that were killed left open. Compared with a file's time: clocks may differ."""
        for folder in self._open.iterdir():
            with suppress(OSError):
                marked = folder / _BALLOT if (folder / _BALLOT).exists() else folder
                if newest.stat().st_mtime - marked.stat().st_mtime > _STALE_S:
                    shutil.rmtree(folder)


def _time(found: Any) -> float:
    """In seconds. Raises one of ``_NONSENSE``; JSON may hold NaN, and numbers that become infinite."""
    if not math.isfinite(seconds := float(found)):
        raise ValueError(f"{found} is no time")
    return seconds
