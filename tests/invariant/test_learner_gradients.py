"""Gradients of the learner on a real DiT with real rollouts: exact ratios, cuts that change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import (
    LORA,
    SIZE,
    World,
    algorithm,
    cut,
    gradients,
    make_learner,
    make_slots,
    roll_out,
    train_batch,
)
from torch import Tensor

from spotlight.algorithms.base import Slot
from spotlight.models.condition import ConditionBatch
from spotlight.models.slots import LoraSlots
from spotlight.training.batching.batch import kept_steps, stack
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.passes import MicroBatchPolicy

ALGORITHMS = ("flow-grpo", "flow-grpo-fast", "diffusion-nft")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


def nudge(learner: Learner, slot: Slot, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(9)
    for parameter in learner.slots.parameters(slot).values():
        parameter.data += size * torch.randn(parameter.shape, generator=generator)


# -- the ratio -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "settings", "guidance"),
    [
        (6, {}, 1.0),
        (4, {"recompute": "blocks"}, 1.0),
        (1, {}, 1.0),
        (3, {}, 3.0),
        (6, {"autocast": "bfloat16"}, 1.0),
    ],
    ids=["whole", "checkpointed", "single", "guided", "autocast"],
)
@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_the_ratio_is_bitwise_1_before_the_first_update(
    world: World, size: int, settings: dict[str, Any], guidance: float, mode: str
) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast"), mode, guidance=guidance, **settings)
    samples = roll_out(world, learner, guidance=guidance)
    sums = train_batch(learner, samples, size).sums
    assert sums.ratio_max == 1.0
    assert sums.means["ratio_deviation"] == 0.0
    assert sums.means["log_prob"] != 0.0


def test_the_ratio_of_a_second_update_is_that_to_the_weights_before_the_first(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast"))
    samples = roll_out(world, learner)
    learner.prepare(samples, cut(samples, 2))
    first, *rest = cut(samples, 2)
    learner.accumulate(first, 2)
    assert learner.step().sums.means["ratio_deviation"] == 0.0
    for keys in rest:
        learner.accumulate(keys, 4)
    assert learner.step().sums.means["ratio_deviation"] > 1e-7


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_replay_repeats_the_rollouts_log_probs(world: World, guidance: float) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast"), guidance=guidance)
    samples = roll_out(world, learner, guidance=guidance, batch=6)
    difference = train_batch(learner, samples, 6).sums.replay_difference
    assert set(difference) == {s.first_step + k for s in samples for k in range(2)}
    assert len({sample.first_step for sample in samples}) > 1
    assert max(difference.values()) < 2e-6


def test_the_replay_difference_labels_denoising_steps_and_stops_at_the_first_update(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast", old_log_probs="rollout"))
    samples = roll_out(world, learner)
    wrong = samples[0].tensors
    assert wrong is not None
    assert wrong.log_probs is not None
    wrong.log_probs[1] += 1.0  # the second step of the first sample's window
    learner.prepare(samples, [])
    keys = [sample.key for sample in samples]
    learner.accumulate(keys[:4], 4)
    difference = learner.step().sums.replay_difference
    assert max(difference, key=lambda step: difference[step]) == samples[0].first_step + 1
    learner.accumulate(keys[4:], 2)
    assert learner.step().sums.replay_difference == {}


# -- cuts ----------------------------------------------------------------------------------------------


class PlainPolicy:
    """The DiT called directly, all samples at once."""

    def __init__(self, learner: Learner, condition: ConditionBatch) -> None:
        self.learner, self.condition = learner, condition

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        with self.learner.slots.use(slot) as model:
            return self.learner.family.velocity(model, latents, sigma, self.condition, None, SIZE)


def plain_gradients(learner: Learner, samples: list[TrainingSample]) -> dict[str, Tensor]:
    """Of the mean loss over samples and timesteps, in one backward."""
    algo, family = learner.algorithm, learner.family
    condition = family.collate([sample.condition for sample in samples])
    policy = PlainPolicy(learner, condition)
    batch = stack(samples, None, family.device, first_update=True)
    timesteps = algo.timesteps(kept_steps(samples[0]))
    losses = [algo.loss(policy, batch, timestep).per_sample for timestep in range(timesteps)]
    torch.stack(losses).mean().backward()
    result = {
        n: p.grad.clone() for n, p in learner.slots.trainable_parameters().items() if p.grad is not None
    }
    learner.optimizer.zero_grad()
    return result


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name != "flow-grpo") == (mode == "lora") else pytest.mark.slow)
        for name in ALGORITHMS
        for mode in ("lora", "full")
    ],
)
def test_accumulated_gradients_equal_one_big_batch(world: World, name: str, mode: str) -> None:
    params = {} if name == "diffusion-nft" else {"kl_weight": 0.04}
    samples: list[TrainingSample] = []
    expected: dict[str, Tensor] = {}
    for size in (6, 4, 1):
        learner = make_learner(world, algorithm(name, **params), mode)
        samples = samples or roll_out(world, learner)
        expected = expected or plain_gradients(learner, samples)
        found = gradients(learner, samples, size)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            # Biases before a softmax and the like have gradients that are rounding alone.
            floor = 1e-5 * max(g.abs().max().item() for g in expected.values())
            torch.testing.assert_close(
                found[key], gradient, rtol=1e-3, atol=max(1e-4 * gradient.abs().max().item(), floor)
            )


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("flow-grpo-fast", "full"),
        ("diffusion-nft", "lora"),
        pytest.param("flow-grpo-fast", "lora", marks=pytest.mark.slow),
        pytest.param("diffusion-nft", "full", marks=pytest.mark.slow),
    ],
)
def test_checkpointed_activations_give_equal_gradients(world: World, name: str, mode: str) -> None:
    """The frozen slots differ from the policy and are evaluated before its backward recomputes."""
    params = {} if name == "diffusion-nft" else {"kl_weight": 0.04}
    found = []
    samples: list[TrainingSample] = []
    for recomputed in ("none", "blocks", "elementwise", 2):
        learner = make_learner(world, algorithm(name, **params), mode, recompute=recomputed)
        frozen: Slot = "old" if name == "diffusion-nft" else "policy"
        nudge(learner, frozen)
        samples = samples or roll_out(world, learner)
        found.append(gradients(learner, samples, 3))
    for others in found[1:]:
        assert found[0].keys() == others.keys()
        for name_, gradient in found[0].items():
            assert torch.equal(gradient, others[name_]), name_


# -- slots ---------------------------------------------------------------------------------------------


def velocity(learner: Learner, world: World, slot: Slot) -> Tensor:
    policy = MicroBatchPolicy(
        learner.family, learner.slots, world.conditions, size=SIZE, guidance=None, autocast=None
    )
    tokens, channels = learner.family.latent_shape(SIZE)
    latents = torch.randn(3, tokens, channels, generator=torch.Generator().manual_seed(1))
    return policy.velocity(latents, torch.tensor([0.2, 0.6, 0.9]), slot)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_reference_is_the_start_to_the_bit_however_long_we_train(world: World, mode: str) -> None:
    algo = algorithm("diffusion-nft")
    learner = make_learner(world, algo, mode)
    start = {slot: velocity(learner, world, slot).detach() for slot in learner.slots.slots}
    base = make_learner(world, algo, mode)
    bare = world.family.velocity(
        world.family.transformer,
        torch.randn(3, *learner.family.latent_shape(SIZE), generator=torch.Generator().manual_seed(1)),
        torch.tensor([0.2, 0.6, 0.9]),
        world.family.collate(world.conditions),
        None,
        SIZE,
    )
    for _ in range(2):
        train_batch(learner, roll_out(world, learner), 3)
    assert torch.equal(velocity(learner, world, "reference"), bare)
    assert torch.equal(velocity(base, world, "reference"), bare)
    assert not torch.equal(velocity(learner, world, "policy"), start["policy"])


def test_only_the_policy_gets_gradients(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"))
    assert velocity(learner, world, "policy").requires_grad
    for slot in ("old", "reference"):
        assert not velocity(learner, world, slot).requires_grad
    gradients(learner, roll_out(world, learner), 6)
    graded = {n for n, p in learner.family.transformer.named_parameters() if p.grad is not None}
    assert graded
    assert all(".policy." in name for name in graded)


def test_guidance_is_part_of_the_gradient(world: World) -> None:
    found = []
    for guidance in (1.0, 3.0):
        learner = make_learner(world, algorithm("diffusion-nft"), guidance=guidance)
        found.append(gradients(learner, roll_out(world, learner), 6))
    assert any(not torch.allclose(found[0][name], found[1][name], rtol=0.1) for name in found[0])


def test_a_fresh_adapter_starts_as_the_base(world: World) -> None:
    family = world.fresh()
    slots = LoraSlots(family.transformer, LORA)
    condition = family.collate(world.conditions)
    latents = torch.randn(3, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.2, 0.6, 0.9])
    results = []
    for slot in ("policy", "reference"):
        with torch.no_grad(), slots.use(slot) as model:  # type: ignore[arg-type]
            results.append(family.velocity(model, latents, sigma, condition, None, SIZE))
    assert torch.equal(*results)


def test_slots_of_a_learner_start_equal(world: World) -> None:
    slots = make_slots(world.fresh(), algorithm("diffusion-nft"), "lora", ["ema"])
    for slot in ("old", "ema"):
        for name, tensor in slots.state(slot).items():  # type: ignore[arg-type]
            assert torch.equal(tensor, slots.state("policy")[name])
