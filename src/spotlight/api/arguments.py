"""Arguments of :func:`spotlight.train` as overrides of a configuration: keys, checks and errors are the
command's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeAlias, get_args

from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.files import write_atomically
from spotlight_rewards.base.kept_pictures import PICTURES_FOLDER, kept_path, with_kept
from spotlight_rewards.base.prompt_files import PICTURE_KEYS, parse_record, with_found_pictures
from spotlight_rewards.base.prompts import Prompt, PromptId

PromptsArgument: TypeAlias = str | Path | Sequence[str] | Iterable[Mapping[str, Any]]
RewardArgument: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]

ARGUMENTS = "the arguments of train"
_HELD_OUT_EVERY = 10


def overrides_of(keys: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments as ``key.subkey=value``; a nested mapping sets only the keys that it names."""
    from spotlight.config.training_stages import settings_in

    for key, value in settings_in(keys):
        try:
            yield f"{key}={json.dumps(value, default=_plain)}"
        except TypeError:
            _refuse(key, value, "a number, a text, or a list or dictionary of them", "Convert it.")


def _plain(value: object) -> object:
    found = _unwrapped(value)
    if found is not value:
        return found
    return str(value) if isinstance(value, Path) else list(value)


def _unwrapped(cell: Any) -> Any:
    """Of NumPy's numbers and rows, such as pandas reads lists of Parquet as, Python's."""
    return cell.tolist() if getattr(cell, "ndim", None) in (0, 1) and hasattr(cell, "tolist") else cell


def sections_of(model: object, algorithm: object) -> dict[str, object]:
    """What is given of the two as sections: a text is a path, or a name. Raises ConfigError."""
    require_kind("train", "model", model, str | Path | Mapping | None, "a path, a hub id, or a dictionary")
    require_kind("train", "algorithm", algorithm, str | Mapping | None, "a name, or a dictionary of keys")
    sections = {
        "model": {"path": str(model)} if isinstance(model, str | Path) else model,
        "algorithm": {"name": algorithm} if isinstance(algorithm, str) else algorithm,
    }
    return {name: each for name, each in sections.items() if each}


def rewards_of(rewards: object, run: Path, cache: Path) -> list[dict[str, Any]]:
    """Names, functions and sections as sections of the configuration. Raises ConfigError.

    Args:
        run: its directory.
        cache: where functions lie that are copied.
    """
    assert isinstance(rewards, Iterable), "as stand_ins_of has found"
    return [reward_of(each, run, cache) for each in rewards]


def stand_ins_of(rewards: object) -> list[dict[str, Any]]:
    """Sections with the curves' names of :func:`rewards_of`, which raises as this does."""
    if isinstance(rewards, str | Mapping) or not isinstance(rewards, Iterable):
        _refuse("rewards", rewards, "a list of names, functions or sections", "Put it into a list.")
    return [_stand_in(each) for each in rewards]


def _stand_in(reward: object) -> dict[str, Any]:
    section = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
    given = section.get("name", "")
    return section if isinstance(given, str) else {**section, "name": label_of(given)}


def label_of(function: object) -> str:
    """Of the curve of a function that is copied."""
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def require_kind(
    call: str, key: str, found: object, kind: type | UnionType | tuple[str, ...], expected: str
) -> None:
    """Raise ConfigError unless an argument is of a kind, or one of the texts; True is no number."""
    if isinstance(kind, tuple):
        optional, right = True, found in kind
    else:
        kinds = {*(get_args(kind) or (kind,))}
        optional = bool({bool, NoneType} & kinds)
        right = isinstance(found, kind) and (bool in kinds or not isinstance(found, bool))
    if not right:
        remedy = "Give one, or leave it out." if optional else "Give one."
        raise ConfigError(f"the arguments of {call}", [Problem(key, repr(found), expected, remedy)])


def _refuse(key: str, found: object, expected: str, remedy: str) -> NoReturn:
    raise ConfigError(ARGUMENTS, [Problem(key, repr(found), expected, remedy)])


def reward_of(reward: RewardArgument, run: Path, cache: Path) -> dict[str, Any]:
    """A name, a function or a section of the configuration as a section. Raises as :func:`rewards_of`."""
    section = dict(reward) if isinstance(reward, Mapping) else {}
    given = section.get("name", "") if isinstance(reward, Mapping) else reward
    if isinstance(given, str):
        return {**section, "name": given}
    if not callable(given):
        _refuse("rewards", given, "a name, a function or a section", "Name one that there is, or write one.")
    if (name := importable(given)) is not None:
        return {**section, "name": name}
    from spotlight.api.pickled_reward import pickled

    return {**pickled(given, run, cache), **{key: each for key, each in section.items() if key != "name"}}


