"""Coarse kicks are the rollout's own noise: independent, of variance 1, and the same path."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spotlight.diffusion import samplers
from spotlight.diffusion.brownian import Draw, Kick, coarse_kicks, coarse_window, fine_draw, kick_batch
from spotlight.diffusion.noise import INITIAL, Stream, noise_batch
from spotlight.diffusion.samplers import CPS, Dance, FlowSDE, Sampler

SDE = FlowSDE(0.7)
STEPS = st.integers(1, 30)
SHIFTS = st.sampled_from([1.0, 1.7, 3.0, 8.0])


def levels(steps: int, shift: float = 1.0) -> list[float]:
    """A flow-matching schedule, shifted as by resolution, in float32 as a family gives it."""
    even = np.linspace(1.0, 0.0, steps + 1)
    return [float(level) for level in (shift * even / (1 + (shift - 1) * even)).astype(np.float32)]


def matrix(kicks: tuple[Kick, ...]) -> tuple[NDArray[np.float64], list[Draw]]:
    """Weights [kick, draw]."""
    draws = sorted({draw for kick in kicks for draw, _ in kick})
    found = np.zeros((len(kicks), len(draws)))
    for row, kick in enumerate(kicks):
        for draw, weight in kick:
            found[row, draws.index(draw)] += weight
    return found, draws


@given(fine=STEPS, coarse=STEPS, shift=SHIFTS)
def test_kicks_are_independent_and_of_variance_one(fine: int, coarse: int, shift: float) -> None:
    weights, _ = matrix(coarse_kicks(levels(fine, shift), levels(coarse, shift)))
    assert weights @ weights.T == pytest.approx(np.eye(coarse), abs=1e-6)


@given(fine=STEPS, coarse=STEPS, shift=SHIFTS)
def test_increments_are_those_of_the_same_path(fine: int, coarse: int, shift: float) -> None:
    high, low = levels(fine, shift), levels(coarse, shift)
    weights, draws = matrix(coarse_kicks(high, low))
    for step, (before, after) in enumerate(pairwise(low)):
        for other, (start, end) in enumerate(pairwise(high)):
            shared = max(0.0, min(before, start) - max(after, end))
            expected = shared / math.sqrt((before - after) * (start - end))
            found = weights[step, draws.index(fine_draw(other))] if fine_draw(other) in draws else 0.0
            assert found == pytest.approx(expected, abs=1e-4)
    # All of the path together: coarse increments add up to what fine ones add up to, bridges cancel.
    total = sum(math.sqrt(a - b) * row for (a, b), row in zip(pairwise(low), weights, strict=True))
    for draw, weight in zip(draws, np.atleast_1d(total), strict=True):
        step = draw.index - 1
        own = math.sqrt(high[step] - high[step + 1]) if draw == fine_draw(step) else 0.0
        assert weight == pytest.approx(own, abs=1e-5)


@given(steps=STEPS, shift=SHIFTS)
def test_as_many_steps_have_the_very_kicks(steps: int, shift: float) -> None:
    same = levels(steps, shift)
    assert coarse_kicks(same, same) == tuple(((fine_draw(step), 1.0),) for step in range(steps))
    drawn = kick_batch([7], coarse_kicks(same, same)[:1], (3, 2))
    assert torch.equal(drawn, noise_batch([7], [0], (3, 2)))


def test_what_divides_needs_no_draws_of_its_own() -> None:
    kicks = coarse_kicks(levels(10), levels(5))
    assert {draw.stream for kick in kicks for draw, _ in kick} == {Stream.ROLLOUT_NOISE}
    assert [weight for _, weight in kicks[2]] == pytest.approx([0.5**0.5] * 2, rel=1e-6)


@pytest.mark.parametrize("coarse", [3, 4, 7])
def test_draws_are_normal_and_depend_on_nothing_else(coarse: int) -> None:
    kicks = coarse_kicks(levels(10), levels(coarse))
    seeds = list(range(200))
    drawn = torch.stack([kick_batch(seeds, [kick] * 200, (8,)) for kick in kicks])  # [step, seed, 8]
    flat = drawn.flatten(1).double()
    assert drawn.dtype == torch.float32
    assert torch.corrcoef(flat).sub(torch.eye(coarse)).abs().max() < 0.1
    assert flat.var(1).sub(1).abs().max() < 0.1
    assert flat.mean(1).abs().max() < 0.1
    alone = kick_batch([seeds[5]], [kicks[1]], (8,))
    assert torch.equal(alone[0], drawn[1, 5])


# -- what it is for: a preview ends near its rollout --------------------------------------------------------

SPREAD = 0.4
"""Of the data, which is Gaussian: then the exact velocity is known, and linear in x."""


def velocity(x: torch.Tensor, level: float) -> torch.Tensor:
    variance = level**2 + (1 - level) ** 2 * SPREAD**2
    return x * (level - (1 - level) * SPREAD**2) / variance


def weights_of_the_end(
    sampler: Sampler, schedule: list[float], kicks: tuple[Kick, ...]
) -> dict[object, float]:
    """What each draw, and the initial noise, contributes to the final latent: a row for each alone."""
    draws = sorted({draw for kick in kicks for draw, _ in kick})
    x = torch.zeros(len(draws) + 1, 1)
    x[0] = 1.0
    for step, (before, after) in enumerate(pairwise(schedule)):
        weight = dict(kicks[step])
        x = samplers.step(
            sampler,
            x,
            velocity(x, before),
            torch.full((len(x),), before),
            torch.full((len(x),), after),
            noise=torch.tensor([[0.0], *([weight.get(draw, 0.0)] for draw in draws)]),
            stochastic=[step < len(schedule) - 2] * len(x),
        ).latents
    return dict(zip([INITIAL, *draws], x[:, 0].tolist(), strict=True))


def correlation(one: dict[object, float], other: dict[object, float]) -> float:
    sizes = [math.sqrt(sum(weight**2 for weight in ends.values())) for ends in (one, other)]
    return sum(weight * other.get(draw, 0.0) for draw, weight in one.items()) / sizes[0] / sizes[1]


@pytest.mark.parametrize("coarse", [4, 5, 7])
@pytest.mark.parametrize(("sampler", "least"), [(SDE, 0.65), (Dance(0.3), 0.9), (CPS(0.8), 0.35)])
def test_previews_on_the_path_end_nearer_than_those_that_reuse_the_first_draws(
    sampler: Sampler, least: float, coarse: int
) -> None:
    high, low = levels(10, 3.0), levels(coarse, 3.0)
    own = [((fine_draw(step), 1.0),) for step in range(10)]
    whole = weights_of_the_end(sampler, high, tuple(own))
    on_path = correlation(whole, weights_of_the_end(sampler, low, coarse_kicks(high, low)))
    reusing = correlation(whole, weights_of_the_end(sampler, low, tuple(own[:coarse])))
    print(sampler, f"{coarse} of 10 steps: path {on_path:.3f}, first draws {reusing:.3f}")
    assert on_path > least
    assert on_path > reusing + 0.05


# -- windows ------------------------------------------------------------------------------------------------


@given(fine=st.integers(2, 30), coarse=st.integers(1, 30), shift=SHIFTS, data=st.data())
def test_a_previews_window_lies_where_the_rollouts_does(
    fine: int, coarse: int, shift: float, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, fine - 2))
    stop = data.draw(st.integers(start + 1, fine - 1))
    high, low = levels(fine, shift), levels(coarse, shift)
    window = coarse_window(range(start, stop), high, low)
    assert window.stop <= max(0, coarse - 1), "the last step is ODE"
    assert bool(window) == (coarse > 1)
    for step in window if len(window) > 1 else ():
        shared = min(low[step], high[start]) - max(low[step + 1], high[stop])
        assert shared >= 0.49 * (low[step] - low[step + 1])
    if fine == coarse:
        assert window == range(start, stop)
    if stop == fine - 1 and start == 0 and coarse <= fine:
        assert window == range(coarse - 1), "all steps but the last stay all but the last"


def test_schedules_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="same ends"):
        coarse_kicks([1.0, 0.5, 0.0], [0.9, 0.0])
    with pytest.raises(ValueError, match="descending"):
        coarse_kicks([1.0, 0.5, 0.5, 0.0], [1.0, 0.0])
