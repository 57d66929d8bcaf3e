"""What random groups would have had is estimated without bias from groups that were chosen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.policies.exploration.contrast import Contrast, contrast
from spotlight.scheduler.policies.exploration.evidence import GroupEvidence, fit_lines, sampled_variance
from spotlight.scheduler.policies.selection import SelectionPolicy, sample_variance, select

POOL, GROUP = 24, 6

Law = Callable[[float, random.Random], float]


def line(x: float, source: random.Random) -> float:
    return 0.3 + 0.6 * x + source.gauss(0, 0.8)


def unrelated(x: float, source: random.Random) -> float:
    return source.gauss(0, 1)


def same(x: float, source: random.Random) -> float:
    return x


def bent(x: float, source: random.Random) -> float:
    """Beyond a point better previews are no better, and the spread is largest in the middle."""
    return min(x, 0.3) + source.gauss(0, 0.2 if abs(x) > 0.8 else 0.9)


def draw(
    law: Law,
    seed: int,
    policy: SelectionPolicy = SelectionPolicy.MAX_VARIANCE,
    drawn: int = 0,
    size: int = GROUP,
    chance: float | None = None,
) -> tuple[GroupEvidence, list[float]]:
    """A group chosen from a pool by preview rewards, and the regenerated rewards of the whole pool.

    With a ``chance`` previews score 1 with that probability, else 0.
    """
    source = random.Random(seed)
    previews = {
        place: source.gauss(0, 1) if chance is None else float(source.random() < chance)
        for place in range(POOL)
    }
    realised = {place: law(x, source) for place, x in previews.items()}
    chosen = select(previews, size, policy, draw_seed=seed, kept_at_random=drawn, draw_flat=True)
    x = tuple(previews[place] for place in chosen.seeds)
    y = tuple(realised[place] for place in chosen.seeds)
    variance = sample_variance(list(previews.values()))
    return GroupEvidence(POOL, variance, x, y, chosen.kept_at_random), list(realised.values())


def close_to(found: list[float], expected: float) -> None:
    error = statistics.stdev(found) / len(found) ** 0.5
    assert abs(statistics.mean(found) - expected) < 4 * error, (statistics.mean(found), expected, error)


@pytest.mark.parametrize(("law", "truth"), [(line, 0.36 + 0.64), (unrelated, 1.0)])
@pytest.mark.parametrize(
    "policy", [SelectionPolicy.MAX_VARIANCE, SelectionPolicy.TOP, SelectionPolicy.RANDOM]
)
def test_by_slope_the_random_groups_variance_is_unbiased(
    law: Law, truth: float, policy: SelectionPolicy
) -> None:
    found = []
    for seed in range(1500):
        group, _ = draw(law, seed, policy)
        (fitted,) = fit_lines([group])
        assert fitted is not None
        found.append(fitted.pool_variance(group))
    close_to(found, truth)


def test_the_gain_of_an_iteration_is_unbiased_also_for_groups_of_two() -> None:
    for size in (2, GROUP):
        found, chosen = [], []
        for seed in range(0, 4000, 8):
            groups = [draw(line, seed + slot, size=size)[0] for slot in range(8)]
            result = contrast(groups)
            assert result is not None
            found.append(result.gain)
            chosen += [sample_variance(group.realised) for group in groups]
        close_to(found, statistics.mean(chosen) - 1.0)
        assert statistics.mean(found) > 0.3, "and choosing did bring something"


CHANCES = (0.05, 0.1, 0.25, 0.5)
"""Of previews of an iteration's prompts to score 1: some groups chosen are all alike, or their pools are."""


def scored_0_or_1(
    law: Law, policy: SelectionPolicy, drawn: int = 0, iterations: int = 400
) -> Iterator[tuple[Contrast | None, float]]:
    """What iterations report, and the gain that they had."""
    for seed in range(0, 16 * iterations, 16):
        drawings = [draw(law, seed + at, policy, drawn, chance=CHANCES[at % 4]) for at in range(16)]
        true = [sample_variance(group.realised) - sample_variance(pool) for group, pool in drawings]
        yield contrast([group for group, _ in drawings]), statistics.mean(true)


