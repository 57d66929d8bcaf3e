"""Loading a configuration: YAML files, dotted overrides and user-fixable errors."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spotlight.config.preset import with_preset
from spotlight.config.removed import without_removed
from spotlight.config.schema import RunConfig
from spotlight.config.section import RUN_NAME_IS, STATED
from spotlight.config.sections.algorithm import KEYS_OF_GROUPS, AlgorithmSection
from spotlight.config.sections.policies import policy_section
from spotlight.config.training_stages import settings_in, take_stage
from spotlight.registry import ALGORITHMS
from spotlight_rewards.base.errors import ConfigError, Problem, did_you_mean
from spotlight_rewards.base.yaml_tree import merge, parse_override, parse_yaml, read_tree, section_of
from spotlight_rewards.registry import ANY_NAME, absent_remedy

EMBEDDED = Path(__file__).with_name("demo.yaml")
"""What ``spotlight train`` runs without a file."""


_HALF = re.compile("[\ud800-\udfff]")
_OWNERS_MAX = 3
_ALGORITHM = "algorithm.name"


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: YAML file, whose own name is the run's if it gives none; None: :data:`EMBEDDED` (the tiny
            Qwen-Image demo, without its tags where ``overrides`` name other prompts), or what ``like=NAME``
            names.
        overrides: ``key.subkey=value`` in YAML syntax, applied in order; ``stage=NAME`` chooses one of the
            file's (:mod:`spotlight.config.training_stages`).

    Raises:
        ConfigError: all problems found, each naming key, value, expectation and remedy.
    """
    preset = any(text.startswith("like=") for text in overrides)
    tree = {} if path is None and preset else read_tree(path or EMBEDDED)
    stage, overrides = take_stage(tree, overrides, str(path or "the command"))
    if path is None and any(text.startswith(("data.train=", "data.test=", "data=")) for text in overrides):
        tree.pop("data", None)  # the demo's tags are of the testbed's prompts
    read, problems = without_removed(tree)
    tree = tree if problems else read  # an old file's key under its new name, which an override may set
    # Apply a change of algorithm first: all its keys but those of groups start from its own defaults.
    for override in sorted(overrides, key=lambda text: not text.startswith((f"{_ALGORITHM}=", "algorithm="))):
        apply_override(tree, override)
    named = f"like: {tree['like']}" if tree.get("like") is not None else ""
    parts = (str(path), named) if path else (named or "the embedded default",)
    source = ", ".join(filter(None, parts))
    others = [text for text in overrides if not text.startswith("like=")]
    name = str(tree.get("like") or "") if path is None else path.stem if path.is_file() else ""
    if name:
        tree.setdefault("name", name)
    stage.put_in_place(tree, source)
    return build_config(with_preset(tree), f"{source} with {' '.join(others)}" if others else source)


def load_dump(path: Path, *, installed: bool = True) -> RunConfig:
    """Read a run's own ``config.yaml``, whose ``like`` is only a label. Raises :class:`ConfigError`.

    Settings that do not go together are let through, and removed ones are left out: an older version may
    have trained with them.

    Args:
        installed: names that a package adds must be of one that is installed; not needed to read what a run
            recorded.
    """
    tree, _ = without_removed(read_tree(path))
    return _parsed(tree, str(path), any_name=not installed)


def load_run(directory: Path, overrides: Sequence[str] = (), *, forks: bool = False) -> RunConfig:
    """What a run has, with changes of its course: a configuration that names its run.

    Args:
        forks: for a fork of it, which has another name.

    Raises:
        ConfigError: all problems found.
    """
    tree, problems = without_removed(read_tree(directory / "config.yaml"), renamed=True)
    source = " ".join((str(directory), *(("with", *overrides) if overrides else ())))
    if problems:
        raise ConfigError(source, problems)
    tree |= {"name": directory.resolve().name, "runs_dir": str(directory.parent)}
    own = tree["name"]
    for override in overrides:
        apply_override(tree, override)
    if tree["name"] != own and not forks:
        remedy = f"Leave it out; or begin another run from its checkpoint: --fork {directory} --name NEW."
        raise ConfigError(source, [Problem("name", repr(tree["name"]), f"{own!r}, the run's", remedy)])
    return build_config(tree, source).naming_run()


def build_config(tree: Mapping[str, Any], source: str) -> RunConfig:
    """Validate a nested mapping, on top of the defaults. Raises :class:`ConfigError`."""
    tree, removed = without_removed(tree)
    if removed:
        raise ConfigError(source, removed)
    config = _parsed(tree, source)
    if problems := list(config.every_problem()):
        raise ConfigError(source, problems)
    return config


