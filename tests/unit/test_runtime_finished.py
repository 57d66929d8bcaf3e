"""What is done or wrong shows at a look, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotlight.config.load import dump_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.runtime.preflight import finished_summary
from spotlight.scheduler.types import DropReason, Phase, WorkerId
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunDirectory
from spotlight.store.run_summary import RunSummary, SampleCounts, ValidationPoint, write_summary
from spotlight.store.store_errors import OtherConfigurationError
from spotlight_rewards.base.file_errors import StoreError


def config(root: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"runs_dir={root}", "iterations=4", *overrides])


def make_run(root: Path, ending: Ending) -> RunSummary:
    made = config(root)
    summary = RunSummary(
        iterations=4,
        validation=(ValidationPoint(0, 0, 1.0, None, 0.5), ValidationPoint(4, 96, 9.0, None, 0.75)),
        validation_stderr=0.01,
        wall_s=9.0,
        gpu_seconds_by_phase={Phase.ROLLOUT: 9.0},
        cost_usd=0.1,
        samples=SampleCounts(96, 96, dict.fromkeys(DropReason, 0)),
        lora="lora/adapter.safetensors",
        run_seed=0,
    )
    with RunDirectory.open(root, made.name, dump_config(made)) as run, SqliteLedger(run.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="here", workers={WorkerId("w"): 0.1}, now_s=time.time() - 9)
        ledger.end_attempt(ending, time.time())
        write_summary(run.summary, summary)
        (run.path / "lora").mkdir()
        (run.path / "lora" / "adapter.safetensors").touch()
        assert queries.worked_s(ledger.connection) == pytest.approx(9, abs=0.5)
    return summary


def test_a_finished_run_shows_its_summary_until_more_is_asked_of_it(tmp_path: Path) -> None:
    summary = make_run(tmp_path, Ending.FINISHED)
    assert finished_summary(config(tmp_path)) == summary
    assert finished_summary(config(tmp_path, "iterations=3", "checkpoint.keep=5")) == summary
    assert finished_summary(config(tmp_path, "iterations=5")) is None
    assert finished_summary(config(tmp_path, "name=other")) is None
    (tmp_path / "demo" / "lora" / "adapter.safetensors").unlink()
    assert finished_summary(config(tmp_path)) is None


@pytest.mark.parametrize("content", ["", "{}", '{"samples": 3}', "[]"])
def test_a_damaged_summary_is_reported_with_what_to_do(tmp_path: Path, content: str) -> None:
    make_run(tmp_path, Ending.FINISHED)
    (tmp_path / "demo" / "summary.json").write_text(content)
    with pytest.raises(StoreError, match=r"not a summary of a run .*delete it: `spotlight train` then"):
        finished_summary(config(tmp_path))
    (tmp_path / "demo" / "summary.json").unlink()
    assert finished_summary(config(tmp_path)) is None


@pytest.mark.parametrize("ending", [Ending.STOPPED, Ending.FAILED, Ending.KILLED])
def test_a_run_that_did_not_come_to_its_end_is_not_finished(tmp_path: Path, ending: Ending) -> None:
    make_run(tmp_path, ending)
    assert finished_summary(config(tmp_path)) is None


def test_a_directory_that_cannot_be_used_is_refused_and_left_alone(tmp_path: Path) -> None:
    make_run(tmp_path, Ending.FINISHED)
    with pytest.raises(OtherConfigurationError, match=r"rollout\.steps: 10 in the run, 8 now"):
        finished_summary(config(tmp_path, "rollout.steps=8"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"^runs_dir: the run directory .* cannot be made: Not a directory"):
        finished_summary(config(tmp_path / "file"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").touch()
    with pytest.raises(StoreError, match="not a run directory"):
        finished_summary(config(tmp_path, "name=photos"))
    assert not (tmp_path / "nowhere").exists()
    assert finished_summary(config(tmp_path / "nowhere")) is None
    assert not (tmp_path / "nowhere").exists()


def test_looking_imports_no_torch() -> None:
    code = "import sys, spotlight.runtime.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
