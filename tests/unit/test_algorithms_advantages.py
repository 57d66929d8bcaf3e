from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.algorithms.advantages import advantages
from spotlight.config.sections.algorithm import AdvantageConfig

VALUES = st.floats(-100, 100, allow_subnormal=False)
GROUPS = st.lists(st.lists(VALUES, min_size=1, max_size=9), min_size=1, max_size=6)
PARAMS = st.builds(
    AdvantageConfig,
    std=st.sampled_from(["global", "group"]),
    ddof=st.sampled_from([0, 1]),
    epsilon=st.sampled_from([1e-4, 1e-8]),
    clip=st.just(1e9),
    combine=st.sampled_from(["sum", "normalise_each"]),
)


def one_reward(groups: list[list[float]], params: AdvantageConfig) -> list[list[float]]:
    return advantages([[{"r": value} for value in group] for group in groups], {"r": 1.0}, params)


@given(GROUPS, PARAMS)
def test_groups_have_mean_zero_and_agree_with_numpy(
    groups: list[list[float]], params: AdvantageConfig
) -> None:
    result = one_reward(groups, params)
    everything = np.concatenate([np.array(group) for group in groups])
    for group, values in zip(result, groups, strict=True):
        pool = everything if params.std == "global" else np.array(values)
        spread = pool.std(ddof=params.ddof) if len(pool) > 1 else 0.0
        expected = (np.array(values) - np.mean(values)) / (spread + params.epsilon)
        # Equal values: numpy's own rounding of the mean over a tiny epsilon is not worth reproducing.
        np.testing.assert_allclose(group, expected, rtol=1e-6, atol=1e-5)
        # A mean that is no float64 is off by up to half a unit in the last place, for each value.
        rounding = len(values) * np.spacing(max(map(abs, values))) / (spread + params.epsilon)
        assert abs(math.fsum(group)) <= 1e-8 * (1 + max(map(abs, group))) + rounding


@given(GROUPS, PARAMS, st.randoms())
def test_order_changes_not_a_bit(
    groups: list[list[float]], params: AdvantageConfig, rng: random.Random
) -> None:
    labelled = [[(g, i) for i in range(len(group))] for g, group in enumerate(groups)]
    rng.shuffle(labelled)
    for group in labelled:
        rng.shuffle(group)
    shuffled = one_reward([[groups[g][i] for g, i in group] for group in labelled], params)
    original = one_reward(groups, params)
    for group, values in zip(labelled, shuffled, strict=True):
        assert values == [original[g][i] for g, i in group]


@given(st.floats(0.1, 50), st.floats(-50, 50), PARAMS)
def test_an_affine_change_of_the_rewards_changes_nothing(
    scale: float, shift: float, params: AdvantageConfig
) -> None:
    groups = [[0.0, 1.0, 0.25], [2.0, 5.0, 3.0, 3.5]]
    tiny = params.model_copy(update={"epsilon": 1e-12})
    changed = one_reward([[scale * value + shift for value in group] for group in groups], tiny)
    for a, b in zip(one_reward(groups, tiny), changed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


def test_equal_rewards_and_lone_survivors_get_exactly_zero() -> None:
    for std in ("global", "group"):
        for ddof in (0, 1):
            params = AdvantageConfig(std=std, ddof=ddof, epsilon=1e-8)  # type: ignore[arg-type]
            assert one_reward([[0.1, 0.1, 0.1], [0.7]], params) == [[0, 0, 0], [0]]
            assert one_reward([[0.1]], params) == [[0]]


def test_clipping_is_last_and_at_five() -> None:
    result = one_reward([[0.0] * 99 + [1.0]], AdvantageConfig(std="group"))
    assert max(result[0]) == 5.0
    assert -5.0 < min(result[0]) < 0


def test_normalising_each_reward_keeps_a_large_scale_from_drowning_a_small_one() -> None:
    samples = [{"big": 0.0, "small": 1.0}, {"big": 1000.0, "small": 0.0}]
    weights = {"big": 1.0, "small": 2.0}
    summed = advantages([samples], weights, AdvantageConfig(std="group", epsilon=1e-12))
    each = advantages(
        [samples], weights, AdvantageConfig(std="group", epsilon=1e-12, combine="normalise_each")
    )
    np.testing.assert_allclose(summed[0], [-1, 1])
    np.testing.assert_allclose(each[0], [-1 + 2, 1 - 2])


def test_weights_apply_to_the_sum() -> None:
    samples = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    assert advantages([samples], {"a": 1.0, "b": 1.0}, AdvantageConfig()) == [[0, 0]]
    assert advantages([samples], {"a": 2.0, "b": 1.0}, AdvantageConfig())[0][0] > 0.9


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[]], "group 0 has no samples"),
        ([[{"r": 1.0}], [{"r": math.nan}]], "reward 'r' of sample 0 of group 1 is nan"),
        ([[{"r": math.inf}]], "finite"),
        ([[{"q": 1.0}]], r"\['q'\]; expected \['r'\]"),
    ],
)
def test_bad_rewards_are_errors(groups: list[list[dict[str, float]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(groups, {"r": 1.0}, AdvantageConfig())


@pytest.mark.parametrize(
    "field", [{"std": "batch"}, {"ddof": 2}, {"epsilon": 0.0}, {"clip": -1.0}, {"combine": "mean"}]
)
def test_bad_conventions_are_errors(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        AdvantageConfig(**field)  # type: ignore[arg-type]


def test_gdpo_normalises_each_reward_by_group_and_their_sum_over_the_batch() -> None:
    config = AdvantageConfig(combine="gdpo", std="group", epsilon=1e-9)
    weights = {"a": 1.0, "b": 0.5}
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4)) * [[1], [5], [0.1]], rng.normal(size=(3, 4)) * 40
    groups = [
        [{"a": x, "b": y} for x, y in zip(*pair, strict=True)]
        for pair in zip(a.tolist(), b.tolist(), strict=True)
    ]
    normal = [(each - each.mean(1, keepdims=True)) / each.std(1, keepdims=True) for each in (a, b)]
    total = normal[0] + 0.5 * normal[1]
    expected = (total - total.mean()) / total.std()
    np.testing.assert_allclose(advantages(groups, weights, config), expected, rtol=1e-6)
