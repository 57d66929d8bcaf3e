"""Iterations to target follow from what exploration brought in the simulated run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.learning_speed import Explored, explored_of, learned_target
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.scenario_sections import CONTRAST_EXPONENT, Exponent, Target

RANDOM = Target(value=200, source="assumed: for a test")
BENCHMARKS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """What an arm of ``python -m benchmarks.exploration`` brought.

    Attributes:
        contrast: variance over random groups, in the run.
        speed: how many times fewer iterations than random seeds needed for 16.
        least, most: of its 90 % interval over run seeds; None: open.
    """

    contrast: float
    speed: float
    least: float
    most: float | None


MEASURED = (SpeedPoint(2.60, 2.61, 1.58, None), SpeedPoint(1.86, 1.84, 1.25, 2.81))
"""Previews by current weights, and by weights one version old."""


def fitted_exponent(points: Sequence[SpeedPoint]) -> Exponent:
    """Least squares of log speed over log contrast, through the origin; ends: the points' widest."""
    logs = [(math.log(point.contrast), math.log(point.speed)) for point in points]
    likely = sum(x * y for x, y in logs) / sum(x * x for x, _ in logs)
    least = min(math.log(point.least) / math.log(point.contrast) for point in points)
    most = max(math.log(point.most) / math.log(point.contrast) for point in points if point.most)
    return least, likely, most


def test_the_points_are_those_of_the_benchmarks_page() -> None:
    row = re.search(r"\| variance over random groups, in the run .*", BENCHMARKS)
    assert row is not None
    assert [float(found) for found in re.findall(r"(\d\.\d+) ±", row[0])] == [
        point.contrast for point in MEASURED
    ]
    current, stale = MEASURED
    assert f", {current.speed} [{current.least}, -] |" in BENCHMARKS
    assert f", {stale.speed} [{stale.least}, {stale.most}] |" in BENCHMARKS


def test_the_default_exponent_is_the_fitted_one() -> None:
    assert fitted_exponent(MEASURED) == pytest.approx(CONTRAST_EXPONENT, abs=0.005)
    least, likely, most = CONTRAST_EXPONENT
    for point in MEASURED:
        assert point.contrast**likely == pytest.approx(point.speed, rel=0.03)
        assert point.contrast**least <= point.least * 1.001
        assert point.most is None or point.contrast**most >= 0.99 * point.most


@given(contrast=st.floats(0.5, 4), coverage=st.floats(0, 1))
def test_more_contrast_and_coverage_never_take_more_iterations(contrast: float, coverage: float) -> None:
    target, why = learned_target(RANDOM, 1.0, Explored(contrast, coverage))
    assert target is not None, why
    assert target.ends[0] <= target.iterations <= target.ends[1]
    more, _ = learned_target(RANDOM, 1.0, Explored(contrast * 1.1, coverage))
    assert more is not None
    assert more.iterations <= target.iterations
    if contrast > 1:
        wider, _ = learned_target(RANDOM, 1.0, Explored(contrast, min(1.0, coverage + 0.1)))
        assert wider is not None
        assert wider.iterations <= target.iterations


def test_without_contrast_or_coverage_it_is_as_with_random_seeds() -> None:
    for explored in (Explored(1.0, 1.0), Explored(3.0, 0.0)):
        target, _ = learned_target(RANDOM, 1.0, explored)
        assert target is not None
        assert target.value == (200, 200, 200)


def test_half_of_the_groups_bring_half_of_the_speed() -> None:
    target, _ = learned_target(RANDOM, 1.0, Explored(2.0, 0.5), (1.0, 1.0, 1.0))
    assert target is not None
    assert target.iterations == math.ceil(200 / 1.5)
    assert "in 50% of the groups" in target.source


@pytest.mark.parametrize(
    ("random", "previews", "explored", "why"),
    [
        (RANDOM, 0.79, Explored(2, 1), "only 79% of the previews"),
        (RANDOM, 1.0, None, "no contrast"),
        (None, 1.0, Explored(2, 1), ""),
    ],
)
def test_nothing_is_promised_without_its_grounds(
    random: Target | None, previews: float, explored: Explored | None, why: str
) -> None:
    target, reason = learned_target(random, previews, explored)
    assert target is None
    assert why in reason


def test_the_last_report_of_an_iteration_counts_and_groups_are_weighted() -> None:
    def report(iteration: int, groups: float, realised: float) -> dict[str, object]:
        return {"iteration": iteration, "contrast": {"groups": groups, "realised": realised, "random": 1.0}}

    reports = [report(1, 9, 9.0), report(1, 1, 1.0), report(2, 3, 3.0), {"iteration": 3, "contrast": {}}]
    assert explored_of(reports, prompts=4, windows=3) == Explored(2.5, 4 / 12)
    assert explored_of([], 4, 3) is None
    assert explored_of(reports, 4, 0) is None


def test_the_simulated_contrast_is_that_of_the_scenarios_group_and_pool() -> None:
    """Small groups of a large pool learn faster than large groups of nearly all that was previewed."""
    calm = ("trace.kind=always_on", "workload.evaluation=null", "run.iterations=4", "run.noise=0")

    def iterations(prompts: int, group: int, pool: int) -> int:
        shape = (f"workload.prompts={prompts}", f"workload.group_size={group}")
        previews = (f"exploration.seeds_per_prompt={pool}", "exploration.steps=20")
        file = load_scenario("paper-512", [*calm, *shape, *previews])
        prepared = prepare(file, ("critical_path",), datetime(2026, 11, 21, tzinfo=UTC))
        target = run_task(SimulationTask(prepared, "critical_path")).outcome.target
        assert target is not None
        return target.iterations

    # The benchmark's own shape, groups of 4 of 16 full previews by current weights, has 2.79 times the
    # variance of random groups; normally distributed rewards, which have no bounds, more.
    assert iterations(32, 4, 16) == pytest.approx(200 / 2.79, rel=0.2)
    assert iterations(8, 16, 20) > 150
