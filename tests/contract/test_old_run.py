"""A run that version 0.1.0 made, before the rooms were rebuilt: it is audited, listed, used and continued.

``run-0.1.0.tar.gz`` holds its directory, without logs, charts and grids. It is one iteration of the embedded
pipeline: ``spotlight train name=old iterations=1 learner.lora.rank=1 learner.lora.targets=[to_q]
rollout.prompts_per_iteration=2 rollout.group_size=4 ...``; all its keys are in its ``config.yaml``.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.runtime.inference import TrainedRun
from spotlight.runtime.observer import Observer
from spotlight.runtime.run import train
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.run_summary import read_summary
from spotlight.training.learner_state import StateError, load_weights

LIMITS = AuditLimits(group_size=4, staleness_max=0)
ARCHIVE = Path(__file__).parent / "run-0.1.0.tar.gz"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run's directory."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "old"


def test_it_is_audited_and_listed(run: Path) -> None:
    assert audit(run, LIMITS).violations == ()
    listed = CliRunner().invoke(app, ["runs", str(run.parent)])
    assert listed.exit_code == 0, listed.output
    assert all(said in listed.output for said in ("old", "1/1", "finished")), listed.output


def test_its_weights_judge_as_they_did(run: Path) -> None:
    trained = TrainedRun.open(run, device="cpu")
    before = read_summary(run / "summary.json").validation[-1]
    now = trained.evaluate(Observer())
    assert (now.curves["reward"].mean, now.judged.mean) == pytest.approx((before.graded, before.strict))
    picture = trained.generate(["two red circles"], [0])
    assert picture.shape == (1, 32, 32, 3)
    assert not np.array_equal(picture, trained.with_weights("reference").generate(["two red circles"], [0]))


def test_a_run_of_a_gpu_is_used_where_its_kernels_are_not(run: Path) -> None:
    expected = TrainedRun.open(run, device="cpu").generate(["two red circles"], [0])
    config = load_config(run / "config.yaml").model_dump(mode="json")
    config["device"] = "cuda"
    config["model"] |= {"attention": "flash-3-varlen", "compile": "regional", "cuda_graphs": True}
    (run / "config.yaml").write_text(json.dumps(config))
    trained = TrainedRun.open(run, device="cpu")
    assert np.array_equal(trained.generate(["two red circles"], [0]), expected)
    assert trained.export_lora(run / "lora").is_file()


def test_it_is_continued(run: Path) -> None:
    config = load_config(run / "config.yaml", [f"runs_dir={run.parent}", "iterations=2"])
    result = train(config, Observer())
    assert result.finished
    assert [point.iteration for point in read_summary(run / "summary.json").validation] == [0, 2]
    assert audit(run, LIMITS).violations == ()


def test_a_ledger_of_another_version_is_refused_with_both_versions_and_what_to_do(run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    refused = CliRunner().invoke(app, ["audit", str(run)])
    assert refused.exit_code != 0
    said = " ".join(refused.output.split())
    assert "99" in said
    assert "Use the version that made it, or start a run of another name." in said


def test_a_checkpoint_of_another_version_is_refused_with_both_versions_and_what_to_do(run: Path) -> None:
    trained = TrainedRun.open(run, device="cpu")
    (path,) = run.glob("checkpoints/*/learner/learner.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(StateError, match=r"format 99; this version reads 1\. Use the version that made it"):
        load_weights(path.parent, trained._slots)
