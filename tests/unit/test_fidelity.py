"""Rank correlations are scipy's, and estimates of the whole pool are not fooled by the choice of extremes."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spotlight.scheduler.policies.exploration.evidence import GroupEvidence
from spotlight.scheduler.policies.exploration.fidelity import (
    fidelity,
    hit_rate,
    kendall_tau,
    pool_tau,
    spearman_rho,
    tau_by_slope,
)
from spotlight.scheduler.policies.selection import SelectionPolicy, sample_variance, select

VALUES = st.one_of(st.floats(-5, 5).map(lambda value: round(value, 3)), st.sampled_from([0.0, 0.5, 1.0]))
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=20)


@given(pairs=PAIRS)
def test_correlations_are_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert kendall_tau(x, y) is None
        assert spearman_rho(x, y) is None
        return
    assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-9)
    assert spearman_rho(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)


@given(pairs=PAIRS, data=st.data(), top=st.booleans())
def test_hits_are_counted_over_every_order_of_equals(
    pairs: list[tuple[float, float]], data: st.DataObject, top: bool
) -> None:
    count = data.draw(st.integers(1, len(pairs)))
    x, y = np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])
    found = hit_rate(list(x), list(y), count, top=top)
    assert 0 <= found <= 1 + 1e-12
    assert hit_rate(list(x), list(x + 1), count, top=top) >= found - 1e-9 or len(set(x)) < len(x)
    if len(set(x)) == len(x) and len(set(y)) == len(y):
        sign = -1 if top else 1
        best = [set(np.argsort(sign * values)[:count].tolist()) for values in (x, y)]
        assert found == pytest.approx(len(best[0] & best[1]) / count)


def drawn_group(seed: int, correlation: float, drawn: int) -> tuple[GroupEvidence, float]:
    """A chosen group of 8 out of 32, and the tau of the whole pool."""
    source = random.Random(seed)
    x = {place: source.gauss(0, 1) for place in range(32)}
    y = {p: correlation * v + math.sqrt(1 - correlation**2) * source.gauss(0, 1) for p, v in x.items()}
    found = select(x, 8, SelectionPolicy.MAX_VARIANCE, draw_seed=seed, kept_at_random=drawn)
    group = GroupEvidence(
        32,
        sample_variance(list(x.values())),
        tuple(x[p] for p in found.seeds),
        tuple(y[p] for p in found.seeds),
        drawn,
    )
    tau = kendall_tau(list(x.values()), list(y.values()))
    assert tau is not None
    return group, tau


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_the_pools_tau_is_found_from_chosen_groups(correlation: float) -> None:
    made = [drawn_group(seed, correlation, 2) for seed in range(400)]
    groups, truth = [group for group, _ in made], statistics.mean(tau for _, tau in made)
    by_design, by_slope = pool_tau(groups), tau_by_slope(groups)
    assert by_design == pytest.approx(truth, abs=0.06)
    assert by_slope == pytest.approx(truth, abs=0.03 if correlation else 0.12)
    if correlation == 0.5:
        within = fidelity(groups).group_tau
        assert within is not None
        assert within > truth + 0.1, "within chosen groups the correlation is larger than in the pool"


def test_without_drawn_seeds_the_slope_has_to_do() -> None:
    found = fidelity([drawn_group(seed, 0.8, 0)[0] for seed in range(50)])
    assert (found.sampled, found.tau) == (0, None)
    assert "tau" not in found.as_metrics()
    nothing = fidelity([])
    assert nothing.as_metrics() == {"groups": 0.0, "sampled": 0.0}


def test_worse_than_chance_is_negative() -> None:
    groups = [drawn_group(seed, -0.8, 2)[0] for seed in range(60)]
    found = fidelity(groups)
    assert found.tau is not None
    assert found.tau < -0.3
    assert found.tau_by_slope is not None
    assert found.tau_by_slope < -0.3