def _parsed(tree: Mapping[str, Any], source: str, *, any_name: bool = False) -> RunConfig:
    try:
        # Through JSON: strict mode then accepts lists as tuples and strings as paths, but `steps: "8"` and
        # `steps: yes` are errors, not 8 and 1.
        defaults = _defaults_for(tree)
        for key in ("train", "test"):  # stay unset where nobody set them: see load_prompts
            del defaults["data"][key]
        text = json.dumps(merge(defaults, tree), default=str)
        return RunConfig.model_validate_json(text, strict=True, context={ANY_NAME: any_name})
    except ValidationError as error:
        explained = list(_halves(tree)) or _explain_all(error.errors(), _algorithm_of(tree))
        raise ConfigError(source, explained) from None


def _halves(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Texts with half a character, as Python has names of files that are not UTF-8: JSON has none."""
    for key, value in settings_in(tree):
        if _HALF.search(json.dumps(value, ensure_ascii=False, default=str)):
            yield Problem(
                key, ascii(value), "text in UTF-8", "Write it in UTF-8; rename the file if need be."
            )


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML with every key; loading it gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def changed_keys(config: RunConfig) -> dict[str, tuple[object, object]]:
    """By dotted key, value and default of what differs; other defaults of the algorithm are its own."""
    found = config.model_dump(mode="json")
    defaults = dict(settings_in(_defaults_for({"algorithm": {"name": config.algorithm.name}})))
    defaults[_ALGORITHM] = RunConfig().algorithm.name
    return {
        key: (value, defaults.get(key)) for key, value in settings_in(found) if value != defaults.get(key)
    }


def with_new_keys(text: str) -> str:
    """A dumped configuration, with keys that it lacks because an older version wrote it at their defaults.

    Removed keys that did nothing are left out. Otherwise unchanged if this version refuses it.

    Raises:
        ConfigError: the removed keys that did something.
    """
    source = "the run's configuration"
    try:
        tree, removed = without_removed(_mapping(text, source), renamed=True)
    except ConfigError:
        return text
    if removed:
        raise ConfigError(source, removed)
    try:
        return dump_config(_parsed(tree, source))
    except ConfigError:
        return yaml.safe_dump(tree, sort_keys=False, width=100)


def read_config(text: str, source: str) -> RunConfig:
    """Inverse of :func:`dump_config`, in another process. Raises ConfigError."""
    return build_config(_mapping(text, source), source)


def _mapping(text: str, source: str) -> dict[str, Any]:
    tree = parse_yaml(text)
    if not isinstance(tree, dict):
        problem = Problem(source, type(tree).__name__, "a mapping", "Run the same version on every node.")
        raise ConfigError(source, [problem])
    return tree


def _defaults_for(tree: Mapping[str, Any]) -> dict[str, Any]:
    """All defaults, with those of ``tree``'s algorithm.

    Merge onto these, not section by section: a section may have different defaults in different places.
    """
    defaults = RunConfig().model_dump(mode="json")
    if (section := _algorithm_of(tree)) is None:
        defaults["algorithm"] = {}
    elif (name := section.model_fields["name"].default) != defaults["algorithm"]["name"]:
        defaults["algorithm"] = section.model_validate({"name": name}).model_dump(mode="json")
    return defaults


def _algorithm_of(tree: Mapping[str, Any]) -> type[AlgorithmSection] | None:
    """Section class of ``tree``'s algorithm, or of the default; None for an unknown name."""
    chosen = tree.get("algorithm")
    name = chosen.get("name") if isinstance(chosen, Mapping) else None
    if not isinstance(name, str):
        return type(RunConfig().algorithm)
    return ALGORITHMS.load(name) if name in ALGORITHMS else None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply one ``key.subkey=value`` (YAML syntax) to a nested mapping. Raises :class:`ConfigError`."""
    key, value = parse_override(override)
    node, leaf = section_of(tree, key)
    current = node.get(leaf)
    if key == _ALGORITHM and current != value:
        tree["algorithm"] = {"name": value} | {key: node[key] for key in KEYS_OF_GROUPS if key in node}
    elif isinstance(value, dict) and isinstance(current, dict) and not _is_another(key, current, value):
        node[leaf] = current | value
    else:
        node[leaf] = value


def _is_another(key: str, current: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return key == "algorithm" and value.get("name", current.get("name")) != current.get("name")


def _explain_all(details: Sequence[ErrorDetails], algorithm: type[AlgorithmSection] | None) -> list[Problem]:
    # Drop errors that only follow from others: a bad item also makes its list "too short".
    broken = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [
        _explain(detail, algorithm)
        for detail in details
        if detail["type"] != "too_short" or detail["loc"] not in broken
    ]


def _explain(detail: ErrorDetails, algorithm: type[AlgorithmSection] | None) -> Problem:
    parts = [str(part) for part in detail["loc"]]
    key = ".".join(parts) or "CONFIG"
    if detail["type"] == "extra_forbidden":
        known = list(_fields_at(parts[:-1], algorithm))
        if len(parts) == 1 and (owners := _sections_with(key, algorithm)):
            meant = " or ".join(repr(f"{owner}.{key}") for owner in owners)
            return Problem(key, "an unknown key", "the key of its section", f"Did you mean {meant}?")
        remedy = did_you_mean(parts[-1], known, "Remove it.")
        return Problem(key, "an unknown key", f"one of {', '.join(sorted(known))}", remedy)
    if detail["type"] == STATED:
        return Problem(key, **detail["ctx"])
    if detail["type"] == "missing":
        return Problem(key, "nothing", "a value", "Add the key.")
    if detail["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        context = detail.get("ctx", {})
        expected = str(context.get("expected_tags", "an algorithm's name"))
        tag, found = context.get("tag"), detail["input"]
        if not isinstance(found, Mapping):
            name = found if isinstance(found, str) else "NAME"
            return Problem(key, repr(found), "a section", f"Write {key}.name={name}.")
        if tag is None:
            return Problem(f"{key}.name", "nothing", expected, f"Set {key}.name=NAME.")
        return Problem(f"{key}.name", repr(tag), expected, _nearest(tag, expected) or absent_remedy(tag))
    if parts[:1] == ["rewards"] and isinstance(text := detail["input"], str) and len(parts) < 3:
        listed = text if len(parts) == 1 else f"'{text}'"
        remedy = f"Write rewards=[{{name: {listed}}}], which may also have weight and params."
        return Problem(key, repr(text), "a list of sections" if len(parts) == 1 else "a section", remedy)
    if detail["type"] in _SHAPES:
        return Problem(key, repr(detail["input"]), *_SHAPES[detail["type"]])
    if detail["type"] == "too_short":
        items = f"at least {detail['ctx']['min_length']} item"
        return Problem(key, repr(detail["input"]), items, "Add one in the brackets: [ITEM].")
    if detail["type"] == "string_pattern_mismatch":
        remedy = f"Give the run another: {key}=NAME, or `{key}: NAME` in the file."
        return Problem(key, repr(detail["input"]), RUN_NAME_IS, remedy)
    expected = re.sub(r"^(Input should be |Value error, |\w+ should have )", "", detail["msg"])
    named = "entry points" in expected
    other = absent_remedy(detail["input"]) if named else _default_of(parts, algorithm)
    return Problem(key, repr(detail["input"]), expected, _nearest(detail["input"], expected) or other)


_LIST = ("a list", "Write it in brackets: [ITEM, ITEM].")
_SECTION = ("a section", "Write its keys: {KEY: VALUE, KEY: VALUE}.")
_SHAPES = {"tuple_type": _LIST, "list_type": _LIST, "model_type": _SECTION, "dict_type": _SECTION}
"""By type of error, what is expected and the remedy."""


def _nearest(found: object, expected: str) -> str | None:
    return did_you_mean(str(found), re.findall(r"'([^']+)'", expected), "") or None


def _default_of(path: Sequence[str], algorithm: type[AlgorithmSection] | None) -> str:
    defaults = {
        repr(section.model_fields[path[-1]].default)
        for section in _sections_at(path[:-1], algorithm)
        if path[-1:] and path[-1] in section.model_fields
    }
    # A section has no short default, and fields of one name in several sections may disagree.
    if len(defaults) == 1 and len(default := defaults.pop()) < 40 and "Undefined" not in default:
        return f"Change it, or leave the key out for the default, {default}."
    return "Change the value."


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a field of this type can have."""
    if _is_section(annotation):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from sections_in(argument)


def _fields_at(path: Sequence[str], algorithm: type[AlgorithmSection] | None) -> set[str]:
    return {name for model in _sections_at(path, algorithm) for name in model.model_fields}


def _sections_with(key: str, algorithm: type[AlgorithmSection] | None) -> list[str]:
    """The sections that have this key, if they are few."""
    found = [name for name in RunConfig.model_fields if key in _fields_at([name], algorithm)]
    return found if len(found) <= _OWNERS_MAX else []


def _sections_at(path: Sequence[str], algorithm: type[AlgorithmSection] | None) -> list[type[BaseModel]]:
    """The possible sections at a dotted path, given the chosen algorithm's."""
    current: list[type[BaseModel]] = [RunConfig]
    if path[:1] == ["policies"] and path[1:] and (section := policy_section(path[1])) is not None:
        current, path = [section], path[2:]
    for part in path:
        if part.isdigit():
            continue
        current = [
            section
            for model in current
            if part in model.model_fields
            for section in sections_in(model.model_fields[part].annotation)
        ]
        if current == [AlgorithmSection] and algorithm is not None:
            current = [algorithm]
    return current
