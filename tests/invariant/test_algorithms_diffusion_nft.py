"""DiffusionNFT's exact identities, on an analytic policy, against float64 references."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from scipy import stats
from tiny_policy import CHANNELS, TOKENS, TinyPolicy, rollout, schedule
from torch import Tensor

from spotlight.algorithms.base import TrainBatch
from spotlight.algorithms.diffusion_nft import DiffusionNFT
from spotlight.algorithms.forward_process import noised, stratified
from spotlight.config.sections.algorithm import DiffusionNFTConfig, OldPolicyConfig
from spotlight.diffusion.samplers import ODE


def algorithm(
    *,
    beta: float = 1.0,
    reference_weight: float = 0.0,
    noise_levels: Literal["uniform", "schedule"] = "uniform",
    old_policy: OldPolicyConfig | None = None,
) -> DiffusionNFT:
    old_policy = OldPolicyConfig() if old_policy is None else old_policy
    params = DiffusionNFTConfig(
        beta=beta, reference_weight=reference_weight, noise_levels=noise_levels, old_policy=old_policy
    )
    return DiffusionNFT(params, ODE())


def batch_of(policy: TinyPolicy, advantages: Tensor | None = None) -> TrainBatch:
    batch = rollout(policy, ODE(), slot="old")
    assert batch.latents is None
    return batch if advantages is None else replace(batch, advantages=advantages)


def total(nft: DiffusionNFT, policy: TinyPolicy, batch: TrainBatch) -> Tensor:
    return torch.stack([nft.loss(policy, batch, t).per_sample for t in range(nft.timesteps(0))]).mean()


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_first_gradient_is_that_of_flow_matching_times_2_rho_minus_1(beta: float) -> None:
    policy = TinyPolicy()
    nft, batch = algorithm(beta=beta), batch_of(policy)
    for timestep in range(3):
        x_t, sigma, e = noised(batch, timestep, 3, "uniform")
        rho = (batch.advantages / 10 + 0.5).clamp(0, 1)
        velocity = policy.velocity(x_t, sigma)
        t = sigma.view(-1, 1, 1)
        miss = velocity - (e - batch.final)
        weight = (t * miss).abs().mean((1, 2)).detach()
        flow_matching = sigma**2 / weight * miss.square().mean((1, 2))
        expected = policy.gradient((5 * (2 * rho - 1) * flow_matching).mean())
        gradient = policy.gradient(nft.loss(policy, batch, timestep).per_sample.mean())
        torch.testing.assert_close(gradient, expected, rtol=2e-4, atol=2e-5)
        assert expected.abs().max() > 1e-2


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_loss_is_the_published_one_in_float64(beta: float) -> None:
    policy = TinyPolicy()
    policy.nudge(0.05)
    policy.nudge(0.05, "old", seed=2)
    batch = batch_of(policy)
    nft = algorithm(beta=beta, reference_weight=0.3)
    x_t, sigma, _ = noised(batch, 1, 3, "uniform")
    with torch.no_grad():
        v, old, ref = (policy.velocity(x_t, sigma, s).double() for s in ("policy", "old", "reference"))  # type: ignore[arg-type]
    t, x0 = sigma.double().view(-1, 1, 1), batch.final.double()
    rho = (batch.advantages.double() / 10 + 0.5).clamp(0, 1)

    def error(implicit: Tensor) -> Tensor:
        difference = x_t.double() - t * implicit - x0
        return difference.square().mean((1, 2)) / difference.abs().mean((1, 2)).clamp(min=1e-5)

    positive = error(beta * v + (1 - beta) * old)
    negative = error((1 + beta) * old - beta * v)
    expected = 5 * (rho * positive + (1 - rho) * negative) / beta + 0.3 * (v - ref).square().mean((1, 2))
    result = nft.loss(policy, batch, 1).per_sample
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_neutral_advantage_gives_no_gradient_on_policy_and_opposite_ones_cancel() -> None:
    policy = TinyPolicy()
    nft = algorithm()
    neutral = policy.gradient(total(nft, policy, batch_of(policy, torch.zeros(6))))
    good = policy.gradient(total(nft, policy, batch_of(policy, torch.ones(6))))
    bad = policy.gradient(total(nft, policy, batch_of(policy, -torch.ones(6))))
    assert neutral.abs().max() < 1e-4 * good.abs().max()
    torch.testing.assert_close(good, -bad, rtol=1e-3, atol=1e-4)


def test_advantages_beyond_the_largest_do_not_count() -> None:
    policy = TinyPolicy()
    nft = algorithm()
    at = nft.loss(policy, batch_of(policy, torch.full((6,), 5.0)), 0)
    beyond = nft.loss(policy, batch_of(policy, torch.full((6,), 50.0)), 0)
    assert torch.equal(at.per_sample, beyond.per_sample)
    assert torch.equal(at.metrics["rho"], torch.ones(6))


def test_following_the_gradient_moves_towards_good_samples_and_away_from_bad_ones() -> None:
    for advantage, better in ((1.0, True), (-1.0, False)):
        policy = TinyPolicy()
        nft, batch = algorithm(), batch_of(policy, torch.full((6,), advantage))
        before = [nft.loss(policy, batch, t).metrics["positive_loss"].mean().item() for t in range(3)]
        policy.descend(total(nft, policy, batch), 1e-3)
        after = [nft.loss(policy, batch, t).metrics["positive_loss"].mean().item() for t in range(3)]
        assert (sum(after) < sum(before)) is better


def test_the_reference_term_pulls_back_and_is_not_evaluated_without_weight() -> None:
    policy = TinyPolicy()
    policy.nudge(0.1)
    policy.weights["old"].data.copy_(policy.weight.detach())
    neutral = batch_of(policy, torch.zeros(6))
    pull = policy.gradient(total(algorithm(reference_weight=1.0), policy, neutral))
    away = policy.weight.detach() - policy.weights["reference"]
    assert (pull * away).sum() > 0
    assert "reference" in policy.calls
    policy.calls.clear()
    total(algorithm(), policy, neutral)
    assert set(policy.calls) == {"policy", "old"}
    assert algorithm().extra_slots == ("old",)
    assert algorithm(reference_weight=1e-4).extra_slots == ("old", "reference")


def test_chunks_of_a_batch_give_the_gradient_of_the_whole() -> None:
    policy = TinyPolicy()
    nft, batch = algorithm(), batch_of(policy)

    def gradient(rows: slice) -> Tensor:
        part = replace(
            batch,
            final=batch.final[rows],
            sigmas=batch.sigmas[rows],
            advantages=batch.advantages[rows],
            seeds=batch.seeds[rows],
            versions=batch.versions[rows],
        )
        return policy.gradient(total(nft, policy, part) * len(part.seeds))

    whole = gradient(slice(None))
    parts = gradient(slice(0, 1)) + gradient(slice(1, 4)) + gradient(slice(4, 6))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def levels_of(count: int, kind: Literal["uniform", "schedule"]) -> Tensor:
    """[timesteps = 4, count] noise levels of ``count`` samples."""
    batch = TrainBatch(
        final=torch.zeros(count, TOKENS, CHANNELS),
        latents=None,
        sigmas=schedule(10).repeat(count, 1),
        rollout_log_probs=None,
        old_log_probs=None,
        advantages=torch.zeros(count),
        seeds=tuple(range(count)),
        versions=(7,) * count,
    )
    return torch.stack([noised(batch, timestep, 4, kind).sigma for timestep in range(4)])


def test_noise_levels_are_stratified_uniform() -> None:
    levels = levels_of(600, "uniform")
    for timestep in range(4):
        assert (levels[timestep] >= timestep / 4).all()
        assert (levels[timestep] <= (timestep + 1) / 4).all()
    assert stats.kstest(levels.flatten().double().numpy(), "uniform").pvalue > 1e-3


def test_noise_levels_can_follow_the_schedule() -> None:
    levels = levels_of(600, "schedule").double()
    assert ((levels > 0) & (levels < 1)).all()
    # shift s / (1 + (shift - 1) s) of a uniform s, up to the straight lines between ten points.
    unshifted = levels / (3 - 2 * levels)
    assert stats.kstest(unshifted.flatten().numpy(), "uniform").statistic < 0.04
    assert levels.median() > 0.7


def test_draws_depend_on_sample_version_and_timestep_alone() -> None:
    policy = TinyPolicy()
    batch = batch_of(policy)
    here = noised(batch, 0, 3, "uniform")
    again = noised(batch, 0, 3, "uniform")
    rows = {"final": batch.final[5:], "sigmas": batch.sigmas[5:]}
    last = noised(replace(batch, **rows, seeds=batch.seeds[5:], versions=batch.versions[5:]), 0, 3, "uniform")
    assert torch.equal(here.x, again.x)
    assert torch.equal(here.x[5:], last.x)
    newer = replace(batch, versions=(4,) * 6)
    for other in (noised(batch, 1, 3, "uniform"), noised(newer, 0, 3, "uniform")):
        assert (other.noise != here.noise).float().mean() > 0.99
        assert (other.sigma != here.sigma).all()
    assert 1 / 3 <= stratified(0, 0, 1, 3) <= 2 / 3


def test_a_sample_of_an_older_version_among_newer_ones_draws_what_it_draws_alone() -> None:
    batch = batch_of(TinyPolicy())
    mixed = noised(replace(batch, versions=(3, 4, 4, 3, 4, 3)), 1, 3, "schedule")
    for version, rows in ((3, [0, 3, 5]), (4, [1, 2, 4])):
        whole = noised(replace(batch, versions=(version,) * 6), 1, 3, "schedule")
        assert all(torch.equal(one[rows], other[rows]) for one, other in zip(mixed, whole, strict=True))


def test_draws_have_fixed_golden_values() -> None:
    """Taken when a batch had one version: with one version they are the same to the bit."""
    drawn = noised(batch_of(TinyPolicy()), 1, 3, "uniform")
    assert drawn.sigma[:3].tolist() == [0.577427864074707, 0.43482905626296997, 0.5804616212844849]
    assert drawn.noise[0, 0].tolist() == [
        *(1.6012905836105347, 2.4518253803253174),
        *(0.6301252841949463, 1.2204303741455078),
    ]


def test_the_old_policy_follows_by_the_published_schedules() -> None:
    assert [algorithm().old_decay(n) for n in (0, 100, 500, 9000)] == [0, 0.1, 0.5, 0.5]
    ocr = algorithm(old_policy=OldPolicyConfig(slope=0.0075, cap=0.999, delay=75))
    assert [ocr.old_decay(n) for n in (0, 75, 175, 9000)] == [0, 0, 0.75, 0.999]
    assert algorithm().rollout_slot == "old"
    assert algorithm().old_log_probs(TinyPolicy(), batch_of(TinyPolicy()), 0) is None


def test_metrics_are_detached_and_per_sample() -> None:
    policy = TinyPolicy()
    terms = algorithm(reference_weight=1e-4).loss(policy, batch_of(policy), 0)
    assert terms.metrics.keys() == {
        *("rho", "positive_loss", "negative_loss", "old_distance"),
        *("reference_distance", "velocity_norm_ratio"),
    }  # fmt: skip
    for metric in terms.metrics.values():
        assert metric.shape == (6,)
        assert not metric.requires_grad
    assert not terms.metrics["old_distance"].any()


def test_wrong_use_is_an_error() -> None:
    policy = TinyPolicy()
    with pytest.raises(ValueError, match="timestep is 3 of 3"):
        algorithm().loss(policy, batch_of(policy), 3)
    for bad in ({"beta": 0.0}, {"train_timesteps": 0}, {"noise_levels": "normal"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            DiffusionNFTConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="less than 1"):
        OldPolicyConfig(cap=1.0)
