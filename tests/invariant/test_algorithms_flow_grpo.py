"""Flow-GRPO's exact identities, on an analytic policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_policy import TinyPolicy, rollout
from torch import Tensor

from spotlight.algorithms.base import LossTerms, TrainBatch
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.algorithms.replay import trained_steps, transition
from spotlight.config.sections.algorithm import FlowGRPOConfig
from spotlight.diffusion.samplers import CPS, ODE, Dance, FlowSDE, Sampler

SAMPLERS: list[Sampler] = [FlowSDE(0.7), CPS(0.8), Dance(0.3)]


def losses(algorithm: FlowGRPO, policy: TinyPolicy, batch: TrainBatch) -> list[LossTerms]:
    assert batch.latents is not None
    count = algorithm.timesteps(batch.latents.shape[1] - 1)
    return [algorithm.loss(policy, batch, timestep) for timestep in range(count)]


def with_old(algorithm: FlowGRPO, policy: TinyPolicy, batch: TrainBatch) -> TrainBatch:
    assert batch.latents is not None
    count = algorithm.timesteps(batch.latents.shape[1] - 1)
    columns = [algorithm.old_log_probs(policy, batch, timestep) for timestep in range(count)]
    found = [column for column in columns if column is not None]
    return replace(batch, old_log_probs=torch.stack(found, 1) if found else None)


def log_probs(sampler: Sampler, policy: TinyPolicy, batch: TrainBatch) -> Tensor:
    """[batch, S] with gradient, by hand."""
    assert batch.latents is not None
    columns = []
    for k in range(batch.latents.shape[1] - 1):
        x, sigma, sigma_next = batch.latents[:, k], batch.sigmas[:, k], batch.sigmas[:, k + 1]
        moments = sampler.moments(x, policy.velocity(x, sigma), sigma, sigma_next)
        columns.append(sampler.log_prob(batch.latents[:, k + 1], moments))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["recompute", "stop_gradient", "rollout"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_before_any_update_every_ratio_is_bitwise_one(
    sampler: Sampler, mode: str, dtype: torch.dtype
) -> None:
    policy = TinyPolicy()
    algorithm = FlowGRPO(FlowGRPOConfig(old_log_probs=mode), sampler)  # type: ignore[arg-type]
    batch = with_old(algorithm, policy, rollout(policy, sampler, dtype=dtype, window=range(1, 4)))
    for terms in losses(algorithm, policy, batch):
        assert torch.equal(terms.metrics["ratio"], torch.ones(6))
        assert torch.equal(terms.per_sample.detach(), -batch.advantages)
        assert not terms.metrics["clip_fraction"].any()
        assert not terms.metrics["log_prob_rollout_difference"].any()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_on_policy_gradient_is_minus_mean_of_advantage_times_score(sampler: Sampler) -> None:
    policy = TinyPolicy()
    algorithm = FlowGRPO(FlowGRPOConfig(), sampler)
    batch = with_old(algorithm, policy, rollout(policy, sampler))
    expected = policy.gradient(-(batch.advantages[:, None] * log_probs(sampler, policy, batch)).mean())
    loss = torch.stack([terms.per_sample for terms in losses(algorithm, policy, batch)]).mean()
    torch.testing.assert_close(policy.gradient(loss), expected, rtol=1e-4, atol=1e-8)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_off_policy_the_gradient_is_zero_on_the_clipped_side_and_only_there(sampler: Sampler) -> None:
    policy = TinyPolicy()
    algorithm = FlowGRPO(FlowGRPOConfig(clip_range=1e-3), sampler)
    batch = with_old(algorithm, policy, rollout(policy, sampler, batch=16))
    policy.nudge(0.02)
    clipped, open_, signs = 0, 0, set()
    for terms in losses(algorithm, policy, batch):
        for i in range(16):
            ratio, advantage = terms.metrics["ratio"][i].item(), batch.advantages[i].item()
            gradient = policy.gradient(terms.per_sample[i])
            outside = ratio > 1.001 if advantage > 0 else ratio < 0.999
            assert bool(gradient.any()) is not outside
            if outside:
                clipped += 1
                signs.add(advantage > 0)
                assert terms.metrics["clip_fraction"][i] == 1
            else:
                open_ += 1
    assert clipped > 10
    assert open_ > 10
    assert signs == {True, False}


def test_the_loss_is_the_pessimistic_clipped_surrogate() -> None:
    policy, sampler = TinyPolicy(), FlowSDE(0.7)
    algorithm = FlowGRPO(FlowGRPOConfig(clip_range=1e-3), sampler)
    batch = with_old(algorithm, policy, rollout(policy, sampler, batch=16))
    assert batch.old_log_probs is not None
    policy.nudge(0.02)
    new = log_probs(sampler, policy, batch).detach().double()
    ratio = torch.exp(new - batch.old_log_probs.double())
    a = batch.advantages.double()[:, None]
    expected = torch.maximum(-a * ratio, -a * ratio.clamp(0.999, 1.001))
    result = torch.stack([terms.per_sample for terms in losses(algorithm, policy, batch)], 1)
    torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_kl_has_a_gradient_off_the_reference_and_none_at_it(sampler: Sampler) -> None:
    policy = TinyPolicy()
    batch = replace(rollout(policy, sampler), advantages=torch.zeros(6))
    algorithm = FlowGRPO(FlowGRPOConfig(kl_weight=0.04, old_log_probs="stop_gradient"), sampler)
    assert algorithm.extra_slots == ("reference",)

    def total() -> Tensor:
        return torch.stack([terms.per_sample for terms in losses(algorithm, policy, batch)]).mean()

    assert total() == 0
    assert not policy.gradient(total()).any()
    policy.nudge(0.1)
    assert total() > 0
    assert policy.gradient(total()).any()
    before = total().item()
    policy.descend(total(), 1e-2)
    assert total().item() < before


def test_the_kl_is_weighted_by_beta_and_matches_the_formula() -> None:
    policy, sampler = TinyPolicy(), Dance(0.3)
    batch = rollout(policy, sampler)
    policy.nudge(0.1)
    assert batch.latents is not None
    terms = FlowGRPO(FlowGRPOConfig(kl_weight=0.5, old_log_probs="stop_gradient"), sampler).loss(
        policy, batch, 0
    )
    x, s, s1 = batch.latents[:, 0], batch.sigmas[:, 0], batch.sigmas[:, 1]
    means = [
        sampler.moments(x, policy.velocity(x, s, slot), s, s1).mean.double()
        for slot in ("policy", "reference")
    ]
    kl = (means[0] - means[1]).square().mean((1, 2)) / (2 * 0.3**2)
    torch.testing.assert_close(terms.metrics["kl"].double(), kl, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        terms.per_sample.double(), -batch.advantages.double() + 0.5 * kl, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), Dance(0.3), CPS(0.8)], ids=lambda one: type(one).__name__)
def test_a_steps_kl_is_that_of_its_normal_densities(sampler: Sampler) -> None:
    """Of flow-sde and dance it is the other one over the step's length; of cps the same."""
    policy = TinyPolicy()
    batch = replace(rollout(policy, sampler), advantages=torch.zeros(6))
    policy.nudge(0.1)
    settings = FlowGRPOConfig(kl_weight=1, old_log_probs="stop_gradient")
    rate, step = (
        losses(FlowGRPO(settings.model_copy(update={"kl_scale": scale}), sampler), policy, batch)
        for scale in ("rate", "step")
    )
    for at, (one, other) in enumerate(zip(rate, step, strict=True)):
        length = batch.sigmas[:, at] - batch.sigmas[:, at + 1]
        expected = one.metrics["kl"] if isinstance(sampler, CPS) else one.metrics["kl"] / length
        torch.testing.assert_close(other.metrics["kl"], expected, rtol=1e-5, atol=0)


