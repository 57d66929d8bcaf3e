"""Where a benchmark's runs lie."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def place_for_runs(given: Path | None, prefix: str) -> Iterator[Path]:
    """The given folder; or one of our own, which stays only if the block raises, to be looked into."""
    place = given or Path(tempfile.mkdtemp(prefix=prefix))
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    except BaseException:
        print(f"The runs are in {place}")
        raise
    if given is None:
        shutil.rmtree(place)
