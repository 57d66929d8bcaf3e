"""Arguments of :func:`spotlight.train` as overrides of a configuration: keys, checks and errors are the
command's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.files import write_atomically

PromptsArgument: TypeAlias = str | Path | Sequence[str] | Iterable[Mapping[str, Any]]
RewardArgument: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]

_HELD_OUT_EVERY = 10


def overrides_of(keys: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments as ``key.subkey=value``; a nested mapping sets only the keys that it names."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{key}.{below}" for below in overrides_of(value))
        else:
            yield f"{key}={json.dumps(value, default=_plain)}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value)  # type: ignore[call-overload]


def rewards_of(rewards: object) -> list[dict[str, Any]]:
    """Names, functions and sections as sections of the configuration. Raises ConfigError."""
    if isinstance(rewards, str | Mapping) or not isinstance(rewards, Iterable):
        _refuse("rewards", rewards, "a list of names, functions or sections", "Put it into a list.")
    return [reward_of(each) for each in rewards]


def _refuse(key: str, found: object, expected: str, remedy: str) -> NoReturn:
    raise ConfigError("the arguments of train", [Problem(key, repr(found), expected, remedy)])


def reward_of(reward: RewardArgument) -> dict[str, Any]:
    """A name, a function or a section of the configuration as a section. Raises ConfigError."""
    if isinstance(reward, Mapping):
        return {**reward, "name": _named(reward.get("name", ""))}
    return {"name": _named(reward)}


def _named(reward: str | Callable[..., Any]) -> str:
    """``module:function``, by which a reward's own process imports it."""
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        _refuse("rewards", reward, "a name, a function or a section", "Name one that there is, or write one.")
    module, name = reward.__module__, reward.__qualname__
    if module == "__main__" and (script := getattr(sys.modules["__main__"], "__file__", None)):
        module = Path(script).stem
    if module == "__main__" or "<" in name:
        problem = Problem(
            "rewards", f"the function {name} of {'this session' if module == '__main__' else module}",
            "a function at the top of a module: a reward runs in a process of its own, which imports it",
            "Write it into a file beside this one (in a notebook: %%writefile my_rewards.py) and import it.",
        )  # fmt: skip
        raise ConfigError("the arguments of train", [problem])
    return f"{module}:{name}"


def prompt_files(
    prompts: PromptsArgument | None, test_prompts: PromptsArgument | None, cache: Path
) -> dict[str, str]:
    """``data.train`` and ``data.test``; lists are written into the cache directory under their digests.

    Without ``test_prompts`` every tenth prompt of a list is held out. Raises ConfigError.
    """
    files: dict[str, str] = {}
    if test_prompts is None and prompts is not None and not isinstance(prompts, str | Path):
        records = _records("prompts", prompts)
        if len(records) < 2:
            _refuse("prompts", records, "at least 2", "Give test_prompts, too.")
        test_prompts = records[::_HELD_OUT_EVERY]
        prompts = [each for index, each in enumerate(records) if index % _HELD_OUT_EVERY]
    for key, given in (("prompts", prompts), ("test_prompts", test_prompts)):
        if given is None:
            continue
        name = "data.train" if key == "prompts" else "data.test"
        files[name] = (
            str(given) if isinstance(given, str | Path) else str(_written(_records(key, given), cache))
        )
    return files


def _records(key: str, prompts: Any) -> list[dict[str, Any]]:
    """Of texts, of mappings with ``prompt``, of a DataFrame or of a ``datasets.Dataset``."""
    if hasattr(prompts, "columns") and hasattr(prompts, "to_dict"):
        prompts = prompts.to_dict("records")
    elif hasattr(prompts, "to_list"):
        prompts = prompts.to_list()
    expected = "texts, or rows whose column 'prompt' is one"
    if not isinstance(prompts, Iterable):
        _refuse(key, prompts, f"a file, {expected}", "Give a list.")
    records = []
    for each in prompts:
        record = {"prompt": each} if isinstance(each, str) else each
        if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
            _refuse(key, each, expected, "Correct it, or rename the column of the texts.")
        records.append(dict(record))
    return records


def _written(records: Sequence[Mapping[str, Any]], cache: Path) -> Path:
    content = "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in records).encode()
    path = cache / "prompts" / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path