def test_without_kl_the_reference_is_never_evaluated() -> None:
    policy = TinyPolicy()
    algorithm = FlowGRPO(FlowGRPOConfig(), FlowSDE())
    batch = rollout(policy, algorithm.sampler)
    policy.calls.clear()
    losses(algorithm, policy, with_old(algorithm, policy, batch))
    assert set(policy.calls) == {"policy"}
    assert algorithm.extra_slots == ()
    assert algorithm.old_decay(3) is None


@pytest.mark.parametrize("mode", ["recompute", "stop_gradient"])
def test_chunks_of_a_batch_give_the_gradient_of_the_whole(mode: str) -> None:
    policy, sampler = TinyPolicy(), FlowSDE()
    params = FlowGRPOConfig(train_timesteps=2, kl_weight=0.1, old_log_probs=mode)  # type: ignore[arg-type]
    algorithm = FlowGRPO(params, sampler)
    batch = rollout(policy, sampler)
    policy.nudge(0.01, "reference")

    def gradient(rows: slice) -> Tensor:
        assert batch.latents is not None
        assert batch.rollout_log_probs is not None
        part = replace(
            batch,
            final=batch.final[rows],
            latents=batch.latents[rows],
            sigmas=batch.sigmas[rows],
            rollout_log_probs=batch.rollout_log_probs[rows],
            advantages=batch.advantages[rows],
            seeds=batch.seeds[rows],
            versions=batch.versions[rows],
        )
        part = with_old(algorithm, policy, part)
        return policy.gradient(sum(t.per_sample.sum() for t in losses(algorithm, policy, part)))  # type: ignore[arg-type]

    whole = gradient(slice(None))
    parts = gradient(slice(0, 1)) + gradient(slice(1, 4)) + gradient(slice(4, 6))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_trained_steps_are_distinct_and_fixed_by_seed_and_version() -> None:
    chosen = {(seed, version): trained_steps(seed, version, 9, 4) for seed in range(40) for version in (0, 1)}
    assert chosen == {key: trained_steps(*key, 9, 4) for key in chosen}
    assert all(len(set(steps)) == 4 and steps == sorted(steps) for steps in chosen.values())
    assert {step for steps in chosen.values() for step in steps} == set(range(9))
    assert sum(chosen[seed, 0] != chosen[seed, 1] for seed in range(40)) > 30
    assert trained_steps(0, 0, 9, 9) == list(range(9))


