"""The exploration benchmark's arithmetic: rankings, variances of chosen groups, curves and targets."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest
from benchmarks import _exploration_curves as lines
from benchmarks import _exploration_figures as figures
from benchmarks import exploration

from spotlight.scheduler.policies.selection import SelectionPolicy


def test_a_figures_spread_is_over_the_runs_that_have_it() -> None:
    found = figures.spread([1.0, None, 3.0, math.nan])
    assert (found.mean, found.runs) == (2.0, 2)
    assert found.stderr == pytest.approx(statistics.stdev([1, 3]) / math.sqrt(2))
    assert figures.spread([5.0]).as_json() == {"mean": 5.0, "stderr": None, "runs": 1}
    assert figures.spread([None]).as_json() == {"mean": None, "stderr": None, "runs": 0}


def test_previews_that_rank_as_regenerated_ones_are_perfect_and_opposite_ones_the_reverse() -> None:
    realised = [[0.1, 0.5, 0.9, 0.3], [0.2, 0.2, 0.2, 0.2]]  # the second prompt tells nothing
    same = figures.fidelity_figures(realised, realised)
    assert same == pytest.approx({"tau": 1, "rho": 1, "top_quarter": 1, "bottom_quarter": 1})
    opposite = figures.fidelity_figures([[-value for value in row] for row in realised], realised)
    assert opposite == pytest.approx({"tau": -1, "rho": -1, "top_quarter": 0, "bottom_quarter": 0})


def test_variance_grows_with_what_previews_know_up_to_the_best_there_is() -> None:
    draw = random.Random(0)
    realised = [[draw.gauss(0, 1) for _ in range(32)] for _ in range(40)]
    noisy = [[value + draw.gauss(0, 1) for value in row] for row in realised]
    blind = [[draw.gauss(0, 1) for _ in row] for row in realised]
    policy = SelectionPolicy.MAX_VARIANCE
    found = [figures.variance_figures(x, realised, 32, 8, policy) for x in (blind, noisy, realised)]
    blind_gain, noisy_gain, best_gain = (one["gain"] for one in found)
    assert blind_gain == pytest.approx(1, abs=0.15)
    assert blind_gain + 0.3 < noisy_gain < best_gain - 0.3
    assert found[2]["chosen"] == found[2]["best"]
    fewer = figures.variance_figures(realised, realised, 16, 8, policy)
    assert fewer["gain"] < best_gain


def test_prompts_without_contrast_take_random_seeds_and_count_as_such() -> None:
    flat, realised = [[0.5] * 6], [[0.0, 1.0, 0.0, 1.0, math.nan, 1.0]]
    found = figures.variance_figures(flat, realised, 5, 2, SelectionPolicy.MAX_VARIANCE)
    assert (found["flat"], found["gain"], found["reward_shift"]) == (1, 1, 0)


def test_curves_are_smoothed_and_reach_targets_between_evaluations() -> None:
    curve = {0: 0.4, 5: 0.6, 10: 0.8, 15: 0.8}
    assert lines.smoothed(curve) == pytest.approx({0: 1.4 / 3, 5: 0.6, 10: 0.75, 15: 0.8})
    assert lines.iterations_to(0.7, curve) == pytest.approx(7.5)
    assert lines.iterations_to(0.3, curve) == 0
    assert lines.iterations_to(0.9, curve) is None
    assert lines.iterations_to(0.5, {0: 0.6, 5: 0.4, 10: 0.6}) == pytest.approx(7.5), "it stays from there on"
    assert lines.areas({0: 0.0, 10: 1.0}) == 0.5
    assert lines.seconds_at(0, [3.0, 5.0]) == 0
    assert lines.seconds_at(1.5, [3.0, 5.0]) == 4
    assert lines.seconds_at(2, [3.0, 5.0]) == 5
    assert lines.seconds_at(4, [3.0, 5.0]) == 10


SIZES = exploration.Sizes(
    iterations=4,
    prompts=2,
    group_size=2,
    rollout_steps=5,
    learning_rate=1e-3,
    evaluate_every=2,
    evaluation_images=1,
    seeds_per_prompt=4,
    preview_steps=5,
    policy="max_variance",
    warmup=2,
    stale=(0, 1),
    steps=(4,),
    pool=4,
    reserved=1,
    spot=1,
    uptime_min=0.0,
    overrides=(),
)


def test_conditions_are_compared_where_they_are_as_good_as_the_control() -> None:
    def run(*scores: float) -> figures.Tree:
        validation = {str(2 * at): {"graded": score} for at, score in enumerate(scores)}
        return {"validation": validation, "exploration": [], "grad_norm": [None, 1.0]}

    clock = {"iteration_ends_s": [10.0, 20.0, 30.0, 40.0], "iteration_usd": 0.5, "preview_share": None}
    curves = {
        "none": {0: run(0.2, 0.4, 0.6), 1: run(0.2, 0.4, 0.6)},
        "critical_path": {0: run(0.2, 0.6, 1.0), 1: run(0.2, 0.6, 1.0)},
        "idle": {0: run(0.2, 0.2, 0.2), 1: run(0.2, 0.2, 0.2)},
    }
    found = exploration.curve_figures(curves, dict.fromkeys(curves, clock), SIZES, "graded")
    assert found["conditions"]["critical_path"]["height_gain"]["mean"] == pytest.approx(0.2)
    whole = found["equal_scores"][-1]
    assert (whole["after"], whole["target"]) == (
        4,
        pytest.approx(lines.smoothed({0: 0.2, 2: 0.4, 4: 0.6})[4]),
    )
    plain, sooner, idle = whole["conditions"].values()
    assert plain["iterations"] == pytest.approx({"value": 4, "low": 4, "high": 4})
    assert plain["seconds"]["value"] == pytest.approx(40)
    assert plain["dollars"]["value"] == pytest.approx(2)
    assert sooner["fewer"]["value"] == pytest.approx(4 / sooner["iterations"]["value"])
    assert sooner["fewer"]["low"] > 1
    assert (idle["reached"], idle["runs"], idle["iterations"]["value"], idle["fewer"]["value"]) == (
        0,
        2,
        None,
        0,
    )
    assert all(table.row_count for table in lines.curve_tables(found))


def test_intervals_widen_with_the_spread_of_runs() -> None:
    def fewer(noise: float) -> float:
        draw = random.Random(1)
        slopes = {
            name: {seed: rate + draw.gauss(0, noise) for seed in range(6)} for name, rate in RATES.items()
        }
        runs = {
            name: {seed: {at: at * slope for at in range(0, 21, 5)} for seed, slope in each.items()}
            for name, each in slopes.items()
        }
        clocks = {name: {"iteration_ends_s": [1.0], "iteration_usd": 1.0} for name in runs}
        found = lines.at_equal_score(runs, clocks, 10.0)["conditions"]["idle"]["fewer"]
        assert found["low"] <= found["value"] <= found["high"]
        return float(found["high"] - found["low"])

    assert fewer(0.0) == pytest.approx(0)
    assert fewer(0.002) > 0.05


RATES = {"none": 0.01, "idle": 0.02}


def test_the_file_keeps_what_is_measured_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "made" / "exploration.json"
    record = exploration.Record(path, SIZES)
    made = record.once("pools", "0", lambda: {"made": 1})
    assert made["made"] == 1
    again = exploration.Record(path, SIZES)
    assert again.once("pools", "0", lambda: {"made": 2}) == made
    content = json.loads(path.read_text())
    content["settings"]["pool"] = 9
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"other settings \(pool\)"):
        exploration.Record(path, SIZES)


def test_idle_slots_are_simulated_with_and_without_exploration() -> None:
    plain, idle = (exploration.simulate_strategy(SIZES, name, 4) for name in ("none", "idle"))
    assert len(plain["iteration_ends_s"]) == len(idle["iteration_ends_s"]) == 4
    assert plain["preview_share"] is None
    assert 0 <= idle["spot_idle_share"] < plain["spot_idle_share"] <= 1
