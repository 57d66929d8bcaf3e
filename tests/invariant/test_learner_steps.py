"""Optimizer steps: AdamW with clipping and warm-up, averages, and steps that must not happen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_world import World, algorithm, cut, gradients, make_learner, roll_out, train_batch

from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.media import MediaSize
from spotlight.models.slots import CopySlots
from spotlight.training.learner import Learner, TrainingError
from spotlight_files.model_errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


def copied(learner: Learner, slot: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.slots.state(slot).items()}  # type: ignore[arg-type]


def test_a_step_is_adamw_on_the_clipped_gradient_with_warm_up(world: World) -> None:
    options = {"max_grad_norm": 1e-3, "warmup_steps": 4, "weight_decay": 0.1, "learning_rate": 0.02}
    learner = make_learner(world, algorithm("diffusion-nft"), **options)
    samples = roll_out(world, learner)
    before = copied(learner, "policy")
    raw = gradients(learner, samples, 3)
    report = learner.step()
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in raw.values()])).item()
    entries = sum(gradient.numel() for gradient in raw.values())
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert report.grad_norm > 1e-3
    assert report.grad_rms == pytest.approx(norm / entries**0.5, rel=1e-5)
    assert report.epsilon_ratio == pytest.approx(report.grad_rms / 1e-8, rel=1e-6)
    assert report.learning_rate == pytest.approx(0.005)
    after = copied(learner, "policy")
    for name, gradient in raw.items():
        parameter = torch.nn.Parameter(before[name])
        parameter.grad = gradient * (1e-3 / norm)
        torch.optim.AdamW([parameter], lr=0.005, weight_decay=0.1, foreach=False).step()
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_average_follows_the_published_decay(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"), ema_cap=0.2, ema_every=2)
    expected = {name: tensor.double() for name, tensor in copied(learner, "ema").items()}
    samples = roll_out(world, learner)
    for step, decay in ((1, None), (2, 3 / 12), (3, None), (4, 0.2)):
        learner.prepare(samples, [])
        learner.accumulate([sample.key for sample in samples], len(samples))
        learner.step()
        learner.finish_batch()
        assert learner.steps == step
        if decay is not None:
            capped = min(decay, 0.2)
            for name, tensor in copied(learner, "policy").items():
                expected[name] = capped * expected[name] + (1 - capped) * tensor.double()
        for name, tensor in copied(learner, "ema").items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "decays"), [("batches", (0.3, 0.6)), ("steps", (0.6, 0.8))])
def test_the_old_policy_follows_after_a_batch_only(
    world: World, count: str, decays: tuple[float, float]
) -> None:
    old_policy = {"slope": 0.3, "cap": 0.8, "count": count}
    learner = make_learner(world, algorithm("diffusion-nft", old_policy=old_policy))
    samples = roll_out(world, learner)
    for decay in decays:
        old = copied(learner, "old")
        learner.prepare(samples, [])
        for keys in cut(samples, 3):
            learner.accumulate(keys, 3)
            learner.step()
        assert all(torch.equal(old[name], tensor) for name, tensor in copied(learner, "old").items())
        learner.finish_batch()
        for name, tensor in copied(learner, "policy").items():
            torch.testing.assert_close(
                learner.slots.state("old")[name],
                decay * old[name] + (1 - decay) * tensor,
                rtol=1e-5,
                atol=1e-7,
            )


def test_a_gradient_that_is_not_finite_changes_nothing(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"), ema_cap=0.9)
    samples = roll_out(world, learner)
    train_batch(learner, samples, 6)
    before = learner.digest()
    assert samples[1].tensors is not None
    broken = replace(
        samples[1], tensors=replace(samples[1].tensors, final=samples[1].tensors.final * torch.nan)
    )
    with pytest.raises(TrainingError, match=r"gradient norm of optimizer step 2 is nan.*lower learning_rate"):
        train_batch(learner, [samples[0], broken], 2)
    assert learner.digest() == before
    assert learner.steps == 1
    assert all(parameter.grad is None for parameter in learner.slots.trainable_parameters().values())
    learner.finish_batch()
    train_batch(learner, samples, 6)
    assert learner.steps == 2


def test_a_step_needs_all_its_samples(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"))
    samples = roll_out(world, learner)
    before = learner.digest()
    learner.prepare(samples, [])
    with pytest.raises(RuntimeError, match="without a gradient"):
        learner.step()
    learner.accumulate([samples[0].key], 3)
    with pytest.raises(ValueError, match="update_samples is 2, but 3"):
        learner.accumulate([samples[1].key], 2)
    with pytest.raises(RuntimeError, match="call step"):
        learner.finish_batch()
    with pytest.raises(TrainingError, match="of 3 samples got 1"):
        learner.step()
    assert learner.digest() == before


def test_samples_counted_as_zero_shorten_the_gradient(world: World) -> None:
    norms = []
    for zeros in (0, 1):
        learner = make_learner(world, algorithm("diffusion-nft"))
        samples = roll_out(world, learner)[:3]
        keys = [sample.key for sample in samples]
        learner.prepare(samples, [keys])
        learner.accumulate(keys, len(keys) + zeros)
        norms.append(learner.step(zeros=zeros).grad_norm)
    assert norms[1] == pytest.approx(norms[0] * 3 / 4, rel=1e-5)


def test_a_sample_enters_one_update(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"))
    samples = roll_out(world, learner)
    learner.prepare(samples, [])
    learner.accumulate([samples[0].key], 1)
    learner.step()
    for key in (samples[0].key, "nobody"):
        with pytest.raises(ValueError, match=f"sample {key} is not in the prepared batch, or was trained"):
            learner.accumulate([key], 1)
    with pytest.raises(RuntimeError, match=r"prepare\(\) before finish_batch"):
        learner.prepare(samples, [])
    with pytest.raises(RuntimeError, match="within a batch"):
        learner.save(Path("unused"))
    learner.finish_batch()
    learner.prepare(samples, [])


def test_samples_that_do_not_belong_are_named(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast"))
    samples = roll_out(world, learner)
    keys = [sample.key for sample in samples]
    with pytest.raises(ValueError, match="2 samples have 1 different keys"):
        learner.prepare([samples[0], samples[0]], [])
    learner = make_learner(world, algorithm("flow-grpo-fast"))
    learner.prepare([replace(sample, tensors=None) for sample in samples], [])
    with pytest.raises(ValueError, match="rank 0 of 1 has none of a micro-batch's 6 samples"):
        learner.accumulate(keys, 6)
    learner.finish_batch()


def test_missing_slots_and_unsuitable_sizes_are_errors_at_once(world: World) -> None:
    family = world.fresh()
    algo = algorithm("diffusion-nft")
    slots, settings = CopySlots(family.transformer, ["reference"]), LearnerConfig()
    with pytest.raises(ModelError, match="weight slots old are missing; have policy, reference"):
        Learner(family, slots, algo, settings, size=MediaSize(16, 16))
    with pytest.raises(ModelError, match="height is 17"):
        Learner(family, slots, algorithm("flow-grpo"), settings, size=MediaSize(17, 16))
    settings, grpo = LearnerConfig(recompute="blocks"), algorithm("flow-grpo")
    family.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="Linear cannot recompute activations"):
        Learner(family, CopySlots(family.transformer), grpo, settings, size=MediaSize(16, 16))


def test_advantages_are_reported(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"))
    samples = [replace(s, advantage=0.0) for s in roll_out(world, learner)]
    samples[0], samples[1] = (replace(samples[i], advantage=a) for i, a in enumerate((1.0, -1.0)))
    report = learner.prepare(samples, [])
    assert (report.samples, report.groups) == (6, 3)
    assert report.silent_groups_share == pytest.approx(2 / 3)
    assert report.advantage_std > 0