@pytest.mark.parametrize(
    ("law", "policy", "drawn"),
    [
        pytest.param(law, policy, drawn, marks=pytest.mark.slow if law is line and slow else ())
        for law in (same, line)
        for policy, drawn, slow in (
            (SelectionPolicy.MAX_VARIANCE, 0, False),
            (SelectionPolicy.TOP_AND_BOTTOM, 2, True),
            (SelectionPolicy.TOP, 0, True),
        )
    ],
)
def test_groups_whose_previews_are_all_alike_count(law: Law, policy: SelectionPolicy, drawn: int) -> None:
    errors = []
    exact = law is same
    for report, true in scored_0_or_1(law, policy, drawn, iterations=40 if exact else 400):
        assert report is not None
        assert report.groups == 16, "none is left out for its rewards"
        errors.append(report.gain - true)
    if exact:
        assert max(abs(error) for error in errors) < 1e-9
    else:
        close_to(errors, 0.0)


@pytest.mark.parametrize("law", [same, line])
def test_the_control_gains_nothing_by_design_nor_by_slope(law: Law) -> None:
    by_slope = []
    for report, _ in scored_0_or_1(law, SelectionPolicy.RANDOM):
        assert report is not None
        assert (report.gain, report.sampled) == (0.0, 16)
        assert report.random_of_sampled is not None
        by_slope.append(report.realised - report.random_of_sampled)
    close_to(by_slope, 0.0)


def test_a_group_that_lost_seeds_leaves_the_others_their_lines() -> None:
    """Prompts whose lines differ: one line for all would be wrong for each."""

    def steep(x: float, source: random.Random) -> float:
        return 2 * x

    whole = [draw(law, seed)[0] for seed, law in enumerate((steep, unrelated, steep))]
    (short,) = [draw(unrelated, 9, size=2)[0]]
    assert fit_lines([*whole, short]) == [*fit_lines(whole), None]
    assert contrast([short, *whole]) == contrast(whole)


def test_previews_that_tell_nothing_bring_nothing() -> None:
    close_to([contrast([draw(unrelated, seed)[0]]).gain for seed in range(1500)], 0.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("law", [line, bent])
def test_by_design_it_is_unbiased_whatever_the_law(law: Law) -> None:
    errors = []
    for seed in range(2000):
        group, pool = draw(law, seed, drawn=2)
        found = sampled_variance(group)
        assert found is not None
        errors.append(found - sample_variance(pool))
    close_to(errors, 0.0)


def test_what_the_line_misses_shows_beside_the_drawn_seeds() -> None:
    results = [contrast([draw(bent, seed, drawn=2)[0]]) for seed in range(1500)]
    by_slope = statistics.mean(result.random_of_sampled for result in results if result)  # type: ignore[misc]
    by_design = statistics.mean(result.random_sampled for result in results if result)  # type: ignore[misc]
    truth = statistics.mean(sample_variance(draw(bent, seed)[1]) for seed in range(1500))
    assert by_design == pytest.approx(truth, rel=0.05)
    assert abs(by_slope - truth) > 0.05 * truth, "a bent law is where the slope is biased"


@given(
    ranked=st.integers(0, 4),
    drawn=st.integers(2, 4),
    more=st.integers(0, 4),
    values=st.lists(st.floats(-3, 3), min_size=12, max_size=12),
)
def test_pairs_of_the_group_stand_for_all_pairs_of_the_pool(
    ranked: int, drawn: int, more: int, values: list[float]
) -> None:
    """The mean over every possible draw is the pool's variance, exactly."""
    pool = values[: ranked + drawn + more]
    estimates = []
    for sample in combinations(pool[ranked:], drawn):
        rewards = (*pool[:ranked], *sample)
        estimates.append(sampled_variance(GroupEvidence(len(pool), 1.0, rewards, rewards, drawn)))
    assert statistics.mean(estimates) == pytest.approx(sample_variance(pool), abs=1e-9)  # type: ignore[arg-type]


def test_without_drawn_seeds_or_contrast_nothing_is_made_up() -> None:
    assert sampled_variance(GroupEvidence(8, 1.0, (0.0, 1.0), (0.0, 1.0))) is None
    assert sampled_variance(GroupEvidence(8, 1.0, (0.0, 1.0), (0.0, 1.0), 1)) is None
    assert contrast([]) is None
    alike, flat = (
        contrast([GroupEvidence(8, variance, (1.0, 1.0, 1.0), (0.0, 1.0, 2.0))]) for variance in (0.3, 0.0)
    )
    assert alike is None, "what seeds of other previews would have had is unknown"
    assert flat is not None
    assert flat.gain == 0.0
    with pytest.raises(ValueError, match="pool no smaller"):
        GroupEvidence(1, 0.0, (0.0, 1.0), (0.0, 1.0))