def importable(function: Callable[..., Any]) -> str | None:
    """``module:function``, by which another process imports it; None: it cannot, as a bound method."""
    module, name = function.__module__, getattr(function, "__qualname__", "")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if module == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(script).stem if script else ""
    return f"{module}:{name}" if module and found is function else None


def prompt_files(
    prompts: PromptsArgument | None, test_prompts: PromptsArgument | None, cache: Path
) -> dict[str, str]:
    """``data.train`` and ``data.test``; lists are written into the cache directory under their digests.

    Without ``test_prompts`` every tenth prompt of a list is held out. Raises ConfigError, or
    PromptFileError for pictures that are not there.
    """
    files: dict[str, str] = {}
    if test_prompts is None and prompts is not None and not isinstance(prompts, str | Path):
        records = _records("prompts", prompts, cache / PICTURES_FOLDER)
        if len(records) < 2:
            _refuse("prompts", records, "at least 2", "Give test_prompts, too.")
        test_prompts = records[::_HELD_OUT_EVERY]
        prompts = [each for index, each in enumerate(records) if index % _HELD_OUT_EVERY]
    for key, given in (("prompts", prompts), ("test_prompts", test_prompts)):
        if given is None:
            continue
        name = "data.train" if key == "prompts" else "data.test"
        files[name] = (
            str(given)
            if isinstance(given, str | Path)
            else str(_written(_records(key, given, cache / PICTURES_FOLDER), cache))
        )
    return files


def _records(key: str, prompts: Any, kept: Path) -> list[dict[str, Any]]:
    """Of texts, of mappings with ``prompt``, of a DataFrame or of a ``datasets.Dataset``.

    Paths of pictures start from the current directory; pictures themselves are kept in ``kept``.
    """
    if hasattr(prompts, "columns") and hasattr(prompts, "to_dict"):
        prompts = _filled(prompts.to_dict("records"))
    elif hasattr(prompts, "to_list"):
        prompts = _filled(prompts.to_list())
    expected = "texts, or rows whose column 'prompt' is one"
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        _refuse(key, prompts, f"a file, {expected}", "Give a list.")
    found: dict[PromptId, Prompt] = {}
    for number, each in enumerate(prompts):
        record = {"prompt": each} if isinstance(each, str) else each
        if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
            _refuse(key, each, expected, "Correct it, or rename the column of the texts.")
        try:
            cells = {name: with_kept(_unwrapped(cell), kept) for name, cell in record.items()}
            prompt = parse_record(json.dumps(cells))
        except (TypeError, ValueError, OSError) as error:  # no JSON, or nothing to train on
            _refuse(f"{key}[{number}]", each, expected, f"{error}. Correct it, or leave the column out.")
        if prompt.id in found:
            earlier = f"each prompt once; it is {key}[{list(found).index(prompt.id)}] too"
            _refuse(f"{key}[{number}]", each, earlier, "Leave it out, as list(dict.fromkeys(texts)) does.")
        found[prompt.id] = prompt
    if not found:
        _refuse(key, [], f"at least one of {expected}", "Give some, or leave it out.")
    given = list(found.values())
    prompts = with_found_pictures(given, key, kept)
    return [
        {"prompt": each.text, **each.metadata, **_kept_names(before, each, kept)}
        for before, each in zip(given, prompts, strict=True)
    ]


def _kept_names(given: Prompt, found: Prompt, kept: Path) -> dict[str, list[str]]:
    """Kept pictures by their digests, so a prompt's id does not depend on where the cache lies."""
    return {
        key: [
            path if kept_path(name, kept) is None else name
            for name, path in zip(given.paths(key), found.paths(key), strict=True)
        ]
        for key in PICTURE_KEYS
        if found.paths(key)
    }


def _filled(rows: list[Any]) -> list[Any]:
    """A table's rows without empty cells, as of files."""
    from pandas import isna
    from pandas.api.types import is_scalar

    return [
        {name: cell for name, cell in row.items() if not (is_scalar(cell) and isna(cell))}
        if isinstance(row, Mapping)
        else row
        for row in rows
    ]


def _written(records: Sequence[Mapping[str, Any]], cache: Path) -> Path:
    content = "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in records).encode()
    path = cache / "prompts" / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path
