"""Every group of a part is compared as the controller says, whatever the others of the part are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.algorithms.advantages import advantages, exploration_advantages, slice_advantages
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Baseline, Comparison, Group, RolloutId
from spotlight.training.batching.feed import sample_advantages
from spotlight_rewards.base.prompts import PromptId

WEIGHTS = {"ocr": 1.0, "jpeg": 0.5}
OWN = AdvantageConfig(std="group")
Scores = list[dict[str, float]]


def scores(values: list[float]) -> Scores:
    return [{"reward": value, "ocr": value, "jpeg": value * value} for value in values]


def only(found: Scores) -> Scores:
    return [{name: sample[name] for name in WEIGHTS} for sample in found]


def part(groups: list[Scores], comparisons: tuple[Comparison, ...] = ()) -> PrepareBatch:
    named = [
        Group(PromptId("p"), tuple(RolloutId(f"{g}/{i}") for i in range(len(group))))
        for g, group in enumerate(groups)
    ]
    trained = {
        rollout: sample
        for group, found in zip(named, groups, strict=True)
        for rollout, sample in zip(group.rollouts, found, strict=True)
    }
    return PrepareBatch(0, tuple(named), trained, (), partial=True, comparisons=comparisons)


VALUES = st.lists(st.floats(-10, 10), min_size=3, max_size=6).map(scores)


@given(groups=st.lists(VALUES, min_size=1, max_size=3))
def test_whole_groups_have_the_advantages_of_the_whole_batch_to_the_bit(groups: list[Scores]) -> None:
    whole = advantages([only(group) for group in groups], WEIGHTS, OWN)
    found = sample_advantages(part(groups), WEIGHTS, OWN)
    assert list(found.values()) == [value for group in whole for value in group]


@given(whole=VALUES, arrived=VALUES, seen=VALUES, explored=VALUES)
def test_baselines_mix_within_a_part(whole: Scores, arrived: Scores, seen: Scores, explored: Scores) -> None:
    comparisons = (
        Comparison(Baseline.GROUP),
        Comparison(Baseline.SLICE, tuple(seen)),
        Comparison(Baseline.EXPLORATION, tuple(explored)),
    )
    found = sample_advantages(part([whole, arrived, arrived], comparisons), WEIGHTS, OWN)
    in_slice = slice_advantages(only(arrived), only(seen), WEIGHTS, OWN)
    explored_ = exploration_advantages(only(arrived), only(explored), WEIGHTS, OWN)
    expected = [*advantages([only(whole)], WEIGHTS, OWN)[0], *in_slice, *explored_]
    assert list(found.values()) == expected


@pytest.mark.parametrize(("arrived", "seen"), [([4.0], []), ([4.0], [1.0]), ([4.0, 1.0], [])])
def test_a_slice_that_lost_too_many_has_nothing_to_be_compared_with(
    arrived: list[float], seen: list[float]
) -> None:
    comparison = Comparison(Baseline.SLICE, tuple(scores(seen)))
    found = sample_advantages(part([scores(arrived)], (comparison,)), WEIGHTS, OWN)
    assert list(found.values()) == [0.0] * len(arrived)
    comparison = Comparison(Baseline.SLICE, tuple(scores([*seen, 2.0, 3.0])))
    assert all(sample_advantages(part([scores(arrived)], (comparison,)), WEIGHTS, OWN).values())


def test_what_cannot_be_compared_is_named() -> None:
    some = scores([1.0, 2.0, 4.0])
    params = AdvantageConfig(std="global")
    with pytest.raises(ValueError, match=r"advantage.std is 'global'.*set it to 'group'"):
        sample_advantages(part([some]), WEIGHTS, params)
    explored = Comparison(Baseline.EXPLORATION, tuple(some))
    assert sample_advantages(part([some], (explored,)), WEIGHTS, params)
    with pytest.raises(ValueError, match="2 groups have 1 comparisons; expected one a group"):
        sample_advantages(part([some, some], (explored,)), WEIGHTS, OWN)
    with pytest.raises(ValueError, match="0 other seeds of the prompt were explored"):
        sample_advantages(part([some], (Comparison(Baseline.EXPLORATION),)), WEIGHTS, OWN)
    with pytest.raises(ValueError, match=r"has the rewards \['jpeg', 'ocr', 'reward'\]; 'clip' is missing"):
        sample_advantages(part([some]), {"clip": 1.0}, OWN)


def test_a_whole_batch_is_scaled_together() -> None:
    groups, config = [scores([0.0, 0.4, 1.0]), scores([0.5, 0.5, 3.0])], AdvantageConfig()
    rows = [only(group) for group in groups]
    plain = sample_advantages(replace(part(groups), partial=False), WEIGHTS, config)
    assert list(plain.values()) == [v for values in advantages(rows, WEIGHTS, config) for v in values]
    with pytest.raises(ValueError, match="'clip' is missing"):
        sample_advantages(replace(part(groups), partial=False), {"clip": 1.0}, config)


@given(
    groups=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=3),
    std=st.sampled_from(["global", "group"]),
    combine=st.sampled_from(["sum", "normalise_each"]),
)
def test_samples_not_trained_scale_advantages_and_move_no_mean(
    groups: list[tuple[Scores, Scores]], std: str, combine: str
) -> None:
    config = AdvantageConfig.model_validate({"std": std, "combine": combine, "clip": 1e9})
    chosen = [only(group) for group, _ in groups]
    others = [only(more) for _, more in groups]
    comparisons = tuple(Comparison(Baseline.GROUP, tuple(more)) for _, more in groups)
    effect = replace(part([group for group, _ in groups], comparisons), partial=std == "group")
    found = list(sample_advantages(effect, WEIGHTS, config).values())
    everything = advantages([a + b for a, b in zip(chosen, others, strict=True)], WEIGHTS, config)
    start = 0
    for group, whole in zip(chosen, everything, strict=True):
        own = found[start : start + len(group)]
        start += len(group)
        # The whole group's advantages, centred again.
        mean = sum(whole[: len(group)]) / len(group)
        assert own == pytest.approx([value - mean for value in whole[: len(group)]], rel=1e-6, abs=1e-6)
