"""What ``spotlight sweep FILE`` runs: a grid, or a search of Optuna's. Pure, but for reading the file.

A run's name is made of its settings, so that the same file, with values added, finds the runs made before.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, ValidationError

from spotlight.config.section import RUN_NAME, RUN_NAME_IS
from spotlight_rewards.base.errors import ConfigError, Problem, did_you_mean
from spotlight_rewards.base.strict_section import StrictSection
from spotlight_rewards.base.yaml_tree import read_tree

FINISHED, NOT_BEGUN = "finished", "not begun"
"""States of a run that a sweep decides by."""
_NAME_CHARS_MAX = 80
_REMEDY = "docs/howto/sweeps.md has examples."

Settings: TypeAlias = Mapping[str, Any]
"""By dotted key of the configuration."""


class Between(StrictSection):
    """A range to search."""

    low: FiniteFloat
    high: FiniteFloat
    log: bool = False
    """Draw by orders of magnitude."""
    whole: bool = False
    """Draw whole numbers."""


class OptunaSection(StrictSection):
    """Optuna chooses the settings of each run by what the runs before it scored."""

    trials: PositiveInt
    space: Annotated[dict[str, Between | Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]
    """By dotted key, a range or a list of choices."""
    score: str | None = None
    """A curve of the last validation; default: the one a run is judged by."""
    goal: Literal["maximize", "minimize"] = "maximize"
    seed: int = 0


class SweepFile(StrictSection):
    """Several runs of one configuration."""

    name: Annotated[str, Field(pattern=RUN_NAME.pattern)]
    """What the names of its runs begin with; default: that of the file."""
    config: str | None = None
    """The file that ``spotlight train`` would be given; none: the demo."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings of all runs, by dotted key."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """By dotted key, its values; every combination is a run."""
    cases: list[dict[str, Any]] = Field(default_factory=list)
    """Settings that go together; each is combined with the grid."""
    search: OptunaSection | None = None
    together: PositiveInt = 1
    """Runs at a time on this machine; with GPUs, each has its share of them."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep; ``settings``: those in which it differs from the others."""

    name: str
    settings: Settings
    config: str | None
    overrides: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """What ``spotlight train`` is given."""
        return [*([self.config] if self.config else []), *self.overrides]


def read_sweep(path: Path) -> SweepFile:
    """Read a file. Raises :class:`ConfigError` with every problem."""
    return sweep_of({"name": path.stem} | read_tree(path), str(path))


def sweep_of(tree: Mapping[str, Any], source: str) -> SweepFile:
    """A file's content. Raises as :func:`read_sweep`."""
    try:
        # Through JSON, as configurations: strict, but numbers may be whole where others are allowed.
        sweep = SweepFile.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        found = [_problem(detail["loc"], detail["type"], detail["input"], detail["msg"])
                 for detail in error.errors()]  # fmt: skip
        raise ConfigError(source, list({each.key: each for each in found}.values())) from None
    if problems := list(_contradictions(sweep)):
        raise ConfigError(source, problems)
    return sweep


def grid_runs(sweep: SweepFile) -> list[SweepRun]:
    """Every case with every combination of the grid, the last key changing first."""
    combinations = itertools.product(*sweep.grid.values())
    points = [dict(zip(sweep.grid, values, strict=True)) for values in combinations]
    return [sweep_run(sweep, case | point) for case in sweep.cases or [{}] for point in points]


def sweep_run(sweep: SweepFile, settings: Settings) -> SweepRun:
    """A run of these settings, named after them."""
    name = _name(sweep.name, {key: value for key, value in settings.items() if key != "stage"})
    given = {**sweep.set, **settings}
    # The algorithm first: its other keys start from its own defaults when it changes.
    keys = sorted(given, key=lambda key: key != "algorithm.name")
    overrides = [f"{key}={json.dumps(given[key])}" for key in keys]
    named = f"{name}-{given['stage']}" if "stage" in given else name
    return SweepRun(named, settings, sweep.config, (*overrides, f"name={name}"))


