"""What a model card tells of a configuration: numbers and choices of training, never free text.

Places, addresses, commands and parameters of rewards are free text or not listed here; a key that is new is
published only if it is a number or a choice of a section that is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from spotlight.config.schema import RunConfig
from spotlight.testbed import TESTBEDS

_SECTIONS = ("model", "rollout", "algorithm", "learner", "exploration", "pipeline", "evaluation")
_KEYS = ("run_seed", "iterations", "deterministic", *_SECTIONS, "reward_policy")
_NAMES = ("algorithm.name", "model.family", "learner.targets")
"""Texts that say what was trained and how: names of this program, and of layers."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PLACE = re.compile(r"""(['"])/[^'"]*/([^'"/]+)\1""")


def published_settings(config: RunConfig) -> str:
    """YAML of what may be published."""
    tree = _shown(config, _KEYS, "")
    if (base := hub_model(config)) is not None:
        tree["model"] |= {"path": base, "revision": config.model.revision}
    tree["rewards"] = [{"name": reward_name(each.name), "weight": each.weight} for each in config.rewards]
    return str(yaml.safe_dump(tree, sort_keys=False, width=100))


def hub_model(config: RunConfig) -> str | None:
    """The id of the model on the hub; None: it is a folder somewhere."""
    path = config.model.path
    found = path not in TESTBEDS and _HUB_ID.fullmatch(path) and not Path(path).expanduser().exists()
    return path if found else None


def reward_name(name: str) -> str:
    """Of a function of one's own, without its module or file."""
    return name.rpartition(":")[2]


def without_places(code: str) -> str:
    """Python whose absolute paths are placeholders with the same last part."""
    return _PLACE.sub(r"\1PATH/TO/\2\1", code)


def _shown(section: BaseModel, names: Iterable[str], prefix: str) -> dict[str, Any]:
    fields = type(section).model_fields
    return {
        name: shown
        for name in names
        for shown in _published(getattr(section, name), f"{prefix}{name}", fields[name].annotation)
    }


def _published(value: Any, key: str, annotation: Any) -> Iterator[Any]:
    """The value as plain YAML, once if it is published."""
    if isinstance(value, BaseModel):
        yield _shown(value, type(value).model_fields, f"{key}.")
    elif value is None or isinstance(value, bool | int | float) or value in _choices(annotation):
        yield value
    elif isinstance(value, tuple) and (key in _NAMES or all(isinstance(each, int | float) for each in value)):
        yield list(value)
    elif key in _NAMES:
        yield value


def _choices(annotation: Any) -> Iterator[object]:
    """Values of the literals in a type."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)
