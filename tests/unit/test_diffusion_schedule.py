from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.diffusion.schedule import AllSteps, RandomWindow, SdeWindow, SlidingWindow


@st.composite
def windows(draw: st.DrawFn) -> tuple[SdeWindow, int]:
    total = draw(st.integers(2, 60))
    low = draw(st.integers(0, total - 2))
    high = draw(st.integers(low + 1, total - 1))
    size = draw(st.integers(1, high - low))
    window: SdeWindow = draw(
        st.sampled_from(
            [
                AllSteps(),
                RandomWindow(size, low, high),
                SlidingWindow(size, draw(st.integers(1, 30)), low, high),
                SlidingWindow(size, 25, low=low, high=high, decay=draw(st.floats(0, 20))),
            ]
        )
    )
    return window, total


@given(windows(), st.integers(0, 2**63 - 1), st.integers(0, 10**9))
def test_a_window_is_contiguous_never_empty_and_leaves_the_last_step(
    window_total: tuple[SdeWindow, int], seed: int, iteration: int
) -> None:
    window, total = window_total
    steps = window.steps(total, seed, iteration)
    assert steps.step == 1
    assert len(steps) == window.kept(total) > 0
    assert 0 <= steps[0] <= steps[-1] <= total - 2
    if not isinstance(window, AllSteps):
        assert window.low <= steps[0] <= steps[-1] < window.high  # type: ignore[attr-defined]
    assert steps == window.steps(total, seed, iteration)


def test_all_steps_trains_nine_of_ten() -> None:
    assert AllSteps().steps(10, 0, 0) == range(9)


def test_random_windows_use_every_position_equally_and_default_to_the_noisy_half() -> None:
    window = RandomWindow(3)
    starts = Counter(window.steps(10, seed, 0)[0] for seed in range(3000))
    assert sorted(starts) == [0, 1, 2]
    assert all(900 < count < 1100 for count in starts.values())
    assert {window.steps(10, 5, iteration) for iteration in range(9)} == {window.steps(10, 5, 0)}


def test_a_window_per_iteration_is_shared_by_its_rollouts() -> None:
    starts = []
    for shared_seed in (0, 1):
        window = RandomWindow(2, shared_seed=shared_seed)
        found = [{window.steps(10, seed, iteration) for seed in range(9)} for iteration in range(20)]
        assert all(len(each) == 1 for each in found)
        starts.append([min(each)[0] for each in found])
    assert len(set(starts[0])) > 1
    assert starts[0] != starts[1]


def test_sliding_moves_by_one_every_25_iterations_and_rolls_back() -> None:
    window = SlidingWindow(size=4, every=25)
    starts = [window.steps(25, 0, iteration)[0] for iteration in range(2 * 21 * 25)]
    assert starts == 2 * [start for start in range(21) for _ in range(25)]


def test_decay_leaves_clean_steps_sooner_but_visits_each() -> None:
    window = SlidingWindow(size=4, decay=0.1)
    stays = Counter(window.steps(25, 0, iteration)[0] for iteration in range(470))
    assert [stays[start] for start in range(14)] == 14 * [25]
    assert [stays[start] for start in (14, 15, 20)] == [23, 20, 12]  # 25 exp(-(l - 13) / 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllSteps().kept(1), "at least 2 steps"),
        (lambda: RandomWindow(0), "size is 0"),
        (lambda: RandomWindow(3, 4, 6), "does not fit"),
        (lambda: RandomWindow(2, 0, 5).kept(5), "high <= 4"),
        (lambda: RandomWindow(4).kept(4), "at most 3"),
        (lambda: SlidingWindow(4, 0), "every is 0"),
        (lambda: SlidingWindow(4).kept(4), "at most 3"),
        (lambda: SlidingWindow(decay=-1.0), "decay is -1"),
    ],
)
def test_impossible_windows_are_errors(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
