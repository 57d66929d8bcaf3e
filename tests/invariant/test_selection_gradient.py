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

from spotlight.algorithms.advantages import advantages
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.scheduler.policies.selection import SelectionPolicy, select

THETA = (0.0, 0.5)
TRUTH = (1.0, 1.0)
POOL, GROUP, TRIALS = 32, 8, 2000
CENTRED = AdvantageConfig(std="group", epsilon=1e9, clip=1e9)  # what is left of it is centring
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


def estimate(policy: SelectionPolicy, *, noise: float = 1.0) -> Found:
    draws = [_gradient(seed, policy, noise) for seed in range(TRIALS)]
    columns = list(zip(*draws, strict=True))
    deviation = tuple(statistics.stdev(column) for column in columns)
    return Found(
        tuple(statistics.mean(column) for column in columns),  # type: ignore[arg-type]
        tuple(one / math.sqrt(TRIALS) for one in deviation),  # type: ignore[arg-type]
        deviation,  # type: ignore[arg-type]
    )


def _gradient(seed: int, policy: SelectionPolicy, noise: float) -> Vector:
    source = random.Random(seed)
    z = [(source.gauss(0, 1), source.gauss(0, 1)) for _ in range(POOL)]
    rewards = [THETA[0] + a + (THETA[1] + b) ** 2 for a, b in z]
    previews = {place: reward + source.gauss(0, noise) for place, reward in enumerate(rewards)}
    chosen = select(previews, GROUP, policy, draw_seed=seed)
    group = [rewards[place] for place in chosen.seeds]
    ((*scaled,),) = advantages([[{"r": reward} for reward in group]], {"r": 1.0}, CENTRED)
    factors = [a * CENTRED.epsilon for a in scaled]
    one, other = (
        sum(factor * z[place][axis] for factor, place in zip(factors, chosen.seeds, strict=True)) / GROUP
        for axis in (0, 1)
    )
    return one, other


def test_random_groups_shrink_it_by_the_baseline_alone() -> None:
    """A baseline that holds the sample itself: (K - 1) / K, as in GRPO."""
    assert estimate(SelectionPolicy.RANDOM).equals(TRUTH, (GROUP - 1) / GROUP)


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
