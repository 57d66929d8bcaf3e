"""Rows of what keys require: each names keys that exist, and gives one message of one format."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from spotlight.config.load import load_config
from spotlight.config.requires import (
    SET,
    UNSET,
    Need,
    Requirement,
    Requires,
    That,
    at_most,
    less_than,
    other_than,
    problems_of,
)
from spotlight.config.schema import RunConfig
from spotlight.config.section import Section
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.registry import ALGORITHMS

CONFIG = load_config(
    None, ["fleet.driver=ray", "rollout={group_size: 8, batch_size: 64}", "learner.micro_batch_size=96"]
)


def models(annotation: object) -> Iterator[type[BaseModel]]:
    if annotation is AlgorithmSection:
        yield from (ALGORITHMS.load(name) for name in ALGORITHMS.built_in)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models(argument)


def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for found in models(field.annotation):
            yield from sections(found)


def exists(key: str) -> bool:
    """Whether some configuration has this key."""
    found: list[type[BaseModel]] = [RunConfig]
    for part in key.replace(".*", "").split("."):
        fields = [each.model_fields[part] for each in found if part in each.model_fields]
        if not fields:
            return False
        found = [model for field in fields for model in models(field.annotation)]
    return True


ROWS: dict[str, Requirement[RunConfig]] = {
    f"{section.__name__}-{index}": row
    for section in dict.fromkeys(sections(RunConfig))
    if issubclass(section, Section)
    for index, row in enumerate(section.__dict__.get("requires", ()))
}


def test_there_are_rows() -> None:
    assert len(ROWS) > 100


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_names_keys_that_there_are(row: Requirement[RunConfig]) -> None:
    key, needs, condition, remedy = row.row()
    assert exists(key), key
    assert needs
    assert not re.search(r"{\w", needs + condition + remedy)
    if isinstance(row, Requires):
        assert re.search(r"[.]$", remedy), "whole sentences"
        if not isinstance(row.when, That):
            assert all(map(exists, row.when)), row.when
            others = (each.other for each in row.when.values() if isinstance(each, Need))
            assert all(exists(other) for other in others if isinstance(other, str))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Requires("rollout.group_size", {"fleet.driver": "ray"}, 4, "Set 4."),
            "rollout.group_size: found 8; expected 4 with fleet.driver=ray. Set 4.",
        ),
        (
            Requires("rollout.sampler", {"exploration": UNSET, "rewards": SET}, ("cps", "dance"), "Do."),
            "rollout.sampler: found 'ode'; expected 'cps' or 'dance' with rewards, without exploration. Do.",
        ),
        (
            Requires("rollout.batch_size", {}, at_most("rollout.group_size"), "Set {rollout.group_size}."),
            "rollout.batch_size: found 64; expected at most rollout.group_size = 8. Set 8.",
        ),
        (
            Requires("rewards.*.name", {"rewards.*.weight": 1}, other_than("shapes"), "Do."),
            "rewards[0].name: found 'shapes'; expected other than 'shapes' with rewards[0].weight=1. Do.",
        ),
        (
            Requires(
                "rollout.batch_size",
                {"rollout.group_size": SET, "fleet.driver": "ray"},
                at_most("rollout.group_size"),
                "Do.",
                found="{rollout.batch_size} samples",
            ),
            "rollout.batch_size: found 64 samples; expected at most rollout.group_size = 8 with "
            "fleet.driver=ray. Do.",
        ),
        (Requires("exploration.steps", {}, less_than(0), "The section is off."), None),
        (Requires("rollout.batch_size", {"fleet.driver": "inline"}, 1, "Does not apply."), None),
        (Requires("algorithm.train_samples", {}, less_than(0), "Left out."), None),
        (
            Requires(
                "fleet.driver",
                That("where {rollout.steps} steps are made", lambda run: run.rollout.steps > 1),
                That("nothing", lambda run: run.fleet.driver == "inline"),
                lambda run: f"Not {run.fleet.driver}.",
            ),
            f"fleet.driver: found 'ray'; expected nothing where {CONFIG.rollout.steps} steps are made. "
            "Not ray.",
        ),
    ],
)
def test_messages(row: Requires[RunConfig], message: str | None) -> None:
    found = [str(problem) for problem in problems_of([row], CONFIG)]
    assert found == ([] if message is None else [message])


def test_all_problems_of_a_key_are_named_each_once() -> None:
    rows = [Requires[RunConfig]("fleet.driver", {}, wanted, "Do.") for wanted in ("a", "b", "a")]
    assert [problem.expected for problem in problems_of(rows, CONFIG)] == ["'a'", "'b'"]


def test_a_row_without_a_run_does_without_figures() -> None:
    needs = That[RunConfig]("at most the {trained_timesteps} timesteps of {rollout.steps}, {run_seed}", bool)
    assert Requires("rollout.steps", {}, needs, "Do.").row()[1] == "at most the timesteps of steps"
