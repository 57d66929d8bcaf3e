"""A batch that arrives in parts, groups or slices of groups, trains what the whole batch would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_world import (
    GROUP,
    World,
    algorithm,
    cut,
    gathered,
    gradients,
    make_learner,
    roll_out,
    train_batch,
)

from spotlight.training.learner import TrainingSample

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


FIRST = (("flow-grpo", "auto"), ("diffusion-nft", 1))
"""(algorithm, timesteps of a pass) of the first tier."""


@pytest.mark.parametrize(
    ("name", "per_pass"),
    [
        pytest.param(name, each, marks=() if (name, each) in FIRST else pytest.mark.slow)
        for name in ("flow-grpo", "diffusion-nft")
        for each in (1, 3, "auto")
    ],
)
def test_groups_trained_as_they_arrive_give_the_gradient_of_the_whole_batch_to_the_bit(
    world: World, name: str, per_pass: int | str
) -> None:
    options = {"timesteps_per_pass": per_pass}
    whole = make_learner(world, algorithm(name), **options)
    samples = roll_out(world, whole)
    expected = gradients(whole, samples, GROUP)
    report = whole.step()
    learner = make_learner(world, algorithm(name), **options)
    for arrived, keys in enumerate(cut(samples, GROUP), start=1):
        part = [sample for sample in samples if sample.key in keys]
        assert learner.prepare(part, [keys], part=True).groups == arrived
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


@pytest.mark.parametrize("name", ["flow-grpo", "diffusion-nft"])
def test_several_updates_of_a_batch_in_parts_are_those_of_the_whole_to_the_bit(
    world: World, name: str
) -> None:
    """All parts come before the first step, so ratios of the second update are to the batch's first weights.

    The first update's micro-batches are trained between parts.
    """
    whole, learner = (make_learner(world, algorithm(name)) for _ in range(2))
    samples = roll_out(world, whole)
    first, *others = cut(samples, GROUP)
    whole.prepare(samples, [first, *others])
    learner.prepare(samples[:GROUP], [first], part=True)
    for each in (whole, learner):
        each.accumulate(first, GROUP)
    learner.prepare(samples[GROUP:], others, part=True)
    reports = []
    for each in (whole, learner):
        reports.append([each.step().sums])
        for keys in others:
            each.accumulate(keys, 2 * GROUP)
        reports[-1].append(each.step().sums)
        each.finish_batch()
    assert reports[0] == reports[1]
    assert whole.digest() == learner.digest()
    if name == "flow-grpo":
        assert [sums.ratio_max == 1.0 for sums in reports[1]] == [True, False]


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
    learner = make_learner(world, algorithm("flow-grpo"))
    for part in slices:
        keys = [sample.key for sample in part]
        learner.prepare(part, [keys], part=True)
        learner.accumulate(keys, len(samples))
    found = gathered(learner)
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


def test_a_batch_of_fewer_samples_than_announced_is_the_mean_over_those(world: World) -> None:
    whole = make_learner(world, algorithm("diffusion-nft"))
    samples = roll_out(world, whole)
    expected = gradients(whole, samples[: 2 * GROUP], GROUP)
    learner = make_learner(world, algorithm("diffusion-nft"))
    first, second, _lost = cut(samples, GROUP)
    learner.prepare(samples[:GROUP], [first], part=True)
    learner.accumulate(first, len(samples))
    learner.prepare(samples[GROUP : 2 * GROUP], [second], part=True)
    learner.accumulate(second, len(samples))
    learner._announce(2 * GROUP)
    found = gathered(learner)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)
    assert learner.step().sums.samples == 2 * GROUP


def test_parts_that_would_train_wrongly_are_refused(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo"))
    samples = roll_out(world, learner)
    first, second, _ = cut(samples, GROUP)
    some = samples[:GROUP]
    learner.prepare(some, [first], part=True)
    with pytest.raises(ValueError, match="was in an earlier part of the batch"):
        learner.prepare(some, [first], part=True)
    learner.accumulate(first, GROUP)
    with pytest.raises(ValueError, match="was in an earlier part of the batch"):
        learner.prepare(some, [first], part=True)
    with pytest.raises(RuntimeError, match=r"prepare\(\) before finish_batch"):
        learner.prepare(samples, [])
    learner.step()
    with pytest.raises(RuntimeError, match=r"arrives after an optimizer step.*all parts before the first"):
        learner.prepare(samples[GROUP : 2 * GROUP], [second], part=True)


def test_parts_after_an_optimizer_step_are_fine_where_ratios_are_to_the_rollout(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo", old_log_probs="rollout"))
    samples = roll_out(world, learner)
    for keys in cut(samples, GROUP):
        learner.prepare([replace(s) for s in samples if s.key in keys], [keys], part=True)
        learner.accumulate(keys, GROUP)
        learner.step()
    learner.finish_batch()
    assert (learner.steps, learner.batches) == (3, 1)


FRESH_ONLY = [
    ("flow-grpo", {}),
    ("flow-grpo", {"old_log_probs": "stop_gradient"}),
    ("grpo-guard", {}),
]


@pytest.mark.parametrize(("name", "params"), FRESH_ONLY)
def test_an_older_sample_is_refused_where_its_ratio_would_be_to_weights_that_did_not_make_it(
    world: World, name: str, params: dict[str, str]
) -> None:
    learner = make_learner(world, algorithm(name, **params))
    samples = roll_out(world, learner)
    train_batch(learner, samples, 6)
    stale, fresh = samples[:GROUP], [replace(sample, version=1) for sample in samples[GROUP:]]
    first, *others = cut(samples, GROUP)
    wanted = "sample 0/0 was made by policy version 0, and the batch starts from version 1.*=rollout"
    with pytest.raises(ValueError, match=wanted):
        learner.prepare([*stale, *fresh], [first, *others])
    with pytest.raises(ValueError, match=wanted):  # though nothing newer is there of the batch yet
        learner.prepare(stale, [first], part=True)
    learner.prepare(fresh, others, part=True)
    with pytest.raises(ValueError, match=wanted):
        learner.prepare(stale, [first], part=True)


@pytest.mark.parametrize(
    ("name", "params"), [("flow-grpo", {"old_log_probs": "rollout"}), ("diffusion-nft", {}), ("awm", {})]
)
def test_one_micro_batch_of_two_versions_gives_the_gradients_of_each_version_alone(
    world: World, name: str, params: dict[str, str]
) -> None:
    learner = make_learner(world, algorithm(name, **params), learning_rate=1e-2)
    samples = roll_out(world, learner)
    train_batch(learner, samples, 6)
    newer = [replace(s, version=1) for s in roll_out(world, learner, iteration=1)]
    mixed = [*samples[:3], *newer[3:]]
    mixed = [replace(s, group="one", key=f"{s.version}-{s.key}") for s in mixed]
    keys = [sample.key for sample in mixed]
    learner.prepare(mixed, [keys])
    learner.accumulate(keys, 6)
    together = gathered(learner)
    sums = learner._update.meter.reduce(learner.ranks)
    learner._drop_update()
    learner.finish_batch()
    learner.prepare(mixed, [keys[:3], keys[3:]])
    for part in (keys[:3], keys[3:]):
        learner.accumulate(part, 6)
    apart = gathered(learner)
    largest = max(gradient.abs().max().item() for gradient in apart.values())
    for key, gradient in apart.items():
        torch.testing.assert_close(
            together[key], gradient, rtol=1e-3, atol=1e-2 * largest
        )  # wrong draws: 0.2
    if name == "flow-grpo":
        assert sums.ratio_max is not None
        assert sums.ratio_max > 1 + 1e-6  # of the stale ones: the weights have moved
