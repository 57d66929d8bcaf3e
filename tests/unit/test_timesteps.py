"""How many timesteps share a pass: even cuts, and the largest number that measurements show to fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.training.timesteps import PassMemory, Shape, Trial, cut_timesteps, largest_pass

COUNTS = st.integers(1, 60)


@given(start=st.integers(0, 9), timesteps=COUNTS, per_pass=COUNTS)
def test_cuts_cover_everything_once_in_as_few_and_as_even_passes_as_can_be(
    start: int, timesteps: int, per_pass: int
) -> None:
    cuts = cut_timesteps(range(start, start + timesteps), per_pass)
    assert [timestep for cut in cuts for timestep in cut] == list(range(start, start + timesteps))
    sizes = [len(cut) for cut in cuts]
    assert max(sizes) <= per_pass
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == -(-timesteps // per_pass)
    assert max(sizes) == largest_pass(timesteps, per_pass)


def test_nothing_is_cut_into_nothing_and_no_timesteps_a_pass_is_an_error() -> None:
    assert cut_timesteps(range(4, 4), 3) == []
    with pytest.raises(ValueError, match="timesteps_per_pass is 0; expected at least 1"):
        cut_timesteps(range(3), 0)


def settle(shape: Shape, timesteps: int, budget: float, needs: Callable[[int], float], known: PassMemory):  # type: ignore[no-untyped-def]
    """The learner's loop: propose, run, remember. Returns the number, the knowledge, and what was run."""
    run: list[int] = []
    while not known.proven(shape, wanted := known.most(shape, timesteps, budget)):
        run.append(wanted)
        needed = needs(shape.samples * wanted)
        known = known.after(Trial(shape.tokens, shape.samples * wanted, int(needed)))
    return wanted, known, run


@given(
    samples=st.integers(1, 16),
    timesteps=COUNTS,
    fixed=st.integers(0, 10**7),
    per_row=st.integers(1, 10**6),
    budget=st.integers(1, 10**9),
)
def test_with_affine_memory_the_largest_useful_pass_that_fits_is_found_and_nothing_larger_is_ever_run(
    samples: int, timesteps: int, fixed: int, per_row: int, budget: int
) -> None:
    def needs(rows: int) -> int:
        return fixed + per_row * rows

    fitting = [k for k in range(1, timesteps + 1) if needs(samples * k) <= budget]
    wanted, _, run = settle(Shape(samples, 100), timesteps, budget, needs, PassMemory())
    # After one measurement memory is taken to be proportional, which is too much: if two timesteps do not fit
    # by that, they are not tried.
    tried = [k for k in fitting if k * needs(samples) <= budget]
    found = largest_pass(timesteps, max(tried, default=1)) > 1
    assert wanted == (largest_pass(timesteps, max(fitting)) if found else 1)
    assert all(k == 1 or needs(samples * k) <= budget for k in run)
    assert run[0] == 1
    assert len(run) <= 8


@given(timesteps=st.integers(2, 60), budget=st.integers(1000, 10**6), grows=st.integers(1, 3))
def test_memory_quadratic_in_tokens_is_never_exceeded(timesteps: int, budget: int, grows: int) -> None:
    def needs(tokens: int) -> Callable[[int], float]:
        return lambda rows: 10 + rows * (3 * tokens + tokens**2)

    _, known, _ = settle(Shape(2, 10), timesteps, budget, needs(10), PassMemory())
    longer = Shape(2, 10 * grows)
    _, _, run = settle(longer, timesteps, budget, needs(longer.tokens), known)
    assert all(k == 1 or needs(longer.tokens)(2 * k) <= budget for k in run)


def test_what_was_measured_is_remembered_for_smaller_shapes() -> None:
    known = PassMemory((Trial(100, 4, 400), Trial(100, 12, 1200)))
    assert known.most(Shape(4, 100), 9, 2000) == 5
    assert known.proven(Shape(4, 100), 3)
    assert known.proven(Shape(3, 80), 4)
    assert not known.proven(Shape(4, 101), 3)
    assert not known.proven(Shape(4, 100), 4)


@given(timesteps=st.integers(2, 60), failed=st.integers(2, 60), samples=st.integers(1, 8))
def test_after_a_pass_did_not_fit_at_most_half_of_it_is_proposed(
    timesteps: int, failed: int, samples: int
) -> None:
    known = PassMemory((Trial(100, samples, 1), Trial(100, samples * failed, None)))
    for tokens in (50, 100, 150):
        most = known.most(Shape(samples, tokens), timesteps, 10**9)
        half = int(failed * 100 / tokens / 2)
        assert most == largest_pass(timesteps, max(min(half, timesteps), 1))


def test_nothing_is_known_without_a_measurement() -> None:
    assert PassMemory().most(Shape(1, 1), 9, 10**12) == 1
    assert not PassMemory().proven(Shape(1, 1), 1)
