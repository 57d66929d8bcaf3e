"""On-disk cache of price server responses, with their time of arrival.

Fresh responses are reused. If refreshing an old one fails, the old one is used and each of its prices says so
and why. A response is stored, atomically, only after its prices were parsed. I/O.
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

from spotlight_plan.prices.quotes import PriceError, Quote, with_caveat
from spotlight_rewards.base.files import default_cache

Get: TypeAlias = Callable[[], Sequence[str]]
"""Fetches the response texts."""
Read: TypeAlias = Callable[[Sequence[str], datetime], tuple[Quote, ...]]
"""Parses prices from the texts and their time of arrival."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PriceCache:
    """A directory with one file per response.

    Attributes:
        max_age: responses older than this are refreshed.
    """

    directory: Path
    max_age: timedelta = timedelta(hours=6)

    def quotes(self, key: str, get: Get, read: Read, now: datetime) -> tuple[Quote, ...]:
        """Prices from the cache or the server.

        Args:
            key: identifies server and request.

        Raises:
            PriceError: the server failed or its response is invalid, and there is no older one.
        """
        kept = self._kept(key, read)
        if kept is not None and timedelta() <= now - kept[0] <= self.max_age:
            return kept[1]
        try:
            texts = get()
            quotes = read(texts, now)
        except PriceError as error:
            if kept is None:
                raise
            why = " ".join(str(error).split())
            return with_caveat(kept[1], f"stale: no newer answer to be had: {why}")
        try:
            self._keep(key, texts, now)
        except OSError as error:
            return with_caveat(quotes, f"not cached: {self.directory}: {error.strerror}")
        return quotes

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"

    def _kept(self, key: str, read: Read) -> tuple[datetime, tuple[Quote, ...]] | None:
        """When the stored response came, and its prices; None if missing or damaged: it is overwritten."""
        try:
            record: object = json.loads(self._path(key).read_text(encoding="utf-8"))
            if not isinstance(record, dict) or (record["format"], record["key"]) != (_FORMAT, key):
                return None
            came = datetime.fromisoformat(record["came"])
            return came, read(tuple(record["texts"]), came)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # PriceError is a ValueError
            return None

    def _keep(self, key: str, texts: Sequence[str], came: datetime) -> None:
        record = {"format": _FORMAT, "key": key, "came": came.isoformat(), "texts": list(texts)}
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
    return default_cache() / "prices"
