"""A disk that turns read-only is named; whatever it, or a power cut, leaves is a run that can be finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from fragile_disk import fragile_disk, turn_read_only
from main_job import (
    NFT,
    POWER_CUT,
    READ_ONLY,
    At,
    Job,
    Straight,
    clean_audit,
    lora,
    outcome,
    run_process,
)
from ray_job import running
from test_ray_run import RAY, SMALL
from tests.power_cut import watched, write_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WITH_CURVES = (*NFT, "metrics.tensorboard=true")
TREES = 16
"""Of what cuts leave, evenly spaced: test_power_cut.py takes every one, of a run without a model."""
MOMENTS = (
    At("work rollout", 5),
    At("os.rename /images/tiles", 7),
    At("os.mkdir /checkpoints/.writing", 2),
    At("os.rename /checkpoints/0", 2),
    At("os.rename /checkpoints/latest", 3),
    At("os.rename /images/before-after"),
    At("os.rename /lora"),
    At("os.rename /summary"),
)


@pytest.mark.parametrize("what", [READ_ONLY, POWER_CUT], ids=["read-only", "power-cut"])
def test_a_run_is_finished_after_its_disk_failed(
    job: Job, straight: Straight, tmp_path: Path, what: int
) -> None:
    expected = straight("diffusion-nft with EMA")[1]
    for number, moment in enumerate(MOMENTS):
        with fragile_disk(tmp_path / f"disk-{number}") as disk:
            if disk is None:
                pytest.skip("this user may not mount a disk")
            arguments = [*job.arguments("fragile", *WITH_CURVES), f"runs_dir={disk.path}"]
            answer = tmp_path / "answer.json"
            ended = run_process(arguments, At(moment.label, moment.count, what), answer=answer)
            if what == READ_ONLY:
                assert ended.error is not None, moment
                assert ended.error.startswith(("StoreError: ", "ModelError: ")), (moment, ended.error)
                assert "Read-only file system" in ended.error, (moment, ended.error)
                assert "the disk is read-only" in ended.error or "ModelError" in ended.error
                assert str(disk.path) in ended.error
            disk.repair()
            ended = run_process(arguments, answer=answer)
            assert ended.finished, (moment, ended)
            assert outcome(disk.path / "fragile") == expected, moment
            assert (disk.path / "fragile/images/before-after.png").stat().st_size > 0
            clean_audit(disk.path / "fragile")


def test_on_a_cluster_a_read_only_disk_is_one_error(job: Job, tmp_path: Path) -> None:
    with fragile_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("this user may not mount a disk")
        arguments = [*job.arguments("fragile", *SMALL, *RAY), f"runs_dir={disk.path}"]
        run = disk.path / "fragile"
        with running(tmp_path / "out", arguments) as process:
            process.run = run
            process.wait_for("SELECT 1 FROM optimizer_steps", 1)
            turn_read_only(disk.path)
            assert process.end() == 1
            last = process.printed[process.printed.index("Error: ") :]
            assert "Traceback" not in process.printed, process.printed
            assert "the disk is read-only" in last, process.printed
            assert str(run) in last


def test_a_run_is_finished_from_what_a_power_cut_leaves_at_its_writes(
    job: Job, straight: Straight, tmp_path: Path
) -> None:
    expected = straight("diffusion-nft with EMA")[1]
    root = tmp_path / "runs"
    root.mkdir()
    with watched(root) as disk:
        job.train("cut", *WITH_CURVES, f"runs_dir={root}")
    trees = list(disk.left)
    assert len(trees) > 100
    for number in range(0, len(trees), len(trees) // TREES):
        left = write_tree(trees[number], tmp_path / str(number))
        recorded = job.train("cut", *WITH_CURVES, f"runs_dir={left}")
        assert recorded.result is not None
        assert recorded.result.finished, (number, recorded.error)
        assert outcome(left / "cut") == expected, number
        assert lora(left / "cut")
        assert (left / "cut/images/before-after.png").stat().st_size > 0
        clean_audit(left / "cut")
