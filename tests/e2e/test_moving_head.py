"""A head that dies with its disk five times in a run, and is started elsewhere; nodes follow it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_job import Job, clean_audit, learner_digest, lora
from moving_head import Machine, Machines, may_hide
from ray_job import LOOK_S, ask
from test_bucket_run import release
from test_ray_run import LIMITS, SMALL, trained, validations
from tests.bucket_server import BUCKET, BucketServer, bucket_server

from spotlight.store.ledger.ledger_schema import Ending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not may_hide(), reason="this user may not hide a folder from a process"),
]
PATIENCE_S = 600.0
KILLS = 5
RUN = (
    *(*SMALL, f"iterations={KILLS + 1}", f"evaluation.every={KILLS + 1}", "rollout.batch_size=1"),
    *("checkpoint.every=1", "rewards=[{name: jpeg_size}]"),
)
FLEET = "fleet.driver=ray", "fleet.learner_placement=spot", "fleet.head=any", "fleet.drain_margin_s=2"
STEPS = "SELECT 1 FROM optimizer_steps"


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


def work_of(cache: Path) -> Path:
    return cache / "bucket" / "s3" / BUCKET / "runs" / "work" / "demo"


def wait_for_steps(head: Machine, run: Path, rows: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(ask(run, STEPS)) < rows:
        assert head.process.poll() is None, f"ended before {rows} steps:\n{head.printed}"
        assert time.monotonic() < end_s, f"no {rows} steps:\n{head.printed}"
        time.sleep(LOOK_S)


def test_a_run_whose_head_dies_with_its_disk_five_times_ends_as_if_nothing_had_been(
    job: Job, server: BucketServer, tmp_path: Path
) -> None:
    machines = Machines(f"{server.address}/demo", tmp_path, server.environment, tmp_path / "token")
    disks = tmp_path / "disks"
    disks.mkdir()
    with machines.follower(disks) as follower:
        for number in range(KILLS + 1):
            disk = disks / str(number)
            run, places = work_of(disk), (f"runs_dir={server.address}", f"cache_dir={disk}")
            with machines.head(number, job.arguments("demo", *RUN, *FLEET, *places)) as head:
                if number == KILLS:
                    assert head.process.wait(PATIENCE_S) == 0, head.printed
                    break
                wait_for_steps(head, run, number + 1)
                held = json.loads(server.content("runs/demo/head.json"))
            assert held["address"] in head.arguments[-1]
            shutil.rmtree(disk)
            release(server)
        assert follower.process.wait(PATIENCE_S) == 0, follower.printed
    assert follower.printed.count("joining") == KILLS + 1
    assert not list(run.glob("attempts/learner-*")), "the learner saw the head's disk"
    report = clean_audit(run, LIMITS)
    assert len(report.attempts) > KILLS / 2, "those of which the ledger reached the bucket"
    assert report.attempts[-1].ended is Ending.FINISHED
    assert lora(run)

    job.train("never-killed", *RUN)
    straight = job.root / "never-killed"
    assert validations(run) == validations(straight)
    assert trained(run) == trained(straight)
    assert learner_digest(run) == learner_digest(straight)
