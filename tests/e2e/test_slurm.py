"""The launch scripts as jobs of a real SLURM: runs side by side, preemption, ends of every kind.

Needs SLURM of the distribution (``apt install slurmctld slurmd slurm-client munge``).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from main_job import Job, clean_audit
from own_slurm import MISSING, Slurm, own_slurm
from ray_job import ask
from reward_functions import GATE
from test_bucket_run import release
from test_ray_run import LIMITS, SMALL, trained, validations
from tests.bucket_server import BUCKET, BucketServer, bucket_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' '.join(MISSING)}: apt install slurmctld slurmd slurm-client munge"
    ),
]
JOINED = "SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot"
NOTICED = "SELECT 1 FROM incidents WHERE kind = 'node_noticed'"
WORKS = "SELECT 1 FROM leases"
STEPS = "SELECT 1 FROM optimizer_steps"
RUN = (*SMALL, "iterations=2", "pipeline.trainers_generate=false", "fleet.drain_margin_s=1000")


@pytest.fixture(params=[False, True], ids=["process-tree", "control-groups"])
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    with ExitStack() as stack:
        try:
            slurm = stack.enter_context(own_slurm(control_groups=request.param))
        except RuntimeError as error:
            if not request.param:
                raise
            pytest.skip(f"SLURM does not start with control groups here: {error}")
        yield slurm


@pytest.fixture
def plain_slurm() -> Iterator[Slurm]:
    with own_slurm(control_groups=False) as slurm:
        yield slurm


def reserve(slurm: Slurm, job: Job, name: str, gate: Path) -> str:
    """Submit a run whose rewards wait for ``gate``."""
    script = ["--gpus-per-node=1", "launch/slurm-reserved.sbatch"]
    return slurm.submit(*script, "--plain", *job.arguments(name, *RUN), **{GATE: str(gate)})


def add_spot(slurm: Slurm, reserved: str, *options: str, **more: str) -> str:
    """Submit one spot node of a run."""
    script = ["--array=0-0", "--gpus-per-node=1", *options, "launch/slurm-spot.sbatch", reserved]
    return f"{slurm.submit(*script, **more)}_0"


def test_a_run_ends_beside_another_of_the_same_clone(slurm: Slurm, job: Job, tmp_path: Path) -> None:
    gates = tmp_path / "first", tmp_path / "second"
    first, second = (reserve(slurm, job, f"{tmp_path.name}-{gate.name}", gate) for gate in gates)
    runs = [job.root / f"{tmp_path.name}-{gate.name}" for gate in gates]
    spot = add_spot(slurm, first)
    slurm.wait("a node of the first", lambda: len(ask(runs[0], JOINED)) == 1, first, spot)
    gates[0].touch()
    slurm.wait_for_state(first, "COMPLETED", spot)
    assert not slurm.processes(first), "its Ray outlives it"
    slurm.wait_for_state(spot, "COMPLETED", first)
    assert "the run is over" in slurm.log(spot)
    assert not slurm.processes(slurm.shown(spot)["JobId"])
    clean_audit(runs[0], LIMITS)
    late = add_spot(slurm, second)
    slurm.wait("a node of the second", lambda: len(ask(runs[1], JOINED)) == 1, second, late)
    assert len(ask(runs[0], JOINED)) == 1
    slurm.run("scancel", second)
    slurm.wait_for_state(second, "CANCELLED", late)
    slurm.wait("all gone", lambda: not slurm.processes(second), second)
    slurm.wait_for_state(late, "COMPLETED", second)


def test_a_preempted_node_is_told_once_and_does_not_join_again(
    slurm: Slurm, job: Job, tmp_path: Path
) -> None:
    run = job.root / tmp_path.name
    reserved = reserve(slurm, job, tmp_path.name, tmp_path / "never")
    spot = add_spot(slurm, reserved, "--nodelist=n3")
    slurm.wait("at work", lambda: bool(ask(run, WORKS)), reserved, spot)
    urgent = slurm.submit("--partition=urgent", "--nodelist=n3", "--exclusive", "--wrap=sleep 1")
    slurm.wait("noticed", lambda: len(ask(run, NOTICED)) == 1, reserved, spot)
    slurm.wait_for_state(urgent, "COMPLETED", spot, reserved)
    assert slurm.shown(spot)["Restarts"] == "1"
    assert len(ask(run, NOTICED)) == len(ask(run, JOINED)) == 1
    assert slurm.log(spot).count("Ray runtime started") == 1


def test_a_requeued_run_goes_on_with_the_same_node(plain_slurm: Slurm, job: Job, tmp_path: Path) -> None:
    run, gate = job.root / tmp_path.name, tmp_path / "gate"
    reserved = reserve(plain_slurm, job, tmp_path.name, gate)
    spot = add_spot(plain_slurm, reserved)
    plain_slurm.wait("at work", lambda: bool(ask(run, WORKS)), reserved, spot)
    plain_slurm.run("scontrol", "requeue", reserved)
    plain_slurm.wait_for_state(reserved, "PENDING", spot)
    assert not plain_slurm.processes(reserved), "its Ray outlives it"
    plain_slurm.run("scontrol", "update", f"JobId={reserved}", "StartTime=now")
    gate.touch()
    plain_slurm.wait_for_state(reserved, "COMPLETED", spot)
    plain_slurm.wait_for_state(spot, "COMPLETED")
    assert len(ask(run, JOINED)) == 2
    assert "the run is over" in plain_slurm.log(spot)
    clean_audit(run, LIMITS)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


def test_a_requeued_head_whose_disk_is_gone_goes_on_from_its_bucket(
    plain_slurm: Slurm, job: Job, server: BucketServer, tmp_path: Path
) -> None:
    gate, disk = tmp_path / "gate", tmp_path / "disk"
    run = disk / "bucket" / "s3" / BUCKET / "runs" / "work" / "demo"
    places = f"runs_dir={server.address}", f"cache_dir={disk}"
    begun = (*RUN[:-2], "iterations=4", *RUN[-2:], "checkpoint.every=1")
    script = ["--gpus-per-node=1", "launch/slurm-reserved.sbatch", "--plain"]
    arguments = job.arguments("demo", *begun, *places, "fleet.head=any")
    gate.touch()
    reserved = plain_slurm.submit(*script, *arguments, **{GATE: str(gate)}, **server.environment)
    spot = add_spot(plain_slurm, reserved)
    plain_slurm.wait("a step", lambda: len(ask(run, STEPS)) > 0, reserved, spot)
    gate.unlink()
    plain_slurm.wait("a checkpoint in the bucket", lambda: holds_checkpoint(server), reserved, spot)
    plain_slurm.run("scontrol", "requeue", reserved)
    plain_slurm.wait_for_state(reserved, "PENDING", spot)
    shutil.rmtree(disk)
    release(server)
    gate.touch()
    plain_slurm.run("scontrol", "update", f"JobId={reserved}", "StartTime=now")
    plain_slurm.wait_for_state(reserved, "COMPLETED", spot)
    plain_slurm.wait_for_state(spot, "COMPLETED")
    assert len(clean_audit(run, LIMITS).attempts) == 2
    job.train("never-requeued", *begun)
    straight = job.root / "never-requeued"
    assert validations(run) == validations(straight)
    assert trained(run) == trained(straight)


def holds_checkpoint(server: BucketServer) -> bool:
    """Whether a snapshot that is there names one."""
    found = (server.content(name) for name in server.names() if "/snapshots/" in name)
    return any(b"checkpoints/" in content for content in found)


def test_a_run_begins_when_all_reserved_nodes_have_read_the_model(
    plain_slurm: Slurm, job: Job, tmp_path: Path
) -> None:
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    weights = tmp_path / "model" / "transformer" / "slow.safetensors"
    os.mkfifo(weights)  # each node reads it until somebody writes
    words = job.arguments(tmp_path.name, *RUN, "iterations=1", "fleet.learner_ranks=2", "learner.shard=all")
    script = ["--nodes=2", "--gpus-per-node=1", "launch/slurm-reserved.sbatch"]
    reserved = plain_slurm.submit(*script, "--plain", *words, SPOTLIGHT_MODEL=str(weights.parents[1]))
    spot = add_spot(plain_slurm, reserved)
    weights.write_bytes(b"for the head")
    plain_slurm.wait_for_log(reserved, "waiting for 1 further nodes")
    weights.write_bytes(b"for the second node")
    plain_slurm.wait_for_state(reserved, "COMPLETED", spot)
    assert not plain_slurm.processes(reserved)


def test_an_address_where_nothing_listens_is_found_in_seconds(plain_slurm: Slurm) -> None:
    slurm = plain_slurm
    reserved = slurm.submit("--partition=reserved", "--wrap=sleep 600")
    shared = slurm.clone / "runs" / "slurm"
    shared.mkdir(parents=True)
    (shared / "ray_token").write_text("0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for name in ("head", f"{reserved}.head"):
        (shared / name).write_text(f"{address}\n")
    spot = add_spot(slurm, reserved, SPOTLIGHT_WAIT_S="5")
    slurm.wait_for_log(spot, f"no head at {address}")
    slurm.wait_for_state(spot, "FAILED")
