"""What may change when a run goes on: read off the fields, which say it beside their types.

See :class:`~spotlight_rewards.base.strict_section.WhenResumed`. Changes of all but how the work is done are
recorded in the ledger, with the iteration from which on they hold.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from spotlight.config.load import dump_config, load_dump, with_new_keys
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts
from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.fork import make_fork
from spotlight.store.ledger.course_changes import CourseChange, course_words, read_course, values_before
from spotlight.store.ledger.ledger_queries import open_readonly, prompts_at
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import (
    ABSENT,
    Leaf,
    RunPaths,
    changes_of,
    covers,
    flatten,
    is_confidential,
    stored_leaves,
)
from spotlight.store.store_errors import OtherConfigurationError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import PromptId
from spotlight_rewards.base.strict_section import COURSE, EXTENT, STATE, WORK, WhenResumed
from spotlight_rewards.base.yaml_tree import parse_yaml

_NOT_SHOWN = "(not shown)"
_BESIDE: Mapping[str, Callable[[RunConfig], bool]] = {
    "algorithm": lambda run: run.algorithm.uses_old_policy,
    "learner.ema": lambda run: run.learner.ema is not None,
}
"""Sections that say whether a checkpoint holds other weights beside the policy."""


def marks(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, WhenResumed]]:
    """Keys and sections that say it; ``*`` stands for any item of a list."""
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        yield from ((key, mark) for mark in field.metadata if isinstance(mark, WhenResumed))
        if isinstance(value, BaseModel):
            yield from marks(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield from marks(value[0], f"{key}.*.")


def mark_of(config: RunConfig, key: str) -> WhenResumed | None:
    """What a key says, or the nearest section around it; None: it changes in a fork."""
    found = [(pattern.count("."), mark) for pattern, mark in marks(config) if covers(pattern, key)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


@dataclass(frozen=True, slots=True)
class Resuming:
    """On which terms a run goes on with a configuration, which may not be the one it has.

    Attributes:
        forks: as another run, in which all may change but what the saved weights are of.
    """

    config: RunConfig
    forks: bool = False

    def complete(self, text: str) -> str:
        """What a run's ``config.yaml`` says, for this version. Raises ConfigError."""
        return with_new_keys(text)

    def refused(self, paths: RunPaths, changed: Iterable[str]) -> list[str]:
        """Those of the changed keys with which the run cannot go on."""
        changed = list(changed)
        lost = set(self._of_saved_weights(paths, changed))
        allowed = {WORK, EXTENT, COURSE} if self.config.names_run else {WORK, EXTENT}
        if self.forks:
            allowed = {WORK, EXTENT, COURSE, None}  # type: ignore[arg-type]
        return [key for key in changed if key in lost or mark_of(self.config, key) not in allowed]

    def recorded(self, changed: Iterable[str]) -> list[str]:
        """Those of the changed keys that the ledger is to know."""
        return [key for key in changed if mark_of(self.config, key) is not WORK]

    def remedy(self, paths: RunPaths, refused: Mapping[str, Leaf]) -> str:
        """The ways out: ``refused`` are the keys with the values that are asked for."""
        run = paths.path.name if paths.path.parent == Path("runs") else str(paths.path)
        lost = self._of_saved_weights(paths, refused)
        course = [key for key in refused if key not in lost and mark_of(self.config, key) is COURSE]
        others = [key for key in refused if key not in lost and key not in course]
        lines = [f"To go on as the run is: spotlight train {run}"]
        if course:
            lines.append(
                f"To change its course from here on: spotlight train {run} {_given(course, refused)}"
            )
        if others:
            lines.append(
                f"To go on from its checkpoint as another run: spotlight train --fork {run} --name NEW "
                f"{_given(others, refused)}"
            )
        if lost:
            full = self.config.learner.mode == "full"
            export = f"spotlight export {run} --out DIR" + (" --merged" if full else "")
            lines.append(
                f"The saved weights are of {', '.join(lost)}: to begin another run with them: {export}, and "
                f"{'model.path' if full else 'model.lora'}=DIR"
            )
        return "\n".join(lines)

    def _of_saved_weights(self, paths: RunPaths, changed: Iterable[str]) -> list[str]:
        try:
            former = load_dump(paths.config, installed=False)
        except ConfigError:
            former = self.config
        other = [key for key, has in _BESIDE.items() if has(self.config) != has(former)]
        return [
            key
            for key in changed
            if mark_of(self.config, key) is STATE or any(covers(section, key) for section in other)
        ]


