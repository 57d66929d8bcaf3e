"""Which characters Tesseract's language data can read, from the file itself.

Format (tesseract 4 and 5, ``ccutil/tessdatamanager.cpp`` and ``unicharset.cpp``): int32 number of entries,
their int64 offsets (-1: none), contents. A character set is text: a count, then one character per line,
followed by its properties.
"""

from __future__ import annotations

import struct
from pathlib import Path

from spotlight_rewards.reward import RewardSetupError

_CHARACTER_SETS = (21, 1)
"""Entries: of the neural reader, of the older one."""
_NO_CHARACTERS = {"NULL", "Joined", "|Broken|0|1"}


def readable_characters(path: Path) -> frozenset[str]:
    """The characters in a ``.traineddata`` file. Raises RewardSetupError if it has another format."""
    content = path.read_bytes()
    try:
        (entries,) = struct.unpack_from("<i", content)
        offsets = struct.unpack_from(f"<{entries}q", content, 4)
        start = next(offsets[at] for at in _CHARACTER_SETS if at < entries and offsets[at] >= 0)
        end = min((each for each in offsets if each > start), default=len(content))
        count, *lines = content[start:end].decode("utf-8").splitlines()
        names = [line.partition(" ")[0] for line in lines[: int(count)]]
    except (struct.error, ValueError, StopIteration) as error:
        raise RewardSetupError(
            f"ocr reward: {path} has no character set that can be read ({error}); expected Tesseract's "
            "language data, not compressed. Install it again."
        ) from error
    return frozenset("".join(name for name in names if name not in _NO_CHARACTERS))
