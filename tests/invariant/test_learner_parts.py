"""A batch that arrives in parts, groups or slices of groups, trains what the whole batch would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_world import GROUP, World, algorithm, cut, gradients, make_learner, roll_out, train_batch
from torch import Tensor

from spotlight.algorithms.advantages import AdvantageParams
from spotlight.algorithms.baselines import TOTAL, slice_advantages
from spotlight.training.batch import scaled_advantages
from spotlight.training.learner import Learner, TrainingSample

OWN = AdvantageParams(std="group")
WEIGHTS = {"quality": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


def gathered(learner: Learner) -> dict[str, Tensor]:
    parameters = learner.slots.trainable_parameters().items()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("per_pass", [1, 3, "auto"])
@pytest.mark.parametrize("name", ["flow-grpo", "diffusion-nft"])
def test_groups_trained_as_they_arrive_give_the_gradient_of_the_whole_batch_to_the_bit(
    world: World, name: str, per_pass: int | str
) -> None:
    options = {"advantage": OWN, "timesteps_per_pass": per_pass}
    whole = make_learner(world, algorithm(name), **options)
    samples = roll_out(world, whole)
    expected = gradients(whole, samples, GROUP)
    report = whole.step()
    learner = make_learner(world, algorithm(name), **options)
    for keys in cut(samples, GROUP):
        part = [sample for sample in samples if sample.key in keys]
        assert learner.prepare_part(part, [keys]).groups == 1
        learner.accumulate(keys, len(samples))
    found = gathered(learner)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())
    again = learner.step()
    assert again.sums == report.sums
    if name == "flow-grpo":
        assert again.sums.ratio_max == 1.0
        assert again.sums.replay_difference
    learner.finish_batch()
    assert learner.steps == learner.batches == 1
    train_batch(learner, samples, 6)  # and the next batch may come whole


def by_member(samples: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Slices along the generation axis: one sample of every group in each."""
    return [samples[member::GROUP] for member in range(GROUP)]


def test_slices_with_the_advantages_of_their_groups_give_the_gradient_of_the_whole_batch_to_the_bit(
    world: World,
) -> None:
    whole = make_learner(world, algorithm("flow-grpo"))
    slices = by_member(roll_out(world, whole))
    samples = [sample for part in slices for sample in part]
    expected = gradients(whole, samples, len(slices[0]))
    scaled = scaled_advantages(samples, WEIGHTS, AdvantageParams())
    learner = make_learner(world, algorithm("flow-grpo"))
    for part in slices:
        keys = [sample.key for sample in part]
        learner.prepare_part(part, [keys], {key: scaled[key] for key in keys})
        learner.accumulate(keys, len(samples))
    found = gathered(learner)
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


def test_a_baseline_of_slices_drives_the_learner(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo-fast"))
    samples = roll_out(world, learner)
    given = {}
    for group in {sample.group for sample in samples}:
        members = [sample for sample in samples if sample.group == group]
        values = slice_advantages([m.rewards for m in members], [], WEIGHTS, AdvantageParams(), {TOTAL: 2.0})
        given |= {member.key: value for member, value in zip(members, values, strict=True)}
    report = learner.prepare_part(samples, [], given)
    assert report.advantage_abs_mean == pytest.approx(sum(map(abs, given.values())) / len(given))


def test_a_batch_of_fewer_samples_than_announced_is_the_mean_over_those(world: World) -> None:
    options = {"advantage": OWN}
    whole = make_learner(world, algorithm("diffusion-nft"), **options)
    samples = roll_out(world, whole)
    expected = gradients(whole, samples[: 2 * GROUP], GROUP)
    learner = make_learner(world, algorithm("diffusion-nft"), **options)
    with pytest.raises(RuntimeError, match="no announced number"):
        learner.amend(4)
    first, second, _lost = cut(samples, GROUP)
    learner.prepare_part(samples[:GROUP], [first])
    learner.accumulate(first, len(samples))
    learner.amend(2 * GROUP)
    learner.prepare_part(samples[GROUP : 2 * GROUP], [second])
    learner.accumulate(second, 2 * GROUP)
    found = gathered(learner)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)
    assert learner.step().sums.samples == 2 * GROUP


def test_parts_that_would_train_wrongly_are_refused(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo"), advantage=OWN)
    samples = roll_out(world, learner)
    first, second, _ = cut(samples, GROUP)
    some = samples[:GROUP]
    with pytest.raises(ValueError, match=r"no advantage in `scaled`"):
        learner.prepare_part(some, [first], {first[0]: 1.0})
    learner.prepare_part(some, [first])
    with pytest.raises(ValueError, match="was in an earlier part of the batch"):
        learner.prepare_part(some, [first])
    learner.accumulate(first, GROUP)
    with pytest.raises(ValueError, match="was in an earlier part of the batch"):
        learner.prepare_part(some, [first])
    with pytest.raises(RuntimeError, match=r"prepare\(\) before finish_batch"):
        learner.prepare(samples, [])
    learner.step()
    with pytest.raises(RuntimeError, match=r"arrives after an optimizer step.*updates_per_batch 1"):
        learner.prepare_part(samples[GROUP : 2 * GROUP], [second])
    learner = make_learner(world, algorithm("flow-grpo"))
    with pytest.raises(ValueError, match=r"advantage.std is 'global'.*set it to 'group'"):
        learner.prepare_part(some, [first])


def test_parts_after_an_optimizer_step_are_fine_where_ratios_are_to_the_rollout(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo", old_log_probs="rollout"), advantage=OWN)
    samples = roll_out(world, learner)
    for keys in cut(samples, GROUP):
        learner.prepare_part([replace(s) for s in samples if s.key in keys], [keys])
        learner.accumulate(keys, GROUP)
        learner.step()
    learner.finish_batch()
    assert (learner.steps, learner.batches) == (3, 1)