def test_a_sample_trains_the_steps_of_its_own_version_whatever_the_others_have() -> None:
    batch = rollout(TinyPolicy(), FlowSDE())
    chosen = [transition(batch, timestep, 2).index.tolist() for timestep in (0, 1)]
    assert chosen == [[2, 1, 0, 3, 0, 2], [4, 4, 3, 4, 1, 4]]  # as when a batch had one version
    mixed = transition(replace(batch, versions=(3, 8, 3, 8, 3, 8)), 0, 2).index.tolist()
    newer = transition(replace(batch, versions=(8,) * 6), 0, 2).index.tolist()
    assert mixed[::2] == chosen[0][::2]
    assert mixed[1::2] == newer[1::2] != chosen[0][1::2]


def test_a_transition_is_one_step_of_the_rollout_and_old_log_probs_are_of_those() -> None:
    policy, sampler = TinyPolicy(), CPS()
    algorithm = FlowGRPO(FlowGRPOConfig(train_timesteps=2), sampler)
    batch = with_old(algorithm, policy, rollout(policy, sampler))
    assert batch.latents is not None
    assert batch.old_log_probs is not None
    expected = log_probs(sampler, policy, batch).detach()
    for timestep in range(2):
        at = transition(batch, timestep, 2)
        torch.testing.assert_close(batch.old_log_probs[:, timestep], at.pick(expected))
        for i in range(6):
            step = at.index[i]
            assert torch.equal(at.x[i], batch.latents[i, step])
            assert torch.equal(at.x_next[i], batch.latents[i, step + 1])
            assert at.sigma[i] == batch.sigmas[i, step] > at.sigma_next[i] == batch.sigmas[i, step + 1]
    assert batch.old_log_probs.shape == (6, 2)


def test_the_rollout_difference_is_reported() -> None:
    policy, sampler = TinyPolicy(), FlowSDE()
    batch = rollout(policy, sampler)
    assert batch.rollout_log_probs is not None
    batch = replace(batch, rollout_log_probs=batch.rollout_log_probs + 0.25)
    terms = FlowGRPO(FlowGRPOConfig(old_log_probs="stop_gradient"), sampler).loss(policy, batch, 0)
    torch.testing.assert_close(terms.metrics["log_prob_rollout_difference"], torch.full((6,), 0.25))
    for metric in terms.metrics.values():
        assert metric.shape == (6,)
        assert not metric.requires_grad


def test_wrong_use_is_an_error() -> None:
    policy, sampler = TinyPolicy(), FlowSDE()
    batch = rollout(policy, sampler)
    with pytest.raises(ValueError, match="before the first update is applied"):
        FlowGRPO(FlowGRPOConfig(), sampler).loss(policy, batch, 0)
    with pytest.raises(ValueError, match="must store its log-probs"):
        FlowGRPO(FlowGRPOConfig(old_log_probs="rollout"), sampler).loss(
            policy, replace(batch, rollout_log_probs=None), 0
        )
    with pytest.raises(ValueError, match="holds no trajectory"):
        FlowGRPO(FlowGRPOConfig(), sampler).loss(policy, replace(batch, latents=None), 0)
    with pytest.raises(ValueError, match="keeps 5 stochastic step"):
        FlowGRPO(FlowGRPOConfig(train_timesteps=6), sampler).timesteps(5)
    with pytest.raises(ValueError, match="0 <= timestep < 5"):
        FlowGRPO(FlowGRPOConfig(), sampler).loss(policy, batch, 5)
    with pytest.raises(ValueError, match="needs rollouts with noise"):
        FlowGRPO(FlowGRPOConfig(), ODE())
