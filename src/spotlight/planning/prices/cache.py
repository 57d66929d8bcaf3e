"""Answers of price servers on disk, with the time they came.

A recent answer is used as it is; an old one is fetched again. When that fails, the old one is used, and its
prices say so and why: a price is never older than it claims. An answer is kept only after its prices
could be read, and written whole or not at all. I/O.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from spotlight.planning.prices.quotes import PriceError, Quote, with_caveat

Get: TypeAlias = Callable[[], Sequence[str]]
"""Asks the server: the texts of its answer."""
Read: TypeAlias = Callable[[Sequence[str], datetime], tuple[Quote, ...]]
"""Reads prices from the texts, and when they came."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Answer:
    texts: tuple[str, ...]
    came: datetime


@dataclass(frozen=True, slots=True)
class PriceCache:
    """A directory of answers, one file each.

    Attributes:
        max_age: answers older than this are fetched again.
    """

    directory: Path
    max_age: timedelta = timedelta(hours=6)

    def quotes(self, key: str, get: Get, read: Read, now: datetime) -> tuple[Quote, ...]:
        """Prices from the cache or the server.

        Args:
            key: what was asked, of whom.

        Raises:
            PriceError: the server failed, or sent what cannot be read, and there is no older answer.
        """
        kept = self._kept(key, read)
        if kept is not None and timedelta() <= now - kept.came <= self.max_age:
            return read(kept.texts, kept.came)
        try:
            texts = get()
            quotes = read(texts, now)
        except PriceError as error:
            if kept is None:
                raise
            why = " ".join(str(error).split())
            return with_caveat(read(kept.texts, kept.came), f"stale: no newer answer to be had: {why}")
        try:
            self._keep(key, _Answer(tuple(texts), now))
        except OSError as error:
            return with_caveat(quotes, f"not cached: {self.directory}: {error.strerror}")
        return quotes

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"

    def _kept(self, key: str, read: Read) -> _Answer | None:
        """What is on disk, if it can be read: a damaged file is as good as none, and is overwritten."""
        try:
            record: object = json.loads(self._path(key).read_text(encoding="utf-8"))
            if not isinstance(record, dict) or (record["format"], record["key"]) != (_FORMAT, key):
                return None
            answer = _Answer(tuple(record["texts"]), datetime.fromisoformat(record["came"]))
            read(answer.texts, answer.came)
        except (OSError, ValueError, KeyError, TypeError):  # PriceError is a ValueError
            return None
        return answer

    def _keep(self, key: str, answer: _Answer) -> None:
        record = {
            "format": _FORMAT,
            "key": key,
            "came": answer.came.isoformat(),
            "texts": list(answer.texts),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file)
            Path(name).replace(self._path(key))
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def default_directory() -> Path:
    """``$XDG_CACHE_HOME/spotlight/prices``, by default in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "spotlight" / "prices"
