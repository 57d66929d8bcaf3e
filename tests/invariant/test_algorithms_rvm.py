"""Velocity matching against the papers' formulas in float64, and its special cases against the algorithms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import World, algorithm, gradients, make_learner, roll_out
from tiny_policy import TinyPolicy, rollout
from torch import Tensor

from spotlight.algorithms.base import TrainBatch
from spotlight.algorithms.diffusion_nft import DiffusionNFT
from spotlight.algorithms.forward_process import noised
from spotlight.algorithms.rvm import RVM
from spotlight.config.sections.algorithm import DiffusionNFTConfig
from spotlight.config.sections.newer_algorithms import RAMConfig, RVMConfig
from spotlight.diffusion.samplers import ODE


def rvm(**settings: Any) -> RVM:
    return RVM(RVMConfig(**settings), ODE())


def moved() -> tuple[TinyPolicy, TrainBatch]:
    """A policy whose three slots differ, and samples of it."""
    policy = TinyPolicy()
    policy.nudge(0.05)
    policy.nudge(0.05, "old", seed=2)
    return policy, rollout(policy, ODE())


def exact(policy: TinyPolicy, batch: TrainBatch, anchor: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v with gradient, v*, v_a and t of timestep 1, in float64."""
    x, sigma, noise = noised(batch, 1, 3, "uniform")
    v = policy.velocity(x, sigma).double()
    v_a = policy.velocity(x, sigma, anchor).double().detach()  # type: ignore[arg-type]
    return v, (noise - batch.final).double(), v_a, sigma.double()


def mean(x: Tensor) -> Tensor:
    return x.square().mean((1, 2))


@pytest.mark.parametrize("anchor", ["reference", "old"])
@pytest.mark.parametrize("rule", ["constant", "complement"])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_loss_is_the_published_one_in_float64(anchor: str, rule: str, normalise: bool) -> None:
    policy, batch = moved()
    algo = rvm(anchor=anchor, anchor_rule=rule, anchor_weight=0.7, reward_scale=0.3, normalise=normalise)
    v, target, v_a, t = exact(policy, batch, anchor)
    r = 0.3 * batch.advantages.double()
    beta = 0.7 - r if rule == "complement" else 0.7
    weight = t / (v - target).abs().mean((1, 2)) if normalise else 1
    expected = weight * (r * mean(v - target) + beta * mean(v - v_a)) / 2
    terms = algo.loss(policy, batch, 1)
    torch.testing.assert_close(terms.per_sample.double(), expected, rtol=1e-5, atol=1e-6)
    assert not any(metric.requires_grad for metric in terms.metrics.values())
    if anchor == "reference":
        ratio = (mean(v) / mean(v_a)).sqrt().detach()
        torch.testing.assert_close(terms.metrics["velocity_norm_ratio"].double(), ratio)


def test_the_gradient_is_that_of_the_detached_target_of_ram() -> None:
    """Equation 17 of arXiv 2605.10759: |v - sg[v_ref + r (v* - v)]|² / 2."""
    policy, batch = moved()
    v, target, v_ref, _ = exact(policy, batch, "reference")
    r = 2.0 * batch.advantages.double().view(-1, 1, 1)
    expected = policy.gradient((mean(v - (v_ref + r * (target - v)).detach()) / 2).mean())
    ram = RVM(RAMConfig(reward_scale=2.0), ODE())
    assert (ram.name, ram.rollout_slot, ram.extra_slots) == ("ram", "policy", ("reference",))
    found = policy.gradient(ram.loss(policy, batch, 1).per_sample.mean())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_gradient_is_that_of_the_papers_diffusion_nft(beta: float) -> None:
    """(ρ |v+ - v*|² + (1-ρ) |v- - v*|²) / 2β with v± = v_old ± β (v - v_old), wherever the old policy is."""
    policy, batch = moved()
    v, target, old, _ = exact(policy, batch, "old")
    rho = (batch.advantages.double() / 10 + 0.5).clamp(0, 1)
    away = beta * (v - old)
    implicit = (rho * mean(old + away - target) + (1 - rho) * mean(old - away - target)) / (2 * beta)
    algo = rvm(anchor="old", anchor_rule="complement", anchor_weight=beta, reward_scale=1 / 5)
    assert (algo.rollout_slot, algo.old_decay(100)) == ("old", 0.1)
    found = policy.gradient(algo.loss(policy, batch, 1).per_sample.mean())
    torch.testing.assert_close(found, policy.gradient(implicit.mean()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_gradient_is_that_of_our_diffusion_nft_where_the_old_policy_is_the_policy(beta: float) -> None:
    policy = TinyPolicy()
    batch = replace(rollout(policy, ODE(), slot="old"), old_is_policy=True)
    nft = DiffusionNFT(DiffusionNFTConfig(beta=beta, reference_weight=0), ODE())
    algo = rvm(anchor="old", anchor_rule="complement", anchor_weight=beta, reward_scale=2.0, normalise=True)
    for timestep in range(3):
        expected = policy.gradient(nft.loss(policy, batch, timestep).per_sample.mean())
        found = policy.gradient(algo.loss(policy, batch, timestep).per_sample.mean())
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_following_the_gradient_moves_towards_good_samples_and_away_from_bad_ones() -> None:
    for advantage, better in ((1.0, True), (-1.0, False)):
        policy = TinyPolicy()
        batch = replace(rollout(policy, ODE()), advantages=torch.full((6,), advantage))
        before = rvm().loss(policy, batch, 0)
        assert set(policy.calls[-1:]) == {"policy"}
        policy.descend(before.per_sample.mean(), 1e-3)
        after = rvm().loss(policy, batch, 0).metrics["matching_loss"]
        assert (after.mean() < before.metrics["matching_loss"].mean()).item() is better


def test_on_a_dit_it_trains_as_diffusion_nft_does_whatever_the_micro_batches(
    random_pipeline: Path, tmp_path: Path
) -> None:
    world = World(random_pipeline, tmp_path, layers=1)
    still = {"old_policy": {"cap": 0.0}}
    same = {"anchor": "old", "anchor_rule": "complement", "anchor_weight": 1.0, "reward_scale": 2.0}
    found, samples = [], []
    for name, size, settings in (
        ("diffusion-nft", 6, {"reference_weight": 0.0}),
        ("rvm", 6, {**same, "normalise": True}),
        ("rvm", 2, {**same, "normalise": True}),
    ):
        learner = make_learner(world, algorithm(name, **settings, **still))
        samples = samples or roll_out(world, learner)
        found.append(gradients(learner, samples, size))
    for other in found[1:]:
        for parameter, gradient in found[0].items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(other[parameter], gradient, rtol=1e-3, atol=1e-3 * scale + 1e-9)
    assert any(gradient.any() for gradient in found[0].values())
