"""A run in a bucket, by a real S3 server: heads die with their disks, and the server fails."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from main_job import (
    NFT,
    PROCESS_DEADLINE_S,
    At,
    Ended,
    Job,
    Straight,
    _processes,
    _work_as_rank,
    clean_audit,
    outcome,
)
from tests.bucket_server import BUCKET, BucketServer, bucket_server
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.store.ledger.ledger_schema import Ending

pytestmark = pytest.mark.slow
ADDRESS = f"s3://{BUCKET}/runs"
Train = Callable[..., Ended]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    with bucket_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def train(job: Job, server: BucketServer, tmp_path: Path) -> Train:
    """Train on a machine of this name, in a process of its own."""

    def on(machine: str, name: str, *signals: At, overrides: tuple[str, ...] = ()) -> Ended:
        places = f"runs_dir={ADDRESS}", f"cache_dir={tmp_path / machine}"
        arguments, answer = job.arguments(name, *NFT, *places, *overrides), tmp_path / "answer.json"
        answer.unlink(missing_ok=True)
        process = _processes.Process(
            target=_work_as_rank, args=(server.environment, arguments, signals, answer)
        )
        process.start()
        process.join(PROCESS_DEADLINE_S)
        assert process.exitcode is not None, "the process hangs"
        written = json.loads(answer.read_text()) if answer.exists() else {}
        return Ended(
            process.exitcode, **{k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
        )

    return on


def run_on(machine: Path, name: str) -> Path:
    return machine / "bucket" / "s3" / BUCKET / "runs" / "work" / name


def test_a_head_that_dies_with_its_disk_goes_on_elsewhere_as_if_nothing_had_been(
    train: Train, straight: Straight, server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, _ = straight("diffusion-nft with EMA")
    kills = At("work training", 3), At("work evaluation", 3), At("work rollout", 4), At("work training", 4)
    killed = 0
    for kill in kills:
        ended = train("machine", "demo", kill)
        assert ended.exit_code == -signal.SIGKILL or ended.finished, ended
        killed += ended.exit_code == -signal.SIGKILL
        shutil.rmtree(tmp_path / "machine")
        release(server)
    ended = train("machine", "demo")
    assert ended.finished, ended
    assert killed >= 3
    assert any("resuming after iteration" in note for note in ended.notes), ended.notes
    run = run_on(tmp_path / "machine", "demo")
    assert outcome(run) == expected
    assert [bill.ended for bill in clean_audit(run).attempts][-1] is Ending.FINISHED
    shutil.rmtree(tmp_path / "machine")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    result = CliRunner().invoke(app, ["audit", f"{ADDRESS}/demo", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert report["finished"]
    assert not report["violations"]
    again = train("another", "demo")
    assert any("finished before: 4 iterations" in note for note in again.notes), again


def release(server: BucketServer) -> None:
    """What a minute without a renewal does."""
    head = "runs/demo/head.json"
    held = json.loads(server.content(head))
    server.client.put_object(Bucket=BUCKET, Key=head, Body=json.dumps(held | {"released": True}))