def changed_course(
    config: RunConfig, paths: RunPaths, ledger: SqliteLedger, prompts: Prompts, position: int
) -> dict[str, tuple[Leaf, Leaf]]:
    """What the run's iterations from the record ``position`` on are made with, unlike those before.

    Values that others must not know are left out.
    """
    terms = Resuming(config)
    was: dict[str, Leaf] = {**stored_leaves(paths, terms), **values_before(ledger.connection, position)}
    now: dict[str, Leaf] = {**flatten(parse_yaml(dump_config(config)))}
    for key, ids in prompts.ids.items():
        was[f"{key}.prompts"] = _described(prompts_at(ledger.connection, position).get(key, ids))
        now[f"{key}.prompts"] = _described(ids)
    changes = changes_of(was, now) if position else {}
    return {key: _public(key, changes[key]) for key in terms.recorded(changes)}


def planned_changes(config: RunConfig) -> list[str]:
    """What would change in the run if it went on with this configuration, for a dry run."""
    paths = RunPaths(config.runs_dir / config.name)
    newest = CheckpointStore(paths.checkpoints, keep=1).newest_header() if paths.config.exists() else None
    if newest is None:
        return []
    terms = Resuming(config)
    changes = changes_of(stored_leaves(paths, terms), flatten(parse_yaml(dump_config(config))))
    return course_words(
        [
            CourseChange(newest.iteration, newest.ledger_position, key, *_public(key, changes[key]))
            for key in terms.recorded(changes)
        ]
    )


def fork(parent: Path, config: RunConfig, iteration: int | None) -> Path:
    """Make the run of this configuration of a run's checkpoint (``iteration`` None: the newest).

    A fork that is there is left alone, also when its parent has no longer that checkpoint. Returns its
    directory.

    Raises:
        StoreError: no such checkpoint, another run of this name, or the disk.
        OtherConfigurationError: a key is changed that the checkpoint's weights are of.
    """
    place = RunPaths(config.runs_dir / config.name)
    if not place.path.exists():
        checkpoint, changes = fork_plan(parent, config, iteration)
        if make_fork(RunPaths(parent), checkpoint, place.path, dump_config(config), changes, time.time()):
            return place.path
    found: tuple[CourseChange, ...] = ()
    if place.ledger.exists():
        with closing(open_readonly(place.ledger)) as connection:
            found = read_course(connection)
    lineage = [change for change in found if change.key == "name"][-1:]
    name = stored_leaves(RunPaths(parent))["name"]
    if not any(change.was == name and iteration in (None, change.iteration) for change in lineage):
        at = "" if iteration is None else f" at iteration {iteration}"
        raise StoreError(
            f"--name: {place.path} is there, and is no fork of {parent.name}{at}; expected a new name. "
            "Choose another."
        )
    return place.path


def fork_plan(
    parent: Path, config: RunConfig, iteration: int | None
) -> tuple[Checkpoint, dict[str, tuple[Leaf, Leaf]]]:
    """The checkpoint that a fork begins with, and what it changes. Raises as :func:`fork`."""
    paths, terms = RunPaths(parent), Resuming(config, forks=True)
    store = CheckpointStore(paths.checkpoints, keep=1)
    checkpoint = store.newest_valid() if iteration is None else store.made_after(iteration)
    if checkpoint is None:
        raise StoreError(
            f"--iteration: no checkpoint of {parent} after iteration {iteration}; expected one of "
            f"{', '.join(map(str, store.iterations)) or 'none, since none is there'}. The newest "
            "checkpoint.keep are kept, and the best."
        )
    was, now = stored_leaves(paths, terms), flatten(parse_yaml(dump_config(config)))
    with closing(open_readonly(paths.ledger)) as connection:  # what its course had not changed yet
        before = values_before(connection, checkpoint.header.ledger_position)
    was |= {key: value for key, value in before.items() if key in now and key != "name"}
    changes = changes_of(was, now)
    if refused := terms.refused(paths, changes):
        shown = ", ".join(f"{key}={changes[key][1]!r}" for key in refused)
        remedy = terms.remedy(paths, {key: changes[key][1] for key in refused})
        raise OtherConfigurationError(f"{parent}: no fork of it can have {shown}.\n{remedy}")
    return checkpoint, {key: _public(key, changes[key]) for key in terms.recorded(changes)}


def _public(key: str, values: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
    return (_NOT_SHOWN, _NOT_SHOWN) if is_confidential(key) else values


def _described(ids: Sequence[PromptId]) -> str:
    return f"{len(ids)} ({hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]})"


def _given(keys: Iterable[str], values: Mapping[str, Leaf]) -> str:
    """As arguments; items of a list by the list's name."""
    shown = {}
    for key in keys:
        listed = key.partition(".")[0] if any(part.isdigit() for part in key.split(".")) else ""
        value = values[key]
        given = "..." if listed or value == ABSENT else value if isinstance(value, str) else json.dumps(value)
        shown[listed or key] = shlex.quote(f"{listed or key}={given}")
    return " ".join(shown.values())
