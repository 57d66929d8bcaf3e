"""Whether a run learns, told from its curves; and ``spotlight why``, which says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress
from tests.unit.dashboard_run import make_run
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_dashboard.views.trends import (
    TREND_OF,
    Validated,
    falling_rewards,
    is_worse_than_best,
    trend,
)

REWARDS = st.lists(st.floats(-10, 10), min_size=TREND_OF, max_size=TREND_OF + 20)


@given(REWARDS)
def test_a_trend_is_the_least_squares_line_of_the_newest_values(values: list[float]) -> None:
    found = trend(values)
    assert found is not None
    newest = values[-TREND_OF:]
    line = linregress(np.arange(TREND_OF), newest)
    assert found.end - found.begin == pytest.approx(line.slope * (TREND_OF - 1), abs=1e-9)
    if line.stderr > 1e-6 and abs(line.slope) > 1e-6:
        assert found.strength == pytest.approx(line.slope / line.stderr, rel=1e-4)


def test_too_few_values_and_constants_have_no_trend() -> None:
    assert trend([0.5] * (TREND_OF - 1)) is None
    flat = trend([0.7] * TREND_OF)
    assert flat is not None
    assert flat.strength == 0


def test_noise_is_seldom_taken_for_a_trend() -> None:
    rng = np.random.default_rng(0)
    strengths = [trend(list(rng.normal(0.5, 0.1, TREND_OF))) for _ in range(2000)]
    assert np.mean([each is not None and abs(each.strength) >= 3 for each in strengths]) < 0.012


def test_a_reward_that_falls_while_the_sum_rises_is_named() -> None:
    rng = np.random.default_rng(1)
    up, down, level = (list(slope * np.arange(40) + rng.normal(0, 0.2, 40)) for slope in (0.05, -0.03, 0))
    parts = {"aesthetic": up, "text": down, "level": level}
    assert falling_rewards(up, parts) == ["text"]
    assert falling_rewards(level, parts) == []


def test_only_a_clear_fall_below_the_best_counts() -> None:
    rows = [Validated(0, 0.4, 0.02), Validated(10, 0.8, 0.02), Validated(20, 0.75, 0.02)]
    assert is_worse_than_best(rows) is None
    assert is_worse_than_best([*rows, Validated(30, 0.6, 0.02)]) == rows[1]
    assert is_worse_than_best([Validated(0, 0.4, math.nan), Validated(1, 0.1, math.nan)]) is None
    assert is_worse_than_best(rows[:1]) is None


def changed(run: Path, rewards: dict[str, list[float]], **values: float | None) -> str:
    """Rewrites the training rows of a run, as many as there are rewards."""
    paths = make_run(run)
    (first, *_) = (json.loads(each) for each in paths.metrics.read_text(encoding="utf-8").splitlines())
    rows = [
        {
            **first,
            "iteration": at,
            **{name: each[at] for name, each in rewards.items()},
            "train/loss": 1.0,
            **values,
        }
        for at in range(len(next(iter(rewards.values()))))
    ]
    for row in rows:
        for name in [each for each in row if each.startswith("validation/")]:
            del row[name]
    paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(run)


def why(run: str) -> tuple[int, set[str]]:
    result = CliRunner().invoke(app, ["why", run, "--json"])
    return result.exit_code, {each["name"] for each in json.loads(result.stdout)}


def test_why_says_what_the_dashboard_says(tmp_path: Path) -> None:
    rises = [0.02 * at for at in range(40)]
    falls = [1 - 0.01 * at for at in range(40)]
    wobbles = [0.5 + 0.1 * (-1) ** at for at in range(40)]
    code, names = why(changed(tmp_path / "rises", {"rollout/reward": rises}))
    assert (code, names & {"reward_does_not_rise", "reward_hacked", "epsilon_swamps"}) == (0, set())
    code, names = why(
        changed(tmp_path / "flat", {"rollout/reward": wobbles}, **{"train/grad_rms_over_epsilon": 0.3})
    )
    assert (code, names >= {"reward_does_not_rise", "epsilon_swamps"}) == (0, True)
    hacked = {"rollout/reward": rises, "rollout/text": falls, "rollout/text/strict": falls}
    code, names = why(changed(tmp_path / "hacked", hacked))
    assert (code, "reward_hacked" in names) == (1, True)
    output = CliRunner().invoke(app, ["why", str(tmp_path / "hacked")]).output
    assert "rises while text falls." in output
    assert output.count("rises while") == 1


def test_why_of_nothing_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert result.exit_code == 2
    assert "is no run directory" in result.output
