"""The benchmark of the simulated cluster does the work it names, and leaves all it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import cluster_scale as bench


@pytest.mark.parametrize("gpus", [12, 1000, 10_000])
@pytest.mark.parametrize("work", ["video", "image"])
def test_every_size_has_its_gpus_and_as_much_work_for_each(work: str, gpus: int) -> None:
    file = bench.scaled(bench.Work(work), gpus, 1.0)
    pools = file.cluster.reserved, file.cluster.spot
    assert sum(pool.nodes * pool.gpus_per_node for pool in pools) == gpus
    assert file.samples / gpus == pytest.approx(bench.SAMPLES_PER_GPU[bench.Work(work)], rel=0.35)
    assert file.rewards.scorers is not None
    assert file.rewards.scorers / gpus == pytest.approx(bench.SCORERS_PER_GPU[bench.Work(work)], rel=0.35)


def test_it_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "scale.json"
    bench.main(
        gpus=[12], work=[bench.Work.VIDEO], hours=2.0, operations=2000, clock=bench.Clock.WALL, json=path
    )
    content = json.loads(path.read_text())
    (scale,) = content["scales"]
    assert scale["simulated_h"] == pytest.approx(2.0)
    assert 18 < scale["gpu_hours"] <= 24
    assert scale["gpu_hours_per_s"] == pytest.approx(scale["gpu_hours"] / scale["seconds"])
    for rate in content["queue"]:
        assert rate["outstanding"] == 10_000
        assert 2000 <= rate["operations"] <= 2000 + 2 * rate["batch"]
    said = capsys.readouterr().out
    assert "GPU-h per s" in said
    assert "pulls + completions per s" in said
