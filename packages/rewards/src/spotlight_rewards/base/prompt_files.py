"""Parse prompts: one per line, one JSON object per line in GenEval's metadata format, or a table.

Nothing is skipped or repaired; all bad lines are reported together. A prompt's id hashes its text and
metadata, independent of file and order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NoReturn

from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.files import at_home
from spotlight_rewards.base.kept_pictures import kept_path, paths_of
from spotlight_rewards.base.prompt_datasets import USUAL, Columns, dataset_objects, is_dataset
from spotlight_rewards.base.prompt_tables import DELIMITERS, objects
from spotlight_rewards.base.prompts import Prompt, PromptId

PICTURE_KEYS = ("references", "pictures")
"""Metadata that are lists of paths: what a prompt is about, and pictures of it to train on."""

PROMPT = "prompt"

_PROBLEMS_SHOWN_MAX = 10
_REMOVED_BY_NUMBER_MAX = 50
_DISTINCT = r"""awk '{gsub(/^[ \t\r]+|[ \t\r]+$/, "")} !seen[$0]++'"""
_ID_BYTES = 8

_FORMATS = (
    "a .txt file, one prompt a line, a .jsonl file, one JSON object a line, a .csv, .tsv or .parquet table, "
    "or a Hugging Face dataset"
)
_JSON_DOCUMENT = re.compile(r'\[\s*(\{|$|"[^"]*"\s*,?\s*$|".*"\s*\]\s*$)|\{\s*("[^}]*)?$')
"""First line of an array, or of an object over several lines."""
_BINARY = {
    "a Parquet file that is not named .parquet": (0, b"PAR1"),
    "a tar archive": (257, b"ustar"),
    "compressed by gzip": (0, b"\x1f\x8b"),
    "compressed by zstd": (0, b"\x28\xb5\x2f\xfd"),
    "a zip archive": (0, b"PK\x03\x04"),
    "text in UTF-16": (0, b"\xff\xfe"),
    "an Arrow file": (0, b"ARROW1"),
}
"""Where files that are no prompts say so."""
_RECORD = '{"prompt": "two red circles", ...}'
_OBJECT = '{"class": "circle", "count": 2}'
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|" + _SURROGATE.pattern)


class PromptFileError(UserError, ValueError):
    """An unusable prompt file; names the lines, what they hold, and what was expected."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


class BadLineError(ValueError):
    """What is wrong with one line."""


def prompt_id(text: str, metadata: Mapping[str, object]) -> PromptId:
    """Hash of a prompt's content: 16 hexadecimal digits."""
    content = json.dumps([text, metadata], sort_keys=True)
    return PromptId(hashlib.blake2b(content.encode(), digest_size=_ID_BYTES).hexdigest())


def read_text(path: Path, split: str = "train", columns: Columns = USUAL) -> str:
    """A prompts file's content; of a table or a dataset, an object for each row.

    Args:
        split: of a dataset that has several, and whose path names none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text in UTF-8, or no table; says what it is and what to do.
    """
    if is_dataset(path):
        return "\n".join(dataset_objects(path, split, columns))
    content = path.read_bytes()
    for kind, (at, magic) in _BINARY.items():
        if content.startswith(magic, at):
            raise ValueError(f"it is {kind}: convert it to {_FORMATS}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not UTF-8 (byte {content[error.start]:#x}): convert it, for example with "
            f"iconv -f ISO-8859-1 -t UTF-8 {path} > FILE"
        ) from None
    delimiter = DELIMITERS.get(path.suffix.lower())
    return text if delimiter is None else "\n".join(objects(text, delimiter, columns.text))


