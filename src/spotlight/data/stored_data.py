"""Pictures of a data set as prompts: folders with captions, and Pick-a-Pic's columns. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from spotlight_rewards.base.prompt_files import each_once, read_text

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_INDEX = "metadata.jsonl"
_TEXTS = ("prompt", "text", "caption")
PAIR_FILES = ("jpg_0", "jpg_1")
_PAIR = ("caption", *PAIR_FILES, "label_0", "label_1")


def folder_text(folder: Path) -> str:
    """A folder's pictures, an object with ``prompt`` and ``pictures`` a line, those of an index as there.

    Either ``metadata.jsonl`` names them (``file_name``, and ``prompt``, ``text`` or ``caption``, as in
    folders of Hugging Face data sets), or each has its prompt in a .txt file of the same name.

    Raises:
        OSError: it cannot be read.
        ValueError: nothing there, a picture without a prompt, or a line that names none.
    """
    index = folder / _INDEX
    if index.is_file():
        lines = read_text(index).removeprefix("\ufeff").split("\n")
        found = [_named(number, line) if line.strip() else "" for number, line in enumerate(lines, start=1)]
    else:
        pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in _PICTURES)
        found = [json.dumps({"prompt": _caption(path), "pictures": [path.name]}) for path in pictures]
    if not any(found):
        raise ValueError(
            f"it is a folder without pictures; expected {', '.join(sorted(_PICTURES))} files, each with a "
            f".txt file of its prompt, or {_INDEX}"
        )
    return "\n".join(found)


def with_pairs(text: str, column: str) -> str:
    """``text``, its rows of Pick-a-Pic as a prompt with two pictures, the preferred one first; ties become
    empty, and other lines stay. Keys: ``caption``, ``jpg_0``, ``jpg_1`` (paths), ``label_0``, ``label_1``.

    Args:
        column: key of texts in other lines, and so in the result.

    Raises:
        ValueError: such a row is no object, or its labels are no numbers.
    """
    numbered = enumerate(text.split("\n"), start=1)
    return "\n".join(_paired(number, line, column) for number, line in numbered)


def _paired(number: int, line: str, column: str) -> str:
    if not all(f'"{name}"' in line for name in _PAIR):
        return line
    record = _object(f"line {number}", line)
    if not all(name in record for name in _PAIR):
        return line
    caption, first, second, *labels = (record.pop(name) for name in _PAIR)
    if not all(isinstance(label, int | float) and abs(label) < math.inf for label in labels):
        raise ValueError(
            f"line {number} has label_0={labels[0]!r}, label_1={labels[1]!r}; expected numbers, the larger "
            "one of the preferred picture: leave out rows without a preference"
        )
    better = labels[0] - labels[1]
    if better == 0:
        return ""
    pictures = [first, second] if better > 0 else [second, first]
    return json.dumps({**record, column: caption, "pictures": pictures})


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=each_once)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON that can be read ({error}); expected an object") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}; expected an object, as in {{...}}")
    return record


def _named(number: int, line: str) -> str:
    record = _object(f"line {number} of its {_INDEX}", line)
    keys = sorted(record)
    text = next((record.pop(name) for name in _TEXTS if name in record), None)
    file = record.pop("file_name", None)
    if text is None or file is None:
        raise ValueError(
            f"line {number} of its {_INDEX} has {keys}; expected 'file_name' and one of {_TEXTS}"
        )
    return json.dumps({**record, "prompt": text, "pictures": [file]})


def _caption(path: Path) -> str:
    caption = path.with_suffix(".txt")
    if not caption.is_file():
        raise ValueError(f"{path.name} has no prompt; expected one in {caption.name}, or {_INDEX}")
    try:
        text = " ".join(read_text(caption).removeprefix("\ufeff").split())
    except ValueError as error:
        raise ValueError(f"{caption.name}: {error}") from error
    if not text:
        raise ValueError(f"{caption.name} is empty; expected the prompt of {path.name}")
    return text
