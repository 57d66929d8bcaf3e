from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.cli.runs import train
from spotlight.cli.runs.progress import make_progress
from spotlight.config.load import load_config
from spotlight.scheduler.types import Phase


def test_a_traceback_is_looked_for_in_the_log_of_the_newest_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, [f"runs_dir={tmp_path}", "name=run"])
    (tmp_path / "run/attempts").mkdir(parents=True)
    for name in ("002", "999", "1000", "learner-001-rank-0", "reward-jpeg_size", "rank-0-reward-jpeg_size"):
        (tmp_path / f"run/attempts/{name}.log").touch()
    progress = make_progress(config, True)
    progress.work(Phase.ROLLOUT, 0, 1)
    train._point_to_log(config, progress)
    assert "attempts/1000.log" in capsys.readouterr().err.replace("\n", "")
