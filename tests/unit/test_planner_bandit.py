"""The bandit beats what does not adapt, on arms whose worth drifts; and its state is all in its snapshot."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.policies.exploration.bandit import Arm, DiscountedUCB, arm_grid
from spotlight.scheduler.policies.exploration.decayed_mean import DecayedMean

ARMS = arm_grid((8, 16, 32), (4, 8))
ROUNDS, RUNS, NOISE = 300, 12, 0.25

Worth = Callable[[Arm, int], float]
Player = Callable[[Worth, random.Random], list[Arm]]


def sliding(arm: Arm, at: int) -> float:
    """The best arm changes gradually, so that each of three is best for a while."""
    return math.cos(2 * math.pi * (at / ROUNDS - ARMS.index(arm) / len(ARMS)))


def broken(arm: Arm, at: int) -> float:
    """What was best becomes worst at one blow, and the other way round."""
    place = ARMS.index(arm) / (len(ARMS) - 1)
    return place if at < ROUNDS // 2 else 1 - place


def by_ucb(worth: Worth, source: random.Random) -> list[Arm]:
    bandit = DiscountedUCB(ARMS, alpha=0.5, discount=0.93)
    played = []
    for at in range(ROUNDS):
        arm = bandit.choose(ARMS, bandit.estimates())
        bandit.learn(arm, worth(arm, at) + source.gauss(0, NOISE))
        played.append(arm)
    return played


def by_epsilon(worth: Worth, source: random.Random) -> list[Arm]:
    sums = {arm: [0.0, 0] for arm in ARMS}
    played = []
    for at in range(ROUNDS):
        untried = [arm for arm in ARMS if not sums[arm][1]]
        if untried:
            arm = untried[0]
        elif source.random() < 0.1:
            arm = source.choice(ARMS)
        else:
            arm = max(ARMS, key=lambda arm: sums[arm][0] / sums[arm][1])
        sums[arm][0] += worth(arm, at) + source.gauss(0, NOISE)
        sums[arm][1] += 1
        played.append(arm)
    return played


def at_random(worth: Worth, source: random.Random) -> list[Arm]:
    return [source.choice(ARMS) for _ in range(ROUNDS)]


def best_fixed(worth: Worth, source: random.Random) -> list[Arm]:
    return [max(ARMS, key=lambda arm: sum(worth(arm, at) for at in range(ROUNDS)))] * ROUNDS


def regret(player: Player, worth: Worth) -> float:
    """A round's mean loss against knowing the best arm of each round."""
    lost = 0.0
    for run in range(RUNS):
        played = player(worth, random.Random(run))
        lost += sum(max(worth(arm, at) for arm in ARMS) - worth(played[at], at) for at in range(ROUNDS))
    return lost / RUNS / ROUNDS


@pytest.mark.parametrize("worth", [sliding, broken])
def test_less_is_lost_than_by_the_best_fixed_arm_epsilon_greedy_or_chance(worth: Worth) -> None:
    ours = regret(by_ucb, worth)
    others = {player.__name__: regret(player, worth) for player in (best_fixed, by_epsilon, at_random)}
    print(worth.__name__, f"ours {ours:.3f}", others)
    assert ours < 0.75 * min(others.values())


def test_without_drift_the_best_arm_is_found_and_kept() -> None:
    source = random.Random(0)
    bandit = DiscountedUCB(ARMS, alpha=0.5, discount=0.99)
    played = []
    for _ in range(200):
        arm = bandit.choose(ARMS, bandit.estimates())
        bandit.learn(arm, ARMS.index(arm) / 5 + source.gauss(0, 0.1))
        played.append(arm)
    assert set(played[:6]) == set(ARMS), "each is tried once before any is tried twice"
    assert played[100:].count(ARMS[-1]) > 85


def test_neighbours_share_what_is_learnt() -> None:
    lone, shared = DiscountedUCB(ARMS), DiscountedUCB(ARMS, sharing=0.5)
    for bandit in (lone, shared):
        bandit.learn(Arm(16, 4), 1.0)
    assert lone.estimates()[Arm(32, 4)].mean is None
    beside, further = shared.estimates()[Arm(32, 4)], shared.estimates()[Arm(32, 8)]
    assert (beside.mean, beside.plays, further.plays) == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(("sharing", "tries"), [(0.0, 9), (0.3, 2)])
def test_arms_near_one_that_was_played_need_no_try(sharing: float, tries: int) -> None:
    """What ``docs/howto/explore-seeds.md`` tells of the default: one and two steps away."""
    bandit = DiscountedUCB(arm_grid((8, 16, 32), (4, 8, 10)), sharing=sharing)
    tried = 0
    while None in {estimate.mean for estimate in bandit.estimates().values()}:
        bandit.learn(bandit.choose(bandit.arms, bandit.estimates()), 1.0)
        tried += 1
    assert tried == tries


@given(
    plays=st.lists(st.tuples(st.sampled_from(ARMS), st.floats(-5, 5)), max_size=30), cut=st.integers(0, 30)
)
def test_a_restored_bandit_decides_as_the_old_one(plays: list[tuple[Arm, float]], cut: int) -> None:
    straight = DiscountedUCB(ARMS, sharing=0.3)
    resumed = DiscountedUCB(ARMS, sharing=0.3)
    for at, (arm, reward) in enumerate(plays):
        if at == cut:
            state = json.loads(json.dumps(resumed.snapshot()))
            resumed = DiscountedUCB(ARMS, sharing=0.3)
            resumed.load(state)
        straight.learn(arm, reward)
        resumed.learn(arm, reward)
    assert straight.estimates() == resumed.estimates()


def test_what_no_planner_can_use_is_refused() -> None:
    for settings in ({"alpha": -1.0}, {"discount": 0.0}, {"sharing": 1.0}):
        with pytest.raises(ValueError, match="expected alpha"):
            DiscountedUCB(ARMS, **settings)
    with pytest.raises(ValueError, match="finite"):
        DiscountedUCB(ARMS).learn(ARMS[0], math.nan)
    with pytest.raises(ValueError, match="32x6"):
        Arm.parse("many")
    with pytest.raises(ValueError, match=r"unit\.2: Field required"):
        DecayedMean.read({"unit": [1, 2]}, "unit")
