"""The samplers against the published formulas in float64, and the identities they must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spotlight.diffusion import samplers as S
from spotlight.diffusion.noise import INITIAL, noise_batch

SHAPE = (7, 4)
STOCHASTIC = [S.FlowSDE(0.7), S.CPS(0.8), S.Dance(0.3), S.FlowSDE(1.2), S.CPS(1.0)]
ALL = [*STOCHASTIC, S.ODE()]


def draw(name: int, batch: int = 3) -> Tensor:
    return noise_batch(range(batch), [name] * batch, SHAPE)


def levels(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


X, V, E = draw(INITIAL), draw(1), draw(2)
SIGMA, SIGMA_NEXT = levels(1.0, 0.83, 0.31), levels(0.9, 0.6, 0.07)


def column(sigma: Tensor) -> Tensor:
    return sigma.double().view(-1, 1, 1)


def flow_sde_reference(a: float) -> tuple[Tensor, Tensor]:
    s, s1, x, v = column(SIGMA), column(SIGMA_NEXT), X.double(), V.double()
    d = s - s1
    q = a * torch.sqrt(s / (1 - torch.where(s == 1, s1, s)))
    return x * (1 - q**2 * d / (2 * s)) - v * d * (1 + q**2 * (1 - s) / (2 * s)), q * d.sqrt()


def dance_reference(eta: float) -> tuple[Tensor, Tensor]:
    s, s1, x, v = column(SIGMA), column(SIGMA_NEXT), X.double(), V.double()
    d, x0 = s - s1, x - s * v
    score = -(x - (1 - s) * x0) / s**2
    return x - d * v + 0.5 * eta**2 * d * score, eta * d.sqrt()


def cps_reference(a: float) -> tuple[Tensor, Tensor]:
    s, s1, x, v = column(SIGMA), column(SIGMA_NEXT), X.double(), V.double()
    n = s1 * math.sin(a * math.pi / 2)
    mean = (1 - s1) * (x - s * v) + torch.sqrt(torch.clamp(s1**2 - n**2, min=0)) * (x + (1 - s) * v)
    return mean, n


REFERENCES: list[tuple[S.Sampler, Callable[[float], tuple[Tensor, Tensor]], float]] = [
    (S.FlowSDE(0.7), flow_sde_reference, 0.7),
    (S.FlowSDE(1.2), flow_sde_reference, 1.2),
    (S.Dance(0.25), dance_reference, 0.25),
    (S.CPS(0.8), cps_reference, 0.8),
    (S.CPS(1.0), cps_reference, 1.0),
]


@pytest.mark.parametrize(("sampler", "reference", "a"), REFERENCES)
def test_moments_and_log_probs_are_the_published_ones(
    sampler: S.Sampler, reference: Callable[[float], tuple[Tensor, Tensor]], a: float
) -> None:
    mean, std = reference(a)
    moments = sampler.moments(X, V, SIGMA, SIGMA_NEXT)
    assert moments.mean.dtype == moments.std.dtype == torch.float32
    torch.testing.assert_close(moments.mean.double(), mean, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(moments.std.double(), std, rtol=1e-6, atol=1e-7)
    result = S.step(sampler, X, V, SIGMA, SIGMA_NEXT, noise=E)
    if isinstance(sampler, S.CPS):
        expected = -(result.latents - mean).square().mean((1, 2))
    else:
        normal = torch.distributions.Normal(mean, std)
        expected = normal.log_prob(result.latents.double()).mean((1, 2))
    torch.testing.assert_close(result.log_prob.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("silent", [S.FlowSDE(0), S.CPS(0), S.Dance(0), S.ODE()])
def test_without_noise_every_sampler_is_the_ode(silent: S.Sampler) -> None:
    euler = S.euler(X, V, SIGMA, SIGMA_NEXT)
    moments = silent.moments(X, V, SIGMA, SIGMA_NEXT)
    torch.testing.assert_close(moments.mean, euler, rtol=0, atol=2e-6)
    assert not moments.std.any()
    assert not silent.stochastic
    result = S.step(silent, X, V, SIGMA, SIGMA_NEXT)
    assert torch.equal(result.latents, euler)
    assert result.log_prob.isnan().all()
    for undefined in (
        lambda: silent.log_prob(X, moments),
        lambda: silent.kl(moments, moments),
    ):
        with pytest.raises(S.UndefinedLogProbError, match="deterministic"):
            undefined()


@given(steps=st.integers(1, 30), shift=st.floats(0.5, 9), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_the_ode_is_diffusers_euler_step_bit_for_bit(steps: int, shift: float, seed: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    ours = theirs = noise_batch([seed], [INITIAL], SHAPE)
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = noise_batch([seed], [index], SHAPE) + torch.tanh(ours)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        sigma, sigma_next = scheduler.sigmas[index : index + 2].unbind()
        ours = S.step(S.ODE(), ours, velocity, sigma[None], sigma_next[None]).latents
        assert torch.equal(ours, theirs)


@given(a=st.floats(0.01, 2), second=st.floats(0.2, 0.999))
def test_the_first_flow_sde_kick_is_the_noise_level(a: float, second: float) -> None:
    moments = S.FlowSDE(a).moments(X[:1], V[:1], levels(1.0), levels(second))
    assert moments.std.item() == pytest.approx(a, rel=1e-6)


@pytest.mark.parametrize("sampler", ALL)
def test_the_coefficient_of_x0_is_one_minus_the_next_level(sampler: S.Sampler) -> None:
    """With the exact velocity e - x0 the mean is (1-s') x0 + c e: e = 0 leaves the first term."""
    x0, nothing = draw(5), torch.zeros(3, *SHAPE)
    x = S.interpolate(x0, nothing, SIGMA)
    moments = sampler.moments(x, nothing - x0, SIGMA, SIGMA_NEXT)
    expected = (1 - SIGMA_NEXT).view(-1, 1, 1) * x0
    torch.testing.assert_close(moments.mean, expected, rtol=0, atol=2e-6)


@given(eta=st.floats(0.05, 1), sigma=st.floats(0.05, 0.98), ratio=st.floats(0.1, 0.95))
def test_dance_is_flow_sde_where_q_is_eta(eta: float, sigma: float, ratio: float) -> None:
    s, s1 = levels(sigma), levels(sigma * ratio)
    a = eta / math.sqrt(s.item() / (1 - s.item()))
    dance, flow = (sampler.moments(X[:1], V[:1], s, s1) for sampler in (S.Dance(eta), S.FlowSDE(a)))
    torch.testing.assert_close(dance.mean, flow.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dance.std, flow.std, rtol=1e-5, atol=0)


def noise_left(sampler: S.Sampler, steps: int, until: int) -> tuple[float, float]:
    """(noise level after ``until`` steps of SD3's schedule with exact velocities, the schedule's)."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    # All data at x0 = 0: the exact velocity is x / s, each step is linear, one variance follows it all.
    unit = variance = torch.ones(1, 1, 1)
    for here, after in zip(scheduler.sigmas[:until, None], scheduler.sigmas[1:, None], strict=False):
        moments = sampler.moments(unit, unit / here, here, after)
        variance = moments.mean.square() * variance + moments.std.square()
    return variance.sqrt().item(), scheduler.sigmas[until].item()


def test_cps_keeps_the_noise_level_and_flow_sde_does_not() -> None:
    for a in (0.3, 0.8, 1.0):
        left, planned = noise_left(S.CPS(a), 10, 9)
        assert left == pytest.approx(planned, rel=1e-5)
    left, planned = noise_left(S.FlowSDE(0.7), 10, 9)
    assert planned == pytest.approx(0.0089, abs=1e-4)
    assert left == pytest.approx(0.249, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_replaying_what_was_stored_repeats_the_log_prob_bitwise(
    sampler: S.Sampler, dtype: torch.dtype
) -> None:
    x = X.to(dtype)
    result = S.step(sampler, x, V, SIGMA, SIGMA_NEXT, noise=E, dtype=dtype)
    assert result.latents.dtype == dtype
    stored_x, stored_next = x.float(), result.latents.float()
    replayed = sampler.log_prob(stored_next, sampler.moments(stored_x, V, SIGMA, SIGMA_NEXT))
    assert torch.equal(replayed, result.log_prob)


def test_scoring_before_rounding_would_miss_by_more_than_the_clip_range() -> None:
    sampler = S.FlowSDE(0.7)
    moments = sampler.moments(X, V, SIGMA, SIGMA_NEXT)
    unrounded = moments.mean + moments.std * E
    result = S.step(sampler, X, V, SIGMA, SIGMA_NEXT, noise=E, dtype=torch.bfloat16)
    assert (sampler.log_prob(unrounded, moments) - result.log_prob).abs().max() > 1e-5


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_rows_outside_their_window_take_the_ode_step_and_change_no_other(sampler: S.Sampler) -> None:
    mixed = S.step(sampler, X, V, SIGMA, SIGMA_NEXT, noise=E, stochastic=[True, False, True])
    every = S.step(sampler, X, V, SIGMA, SIGMA_NEXT, noise=E)
    plain = S.step(S.ODE(), X, V, SIGMA, SIGMA_NEXT)
    assert torch.equal(mixed.latents[[0, 2]], every.latents[[0, 2]])
    assert torch.equal(mixed.log_prob[[0, 2]], every.log_prob[[0, 2]])
    assert torch.equal(mixed.latents[1], plain.latents[1])
    assert mixed.log_prob[1].isnan()


@pytest.mark.parametrize("sampler", ALL)
def test_the_last_step_is_ode_and_gives_the_predicted_x0(sampler: S.Sampler) -> None:
    end = torch.zeros(3)
    result = S.step(sampler, X, V, SIGMA, end, stochastic=[False] * 3)
    assert torch.equal(result.latents, S.predict_x0(X, V, SIGMA))


def test_predictions_invert_the_interpolation() -> None:
    x0, e = draw(8), draw(9)
    x = S.interpolate(x0, e, SIGMA)
    torch.testing.assert_close(S.predict_x0(x, e - x0, SIGMA), x0, rtol=0, atol=2e-6)
    torch.testing.assert_close(S.predict_noise(x, e - x0, SIGMA), e, rtol=0, atol=2e-6)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_kl_is_zero_at_the_reference_and_leaves_the_step_length_out(sampler: S.Sampler) -> None:
    here = sampler.moments(X, V, SIGMA, SIGMA_NEXT)
    there = sampler.moments(X, V + 0.1 * E, SIGMA, SIGMA_NEXT)
    assert not sampler.kl(here, here).any()
    scale = here.std.double().flatten() ** 2
    if not isinstance(sampler, S.CPS):
        scale /= (SIGMA - SIGMA_NEXT).double()
    expected = (here.mean - there.mean).double().square().mean((1, 2)) / (2 * scale)
    torch.testing.assert_close(sampler.kl(here, there).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sampler", ALL)
def test_a_row_does_not_depend_on_its_batch(sampler: S.Sampler) -> None:
    whole = S.step(sampler, X, V, SIGMA, SIGMA_NEXT, noise=E)
    for i in range(3):
        row = slice(i, i + 1)
        alone = S.step(sampler, X[row], V[row], SIGMA[row], SIGMA_NEXT[row], noise=E[row])
        assert torch.equal(alone.latents, whole.latents[row])


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(ValueError, match="noise is None"):
        S.step(S.CPS(0.8), X, V, SIGMA, SIGMA_NEXT)
    with pytest.raises(ValueError, match="has 2 entries"):
        S.step(S.CPS(0.8), X, V, SIGMA, SIGMA_NEXT, noise=E, stochastic=[True, False])
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise level"):
            S.build_sampler("flow-sde", bad)
    with pytest.raises(ValueError, match="at most 1"):
        S.build_sampler("cps", 1.2)
    with pytest.raises(ValueError, match="set it to 0"):
        S.build_sampler("ode", 0.7)
    with pytest.raises(ValueError, match="flow-sde, cps, dance, ode"):
        S.build_sampler("ddim", 0.7)
    assert [type(S.build_sampler(n, 0.5)) for n in S.SAMPLERS[:3]] == [S.FlowSDE, S.CPS, S.Dance]
