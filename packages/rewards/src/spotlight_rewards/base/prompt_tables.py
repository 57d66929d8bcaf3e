"""Tables of prompts, a column of texts and others of metadata, as JSON objects one a line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""By the ending of a file's name."""
OTHER_COLUMN = "A run takes texts from another column by data.prompt_column"
_CELL_CHARS_MAX = 1 << 20
_HEADER_SHOWN_MAX = 60


def objects(text: str, delimiter: str, column: str) -> Iterator[str]:
    """Lines, each row's object on the line that its row begins on; empty cells are left out.

    Cells that are JSON lists or objects (GenEval's ``include``) are read as such, others are texts.

    Raises:
        ValueError: no such column, or a row that does not fit the first line.
    """
    csv.field_size_limit(_CELL_CHARS_MAX)
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        _require_columns(header, delimiter, column)
        written, begin = 0, rows.line_num
        for row in rows:
            if any(map(str.strip, row)):
                if len(row) != len(header):
                    raise ValueError(
                        f"line {begin + 1} has {len(row)} cells; expected {len(header)}, as its first line"
                    )
                yield from [""] * (begin - written)
                written = begin + 1
                cells = zip(header, row, strict=True)
                yield json.dumps({name: _cell(cell) for name, cell in cells if cell.strip()})
            begin = rows.line_num
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num} is not that of a table ({error})") from None


def _require_columns(header: list[str], delimiter: str, column: str) -> None:
    if header.count(column) != 1 or len(set(header)) < len(header):
        found = delimiter.join(header)[:_HEADER_SHOWN_MAX]
        raise ValueError(
            f"its first line is {found!r}; expected names of columns, each once, one of them {column}, "
            f"separated by {delimiter!r}. {OTHER_COLUMN}"
        )


def _cell(text: str) -> object:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
