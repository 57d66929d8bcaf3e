"""Baselines on problems whose policy gradient is known: what is unbiased is, what is biased is as predicted.

A softmax policy over three actions is enumerated: expectations are sums over all outcomes, not samples.
For a Gaussian policy with a linear reward the factors have closed forms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spotlight.algorithms.advantages import advantages, exploration_advantages, slice_advantages
from spotlight.config.sections.algorithm import AdvantageConfig

WEIGHTS = {"quality": 1.0}
LARGE = 1e15
UNSCALED = AdvantageConfig(epsilon=LARGE, clip=1e12)
"""With so much epsilon that the spread does not matter."""
Vector = NDArray[np.float64]
Estimator = Callable[[Sequence[float]], Sequence[float]]
"""Rewards of a group in order of arrival to its advantages."""

LOGITS = np.array([0.5, 1.0, -1.5])
CHANCES = np.exp(LOGITS) / np.exp(LOGITS).sum()
REWARDS = np.array([0.0, 1.0, 6.0])
SCORES = np.eye(3) - CHANCES
"""[action, logit]: gradient of log p of each action."""
TRUE = (CHANCES * REWARDS) @ SCORES
"""Gradient of the mean reward."""
MEAN, VARIANCE = float(CHANCES @ REWARDS), float(CHANCES @ REWARDS**2 - (CHANCES @ REWARDS) ** 2)
K = 4


def rows(values: Sequence[float]) -> list[dict[str, float]]:
    return [{"quality": float(value)} for value in values]


def expected_gradient(estimator: Estimator, size: int = K) -> Vector:
    """Of the mean of advantage times score over a group, exactly."""
    total = np.zeros(3)
    for actions in itertools.product(range(3), repeat=size):
        chance = math.prod(CHANCES[action] for action in actions)
        values = estimator([REWARDS[action] for action in actions])
        total += chance * sum(a * SCORES[action] for a, action in zip(values, actions, strict=True)) / size
    return total


def times_large(found: Sequence[float]) -> list[float]:
    """Advantages with ``UNSCALED``, as if the scale were 1."""
    return [LARGE * advantage for advantage in found]


def in_slices(sizes: Sequence[int], params: AdvantageConfig) -> Estimator:
    def estimate(values: Sequence[float]) -> list[float]:
        found: list[float] = []
        for size in sizes:
            seen = values[: len(found)]
            arrived = values[len(found) : len(found) + size]
            found += slice_advantages(rows(arrived), rows(seen), WEIGHTS, params)
        return found

    return estimate


def cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# -- the baseline --------------------------------------------------------------------------------------


def test_the_groups_own_mean_shortens_the_gradient_by_one_kth() -> None:
    found = expected_gradient(lambda values: times_large(advantages([rows(values)], WEIGHTS, UNSCALED)[0]))
    np.testing.assert_allclose(found, (1 - 1 / K) * TRUE, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(4,), (3, 1)])
def test_slices_that_leave_the_sample_out_are_unbiased(sizes: tuple[int, ...]) -> None:
    found = expected_gradient(lambda values: times_large(in_slices(sizes, UNSCALED)(values)))
    np.testing.assert_allclose(found, TRUE, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 1, 1)])
def test_slices_that_include_it_weigh_early_ones_less_as_predicted(sizes: tuple[int, ...]) -> None:
    """What leaving out fixes: a slice that sees n samples counts 1 - 1/n."""

    def estimate(values: Sequence[float]) -> list[float]:
        found: list[float] = []
        for size in sizes:
            until = values[: len(found) + size]
            found += [value - sum(until) / len(until) for value in until[len(found) :]]
        return found

    ends = list(itertools.accumulate(sizes))
    factor = sum(size / K * (1 - 1 / end) for size, end in zip(sizes, ends, strict=True))
    np.testing.assert_allclose(expected_gradient(estimate), factor * TRUE, rtol=1e-12)
    assert factor < 1 - 1 / K or sizes[0] == K


@given(explored=st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_exploration_of_other_seeds_is_unbiased_whatever_it_found(explored: list[float]) -> None:
    found = expected_gradient(
        lambda values: times_large(exploration_advantages(rows(values), rows(explored), WEIGHTS, UNSCALED)), 1
    )
    np.testing.assert_allclose(found, TRUE, rtol=1e-9, atol=1e-12)


@given(explored=st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_the_spread_of_what_was_explored_scales_the_gradient_and_does_not_bend_it(
    explored: list[float],
) -> None:
    """What runs do: mean and spread are both of the explored seeds."""
    params = AdvantageConfig(epsilon=0.2, clip=1e12)
    found = expected_gradient(
        lambda values: exploration_advantages(rows(values), rows(explored), WEIGHTS, params), 1
    )
    np.testing.assert_allclose(found * (np.std(explored) + 0.2), TRUE, rtol=1e-9, atol=1e-9)


# -- variance ------------------------------------------------------------------------------------------


INFORMATION = float(CHANCES @ (SCORES**2).sum(1))
IDEAL = float(CHANCES @ ((REWARDS - MEAN) ** 2 * (SCORES**2).sum(1)))
"""E |A g|² with the best constant that knows nothing of the sample: the mean reward."""


def by_slice(own: float, others: Sequence[float]) -> float:
    """The first sample's advantage, the others of its group being there."""
    return LARGE * slice_advantages(rows([own]), rows(others), WEIGHTS, UNSCALED)[0]


