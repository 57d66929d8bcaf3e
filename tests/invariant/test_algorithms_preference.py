"""The newer algorithms against independent float64 formulas, with gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_policy import TinyPolicy, rollout, schedule

from spotlight.algorithms.awm import AWM
from spotlight.algorithms.base import Algorithm, GroupRows, LossTerms, TrainBatch
from spotlight.algorithms.flow_dppo import FlowDPPO
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.algorithms.forward_process import noised
from spotlight.algorithms.preference.dgpo import DGPO
from spotlight.algorithms.preference.diffusion_dpo import DiffusionDPO, pairs
from spotlight.algorithms.replay import transition
from spotlight.algorithms.v_grpo import VGRPO
from spotlight.config.sections.algorithm import AWMConfig, FlowGRPOConfig
from spotlight.config.sections.newer_algorithms import (
    DGPOConfig,
    DiffusionDPOConfig,
    FlowDPPOConfig,
    VGRPOConfig,
)
from spotlight.diffusion.samplers import CPS, ODE, Dance, FlowSDE, Sampler

Array = NDArray[np.float64]
ADVANTAGES = np.array([0.7, -1.1, 0.4, 1.6, -0.2, -1.4])
GROUPS = (range(3), range(3, 6))


def array(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()


def velocity(weight: Array, x: Array, sigma: Array) -> Array:
    level = np.broadcast_to(sigma[:, None, None], (*x.shape[:2], 1))
    return np.concatenate([x, level, np.ones_like(level)], 2) @ weight


def check(policy: TinyPolicy, terms: LossTerms, loss: Callable[[Array], Array]) -> None:
    """Rows, and by finite differences the gradient of their mean, agree with ``loss`` of the weights."""
    weight, h = array(policy.weight), 1e-6
    np.testing.assert_allclose(array(terms.per_sample), loss(weight), rtol=2e-4, atol=2e-6)
    assert_gradient(policy, terms, loss, weight, h)


def assert_gradient(
    policy: TinyPolicy, terms: LossTerms, loss: Callable[[Array], Array], weight: Array, h: float = 1e-6
) -> None:
    expected = np.zeros_like(weight)
    for index in np.ndindex(*weight.shape):
        step = np.zeros_like(weight)
        step[index] = h
        expected[index] = (loss(weight + step).mean() - loss(weight - step).mean()) / (2 * h)
    found = array(policy.gradient(terms.per_sample.mean()))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3 * abs(expected).max())


def finals(policy: TinyPolicy, size: int = 3) -> TrainBatch:
    """Six final latents in groups of ``size``, each group with draws of its own."""
    advantages, count = torch.tensor(ADVANTAGES, dtype=torch.float32), 6 // size
    groups = GroupRows(
        group=torch.arange(count).repeat_interleave(size),
        member=torch.arange(size).repeat(count),
        advantages=advantages.view(count, size),
        present=torch.ones(count, size, dtype=torch.bool),
        over_ranks=lambda table: table,
    )
    seeds = tuple(100 * (row // size + 1) for row in range(6))
    return replace(rollout(policy, ODE()), advantages=advantages, groups=groups, seeds=seeds)


def moved() -> TinyPolicy:
    policy = TinyPolicy()
    policy.nudge(0.08)
    policy.nudge(0.04, "old", seed=7)
    return policy


def errors(policy: TinyPolicy, batch: TrainBatch, at: Any) -> Callable[[Array], Array]:
    """d of every row as a function of weights."""
    x, sigma, target = array(at.x), array(at.sigma), array(at.noise) - array(batch.final)
    return lambda w: ((velocity(w, x, sigma) - target) ** 2).mean((1, 2))


@pytest.mark.parametrize("clip", [None, 0.01])
def test_dgpo_is_the_papers_group_preference(clip: float | None) -> None:
    policy = moved()
    batch, config = finals(policy), DGPOConfig(beta=30.0, clip_range=clip, reference_weight=0.3)
    at = noised(batch, 1, 4, "steps", None)
    assert at.sigma[0] == at.sigma[2] != at.sigma[3]
    assert torch.equal(at.noise[0], at.noise[1])
    d = errors(policy, batch, at)
    start = array(policy.weights["reference"])
    gain = ADVANTAGES * (d(array(policy.weight)) - d(start))
    scores = [30.0 / 3 * gain[list(group)].sum() for group in GROUPS]
    weight = np.repeat([1 / (1 + math.exp(-score)) for score in scores], 3)
    ratio = np.exp(d(array(policy.weights["old"])) - d(array(policy.weight)))
    free = np.ones(6, dtype=bool)
    if clip is not None:
        free = ~np.where(ADVANTAGES > 0, ratio > 1 + clip, ratio < 1 - clip)
        assert 0 < free.sum() < 6
    fixed = d(array(policy.weight))

    def loss(w: Array) -> Array:
        x, sigma = array(at.x), array(at.sigma)
        held = ((velocity(w, x, sigma) - velocity(start, x, sigma)) ** 2).mean((1, 2))
        return weight * ADVANTAGES * np.where(free, d(w), fixed) + 0.3 * held

    terms = DGPO(config, ODE()).loss(policy, batch, 1)
    check(policy, terms, loss)
    np.testing.assert_allclose(array(terms.metrics["group_weight"]), weight, rtol=1e-4)


def test_dgpo_is_half_its_weight_where_policy_and_reference_agree() -> None:
    policy = TinyPolicy()
    dgpo = DGPO(DGPOConfig(), ODE())
    terms = dgpo.loss(policy, finals(policy), 0)
    assert torch.equal(terms.metrics["group_weight"], torch.full((6,), 0.5))
    assert torch.equal(terms.metrics["ratio"], torch.ones(6))
    assert (dgpo.rollout_slot, dgpo.extra_slots) == ("old", ("old", "reference"))
    alone = DGPO(DGPOConfig(clip_range=None), ODE())
    assert (alone.rollout_slot, alone.extra_slots, alone.old_decay(3)) == ("policy", ("reference",), None)


def test_several_timesteps_in_a_pass_compare_each_one_alone() -> None:
    policy = moved()
    batch = finals(policy)
    algorithms: list[Algorithm] = [
        DGPO(DGPOConfig(clip_range=None), ODE()),
        DiffusionDPO(DiffusionDPOConfig(train_timesteps=4, beta=20.0), ODE()),
    ]
    for algorithm in algorithms:
        together = algorithm.loss(policy, batch.repeated(2), [0] * 6 + [2] * 6).per_sample
        single = [algorithm.loss(policy, batch, timestep).per_sample for timestep in (0, 2)]
        torch.testing.assert_close(together, torch.cat(single), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "size", "chosen"),
    [
        ("extremes", 3, [(0, 1), (3, 5)]),
        ("ranks", 3, [(0, 1), (3, 5)]),
        ("extremes", 6, [(3, 5)]),
        ("ranks", 6, [(3, 5), (0, 1), (2, 4)]),
    ],
)
def test_diffusion_dpo_is_the_papers_pairwise_loss(
    kind: Any, size: int, chosen: list[tuple[int, int]]
) -> None:
    policy = moved()
    batch = finals(policy, size)
    at = noised(batch, 0, 1, "uniform")
    d = errors(policy, batch, at)
    reference = d(array(policy.weights["reference"]))

    def mean_loss(w: Array) -> float:
        behind = d(w) - reference
        margins = [-50.0 / 2 * (behind[w_] - behind[l_]) for w_, l_ in chosen]
        return float(np.mean([math.log1p(math.exp(-margin)) for margin in margins]))

    terms = DiffusionDPO(DiffusionDPOConfig(beta=50.0, pairs=kind), ODE()).loss(policy, batch, 0)
    assert float(terms.per_sample.detach().mean()) == pytest.approx(mean_loss(array(policy.weight)), rel=1e-4)
    assert_gradient(policy, terms, lambda w: np.array([mean_loss(w)]), array(policy.weight))


@pytest.mark.parametrize("name", ["dgpo", "diffusion-dpo"])
def test_a_group_may_be_shared_by_ranks(name: str) -> None:
    policy = moved()
    batch = finals(policy)
    algorithm: Algorithm = DGPO(DGPOConfig(beta=30.0), ODE())
    if name == "diffusion-dpo":
        algorithm = DiffusionDPO(DiffusionDPOConfig(beta=30.0), ODE())
    whole = policy.gradient(algorithm.loss(policy, batch, 0).per_sample.sum())
    ranks = [share(batch, rank) for rank in range(2)]
    tables: list[list[torch.Tensor]] = [[], []]
    for rank, rows in enumerate(ranks):  # what each tells the other
        algorithm.loss(policy, summed(rows, tables[rank], None), 0)
    parts = [
        algorithm.loss(policy, summed(rows, [], tables[1 - rank]), 0).per_sample.sum()
        for rank, rows in enumerate(ranks)
    ]
    torch.testing.assert_close(policy.gradient(torch.stack(parts).sum()), whole, rtol=1e-4, atol=1e-6)


def share(batch: TrainBatch, rank: int) -> TrainBatch:
    """Every other row."""
    assert batch.groups is not None
    mine = slice(rank, None, 2)
    groups = replace(batch.groups, group=batch.groups.group[mine], member=batch.groups.member[mine])
    return replace(
        batch,
        final=batch.final[mine],
        sigmas=batch.sigmas[mine],
        advantages=batch.advantages[mine],
        seeds=batch.seeds[mine],
        versions=batch.versions[mine],
        groups=groups,
    )


def summed(batch: TrainBatch, mine: list[torch.Tensor], other: list[torch.Tensor] | None) -> TrainBatch:
    """With sums over two ranks: ``mine`` collects this one's tables, ``other`` has the other's."""

    def over_ranks(table: torch.Tensor) -> torch.Tensor:
        mine.append(table)
        return table if other is None else table + other[len(mine) - 1]

    assert batch.groups is not None
    return replace(batch, groups=replace(batch.groups, over_ranks=over_ranks))


def test_pairs_are_of_equal_rank_from_both_ends() -> None:
    present = torch.tensor([[True] * 5, [True, True, True, True, False], [True, True, False, False, False]])
    advantages = torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0], [2.0, 2.0, -1.0, 2.0, 0.0], [1.0, 1.0, 0, 0, 0]])
    none = torch.zeros(0, dtype=torch.int64)
    groups = GroupRows(none, none, advantages, present, lambda table: table)
    partner, sign = pairs(groups, None)
    assert [partner[0, i].item() for i in range(5)] == [4, 3, 2, 1, 0]
    assert sign[0].tolist() == [1, -1, 0, 1, -1]
    assert sign[1].tolist() == [1, 0, -1, 0, 0]  # the other pair is equal
    assert not sign[2].any()
    _, ends = pairs(groups, 1)
    assert ends[0].tolist() == [0, -1, 0, 1, 0]


def test_v_grpo_is_the_papers_ratio_of_means() -> None:
    policy = TinyPolicy()
    batch, config = finals(policy), VGRPOConfig(clip_range=0.002, soft_clip=1.2)
    algorithm = VGRPO(config, ODE())
    rows = batch.repeated(4)
    at = [level for level in range(4) for _ in range(6)]
    old = algorithm.old_log_probs(policy, rows, at).view(4, 6).T
    first = algorithm.loss(policy, replace(rows, first_update=True), at)
    assert torch.equal(first.metrics["ratio"], torch.ones(24))
    policy.nudge(0.02)
    batch = replace(batch, old_log_probs=old)
    levels = [noised(batch, level, 4, "stratified_steps") for level in range(4)]
    clean, here = array(batch.final), array(policy.weight)

    def surrogates(w: Array) -> Array:
        found = []
        for level in levels:
            x, sigma = array(level.x), array(level.sigma)
            scale, error = [x - sigma[:, None, None] * velocity(each, x, sigma) - clean for each in (here, w)]
            found.append(-(error**2).mean((1, 2)) / abs(scale).mean((1, 2)))
        return np.stack(found)

    soft = 1.2 * np.tanh(ADVANTAGES / 1.2)

    def loss(w: Array) -> Array:
        ratio = np.exp(surrogates(w).mean(0) - array(old).mean(1))
        return np.tile(np.maximum(-soft * ratio, -soft * np.clip(ratio, 0.998, 1.002)), 4)

    terms = algorithm.loss(policy, batch.repeated(4), at)
    assert 0 < terms.metrics["clip_fraction"].mean() < 1
    check(policy, terms, loss)
    with pytest.raises(ValueError, match=r"2 of the 4 noise levels .*timesteps_per_pass to 4"):
        algorithm.loss(policy, batch.repeated(2), [0] * 6 + [1] * 6)


def test_v_grpos_first_update_may_be_cut_into_passes() -> None:
    policy = moved()
    batch, algorithm = replace(finals(policy), first_update=True), VGRPO(VGRPOConfig(), ODE())
    whole = algorithm.loss(policy, batch.repeated(4), [level for level in range(4) for _ in range(6)])
    single = [algorithm.loss(policy, batch, level).per_sample.mean() for level in range(4)]
    torch.testing.assert_close(
        policy.gradient(whole.per_sample.mean()),
        policy.gradient(torch.stack(single).mean()),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), CPS(0.8)])
def test_flow_dppo_blocks_steps_that_are_far_and_move_further(sampler: Sampler) -> None:
    policy = TinyPolicy()
    batch = rollout(policy, sampler)
    advantages = array(batch.advantages)
    fresh = FlowDPPO(FlowDPPOConfig(), sampler).loss(policy, replace(batch, first_update=True), 2)
    assert torch.equal(fresh.metrics["ratio"], torch.ones(6))
    assert not fresh.metrics["divergence"].any()
    policy.nudge(0.1)
    at = transition(batch, 2, None)
    x, after, s, s_next = (array(each) for each in (at.x, at.x_next, at.sigma, at.sigma_next))

    def mean(w: Array) -> tuple[Array, Array]:
        v, wide, next_wide = velocity(w, x, s), s[:, None, None], s_next[:, None, None]
        if isinstance(sampler, CPS):
            kick = next_wide * math.sin(0.8 * math.pi / 2)
            side = np.sqrt(next_wide**2 - kick**2)
            return (1 - next_wide) * (x - wide * v) + side * (x + (1 - wide) * v), kick
        q = 0.7 * np.sqrt(wide / (1 - wide))
        d = wide - next_wide
        drift = v * d * (1 + q**2 * (1 - wide) / (2 * wide))
        return x * (1 - q**2 * d / (2 * wide)) - drift, q * np.sqrt(d)

    def log_prob(w: Array) -> Array:
        mu, k = mean(w)
        scale = 1.0 if isinstance(sampler, CPS) else 2 * k**2
        return (-((after - mu) ** 2) / scale).mean((1, 2))

    old, here = array(policy.weights["old"]), array(policy.weight)
    k = mean(here)[1]
    divergence = ((mean(here)[0] - mean(old)[0]) ** 2 / (2 * k**2)).mean((1, 2))
    limit = float(np.median(divergence))
    now = np.exp(log_prob(here) - log_prob(old))
    blocked = (divergence >= limit) & ((now - 1) * advantages > 0)
    assert 0 < blocked.sum() < 6

    def loss(w: Array) -> Array:
        ratio = np.exp(log_prob(w) - log_prob(old))
        return -advantages * np.where(blocked, now, ratio)

    terms = FlowDPPO(FlowDPPOConfig(divergence_max=limit), sampler).loss(policy, batch, 2)
    np.testing.assert_allclose(array(terms.metrics["divergence"]), divergence, rtol=1e-3)
    assert terms.metrics["masked_fraction"].bool().tolist() == blocked.tolist()
    check(policy, terms, loss)


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), Dance(0.3)])
def test_tempflow_weights_steps_by_their_kicks_with_mean_one(sampler: Sampler) -> None:
    policy = TinyPolicy()
    batch = rollout(policy, sampler)
    equal = FlowGRPO(FlowGRPOConfig(old_log_probs="stop_gradient"), sampler)
    weighted = FlowGRPO(FlowGRPOConfig(old_log_probs="stop_gradient", step_weights="noise"), sampler)
    s = array(schedule(6))
    divisor = np.where(s[:-1] == 1, s[1], s[:-1])
    q = 0.7 * np.sqrt(s[:-1] / (1 - divisor)) if isinstance(sampler, FlowSDE) else np.full(6, 0.3)
    kicks = (q * np.sqrt(s[:-1] - s[1:]))[:5]
    for timestep in range(5):
        plain, found = (algo.loss(policy, batch, timestep).per_sample for algo in (equal, weighted))
        np.testing.assert_allclose(array(found), array(plain) * kicks[timestep] / kicks.mean(), rtol=1e-5)


def test_awm_has_a_ratio_in_later_updates_if_asked() -> None:
    policy = TinyPolicy()
    config = AWMConfig(old_log_probs="recompute", clip_range=0.01, reference_weight=0, old_weight=0)
    awm, batch = AWM(config, ODE()), rollout(policy, ODE())
    assert not awm.takes_stale
    old = [awm.old_log_probs(policy, batch, timestep) for timestep in range(3)]
    first = awm.loss(policy, replace(batch, first_update=True), 1)
    assert torch.equal(first.metrics["ratio"], torch.ones(6))
    with pytest.raises(ValueError, match="awm got no old log-probs"):
        awm.loss(policy, batch, 1)
    policy.nudge(0.05)
    batch = replace(batch, old_log_probs=torch.stack([each for each in old if each is not None], 1))
    at = noised(batch, 1, 3, "uniform")
    d, sigma, advantages = errors(policy, batch, at), array(at.sigma), array(batch.advantages) / 5

    def loss(w: Array) -> Array:
        ratio = np.exp(-4 * sigma * d(w) ** 0.25 + 4 * sigma * d(array(policy.weights["old"])) ** 0.25)
        return np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.99, 1.01))

    terms = awm.loss(policy, batch, 1)
    assert 0 < terms.metrics["clip_fraction"].mean() < 1
    check(policy, terms, loss)


def test_levels_are_those_of_the_schedule() -> None:
    policy = TinyPolicy()
    batch, levels = rollout(policy, ODE()), schedule(6)[:-1].tolist()
    for kind in ("steps", "stratified_steps"):
        drawn = torch.stack([noised(batch, t, 4, kind).sigma for t in range(4)], 1).tolist()  # type: ignore[arg-type]
        for row in drawn:
            assert len(set(row)) == 4
            assert set(row) <= set(levels)
            if kind == "stratified_steps":  # parts of 2, 2, 1 and 1 levels
                assert [levels.index(level) for level in row][2:] == [4, 5]
    few = torch.stack([noised(batch, t, 2, "steps", 3).sigma for t in range(2)], 1)
    assert float(few.min()) >= levels[2]
    with pytest.raises(ValueError, match="train_timesteps is 7, but there are 6 noise levels"):
        noised(batch, 0, 7, "steps")
