from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtri

from spotlight.diffusion._normal_quantile import normal_quantile_from_centre
from spotlight.diffusion.noise import INITIAL, Stream, noise_batch, normal_batch, uniform

SEEDS = st.integers(0, 2**63 - 1)

GOLDEN_0_INITIAL = [
    "0x1.d1fbf20000000p-2",
    "-0x1.427d060000000p-1",
    "0x1.2855340000000p+0",
    "-0x1.00beea0000000p+0",
]
GOLDEN_0_0 = [
    "0x1.afbeee0000000p-2",
    "0x1.16057c0000000p-2",
    "-0x1.8c959a0000000p+0",
    "-0x1.40cc140000000p-2",
]
GOLDEN_MAX_7 = [
    "-0x1.ad1b060000000p+0",
    "0x1.7ef5980000000p+0",
    "-0x1.4a4bce0000000p-2",
    "-0x1.0823580000000p+0",
]
GOLDEN_UNIFORM = [0.543240017088989, 0.9020050666662264]


def noise(seed: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return noise_batch([seed], [step], shape)[0]


def test_golden_values_never_change() -> None:
    golden = {
        (0, INITIAL): GOLDEN_0_INITIAL,
        (0, 0): GOLDEN_0_0,
        (2**63 - 1, 7): GOLDEN_MAX_7,
    }
    for (seed, step), values in golden.items():
        assert [value.hex() for value in noise(seed, step, (4,)).tolist()] == values
    assert uniform(5, Stream.SDE_WINDOW, 3, 2).tolist() == GOLDEN_UNIFORM


@given(seeds=st.lists(SEEDS, min_size=1, max_size=5), steps=st.data())
@settings(max_examples=25, deadline=None)
def test_a_row_does_not_depend_on_its_batch(seeds: list[int], steps: st.DataObject) -> None:
    chosen = [steps.draw(st.integers(INITIAL, 50)) for _ in seeds]
    batch = noise_batch(seeds, chosen, (3, 5))
    assert batch.dtype == torch.float32
    for row, seed, step in zip(batch, seeds, chosen, strict=True):
        assert torch.equal(row, noise(seed, step, (3, 5)))


def test_numbers_do_not_depend_on_how_many_are_drawn() -> None:
    whole = noise(3, 4, (40_000,))
    for count in (1, 7, 8191, 8192, 8193, 20_000):
        assert torch.equal(noise(3, 4, (count,)), whole[:count])


def test_noise_is_standard_normal() -> None:
    values = noise(11, 2, (200_000,)).double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(stats.kurtosis(values)) < 0.05


def test_seeds_steps_and_streams_are_uncorrelated() -> None:
    draws = [noise(seed, step, (20_000,)) for seed in (0, 1, 2**40) for step in (INITIAL, 0, 1)]
    draws += [normal_batch([0], Stream.TRAIN_NOISE, [0], (20_000,))[0]]
    correlation = np.corrcoef(torch.stack(draws).double().numpy())
    assert np.abs(correlation - np.eye(len(draws))).max() < 5 / np.sqrt(20_000)


def test_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    expected_torch, expected_numpy = torch.rand(3), np.random.rand(3)
    first = noise(1, 1, (8,))
    torch.manual_seed(0)
    np.random.seed(0)
    assert torch.equal(noise(1, 1, (8,)), first)
    assert torch.equal(torch.rand(3), expected_torch)
    assert np.array_equal(np.random.rand(3), expected_numpy)


def test_quantile_is_that_of_scipy_over_the_whole_range() -> None:
    bulk = np.linspace(-0.499999, 0.499999, 200_001)
    tail = np.exp(np.linspace(np.log(2.0**-52), np.log(0.4), 50_000))
    # The lower half only: 1/2 + centred is exact there. The upper half is its mirror image, exactly.
    centred = np.concatenate([bulk[bulk < 0], tail - 0.5])
    quantile = normal_quantile_from_centre(centred)
    np.testing.assert_allclose(quantile, ndtri(0.5 + centred), rtol=1e-13, atol=1e-15)
    assert np.array_equal(normal_quantile_from_centre(-centred), -quantile)
    ends = normal_quantile_from_centre(np.array([-0.5 + 2.0**-53, 0.0, 0.5 - 2.0**-53]))
    assert np.isfinite(ends).all()
    assert ends[0] == -ends[2]
    assert ends[1] == 0


def test_uniform_is_uniform_and_strictly_inside() -> None:
    values = uniform(9, Stream.TRAIN_TIMESTEPS, 0, 100_000)
    assert values.min() > 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("seed", "step"), [(-1, 0), (2**64, 0), (0, -2)])
def test_out_of_range_arguments_are_errors(seed: int, step: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        noise(seed, step, (2,))
