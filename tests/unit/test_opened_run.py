"""A run as Python opens it."""

from __future__ import annotations

from pathlib import Path

from tests.unit.dashboard_run import make_run

import spotlight


def test_tables_of_a_run_that_has_just_begun_have_columns_and_no_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "begun", iterations=0)
    run = spotlight.open(tmp_path / "begun")
    for table in (run.metrics, run.evaluations):
        assert list(table["iteration"]) == []
        assert list(table) == ["iteration", "samples_trained", "wall_s"]
    assert list(run.samples["reward"]) == []
