"""What one version of staleness does to a policy gradient that is known: expectations by quadrature.

One stochastic step x' = m + k e of D coordinates, m linear in the policy's parameters; the reward is the sum
of the squares of x'. So the gradient of the expected reward in a coordinate of m is 2 m; log-probs are means
over coordinates. Samples are made by the policy OLD and trained at the policy NOW, by Flow-GRPO's loss.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spotlight.algorithms.base import Slot, TrainBatch
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.config.sections.algorithm import FlowGRPOConfig, OldLogProbs
from spotlight.diffusion.samplers import FlowSDE

SAMPLER = FlowSDE(0.7)
SIGMA, SIGMA_NEXT = 0.8, 0.7
OLD, NOW = (0.5, -0.3), (0.35, -0.2)
Vector = tuple[float, ...]


class Constant:
    """The same velocity everywhere: its D coordinates are the parameters."""

    def __init__(self, values: Vector) -> None:
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        return self.weight.expand_as(latents)


def moments(values: Vector) -> tuple[Tensor, float]:
    """Mean of x' from x = 0, and k."""
    zero, rows = torch.zeros(1, 1, len(values), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    velocity = torch.tensor(values, dtype=torch.float64).view(1, 1, -1)
    found = SAMPLER.moments(zero, velocity, SIGMA * rows, SIGMA_NEXT * rows)
    return found.mean.flatten().double(), float(found.std.flatten()[0])


def expected_gradient(
    made_by: Vector, now: Vector, kind: OldLogProbs, baseline: float, clip_range: float = 0.999
) -> Tensor:
    """Of minus the loss, by m, over all samples that ``made_by`` makes."""
    points, chances = np.polynomial.hermite_e.hermegauss(16)
    grid = list(itertools.product(range(len(points)), repeat=len(now)))
    kicks = torch.tensor([[points[i] for i in place] for place in grid])
    chance = torch.tensor([math.prod(chances[i] for i in place) for place in grid])
    chance = chance / chance.sum()
    mean, spread = moments(made_by)
    states = mean + spread * kicks
    log_probs = (-0.5 * kicks.square() - math.log(spread) - 0.5 * math.log(2 * math.pi)).mean(1, keepdim=True)
    count = len(grid)
    batch = TrainBatch(
        final=states[:, None],
        latents=torch.stack([torch.zeros_like(states), states], 1)[:, :, None],
        sigmas=torch.tensor([[SIGMA, SIGMA_NEXT]], dtype=torch.float64).repeat(count, 1),
        rollout_log_probs=log_probs,
        old_log_probs=None,
        advantages=states.square().sum(1) - baseline,
        seeds=tuple(range(count)),
        versions=(0,) * count,
    )
    policy = Constant(now)
    terms = FlowGRPO(FlowGRPOConfig(clip_range=clip_range, old_log_probs=kind), SAMPLER).loss(
        policy, batch, 0
    )
    (gradient,) = torch.autograd.grad(-(chance * terms.per_sample).sum(), policy.weight)
    slope = (moments((1.0,))[0] - moments((0.0,))[0]).item()  # of m by the velocity
    return gradient.detach().double() / slope


def expected_reward(values: Vector) -> float:
    mean, spread = moments(values)
    return float(mean.square().sum()) + len(values) * spread**2


def true_gradient(values: Vector) -> Tensor:
    return 2 * moments(values)[0]


@pytest.mark.parametrize("baseline", [0.0, 1.0])
def test_of_one_coordinate_the_ratio_to_the_rollout_gives_the_gradient_of_the_present_policy(
    baseline: float,
) -> None:
    found = expected_gradient(OLD[:1], NOW[:1], "rollout", baseline)
    torch.testing.assert_close(found, true_gradient(NOW[:1]), rtol=1e-4, atol=0)
    assert not torch.allclose(found, true_gradient(OLD[:1]), rtol=0.1)


def test_without_a_ratio_stale_samples_give_the_gradient_of_the_policy_that_made_them() -> None:
    """With the baseline at their mean reward; the ratio that a learner recomputes is 1 as well."""
    found = expected_gradient(OLD[:1], NOW[:1], "stop_gradient", expected_reward(OLD[:1]))
    torch.testing.assert_close(found, true_gradient(OLD[:1]), rtol=1e-4, atol=0)


def test_without_a_ratio_the_baselines_distance_to_the_mean_reward_is_a_bias() -> None:
    off, (old, spread), (now, _) = 0.7, moments(OLD[:1]), moments(NOW[:1])
    found = expected_gradient(OLD[:1], NOW[:1], "stop_gradient", expected_reward(OLD[:1]) - off)
    predicted = true_gradient(OLD[:1]) + off * (old - now) / spread**2
    torch.testing.assert_close(found, predicted, rtol=1e-4, atol=0)


def test_of_d_coordinates_the_mean_log_prob_corrects_one_dth_of_the_way() -> None:
    """r^(1/D) makes of the old policy the one that is 1/D of the way to the present one, times a factor."""
    size = len(OLD)
    between = tuple(old + (now - old) / size for old, now in zip(OLD, NOW, strict=True))
    found = expected_gradient(OLD, NOW, "rollout", expected_reward(between))
    (old, spread), (now, _) = moments(OLD), moments(NOW)
    shift = float(((now - old) / spread).square().sum())
    factor = math.exp(-0.5 * (1 - 1 / size) * shift / size)
    torch.testing.assert_close(found, factor * true_gradient(between) / size, rtol=1e-4, atol=0)
