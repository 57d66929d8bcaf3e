"""The simulator's half of the pipeline benchmark: ceilings are ceilings, and all figures are left."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from benchmarks import _pipeline_simulator as bench


def test_the_ceiling_is_the_published_one() -> None:
    prepared = bench.Setting("Wan2.1", 16, 8, 20, 0.4, True).prepared()
    both_s = bench.shortest_s(prepared, "disaggregated")
    overlapped_s = bench.shortest_s(prepared, "disaggregated+gap")
    training_s = 192 * 8 * 13.6 / 8
    generation_s = 192 * (20 * 3.63 + 12.0 * 480 * 832 / 1e6) / 8
    assert both_s == pytest.approx(generation_s + training_s)
    assert both_s / overlapped_s == pytest.approx(both_s / max(generation_s, training_s))
    helped_s = bench.shortest_s(prepared, "disaggregated+gap+tag")
    assert helped_s == pytest.approx(max(training_s, both_s / 2)), "as many GPUs train as roll out"
    assert bench.shortest_s(prepared, "all_on_demand") == pytest.approx(both_s / 2)


def test_turns_take_time_and_are_not_taken_where_they_take_more_than_they_bring() -> None:
    work = bench.Work(generation_gpu_s=80.0, training_s=4.0, turn_s=1.0, ranks=6, apart=2, rolling=8)
    assert work.overlapping_s(turns=0) == pytest.approx((80 + 6 * 4) / 8)
    assert work.overlapping_s(turns=2) == pytest.approx((80 + 6 * 6) / 8)
    assert work.synchronous_s() == pytest.approx((80 + 6 * 2 * 1) / 8 + 4)
    dear = replace(work, turn_s=1000.0)
    assert dear.overlapping_s(turns=1) == pytest.approx(80 / 2)
    assert dear.synchronous_s() == pytest.approx(80 / 2 + 4)
    colocated = replace(work, ranks=8, apart=0)
    assert colocated.synchronous_s() == pytest.approx(2 * 1 + 80 / 8 + 4)


@pytest.mark.parametrize("model", ["FLUX.1", "HunyuanVideo"])
def test_no_mode_beats_its_ceiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    chosen = ("colocated", "disaggregated", "+gap", "+gap+tsp+tag+tcss", "+tsp", "+tag")
    modes = {name: bench.MODES[name] for name in chosen}
    monkeypatch.setattr(bench, "MODES", modes)
    monkeypatch.setattr(bench, "ITERATIONS", 3)
    setting = bench.Setting(model, 16, 12, 20, 0.4, False)
    (found,) = bench.run_simulator([setting], 1)
    assert {key: found[key] for key in asdict(setting)} == asdict(setting)
    rows = {row["mode"]: row for row in json.loads(json.dumps(found))["modes"]}
    assert set(rows) == set(modes)
    # Over so few iterations what is begun early before the first of them counts too.
    assert all(row["of_ceiling"] < 1.05 for row in rows.values()), "noise aside"
    assert rows["disaggregated"]["over_disaggregated"] == rows["colocated"]["over_colocated"] == 1
    assert rows["+gap"]["over_disaggregated"] > 1.2
    for row in rows.values():
        assert row["of_ceiling"] == pytest.approx(row["over_disaggregated"] / row["ceiling"], rel=0.15)
    assert f"{model}, 12 + 4 H100" in capsys.readouterr().out


def test_settings_are_what_they_say() -> None:
    setting = bench.Setting("Qwen-Image", 32, 24, 40, 0.6, False)
    file = setting.prepared().file
    assert file.cluster.reserved.nodes * file.cluster.reserved.gpus_per_node == 24
    assert file.cluster.spot.nodes * file.cluster.spot.gpus_per_node == 8
    assert (file.workload.steps, file.workload.trained_timesteps) == (40, 24)
    assert not file.workload.resident
    assert replace(setting, resident=True).prepared().file.workload.resident
