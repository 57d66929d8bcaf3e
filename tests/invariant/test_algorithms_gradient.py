"""Algorithms that follow a reward's gradient: the authors' formulas, and what a rollout that stops keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_world import SIZE, World, algorithm, make_learner
from tiny_policy import CHANNELS, TOKENS, TinyPolicy
from torch import Tensor

from spotlight.algorithms.base import TrainBatch
from spotlight.algorithms.gradient.opsd import OPSD
from spotlight.algorithms.gradient.refl import ReFL
from spotlight.config.sections.gradient_algorithms import OPSDConfig, ReFLConfig
from spotlight.diffusion.samplers import ODE
from spotlight.models.family import ModelFamily
from spotlight.rollout.engine import Engine
from spotlight.rollout.reward_gradients import with_gradient
from spotlight.rollout.state import FinishedRollout, Recipe, SampleTensors
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.batching.batch import TrainingSample, stack
from spotlight_rewards.base.prompts import PromptId

ROWS, SIGMA = 6, 0.3


def queries(policy: TinyPolicy, slot: str) -> TrainBatch:
    """Of a rollout by ``slot`` that stopped at SIGMA, with some gradient."""
    generator = torch.Generator().manual_seed(4)
    z, gradient = torch.randn(2, ROWS, TOKENS, CHANNELS, generator=generator)
    with torch.no_grad():
        clean = z - SIGMA * policy.velocity(z, torch.full((ROWS,), SIGMA), slot)  # type: ignore[arg-type]
    return TrainBatch(
        final=clean,
        latents=torch.stack([z, clean], 1),
        sigmas=torch.tensor([[SIGMA, 0.0]]).repeat(ROWS, 1),
        rollout_log_probs=None,
        old_log_probs=None,
        advantages=torch.linspace(-7, 6, ROWS),
        seeds=tuple(range(ROWS)),
        versions=(0,) * ROWS,
        gradient=gradient,
    )


def rows(x: Tensor) -> Tensor:
    return x.flatten(1)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_opsd_is_the_authors_formula_in_float64(beta: float) -> None:
    """As in their script: budget, one step of it, bounded again, both branches, residuals as weights."""
    policy = TinyPolicy()
    policy.nudge(0.05)
    policy.nudge(0.05, "old", seed=2)
    batch = queries(policy, "old")
    assert batch.latents is not None
    assert batch.gradient is not None
    z, y0, g = batch.latents[:, 0].double(), batch.final.double(), batch.gradient.double()
    level = torch.full((ROWS,), SIGMA)
    with torch.no_grad():
        v, old = (policy.velocity(z.float(), level, slot).double() for slot in ("policy", "old"))  # type: ignore[arg-type]
    budget = (0.1 * rows(y0).norm(dim=1)).view(-1, 1, 1)

    def target(direction: float) -> Tensor:
        moved = direction * budget * g / (rows(g).norm(dim=1).view(-1, 1, 1) + 1e-12)
        length = rows(moved).norm(dim=1).view(-1, 1, 1)
        return y0 + moved * torch.clamp(budget / (length + 1e-12), max=1.0)

    def error(implicit: Tensor, wanted: Tensor) -> Tensor:
        miss = z - SIGMA * implicit - wanted
        return miss.square().mean((1, 2)) / miss.abs().mean((1, 2)).clamp(min=1e-5)

    share = (batch.advantages.double().clamp(-5, 5) / 5 / 2 + 0.5).clamp(0, 1)
    positive = error(beta * v + (1 - beta) * old, target(1))
    negative = error((1 + beta) * old - beta * v, target(-1))
    policy.calls.clear()
    terms = OPSD(OPSDConfig(beta=beta), ODE()).loss(policy, batch, 0)
    expected = 5 * (share * positive + (1 - share) * negative)
    torch.testing.assert_close(terms.per_sample.double(), expected, rtol=1e-5, atol=1e-6)
    assert policy.calls == ["policy"], "the old velocity is known from the rollout"


def test_fitting_opsd_reaches_the_gain_that_its_targets_promise() -> None:
    policy = TinyPolicy()
    batch = replace(queries(policy, "old"), advantages=torch.full((ROWS,), 5.0))
    opsd, gains = OPSD(OPSDConfig(radius=0.02), ODE()), []
    optimizer = torch.optim.Adam([policy.weight], lr=3e-3)
    for _ in range(60):
        terms = opsd.loss(policy, batch, 0)
        optimizer.zero_grad()
        terms.per_sample.mean().backward()
        optimizer.step()
        gains.append(terms.metrics["realised_gain"].mean().item())
    assert gains[0] == pytest.approx(0, abs=1e-4)
    assert gains[-1] > 0.1


def test_refl_is_the_gradient_of_the_reward_through_the_step() -> None:
    policy = TinyPolicy()
    batch = queries(policy, "policy")
    wanted = torch.randn(batch.final.shape, generator=torch.Generator().manual_seed(9))

    def reward(clean: Tensor) -> Tensor:
        return -(clean - wanted).square().sum((1, 2)) + clean.sin().sum((1, 2))

    leaf = batch.final.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(leaf).sum(), leaf)
    batch = replace(batch, gradient=gradient)
    assert batch.latents is not None
    z, level = batch.latents[:, 0], torch.full((ROWS,), SIGMA)
    expected = policy.gradient(-reward(z - SIGMA * policy.velocity(z, level)).mean())
    refl = ReFL(ReFLConfig(), ODE())
    found = policy.gradient(refl.loss(policy, batch, 0).per_sample.mean())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    held = ReFL(ReFLConfig(reference_weight=2.0), ODE())
    assert held.extra_slots == ("reference",)
    policy.nudge(0.1)
    distance = held.loss(policy, batch, 0)
    assert (distance.per_sample > refl.loss(policy, batch, 0).per_sample).all()


def test_a_batch_without_queries_is_refused() -> None:
    policy = TinyPolicy()
    with pytest.raises(ValueError, match="opsd trains at queries with reward gradients"):
        OPSD(OPSDConfig(), ODE()).loss(policy, replace(queries(policy, "old"), gradient=None), 0)


# -- on a DiT ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


def roll_out(world: World, family: ModelFamily, steps: int, keeps: str, of: int | None) -> FinishedRollout:
    engine = Engine(family, max_batch=2, negative=world.negative)
    rollout = Rollout(
        RolloutId("a-0"), Purpose.TRAIN, 0, PromptId("p"), 0, seed=5, steps=steps, version=PolicyVersion(0)
    )
    recipe = Recipe(SIZE, ODE(), None, 1.0, keeps, schedule_steps=of)  # type: ignore[arg-type]
    (found,) = engine.run(family.transformer, engine.start([rollout], [world.conditions[0]], recipe))
    assert isinstance(found, FinishedRollout)
    return found


def test_a_rollout_that_stops_takes_the_first_levels_and_goes_straight_to_the_clean_picture(
    world: World,
) -> None:
    family = world.fresh()
    stopped = roll_out(world, family, 3, "query", 5).tensors
    levels = family.sigmas(5, SIZE)
    assert stopped.latents is not None
    assert stopped.sigmas.tolist() == [levels[2].item(), 0.0]
    assert torch.equal(stopped.latents[1], stopped.final)
    z, level = stopped.latents[:1], levels[2:3]
    with torch.no_grad():
        condition = family.collate([world.conditions[0]])
        velocity = family.velocity(family.transformer, z, level, condition, None, SIZE)
    torch.testing.assert_close(stopped.final, (z - level * velocity)[0], rtol=1e-5, atol=1e-5)
    two = roll_out(world, family, 2, "query", 5).tensors
    assert two.latents is not None
    with torch.no_grad():
        before = family.velocity(family.transformer, two.latents[:1], levels[1:2], condition, None, SIZE)
    onwards = two.latents[:1] + (levels[2] - levels[1]) * before
    torch.testing.assert_close(onwards, z, rtol=1e-5, atol=1e-5)


def test_the_gradient_goes_through_the_vae_to_the_latents(world: World) -> None:
    family = world.fresh()
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(family.latent_shape(SIZE), generator=generator)
    by_pixels = torch.randn(SIZE.height, SIZE.width, 3, generator=generator)
    made = roll_out(world, family, 2, "final", None)
    sample = replace(made, tensors=replace(made.tensors, final=latents))
    found = with_gradient(family, sample, by_pixels.numpy(), SIZE).tensors.gradient
    assert found is not None
    assert found.shape == latents.shape

    def value(at: Tensor) -> float:
        pixels = torch.from_numpy(family.decode_float(at[None], SIZE)[0, 0]).double()
        return float((pixels * by_pixels).sum())

    direction = torch.randn(latents.shape, generator=generator)
    step = 1e-2
    measured = (value(latents + step * direction) - value(latents - step * direction)) / (2 * step)
    assert measured == pytest.approx(float((found * direction).sum()), rel=2e-2, abs=1e-2)


def sample_of(world: World, tensors: SampleTensors, at: int) -> TrainingSample:
    gradient = torch.randn(tensors.final.shape, generator=torch.Generator().manual_seed(at))
    given = replace(tensors, gradient=gradient)
    return TrainingSample(f"a-{at}", "a", at - 1.5, world.conditions[0], at, 0, given)


@pytest.mark.parametrize("name", ["opsd", "refl"])
def test_a_learner_trains_at_queries_however_they_are_cut(world: World, name: str) -> None:
    gradients = []
    for size in (4, 2):
        learner = make_learner(world, algorithm(name, train_timesteps=1))
        finished = roll_out(world, world.fresh(), 3, "query", 4).tensors
        samples = [sample_of(world, finished, at) for at in range(4)]
        keys = [sample.key for sample in samples]
        parts = [keys[start : start + size] for start in range(0, 4, size)]
        learner.prepare(samples, parts)
        for part in parts:
            learner.accumulate(part, 4)
        found = learner.slots.parameters("policy")
        gradients.append({key: each.grad.clone() for key, each in found.items() if each.grad is not None})
        assert stack(samples, None, torch.device("cpu"), first_update=True).gradient is not None
        learner.step()
    assert any(each.any() for each in gradients[0].values())
    for key, whole in gradients[0].items():
        near = 1e-4 * float(whole.abs().max()) + 1e-9
        torch.testing.assert_close(gradients[1][key], whole, rtol=1e-3, atol=near)
