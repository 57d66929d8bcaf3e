"""A training in stages: ``stages`` in a configuration file, by name what each sets beside the common keys.

A stage is a run of its own, ``NAME-STAGE``, which ``stage=STAGE`` chooses. Each but the first goes on with
the LoRA of the one before, unless it names another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight_rewards.base.errors import ConfigError, Problem, did_you_mean
from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.yaml_tree import parse_override, read_tree

_STAGES, _CHOICE, _LORA = "stages", "stage=", "model.lora"
_OWN = ("name", "runs_dir", "like", _STAGES)
"""Keys that all stages share."""


@dataclass(frozen=True, slots=True)
class ChosenStage:
    """What a run is among its stages. Without a name: a run that is none.

    Attributes:
        before: the stage whose LoRA it goes on with.
    """

    name: str | None = None
    before: str | None = None

    def put_in_place(self, tree: dict[str, Any], source: str) -> None:
        """Name the run, and what it begins with, once all overrides are applied. Raises ConfigError."""
        if self.name is None:
            return
        training, runs_dir = tree.get("name", "demo"), str(tree.get("runs_dir", "runs"))
        tree["name"] = f"{training}-{self.name}"
        if "://" in runs_dir:
            problem = Problem("runs_dir", runs_dir, "a folder, because stages read each other's LoRAs",
                              "Set runs_dir to a folder.")  # fmt: skip
            raise ConfigError(source, [problem])
        model = tree.get("model") or {}
        if self.before is not None and isinstance(model, Mapping):  # else it is refused with all the rest
            lora = Path(runs_dir) / f"{training}-{self.before}" / "lora"
            tree["model"] = {**model, "lora": str(lora)}


def stage_names(path: Path | None, overrides: Sequence[str]) -> list[str]:
    """The stages to be run one after another: those of the file, if none is chosen. Raises ConfigError."""
    one = any(each.startswith(_CHOICE) for each in overrides)
    if path is None or one or not is_there(path) or not path.is_file():
        return []
    return list(_stages_in(read_tree(path), str(path)))


def take_stage(tree: dict[str, Any], overrides: Sequence[str], source: str) -> tuple[ChosenStage, list[str]]:
    """The chosen stage, whose file's ``stages`` are removed, and all overrides with its settings below.

    Raises:
        ConfigError: none or an unknown one is chosen, or a stage sets what all share.
    """
    stages = _stages_in(tree, source)
    tree.pop(_STAGES, None)
    others = [each for each in overrides if not each.startswith(_CHOICE)]
    chosen = _chosen(overrides)
    if not stages and chosen is None:
        return ChosenStage(), others
    names = list(stages)
    expected = f"one of {', '.join(names)}" if names else "none, since no stages are configured"
    if chosen is None or chosen not in stages:
        found = "nothing" if chosen is None else repr(chosen)
        remedy = (
            f"All, one after another: spotlight train {source}"
            if chosen is None
            else ("Name one." if names else "Leave it out.")
        )
        raise ConfigError(
            source, [Problem("stage", found, expected, did_you_mean(chosen or "", names, remedy))]
        )
    at = names.index(chosen)
    # A date is no setting: it is refused as text.
    settings = [f"{key}={json.dumps(value, default=str)}" for key, value in settings_in(stages[names[at]])]
    keys = {key for each in (*settings, *others) for key, _ in settings_in(dict([parse_override(each)]))}
    before = names[at - 1] if at > 0 and _LORA not in keys else None
    return ChosenStage(names[at], before), [*settings, *others]


def without_stage(name: str, overrides: Sequence[str]) -> str:
    """A run's name less its stage's, which a configuration of these overrides adds."""
    stage = _chosen(overrides)
    return name if stage is None else name.removesuffix(f"-{stage}")


def _chosen(overrides: Sequence[str]) -> str | None:
    # Arguments of Python are quoted.
    chosen = [each.removeprefix(_CHOICE).strip('"') for each in overrides if each.startswith(_CHOICE)]
    return chosen[-1] if chosen else None


def _stages_in(tree: Mapping[str, Any], source: str) -> Mapping[str, Mapping[str, Any]]:
    stages = tree.get(_STAGES, {})
    expected = "settings by the name of each stage"
    if not isinstance(stages, Mapping):
        remedy = "Write NAME: {iterations: 20, ...} lines."
        raise ConfigError(source, [Problem(_STAGES, type(stages).__name__, expected, remedy)])
    problems = [
        Problem(f"{_STAGES}.{name}", repr(settings), expected, "Write its keys below its name.")
        for name, settings in stages.items()
        if not isinstance(settings, Mapping)
    ]
    problems += [
        Problem(
            f"{_STAGES}.{name}.{key}", repr(settings[key]), "nothing", "Set it for all stages, above them."
        )
        for name, settings in stages.items()
        if isinstance(settings, Mapping)
        for key in _OWN
        if key in settings
    ]
    if problems:
        raise ConfigError(source, problems)
    return stages


def settings_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a section without keys is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from settings_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
