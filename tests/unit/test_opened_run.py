"""A run as Python opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.dashboard_run import make_run

import spotlight
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError


def test_tables_of_a_run_that_has_just_begun_have_columns_and_no_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "begun", iterations=0)
    run = spotlight.open(tmp_path / "begun")
    for table in (run.metrics, run.evaluations):
        assert list(table["iteration"]) == []
        assert list(table) == ["iteration", "samples_trained", "wall_s"]
    assert list(run.samples["reward"]) == []


WRONG: list[tuple[str, dict[str, Any], str, tuple[object, ...]]] = [
    ("pictures", {}, "iteration", (None, "1", 1.5, True, [1])),
    ("training_pictures", {}, "iteration", (None, "1", 1.5, True)),
    ("fork", {"name": "b"}, "iteration", ("1", 1.5, True)),
    ("fork", {}, "name", (None, 5, ["b"])),
    ("export", {}, "directory", (None, 5, ["a"])),
    ("export", {"directory": "a"}, "iteration", ("1", 1.5, True)),
    ("export", {"directory": "a"}, "best", (None, 1, ["a"])),
    ("export", {"directory": "a"}, "merged", (None, "yes")),
    ("export", {"directory": "a"}, "device", (None, 0, "gpu", ["cpu"])),
    ("train", {}, "plain", (None, "yes")),
    ("train", {}, "learner", (None, 5, [])),
]


def test_arguments_of_a_wrong_kind_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "begun", iterations=0)
    run = spotlight.open(tmp_path / "begun")
    for call, others, key, values in WRONG:
        for wrong in values:
            with pytest.raises(ConfigError) as error:
                getattr(run, call)(**others, **{key: wrong})
            (problem,) = error.value.problems
            assert (problem.key, problem.found) == (key, repr(wrong)), call
    with pytest.raises(StoreError, match="no such pictures"):
        run.pictures(np.int64(7))  # type: ignore[arg-type] # as a table's cell is one
    for place in (None, 5, ["a"], b"a"):
        with pytest.raises(ConfigError, match=r"directory: found .* expected a run's directory, name or"):
            spotlight.open(place)  # type: ignore[arg-type]
