"""The identities of GRPO-Guard and AWM, on an analytic policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_policy import TinyPolicy, rollout
from torch import Tensor

from spotlight.algorithms.awm import AWM
from spotlight.algorithms.forward_process import noised
from spotlight.algorithms.grpo_guard import GRPOGuard
from spotlight.algorithms.replay import transition
from spotlight.config.sections.algorithm import AWMConfig, GRPOGuardConfig
from spotlight.diffusion.noise import noise_batch
from spotlight.diffusion.samplers import CPS, ODE, Dance, FlowSDE, Moments, Sampler


def gaussian_log_prob(x: Tensor, moments: Moments) -> Tensor:
    mean, std = moments.mean.detach().double(), moments.std.double()
    return torch.distributions.Normal(mean, std).log_prob(x.double()).mean((1, 2))


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), Dance(0.3), CPS(0.8)])
def test_the_guarded_ratio_is_k_times_the_centred_log_ratio_and_the_kick_times_the_shift(
    sampler: Sampler,
) -> None:
    policy = TinyPolicy()
    guard, batch = GRPOGuard(GRPOGuardConfig(clip_range=0.5), sampler), rollout(policy, sampler)
    policy.nudge(0.05)
    for timestep in range(guard.timesteps(5)):
        at = transition(batch, timestep, None)
        new, old = (
            sampler.moments(at.x, policy.velocity(at.x, at.sigma, slot), at.sigma, at.sigma_next)
            for slot in ("policy", "old")
        )  # type: ignore[arg-type]
        k = new.std.double().flatten()
        shift = (new.mean - old.mean).detach().double()
        difference = gaussian_log_prob(at.x_next, new) - gaussian_log_prob(at.x_next, old)
        published = k * (difference + shift.square().mean((1, 2)) / (2 * k**2))
        kick = noise_batch(batch.seeds, [timestep] * 6, batch.final.shape[1:]).double()
        terms = guard.loss(policy, batch, timestep)
        log_ratio = terms.metrics["ratio"].double().log()
        torch.testing.assert_close(log_ratio, published, rtol=1e-3, atol=2e-6)
        torch.testing.assert_close(log_ratio, (kick * shift).mean((1, 2)), rtol=1e-3, atol=2e-6)
        d = (at.sigma - at.sigma_next).double()
        expected = -batch.advantages.double() * log_ratio.exp() / d
        torch.testing.assert_close(terms.per_sample.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_guarded_ratio_of_a_sample_ignores_the_others_and_is_one_before_any_update() -> None:
    policy, sampler = TinyPolicy(), FlowSDE()
    guard, batch = GRPOGuard(GRPOGuardConfig(), sampler), rollout(policy, sampler)
    assert torch.equal(guard.loss(policy, batch, 2).metrics["ratio"], torch.ones(6))
    policy.nudge(0.05)
    whole = guard.loss(policy, batch, 2).metrics["ratio"]
    assert batch.latents is not None
    alone = replace(
        batch,
        final=batch.final[:1],
        latents=batch.latents[:1],
        sigmas=batch.sigmas[:1],
        advantages=batch.advantages[:1],
        seeds=batch.seeds[:1],
        versions=batch.versions[:1],
    )
    torch.testing.assert_close(guard.loss(policy, alone, 2).metrics["ratio"], whole[:1])
    assert guard.old_decay(9) == 0


def test_guard_reports_how_far_the_replay_is_from_the_rollout_for_each_step() -> None:
    policy, sampler = TinyPolicy(), FlowSDE()
    guard, batch = GRPOGuard(GRPOGuardConfig(train_timesteps=2), sampler), rollout(policy, sampler)
    assert batch.rollout_log_probs is not None
    off = replace(batch, rollout_log_probs=batch.rollout_log_probs + 0.25)
    for timestep in range(2):
        at, terms = transition(off, timestep, 2), guard.loss(policy, off, timestep)
        assert terms.kept_step is not None
        assert torch.equal(terms.kept_step, at.index)
        difference = terms.metrics["log_prob_rollout_difference"]
        torch.testing.assert_close(difference, torch.full((6,), 0.25), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_awm_is_advantage_weighted_flow_matching(power: float) -> None:
    policy = TinyPolicy()
    awm = AWM(AWMConfig(power=power, reference_weight=0, old_weight=0), ODE())
    assert awm.extra_slots == ()
    batch = rollout(policy, ODE())
    x_t, sigma, e = noised(batch, 1, 3, "uniform")
    matching = (policy.velocity(x_t, sigma) - (e - batch.final)).square().mean((1, 2))
    weight = batch.advantages / 5 * sigma * matching.detach() ** (power - 1)
    terms = awm.loss(policy, batch, 1)
    torch.testing.assert_close(
        policy.gradient(terms.per_sample.mean()),
        policy.gradient((weight * matching).mean()),
        rtol=1e-4,
        atol=1e-6,
    )
    torch.testing.assert_close(terms.per_sample.detach(), -batch.advantages / 5)


def test_awm_is_held_by_its_average_and_its_reference() -> None:
    policy = TinyPolicy()
    batch = replace(rollout(policy, ODE()), advantages=torch.zeros(6))
    awm = AWM(AWMConfig(reference_weight=0.5, old_weight=2.0), ODE())
    assert awm.extra_slots == ("old", "reference")
    assert not awm.loss(policy, batch, 0).per_sample.any()
    policy.nudge(0.1)
    terms = awm.loss(policy, batch, 0)
    held = 2.0 * terms.metrics["old_distance"] + 0.5 * terms.metrics["reference_distance"]
    torch.testing.assert_close(terms.per_sample.detach(), held)
    assert policy.gradient(terms.per_sample.sum()).any()
    assert [awm.old_decay(n) for n in (0, 100, 9000)] == [0, 0.1, 0.3]
