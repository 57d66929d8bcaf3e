"""``learner.recompute: auto`` ends at the level that fits best, and nothing on the way needs more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotlight.training.recompute import Climb, modes_at


@given(
    blocks=st.integers(1, 70),
    inputs=st.integers(1, 100),
    products=st.integers(0, 1_000),
    rest=st.integers(0, 2_000),
    other=st.integers(0, 10_000),
    budget=st.integers(0, 10**6),
)
def test_a_climb_ends_at_the_highest_level_that_fits(
    blocks: int, inputs: int, products: int, rest: int, other: int, budget: int
) -> None:
    one = inputs + products + rest  # everything of a block, which is there while it is computed again
    lowest = blocks * inputs + one + other

    def peak(level: int) -> int:
        return lowest + products * min(level, blocks) + rest * max(level - blocks, 0)

    climb, runs = Climb(blocks, 2 * blocks), 0
    while (level := climb.next(budget)) != climb.level:
        climb = climb.after(level, peak(level))
        runs += 1
        assert level == 0 or peak(level) <= budget
    assert runs <= 7
    best = max((n for n in range(2 * blocks + 1) if peak(n) <= budget), default=0)
    # A block's memory is not known before a level more has run, which must fit whatever it is.
    known = budget - peak(level) >= lowest or level not in (0, blocks)
    assert level <= best
    assert level == best or not known


def test_what_runs_out_of_memory_is_not_tried_again() -> None:
    climb, tried, budget = Climb(8, 16), [], 10**6
    while (level := climb.next(budget)) != climb.level:
        tried.append(level)
        climb = climb.after(level, 100 + level if level <= 5 else None)
    assert tried == [0, 8, 4], "half way back, and no further search for the border"


@given(blocks=st.integers(1, 70), level=st.integers(0, 140))
def test_blocks_ahead_are_as_many_as_the_level_says(blocks: int, level: int) -> None:
    level = min(level, 2 * blocks)
    modes = modes_at(level, blocks)
    worth = {"blocks": 0, "elementwise": 1, "none": 2}
    assert sum(worth[mode] for mode in modes) == level
    assert len(modes) == blocks
    assert len({*modes}) <= 2
