"""Presets: the settings of other trainers, by name (``like: NAME``).

One file in ``presets`` each: ``source``, where its figures come from; ``differs``, what of that trainer
cannot be set; ``settings``, a configuration without prompts. To add one, add a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight.config.sections.algorithm import KEYS_OF_GROUPS
from spotlight_rewards.base.errors import ConfigError, Problem, did_you_mean
from spotlight_rewards.base.yaml_tree import merge, read_tree

_DIRECTORY = Path(__file__).with_name("presets")


@dataclass(frozen=True, slots=True)
class Preset:
    """Another trainer's settings.

    Attributes:
        differs: sentences about what is not as there.
    """

    name: str
    source: str
    differs: tuple[str, ...]
    settings: Mapping[str, Any]


def preset_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def load_preset(name: object) -> Preset:
    """A preset. Raises ConfigError for an unknown name."""
    known = preset_names()
    if not isinstance(name, str) or name not in known:
        remedy = did_you_mean(str(name), known, "docs/howto/coming-from.md describes them.")
        problem = Problem("like", repr(name), f"one of {', '.join(known)}", remedy)
        raise ConfigError("the configuration", [problem])
    tree = read_tree(_DIRECTORY / f"{name}.yaml")
    return Preset(name, tree["source"], tuple(tree["differs"]), tree["settings"])


def with_preset(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """``tree`` on top of the preset it names, if any.

    With another algorithm only :data:`KEYS_OF_GROUPS` stay of the preset's.
    """
    if (name := tree.get("like")) is None:
        return tree
    settings = dict(load_preset(name).settings)
    chosen = tree.get("algorithm")
    other = chosen.get("name") if isinstance(chosen, Mapping) else None
    theirs = settings["algorithm"]
    if other not in (None, theirs["name"]):
        settings["algorithm"] = {key: theirs[key] for key in KEYS_OF_GROUPS if key in theirs}
    return merge(settings, tree)