def by_exploration(own: float, others: Sequence[float]) -> float:
    return LARGE * exploration_advantages(rows([own]), rows(others), WEIGHTS, UNSCALED)[0]


def by_group(own: float, others: Sequence[float]) -> float:
    return LARGE * advantages([rows([own, *others])], WEIGHTS, UNSCALED)[0][0]


def second_moment(advantage: Callable[[float, Sequence[float]], float], others: int) -> float:
    """E |A g|² of one sample, over it and over others like it that it is compared with."""
    total = 0.0
    for own, *actions in itertools.product(range(3), repeat=1 + others):
        chance = math.prod(CHANCES[action] for action in (own, *actions))
        value = advantage(REWARDS[own], [REWARDS[action] for action in actions])
        total += chance * value**2 * float((SCORES[own] ** 2).sum())
    return total


@pytest.mark.parametrize("others", [2, 3, 5])
@pytest.mark.parametrize("baseline", [by_slice, by_exploration])
def test_the_mean_of_others_adds_its_variance(
    baseline: Callable[[float, Sequence[float]], float], others: int
) -> None:
    predicted = IDEAL + VARIANCE / others * INFORMATION
    assert second_moment(baseline, others) == pytest.approx(predicted, rel=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_the_groups_own_mean_adds_as_much_and_shortens_all_by_one_kth(size: int) -> None:
    """R - mean of all K is (1 - 1/K) times R - mean of the K - 1 others."""
    predicted = (1 - 1 / size) ** 2 * (IDEAL + VARIANCE / (size - 1) * INFORMATION)
    assert second_moment(by_group, size - 1) == pytest.approx(predicted, rel=1e-9)


@pytest.mark.parametrize("off", [-1.5, 1.5])
def test_an_explored_mean_that_is_off_adds_its_distance(off: float) -> None:
    """E|A g|² = E|(R - mean) g|² - 2 off E(R - mean)|g|² + (variance / n + off²) E|g|²."""
    cross = float(CHANCES @ ((REWARDS - MEAN) * (SCORES**2).sum(1)))
    found = second_moment(lambda own, others: by_exploration(own, [value + off for value in others]), 2)
    predicted = IDEAL - 2 * off * cross + (VARIANCE / 2 + off**2) * INFORMATION
    assert found == pytest.approx(predicted, rel=1e-9)


# -- the spread ----------------------------------------------------------------------------------------


def test_a_spread_of_others_keeps_the_direction_and_one_with_the_sample_bends_it() -> None:
    params = AdvantageConfig(std="group", epsilon=0.2, clip=1e12)
    own = expected_gradient(lambda values: advantages([rows(values)], WEIGHTS, params)[0])
    assert cosine(own, TRUE) < 0.9  # the rare action that is worth much divides itself away
    left_out = expected_gradient(in_slices((K,), params))
    assert cosine(left_out, TRUE) == pytest.approx(1, abs=1e-12)
    triples = itertools.product(range(3), repeat=K - 1)
    scale = sum(
        math.prod(CHANCES[action] for action in triple) / (float(np.std(REWARDS[list(triple)])) + 0.2)
        for triple in triples
    )
    np.testing.assert_allclose(left_out, scale * TRUE, rtol=1e-9)
    assert scale > 1 / (math.sqrt(VARIANCE) + 0.2)  # Jensen


def test_the_spread_of_fewer_others_weighs_early_slices_more() -> None:
    whole = in_slices((3, 2), AdvantageConfig(epsilon=0.2, clip=1e12))

    def of_slice(index: int) -> float:
        """Length along the true gradient of what the slice's samples give."""

        def estimate(values: Sequence[float]) -> list[float]:
            found = whole(values)
            return [a if (i >= 3) == bool(index) else 0.0 for i, a in enumerate(found)]

        share = (3, 2)[index] / 5
        return float(expected_gradient(estimate, 5) @ TRUE / (TRUE @ TRUE)) / share

    assert of_slice(0) > 1.2 * of_slice(1)


def gaussian_factor(estimator: Estimator, size: int, groups: int) -> tuple[float, float]:
    """Mean of advantage times score with its standard error: R = x ~ N(3, 2²), score (x - 3) / 2²."""
    x = 3 + 2 * np.random.default_rng(0).standard_normal((groups, size))
    found = np.array([np.dot(estimator(row), (row - 3) / 4) / size for row in x])
    return 2 * float(found.mean()), 2 * float(found.std() / math.sqrt(groups))


def test_dividing_by_the_groups_own_spread_shortens_a_gaussian_gradient_as_predicted() -> None:
    """E of the population deviation over the true one: sqrt(2/K) Γ(K/2) / Γ((K-1)/2)."""
    params = AdvantageConfig(std="group", epsilon=1e-12, clip=1e9)
    factor, error = gaussian_factor(lambda row: advantages([rows(row)], WEIGHTS, params)[0], K, 4000)
    predicted = math.sqrt(2 / K) * math.gamma(K / 2) / math.gamma((K - 1) / 2)
    assert predicted == pytest.approx(0.798, abs=1e-3)
    assert abs(factor - predicted) < 4 * error < 0.05


def test_dividing_by_the_spread_of_others_lengthens_a_gaussian_gradient_as_predicted() -> None:
    """E of the true deviation over the unbiased one of n others: sqrt((n-1)/2) Γ((n-2)/2) / Γ((n-1)/2)."""
    size = 9
    params = AdvantageConfig(ddof=1, epsilon=1e-12, clip=1e9)
    factor, error = gaussian_factor(in_slices((size,), params), size, 3000)
    n = size - 1
    predicted = math.sqrt((n - 1) / 2) * math.gamma((n - 2) / 2) / math.gamma((n - 1) / 2)
    assert predicted == pytest.approx(1.126, abs=1e-3)
    assert abs(factor - predicted) < 4 * error < 0.06


# -- the functions -------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(-100, 100), min_size=3, max_size=8)


@given(values=VALUES)
def test_a_whole_group_left_out_is_the_group_mean_times_k_over_k_minus_1(values: list[float]) -> None:
    found = times_large(slice_advantages(rows(values), [], WEIGHTS, UNSCALED))
    mean, size = math.fsum(values) / len(values), len(values)
    expected = [(value - mean) * size / (size - 1) for value in values]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert math.fsum(found) == pytest.approx(0, abs=1e-9 * max(1.0, *map(abs, found)))


@given(values=VALUES, cut=st.integers(1, 7))
def test_order_changes_not_a_bit_and_a_samples_own_reward_does_not_move_its_baseline(
    values: list[float], cut: int
) -> None:
    params = AdvantageConfig(clip=1e12)
    cut = min(cut, len(values) - 1)
    seen, arrived = values[:cut], values[cut:]
    found = slice_advantages(rows(arrived), rows(seen), WEIGHTS, params)
    assert found[::-1] == slice_advantages(rows(arrived[::-1]), rows(seen[::-1]), WEIGHTS, params)
    raised = slice_advantages(rows([arrived[0] + 64, *arrived[1:]]), rows(seen), WEIGHTS, UNSCALED)
    before = slice_advantages(rows(arrived), rows(seen), WEIGHTS, UNSCALED)
    assert LARGE * (raised[0] - before[0]) == pytest.approx(64, rel=1e-6)


def test_rewards_are_combined_by_the_conventions() -> None:
    samples = [{"a": 1.0, "b": 10.0}, {"a": 2.0, "b": 50.0}, {"a": 4.0, "b": 20.0}]
    weights = {"a": 1.0, "b": 0.5}
    each = AdvantageConfig(combine="normalise_each", epsilon=1e-12, clip=100.0)
    found = exploration_advantages(samples[:1], samples[1:], weights, each)
    assert found == pytest.approx([(1 - 3) / 1 + 0.5 * (10 - 35) / 15])
    whole = AdvantageConfig(epsilon=1e-12, clip=1.0)
    assert slice_advantages(samples, [], weights, whole) == [-1.0, 1.0, pytest.approx((14 - 16.5) / 10.5)]


def test_too_few_to_compare_with_is_an_error_with_a_remedy() -> None:
    params = AdvantageConfig()
    with pytest.raises(ValueError, match=r"has 1 other\(s\).*at least 2: make the first slice larger"):
        slice_advantages(rows([1]), rows([2]), WEIGHTS, params)
    with pytest.raises(ValueError, match=r"1 other seeds.*at least 2.*wait for the group"):
        exploration_advantages(rows([1]), rows([2]), WEIGHTS, params)
    with pytest.raises(ValueError, match="expected a finite number"):
        slice_advantages(rows([1, math.nan, 2]), [], WEIGHTS, params)