def corners(sweep: SweepFile) -> Iterator[SweepRun]:
    """Runs at the lowest and the highest of a search's ranges, to check before any is begun."""
    space = {} if sweep.search is None else sweep.search.space
    for end in ("low", "high"):
        yield sweep_run(sweep, {key: _end(each, end) for key, each in space.items()})


def _end(given: Between | list[Any], end: str) -> Any:
    if isinstance(given, Between):
        value = getattr(given, end)
        return int(value) if given.whole else value
    return given[0 if end == "low" else -1]


def _name(sweep: str, settings: Settings) -> str:
    parts = (f"{key.rpartition('.')[2]}-{_short(value)}" for key, value in settings.items())
    text = "-".join((sweep, *parts))
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", text)
    if plain == text and len(plain) <= _NAME_CHARS_MAX:
        return plain
    content = json.dumps(settings, sort_keys=True, default=str)
    return f"{plain[:_NAME_CHARS_MAX]}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if float(f"{value:.6g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _contradictions(sweep: SweepFile) -> Iterator[Problem]:
    combined = bool(sweep.grid or sweep.cases)
    if combined == (sweep.search is not None):
        found = "both" if combined else "neither"
        yield Problem("grid", f"{found} grid or cases, and search", "one of them", _REMEDY)
    varied = [*sweep.grid, *(key for case in sweep.cases for key in case)]
    varied += [] if sweep.search is None else list(sweep.search.space)
    for key in dict.fromkeys(varied):
        if key in sweep.set or key == "name":
            expected = "a key that is not in set, and not name"
            yield Problem(key, "a key that varies", expected, "Names are made of what varies.")
    if "name" in sweep.set:
        remedy = "Remove it; name: NAME beside set is what they begin with."
        yield Problem(
            "set.name", repr(sweep.set["name"]), "nothing: runs are named by their settings", remedy
        )
    for key in dict.fromkeys(key for case in sweep.cases for key in case if key in sweep.grid):
        yield Problem(key, "a key of both cases and grid", "one of them", "Remove it from the other.")
    by_name: dict[str, list[Settings]] = {}
    for run in grid_runs(sweep) if combined else ():
        by_name.setdefault(run.name, []).append(run.settings)
    if twice := next((name for name, found in by_name.items() if len(found) > 1), None):
        if all(each == by_name[twice][0] for each in by_name[twice]):
            yield Problem("grid", f"{twice} twice", "every combination once", "Remove one.")
        else:
            expected = "another name for each combination; it has the last part of each key, and its value"
            yield Problem("grid", f"{twice} for several", expected, "Make sweeps of two files.")
    for key, each in ({} if sweep.search is None else sweep.search.space).items():
        if isinstance(each, Between) and not (each.low < each.high and (each.low > 0 or not each.log)):
            expected = "low below high, and with log above 0"
            yield Problem(f"search.space.{key}", f"{each.low:g} to {each.high:g}", expected, "Swap them.")
        elif (
            isinstance(each, Between)
            and each.whole
            and not (each.low.is_integer() and each.high.is_integer())
        ):
            found = f"{each.low:g} to {each.high:g}"
            yield Problem(f"search.space.{key}", found, "whole numbers, with whole", "Round them.")


def _problem(location: tuple[int | str, ...], kind: str, found: object, message: str) -> Problem:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        section: type[BaseModel] = SweepFile
        if location[0] == "search":
            section = Between if "space" in location else OptunaSection
        known = sorted(section.model_fields)
        remedy = did_you_mean(str(location[-1]), known, "Remove it.")
        return Problem(key, "an unknown key", f"one of {', '.join(known)}", remedy)
    if kind == "missing":
        return Problem(key, "nothing", "a value", _REMEDY)
    if kind == "string_pattern_mismatch":
        return Problem(key, repr(found), RUN_NAME_IS, f"Write another into the file: {key}: NAME.")
    shapes = {"list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping"}
    expected = shapes.get(kind, message.removeprefix("Input should be "))
    return Problem(key, repr(found), expected, _REMEDY)
