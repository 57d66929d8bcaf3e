"""What choosing seeds does to a policy gradient that is known.

x = theta + z with z standard normal, in two dimensions. The gradient of the expected reward x[0] + x[1]² at
theta = (0, 1/2) is (1, 1), and the score of a sample is z. Groups of 8 are chosen from pools of 32, by
previews that are the reward plus noise of variance 1.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

import pytest

from spotlight.algorithms.advantages import advantages
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.scheduler.exploration.selection import SelectionPolicy, select

THETA = (0.0, 0.5)
TRUTH = (1.0, 1.0)
POOL, GROUP, TRIALS = 32, 8, 2000
CENTRED = AdvantageConfig(std="group", epsilon=1e9, clip=1e9)  # what is left of it is centring and weighting
Vector = tuple[float, float]


@dataclass(frozen=True)
class Found:
    """Of an estimator: mean, its standard error, and one draw's deviation, by coordinate."""

    mean: Vector
    error: Vector
    deviation: Vector

    @property
    def signal(self) -> float:
        """Length of the mean over that of the deviation."""
        return math.hypot(*self.mean) / math.hypot(*self.deviation)

    @property
    def angle_deg(self) -> float:
        return math.degrees(math.atan2(self.mean[1], self.mean[0])) - 45

    def equals(self, truth: Vector, scale: float = 1.0) -> bool:
        return all(
            abs(mean - scale * true) < 4 * error
            for mean, true, error in zip(self.mean, truth, self.error, strict=True)
        )


def estimate(
    policy: SelectionPolicy, *, drawn: int = 0, undo: bool = False, centred: bool = True, noise: float = 1.0
) -> Found:
    draws = [_gradient(seed, policy, drawn, undo, centred, noise) for seed in range(TRIALS)]
    columns = list(zip(*draws, strict=True))
    deviation = tuple(statistics.stdev(column) for column in columns)
    return Found(
        tuple(statistics.mean(column) for column in columns),  # type: ignore[arg-type]
        tuple(one / math.sqrt(TRIALS) for one in deviation),  # type: ignore[arg-type]
        deviation,  # type: ignore[arg-type]
    )


def _gradient(
    seed: int, policy: SelectionPolicy, drawn: int, undo: bool, centred: bool, noise: float
) -> Vector:
    source = random.Random(seed)
    z = [(source.gauss(0, 1), source.gauss(0, 1)) for _ in range(POOL)]
    rewards = [THETA[0] + a + (THETA[1] + b) ** 2 for a, b in z]
    previews = {place: reward + source.gauss(0, noise) for place, reward in enumerate(rewards)}
    chosen = select(previews, GROUP, policy, draw_seed=seed, kept_at_random=drawn)
    weights = [1.0] * GROUP
    if undo:
        assert chosen.inclusion is not None
        weights = [GROUP / POOL / chance for chance in chosen.inclusion]
    group = [rewards[place] for place in chosen.seeds]
    if centred:
        ((*scaled,),) = advantages([[{"r": reward} for reward in group]], {"r": 1.0}, CENTRED, [weights])
        factors = [a * CENTRED.epsilon for a in scaled]
    else:
        factors = [weight * reward for weight, reward in zip(weights, group, strict=True)]
    one, other = (
        sum(factor * z[place][axis] for factor, place in zip(factors, chosen.seeds, strict=True)) / GROUP
        for axis in (0, 1)
    )
    return one, other


RANDOMISED = [
    (SelectionPolicy.RANDOM, 0),
    (SelectionPolicy.PROPORTIONAL, 0),
    (SelectionPolicy.MAX_VARIANCE, 4),
    (SelectionPolicy.TOP, 4),
]


@pytest.mark.parametrize(("policy", "drawn"), RANDOMISED)
def test_weights_by_inclusion_give_the_true_gradient(policy: SelectionPolicy, drawn: int) -> None:
    assert estimate(policy, drawn=drawn, undo=True, centred=False).equals(TRUTH)


@pytest.mark.parametrize("pool", [4, 8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("policy", "drawn"), [*RANDOMISED[:2], (SelectionPolicy.MAX_VARIANCE, 2)])
def test_weights_hold_where_pools_are_flat(policy: SelectionPolicy, drawn: int, pool: int) -> None:
    """Rewards of 0 or 1, mostly 0: many pools are flat, and flat ones are low."""
    chance, size, means = 0.1, 4, []
    for seed in range(6000):
        source = random.Random(seed)
        rewards = {place: float(source.random() < chance) for place in range(pool)}
        chosen = select(rewards, size, policy, draw_seed=seed, kept_at_random=drawn, draw_flat=True)
        assert chosen.inclusion is not None
        weights = [size / pool / inclusion for inclusion in chosen.inclusion]
        means.append(sum(w * rewards[place] for w, place in zip(weights, chosen.seeds, strict=True)) / size)
    assert abs(statistics.mean(means) - chance) < 4 * statistics.stdev(means) / math.sqrt(len(means))


def test_random_groups_shrink_it_by_the_baseline_alone() -> None:
    """A baseline that holds the sample itself: (K - 1) / K, as in GRPO."""
    assert estimate(SelectionPolicy.RANDOM).equals(TRUTH, (GROUP - 1) / GROUP)


@pytest.mark.parametrize(("policy", "drawn"), RANDOMISED[1:3])
def test_with_a_baseline_weights_keep_the_direction_and_lower_the_noise(
    policy: SelectionPolicy, drawn: int
) -> None:
    plain, weighted = estimate(SelectionPolicy.RANDOM), estimate(policy, drawn=drawn, undo=True)
    assert 0.75 < statistics.mean(weighted.mean) < 1.0
    assert abs(weighted.angle_deg) < 5
    assert weighted.signal > 1.05 * plain.signal


def test_contrast_lengthens_the_gradient_and_tells_it_better() -> None:
    plain, chosen = (estimate(policy) for policy in (SelectionPolicy.RANDOM, SelectionPolicy.MAX_VARIANCE))
    assert not chosen.equals(TRUTH)
    assert min(chosen.mean) > 1.5
    assert chosen.signal > 1.3 * plain.signal
    assert abs(chosen.angle_deg) < 10


def test_the_best_alone_point_elsewhere() -> None:
    assert abs(estimate(SelectionPolicy.TOP, noise=0.0).angle_deg) > 30


def test_previews_without_information_leave_no_bias() -> None:
    """Chosen by noise is chosen at random."""
    assert estimate(SelectionPolicy.MAX_VARIANCE, noise=1e6).equals(TRUTH, (GROUP - 1) / GROUP)
