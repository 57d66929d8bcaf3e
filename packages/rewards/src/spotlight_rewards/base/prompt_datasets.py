"""Parquet files and Hugging Face datasets of prompts, as JSON objects one a line. Needs the extra `datasets`.

A dataset is a directory, as ``save_to_disk`` writes it or as the hub holds it, or ``hf:OWNER/NAME`` of the
hub; ``:SPLIT`` after either chooses a split.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from spotlight_rewards.base.kept_pictures import with_kept
from spotlight_rewards.base.prompt_tables import OTHER_COLUMN

HUB = "hf:"
"""What names of datasets on the hub begin with."""
PARQUET = ".parquet"
_INSTALL = "pip install 'spotlight-rl[datasets]'"
_ROWS_AT_ONCE = 64
_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")


def is_dataset(path: Path) -> bool:
    """Whether it is none of the files that hold text."""
    text = str(path)
    if text.startswith(HUB) or path.suffix.lower() == PARQUET:
        return True
    folder = Path(_parted(text)[0])
    return folder.is_dir() and (_is_saved(folder) or any(folder.rglob(f"*{PARQUET}")))


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED)


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a file of prompts, or the keys of its objects, hold.

    Attributes:
        text: the prompt; of tables and datasets it must be there.
        references: pictures that the prompt is about; None: those of ``references`` alone.
        kept: where pictures are kept that datasets hold.
        files: what else names files, which a dataset of the hub may not.
    """

    text: str = "prompt"
    references: str | None = None
    kept: Path | None = None
    files: tuple[str, ...] = ()


USUAL = Columns()


def dataset_objects(path: Path, split: str, columns: Columns) -> Iterator[str]:
    """An object for each row; cells without a value are left out.

    Args:
        split: which, where the path names none and there are several.

    Raises:
        OSError: it cannot be read, or had from the hub.
        ValueError: not installed, no such column, no such split, a picture that cannot be kept, or cells that
            are neither text nor numbers nor lists of them.
    """
    try:
        yield from _objects(path, split, columns)
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: {_INSTALL}") from error


def _objects(path: Path, split: str, columns: Columns) -> Iterator[str]:
    name = columns.references
    within = [] if name is None else [_own_folder(path)]
    for number, row in enumerate(_rows(path, split)):
        if number == 0 and columns.text not in row:
            expected = f"expected one named {columns.text}. {OTHER_COLUMN}"
            raise ValueError(f"its columns are {', '.join(row)}; {expected}")
        if str(path).startswith(HUB):
            _refuse_files(row, {"references", "pictures", *columns.files, *filter(None, [name])})
        if name is not None and columns.kept is not None and row.get(name) is not None:
            try:
                row = {**row, name: with_kept(row[name], columns.kept, within)}
            except (ValueError, OSError) as error:
                raise ValueError(f"the column {name!r} of row {number + 1} has {error}") from error
        yield "{" + ", ".join(_cells(row)) + "}"


def _own_folder(path: Path) -> Path:
    """Which the files of a data set lie in: of the hub, its repository's in the cache, with all snapshots."""
    place, _ = _parted(str(path))
    if not place.startswith(HUB):
        return path.parent if path.suffix.lower() == PARQUET else Path(place)
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=place.removeprefix(HUB), repo_type="dataset")
    return Path(constants.HF_HUB_CACHE, name)


def _refuse_files(row: Mapping[str, Any], columns: Collection[str]) -> None:
    """Whoever wrote a data set of the hub may not choose files of this machine."""
    for name in columns:
        value = row.get(name)
        for entry in value if isinstance(value, list) else [value]:
            path = entry.get("uri") if isinstance(entry, Mapping) else entry
            if isinstance(path, str):
                raise ValueError(
                    f"its column {name!r} names the file {path[:60]!r}; expected the pictures themselves (a "
                    "feature Image): download the data set, and give the folder"
                )


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if value is None:
            continue
        try:
            yield f"{json.dumps(name)}: {json.dumps(value, default=_plain)}"
        except TypeError:
            raise ValueError(
                f"its column {name!r} holds {type(value).__name__}; expected texts, numbers or lists: "
                f"leave it out (remove_columns of `datasets`), or set data.reference_column={name} if it "
                "holds pictures that prompts are about"
            ) from None


def _plain(value: object) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError


def _rows(path: Path, split: str) -> Iterable[Mapping[str, Any]]:
    if path.suffix.lower() == PARQUET:
        return _parquet_rows(path)
    import datasets

    place, named = _parted(str(path))
    folder = Path(place)
    try:
        if _is_saved(folder):
            found: Any = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place.removeprefix(HUB))
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"it is no dataset: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        return _undecoded(found)
    wanted = named or (split if split in found else next(iter(found)) if len(found) == 1 else split)
    if wanted not in found:
        expected = " or ".join(f"{place}:{each}" for each in found)
        raise ValueError(f"it has no split {wanted!r}: say {expected}")
    return _undecoded(found[wanted])


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Not all at once: they may hold pictures."""
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"it is no Parquet file: {error}") from error


def _undecoded(found: Any) -> Iterable[Mapping[str, Any]]:
    """Rows with pictures and sounds as they are stored, which need no decoder to be refused."""
    import datasets

    for name, feature in found.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            found = found.cast_column(name, type(feature)(decode=False))
    rows: Iterable[Mapping[str, Any]] = found
    return rows


def _parted(text: str) -> tuple[str, str]:
    """The place, and the split behind it."""
    begin = len(HUB) if text.startswith(HUB) else 0
    place, colon, split = text[begin:].rpartition(":")
    return (text[:begin] + place, split) if colon else (text, "")
