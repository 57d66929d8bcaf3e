"""The benchmark of plans: factors are of the same starts, with ranges, and simulated exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks import plan_table as bench

from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario

SMALL = (
    "workload.prompts=8",
    "workload.group_size=8",
    "workload.evaluation=null",
    "exploration={seeds_per_prompt: 10, steps: 4}",
    "run.noise=0",
    "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60}",
    *(
        f"iterations_to_target.{name}={{value: [40, 50, 60], source: 'assumed: for a test'}}"
        for name in ("reserved_only", "all_on_demand", "disaggregated", "spot_rollout_only")
    ),
    "plan.parts=[gap, tsp]",
    "plan.reserved_nodes=[1]",
    "plan.spot_nodes=[1]",
)


def small(name: str, wishes: Sequence[str], *, starts: int) -> ScenarioFile:
    return load_scenario(name, [*wishes, *SMALL], starts=starts)


def test_factors_have_ranges_and_are_simulated_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "load_scenario", small)
    monkeypatch.setattr(bench, "CLOUDS", ("aws", "azure"))
    path = tmp_path / "table.json"
    bench.main(workload=["paper-512"], deadline_h=[1.0], starts=2, confirm_starts=1, jobs=1, json=path)
    rows = json.loads(path.read_text())["rows"]
    goals = [row for row in rows if "faster" in row]
    assert [row["place"] for row in goals] == ["aws", "azure", bench.EVERYWHERE]
    for row in goals:
        for name in ("faster", "cheaper"):
            least, most = row[name]["ends"]
            assert least < row[name]["p50"] < most
            assert row[name]["exactly"] == pytest.approx(row[name]["p50"], rel=0.15)
    best = [row for row in rows if row.get("what", "").startswith("best at")]
    assert all(row["exact_usd"] == pytest.approx(row["usd_p50"], rel=0.1) for row in best)
    said = capsys.readouterr().out
    assert f"{goals[0]['faster']['p50']:.1f}x (" in said
    assert f"; exactly {goals[0]['cheaper']['exactly']:.1f}x) of 7x" in said