def parse_prompts(
    text: str, source: str, column: str = PROMPT, references: str | None = None
) -> list[Prompt]:
    """Parse prompts, in file order.

    One a line, or JSON objects with the text as ``prompt``; other keys, such as GenEval's ``tag``,
    ``include`` and ``exclude``, or ``references``, the paths of pictures that the prompt is about, and
    ``pictures``, those of pictures of it, are metadata.

    Args:
        text: the file's content; empty lines are ignored.
        source: the file's name, for messages; its ending says which, else whether the text begins with ``{``.
        column: key of the text in objects; another of the name ``prompt`` is then left out.
        references: key of objects that becomes ``references``: a path, a list of them, or UniRL's ``media``.

    Raises:
        PromptFileError: no prompts, a table or a JSON document, malformed lines (up to ten are listed), or a
            duplicate.
    """
    lines = [
        _Line(number, line.strip())
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise PromptFileError(
            f"{source} holds no prompts; expected one prompt a line, or one JSON object a line"
        )
    jsonl = _is_jsonl(lines[0].text, source)
    if not jsonl:
        _require_lines(lines[0].text, source)
    problems: list[str] = []
    prompts: list[tuple[int, Prompt]] = []
    for line in lines:
        try:
            prompt = parse_record(line.text, column, references) if jsonl else _from_text(line.text)
            prompts.append((line.number, prompt))
        except BadLineError as error:
            problems.append(f"{source}:{line.number}: {error}")
    if problems:
        _refuse(source, "malformed lines", problems)
    _require_distinct(source, prompts)
    return [prompt for _, prompt in prompts]


def with_found_pictures(prompts: Sequence[Prompt], source: str, kept: Path | None = None) -> list[Prompt]:
    """The prompts, the paths of their ``references`` and ``pictures`` made absolute.

    Args:
        source: path of the prompts file, which relative paths start from; what is not there may be in the
            folder ``images`` beside it, as in data sets of Flow-Factory.
        kept: where pictures named ``sha256:DIGEST`` lie.

    Raises:
        PromptFileError: a picture that does not exist.
    """
    folder = at_home(source).parent
    problems: list[str] = []
    found: list[Prompt] = []
    for prompt in prompts:
        places: dict[str, list[str]] = {}
        try:
            for key in PICTURE_KEYS:
                paths = [_found(folder, path, kept) for path in prompt.paths(key)]
                problems += [
                    f"{_short(prompt.text)!r}: {_absent(path, kept)}" for path in paths if not path.is_file()
                ]
                places |= {key: [str(path) for path in paths]} if paths else {}
        except (OSError, ValueError, RuntimeError) as error:  # such as a NUL, or the home of nobody
            problems.append(f"{_short(prompt.text)!r}: {error}")
            continue
        found.append(Prompt(prompt.id, prompt.text, {**prompt.metadata, **places}))
    if problems:
        _refuse(source, "pictures that are not there", problems, f"Paths start from {folder}.")
    return found


def _absent(path: Path, kept: Path | None) -> str:
    if path.parent == kept:
        return (
            f"the picture {path.name} is not kept in {kept}; give it again, or set cache_dir to where it is"
        )
    return f"no file {path}"


def _found(folder: Path, name: str, kept: Path | None) -> Path:
    if kept is not None and (path := kept_path(name, kept)) is not None:
        return path
    path = folder.joinpath(at_home(name)).resolve()
    beside = (folder / "images" / name).resolve()
    return path if path.is_file() or not beside.is_file() else beside


def with_tags(prompts: Sequence[Prompt], source: str, tags: Collection[str]) -> list[Prompt]:
    """The prompts with one of these tags; all if ``tags`` is empty.

    Args:
        source: the file's name, for messages.

    Raises:
        PromptFileError: a tag that no prompt has.
    """
    if not tags:
        return list(prompts)
    present = Counter(str(prompt.metadata["tag"]) for prompt in prompts if "tag" in prompt.metadata)
    unknown = sorted(set(tags) - set(present))
    if unknown:
        found = ", ".join(f"{tag} ({count})" for tag, count in sorted(present.items()))
        raise PromptFileError(
            f"tags: no prompt in {source} has the tag {', '.join(map(repr, unknown))}; "
            f"the tags in it are {found or 'none (only .jsonl prompts have tags)'}. "
            "Name some of them, or none for all prompts."
        )
    return [prompt for prompt in prompts if prompt.metadata.get("tag") in tags]


def _is_jsonl(first_line: str, source: str) -> bool:
    ending = PurePath(source).suffix.lower()
    tables = ending == ".jsonl" or ending in DELIMITERS or is_dataset(Path(source))
    return tables or (ending != ".txt" and first_line.startswith("{"))


def _require_lines(first_line: str, source: str) -> None:
    """Refuse other formats, of which every line would be a prompt."""
    ending = PurePath(source).suffix.lower()
    if ending == ".json":
        raise PromptFileError(f"{source} ends with {ending}; expected {_FORMATS}. Convert it")
    if _JSON_DOCUMENT.match(first_line):
        raise PromptFileError(
            f"{source} begins like a JSON document ({_short(first_line)}); expected {_FORMATS}. Convert it"
        )


def _from_text(line: str) -> Prompt:
    if line.startswith("{") and line.endswith("}"):
        raise BadLineError(
            "looks like a JSON object; expected a prompt (name the file .jsonl if it holds objects)"
        )
    return _prompt(line, {})


def parse_record(line: str, column: str = PROMPT, references: str | None = None) -> Prompt:
    """Of a JSON object; arguments as of :func:`parse_prompts`. Raises BadLineError."""
    try:
        record: object = json.loads(line, parse_constant=_no_such_number, parse_float=_finite,
                                    object_pairs_hook=each_once)  # fmt: skip
    except json.JSONDecodeError as error:
        found = f"no JSON ({error.msg} at column {error.colno})"
        raise BadLineError(f"{found}: {_short(line)}; expected {_RECORD}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or an integer of thousands of digits
        raise BadLineError(
            f"JSON that cannot be read ({error}): {_short(line)}; expected {_RECORD}"
        ) from None
    if not isinstance(record, dict):
        raise BadLineError(f"{_short(line)} is no JSON object; expected {_RECORD}")
    text = record.pop(column, None)
    record.pop(PROMPT, None)
    if not isinstance(text, str) or not text.strip():
        found = "is missing" if text is None else f"is {_short(json.dumps(text))}"
        raise BadLineError(f"{column!r} {found}; expected a text, as in {_RECORD.replace(PROMPT, column)}")
    if references is not None:
        _move_references(record, references)
    _require_utf8(record)
    _require_geneval(record)
    for key in PICTURE_KEYS:
        _require_paths(key, record)
    return _prompt(text.strip(), record)


def _move_references(record: dict[str, object], key: str) -> None:
    if key not in record:
        raise BadLineError(f"{key!r} is missing, which data.reference_column names; expected a path")
    value = record.pop(key)
    if "references" in record:
        raise BadLineError(f"both {key!r} and 'references' are there; expected one of them")
    try:
        record["references"] = paths_of(value)
    except ValueError as error:
        raise BadLineError(f"{key!r} {error}") from None


def _prompt(text: str, metadata: Mapping[str, object]) -> Prompt:
    if found := _UNPRINTABLE.search(text):
        raise BadLineError(f"the character {found[0]!r} in {_short(text)!r}; expected printable text")
    return Prompt(prompt_id(text, metadata), text, metadata)


def _require_utf8(record: Mapping[str, object]) -> None:
    """Refuse half of a surrogate pair, in keys and values at any depth."""
    waiting: list[object] = [record]  # not recursive: objects may be nested as deeply as json reads them
    while waiting:
        match waiting.pop():
            case dict() as found:
                waiting += (*found, *found.values())
            case list() as found:
                waiting += found
            case str() as text if half := _SURROGATE.search(text):
                raise BadLineError(
                    f"{half[0]!r}, half a character, in {_short(text)!r}; "
                    "expected both halves, or the character"
                )


def _require_geneval(record: Mapping[str, object]) -> None:
    """Check the form of GenEval's keys; the reward checks class names."""
    tag = record.get("tag", "")
    if not isinstance(tag, str):
        raise BadLineError(
            f'\'tag\' is {_short(json.dumps(tag))}; expected a text, as in {{"tag": "counting"}}'
        )
    for key in ("include", "exclude"):
        entries = record.get(key, [])
        if not isinstance(entries, list):
            raise BadLineError(
                f"{key!r} is {_short(json.dumps(entries))}; expected a list of objects like {_OBJECT}"
            )
        for index, entry in enumerate(entries):
            _require_object(f"{key}[{index}]", index, entry)


def _require_paths(key: str, record: Mapping[str, object]) -> None:
    if key not in record:
        return
    paths = record[key]
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise BadLineError(
            f"{key!r} is {_short(json.dumps(paths))}; expected a list of paths of pictures, relative to "
            'this file, as in ["pictures/cat.png"]'
        )


def _require_object(where: str, index: int, entry: object) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
        raise BadLineError(f"'{where}' is {_short(json.dumps(entry))}; expected an object like {_OBJECT}")
    count = entry.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        found = "is missing" if count is None else f"is {_short(json.dumps(count))}"
        raise BadLineError(f"'{where}.count' {found}; expected a whole number of at least 1")
    if not isinstance(entry.get("color", ""), str):
        raise BadLineError(f"'{where}.color' is {_short(json.dumps(entry['color']))}; expected a text")
    if "position" in entry and not _is_position(entry["position"], index):
        raise BadLineError(
            f"'{where}.position' is {_short(json.dumps(entry['position']))}; expected [relation, index] "
            'with the index of an earlier object, as in ["left of", 0]'
        )


def _is_position(position: object, index: int) -> bool:
    if not isinstance(position, list) or len(position) != 2:
        return False
    relation, target = position
    earlier = isinstance(target, int) and not isinstance(target, bool) and 0 <= target < index
    return isinstance(relation, str) and earlier


def _require_distinct(source: str, prompts: Sequence[tuple[int, Prompt]]) -> None:
    first: dict[PromptId, int] = {}
    repeated: dict[int, str] = {}
    for number, prompt in prompts:
        earlier = first.setdefault(prompt.id, number)
        if earlier != number:
            repeated[number] = f"{source}:{number}: {_short(prompt.text)} is already on line {earlier}"
    if repeated:
        # By number, since equal lines may be written differently; if there are many, by text.
        few = len(repeated) <= _REMOVED_BY_NUMBER_MAX
        how = f"sed '{';'.join(f'{number}d' for number in repeated)}'" if few else _DISTINCT
        remedy = f"Keep one of each, for example with: {how} {source} > FILE"
        if is_dataset(Path(source)):
            remedy = "Keep one of each, for example with drop_duplicates of pandas."
        _refuse(source, "prompts that repeat an earlier one", list(repeated.values()), remedy)


def _refuse(source: str, what: str, problems: Sequence[str], remedy: str = "") -> NoReturn:
    shown = list(_shown(problems))
    raise PromptFileError(
        "\n  ".join([f"{source}: {what} ({len(problems)}):", *shown, *([remedy] if remedy else [])])
    )


def _shown(problems: Sequence[str]) -> Iterator[str]:
    yield from problems[:_PROBLEMS_SHOWN_MAX]
    if len(problems) > _PROBLEMS_SHOWN_MAX:
        yield f"... and {len(problems) - _PROBLEMS_SHOWN_MAX} more"


def each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, as ``object_pairs_hook``. Raises BadLineError for a key that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadLineError(f"the key {twice!r} stands twice; expected it once")
    return found


def _no_such_number(name: str) -> NoReturn:
    raise BadLineError(f"the number {name}, which JSON does not have; expected {_RECORD}")


def _finite(literal: str) -> float:
    if math.isinf(number := float(literal)):
        raise BadLineError(f"the number {_short(literal)}, which is too large; expected one below 1.8e308")
    return number


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
