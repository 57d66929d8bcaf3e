"""YAML files, dotted overrides, and errors a person can act on."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spotlight.config.contradictions import find_problems
from spotlight.config.errors import ConfigError, Problem
from spotlight.config.schema import DiffusionNFTConfig, RunConfig


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: ``3e-4`` is a number (YAML 1.1 reads a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> object:
    """Parse one YAML document safely; ``3e-4`` is a float."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: YAML file; None takes the embedded default (the tiny Qwen-Image demo).
        overrides: ``key.subkey=value`` in YAML syntax, applied in order.

    Raises:
        ConfigError: with every problem found, each naming key, value, expectation and remedy.
    """
    source = str(path) if path else "the embedded default"
    tree: dict[str, Any] = _read(path) if path else {}
    for override in overrides:
        _apply(tree, override)
    return build_config(tree, source if not overrides else f"{source} with {' '.join(overrides)}")


def build_config(tree: Mapping[str, Any], source: str) -> RunConfig:
    """Validate a nested mapping. Raises :class:`ConfigError`."""
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, Mapping) and "name" not in algorithm:
        # Overriding one field of the default algorithm keeps the default algorithm.
        tree = {**tree, "algorithm": {"name": DiffusionNFTConfig().name, **algorithm}}
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(source, [_explain(detail) for detail in error.errors()]) from None
    if problems := find_problems(config):
        raise ConfigError(source, problems)
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, every key present; loading it gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to dotted keys (lists are values)."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(path.read_text())
    except OSError as error:
        problem = Problem(
            "CONFIG", str(path), "a readable YAML file", f"{error.strerror}; see `spotlight train --help`."
        )
        raise ConfigError(str(path), [problem]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = Problem(
            "CONFIG", "text that is not YAML", "a mapping of keys", " ".join(str(error).split())
        )
        raise ConfigError(str(path), [problem]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problem = Problem("CONFIG", type(tree).__name__, "a mapping of keys", "Write `key: value` lines.")
        raise ConfigError(str(path), [problem])
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        problem = Problem("override", repr(override), "key.subkey=value", "For example rollout.steps=8.")
        raise ConfigError("the command line", [problem])
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = Problem(key, repr(text), "a YAML value", " ".join(str(error).split()))
        raise ConfigError("the command line", [problem]) from None
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    if isinstance(value, dict) and isinstance(node.get(leaf), dict):
        node[leaf] = node[leaf] | value
    else:
        node[leaf] = value


def _explain(detail: ErrorDetails) -> Problem:
    """One pydantic error in our four parts."""
    # Discriminated unions put the chosen tag into the location: it is no key of the file.
    parts = [str(part) for part in detail["loc"]]
    if len(parts) > 1 and parts[0] == "algorithm" and "-" in parts[1]:
        del parts[1]
    key = ".".join(parts) or "CONFIG"
    if detail["type"] == "extra_forbidden":
        known = list(_fields_at(parts[:-1]))
        close = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.6)
        remedy = f"Did you mean {close[0]!r}?" if close else "Remove it."
        return Problem(key, "an unknown key", f"one of {', '.join(sorted(known))}", remedy)
    if detail["type"] == "missing":
        return Problem(key, "nothing", "a value", "Add the key.")
    if detail["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        context = detail.get("ctx", {})
        return Problem(
            f"{key}.name", repr(context.get("tag", "nothing")), str(context.get("expected_tags", "an algorithm's name")),
            "See docs/reference/configuration.md.",
        )  # fmt: skip
    return Problem(
        key, repr(detail["input"]), detail["msg"].removeprefix("Input should be "), "Change the value."
    )


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a field's type may hold (through unions, tuples and Annotated)."""
    if _is_section(annotation):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from _sections(argument)


def _fields_at(path: Sequence[str]) -> set[str]:
    """Names of the fields that may stand at a dotted path."""
    current: list[type[BaseModel]] = [RunConfig]
    for part in path:
        if part.isdigit():
            continue
        current = [
            section
            for model in current
            if part in model.model_fields
            for section in _sections(model.model_fields[part].annotation)
        ]
    return {name for model in current for name in model.model_fields}
