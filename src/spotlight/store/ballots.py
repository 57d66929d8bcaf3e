"""Ballots: groups of pictures on which a person votes, in the folder ``votes`` of a run directory.

    votes/open/ID/ballot.json   a ballot, beside its pictures NAME.png; touched while its vote is awaited
    votes/ID.json               the vote, for good

The reward ``vote`` opens and closes ballots, the dashboard writes votes. Names are digests of the pictures,
and an id is the digest of prompt and names: whoever asks again after a restart finds the vote. Each file, and
each open ballot with its pictures, appears whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp

from spotlight.store.files import TEMPORARY_PREFIX, write_atomically
from spotlight.store.store_errors import StoreError

VOTES_FOLDER = "votes"
TOUCHED_EVERY_S = 2.0
AWAITED_FOR_S = 15.0
"""Since it was touched: then whoever asked has gone, or asks about something else."""
VOTER_MAX = 200
_STALE_S = 60.0
_ID = re.compile(r"[0-9a-f]{32}")
_BALLOT = "ballot.json"


class NoSuchBallotError(StoreError):
    """A ballot on which nobody can vote, now or at all; says why."""


class DamagedVoteError(StoreError):
    """A file that is no vote; names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """A question: which of these pictures of a prompt are better?

    Attributes:
        pictures: their names, see :func:`picture_name`; distinct, ascending.
        asked_at: seconds since the epoch.
        asks_name: whether the vote is to say who voted.
    """

    prompt: str
    pictures: tuple[str, ...]
    asked_at: float
    asks_name: bool = False

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
        self._folder, self._open = folder, folder / "open"

    # -- who asks --

    def open(self, ballot: Ballot, pictures: Mapping[str, bytes]) -> None:
        """Put the question, with PNG files by name, unless it is open already. Raises OSError."""
        self._open.mkdir(parents=True, exist_ok=True)
        if self.touch(ballot.id):
            return
        scratch = Path(mkdtemp(prefix=TEMPORARY_PREFIX, dir=self._open))
        for name, content in pictures.items():
            (scratch / f"{name}.png").write_bytes(content)
        (scratch / _BALLOT).write_text(json.dumps(asdict(ballot)))
        scratch.chmod(0o755)  # of mkdtemp's, which only its owner may read
        self.close(ballot.id)  # what is left of it, if its removal was interrupted
        try:
            scratch.rename(self._open / ballot.id)
        except OSError:
            shutil.rmtree(scratch)
            if not self.touch(ballot.id):  # else another process asks the same
                raise
        self._remove_stale(self._open / ballot.id / _BALLOT)

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
            found = json.loads(path.read_text())
            return Vote(tuple(map(str, found["ranking"])), float(found["took_s"]), str(found["voter"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedVoteError(f"{path}: not a vote ({error!r}). Delete it to be asked again.") from error

    def close(self, ballot: str) -> None:
        """Remove the question with its pictures; the vote stays."""
        shutil.rmtree(self._open / ballot, ignore_errors=True)

    # -- who is asked --

    def awaited(self) -> list[Ballot]:
        """The ballots whose votes are awaited now, the oldest first."""
        found = [ballot for name in self._names() if (ballot := self._awaited(name)) is not None]
        return sorted(found, key=lambda each: (each.asked_at, each.id))

    def picture(self, ballot: str, name: str) -> Path | None:
        """Where a picture of an open ballot is; None for names that are none."""
        named = _ID.fullmatch(ballot) and _ID.fullmatch(name)
        return self._open / ballot / f"{name}.png" if named else None

    def vote(self, ballot: str, ranking: Sequence[str], voter: str = "") -> None:
        """Vote on a ballot that is awaited, once. One thread at a time.

        Args:
            voter: kept only if the ballot asks for it.

        Raises:
            NoSuchBallotError: it is not awaited, or has a vote.
            ValueError: the ranking names other pictures, or one twice; or a name is asked for and missing.
            OSError: it cannot be written.
        """
        found = self._awaited(ballot) if _ID.fullmatch(ballot) else None
        if found is None:
            raise NoSuchBallotError("This group is voted on already, or its vote is not awaited any more.")
        if len(set(ranking)) != len(ranking) or not set(ranking) <= set(found.pictures):
            raise ValueError("ranking is not a list of different pictures of this ballot; expected that.")
        voter = voter.strip()[:VOTER_MAX] if found.asks_name else ""
        if found.asks_name and not voter:
            raise ValueError("voter is missing; this run asks who votes (params.ask_name of its reward).")
        vote = Vote(tuple(ranking), max(0.0, time.time() - found.asked_at), voter)
        write_atomically(self._vote(ballot), json.dumps({**asdict(found), **asdict(vote)}).encode())

    def _awaited(self, ballot: str) -> Ballot | None:
        path = self._open / ballot / _BALLOT
        if path.parent.is_symlink() or path.is_symlink():
            return None
        try:
            if time.time() - path.stat().st_mtime > AWAITED_FOR_S or self._vote(ballot).exists():
                return None
            found = json.loads(path.read_text())
            names = tuple(str(name) for name in found["pictures"] if _ID.fullmatch(str(name)))
            return Ballot(str(found["prompt"]), names, float(found["asked_at"]), found["asks_name"] is True)
        except (OSError, ValueError, KeyError, TypeError):  # closed meanwhile, or not ours
            return None

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
