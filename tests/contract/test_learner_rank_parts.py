"""Parts of a batch, as the controller sends them, train what the whole batch does: alone to the bit, two
ranks within rounding; and what was lost in between leaves the mean over the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_job import Batch, alone, config_of, make_batch, prompts_of, rank_of, train_rank
from test_learner_rank import WEIGHT_TOLERANCE, free_ports, without_seconds

from spotlight.cluster.learner.learner_rank import LearnerRank, RankPlace
from spotlight.config.schema import RunConfig
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Baseline, Comparison, Group, MicroBatch
from spotlight.training.batching.feed import sample_advantages
from spotlight_weights.bundle import read

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def config_in_parts(root: Path, pipeline: Path, algorithm: str) -> RunConfig:
    config = config_of(root, pipeline, algorithm, algorithm)
    advantage = config.algorithm.advantage.model_copy(update={"std": "group"})
    return config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"advantage": advantage})}
    )


def group_by_group(effect: PrepareBatch) -> list[PrepareBatch]:
    """Axis ``prompt``, or ``generation`` where slices wait for their group."""
    return [
        replace(
            effect,
            groups=(group,),
            scores={rollout: effect.scores[rollout] for rollout in group.rollouts},
            micro_batches=tuple(m for m in effect.micro_batches if m.rollouts[0] in group.rollouts),
            partial=True,
        )
        for group in effect.groups
    ]


def slice_by_slice(effect: PrepareBatch, size: int) -> list[PrepareBatch]:
    """Axis ``generation``: a slice of every group, compared with what is there of its group."""
    parts = []
    (count,) = {len(group.rollouts) for group in effect.groups}
    for start in range(0, count, size):
        groups = tuple(Group(g.prompt_id, g.rollouts[start : start + size]) for g in effect.groups)
        before = [tuple(effect.scores[r] for r in group.rollouts[:start]) for group in effect.groups]
        members = tuple(rollout for group in groups for rollout in group.rollouts)
        parts.append(
            PrepareBatch(
                effect.iteration,
                groups,
                {rollout: effect.scores[rollout] for rollout in members},
                (MicroBatch(effect.iteration, 0, members, effect.micro_batches[0].update_samples),),
                partial=True,
                comparisons=tuple(Comparison(Baseline.SLICE, seen) for seen in before),
            )
        )
    return parts


def train_parts(
    rank: LearnerRank, batch: Batch, parts: list[PrepareBatch], samples: int
) -> tuple[float, float]:
    return train_rank(rank, batch, batch.packed, parts, samples)


@pytest.mark.parametrize("algorithm", [pytest.param("nft", marks=pytest.mark.slow), "grpo"])
def test_groups_in_parts_train_what_the_whole_batch_does_to_the_bit(
    random_pipeline: Path, tmp_path: Path, algorithm: str
) -> None:
    config = config_in_parts(tmp_path, random_pipeline, algorithm)
    whole, parted = alone(config), alone(config)
    for iteration in range(2):
        batch = make_batch(config, whole.learning, iteration, iteration)
        expected = train_rank(whole, batch, batch.packed)
        assert train_parts(parted, batch, group_by_group(batch.effect), 8) == expected
        assert parted.digest() == whole.digest()
        assert without_seconds(parted.take_log()) == without_seconds(whole.take_log())


def test_slices_train_with_the_advantages_of_their_baseline(random_pipeline: Path, tmp_path: Path) -> None:
    config = config_in_parts(tmp_path, random_pipeline, "grpo")
    rank, by_hand = alone(config), alone(config)
    batch = make_batch(config, rank.learning, 0, 0)
    parts = slice_by_slice(batch.effect, 3)
    assert [len(part.groups[0].rollouts) for part in parts] == [3, 1]
    train_parts(rank, batch, parts, 8)
    learner, feed = by_hand.learning.learner, by_hand.learning.feed
    given: dict[str, float] = {}
    for part in parts:
        given |= sample_advantages(part, feed.reward_weights, learner.advantage)
    assert len({round(value, 6) for value in given.values()}) > 2
    order = [micro_batch for part in parts for micro_batch in part.micro_batches]
    samples = feed._batch(batch.effect, batch.rollouts, batch.tensors)
    samples = [replace(sample, advantage=given[sample.key]) for sample in samples]
    learner.prepare(samples, [each.rollouts for each in order], part=True)
    for micro_batch in order:
        learner.accumulate(micro_batch.rollouts, micro_batch.update_samples)
    learner.step(8)
    learner.finish_batch()
    assert rank.digest() == by_hand.digest()


def test_samples_lost_between_parts_leave_the_mean_over_the_rest(
    random_pipeline: Path, tmp_path: Path
) -> None:
    """The first part announces eight samples, as planned; half of them never come."""
    config = config_in_parts(tmp_path, random_pipeline, "nft")
    whole, parted = alone(config), alone(config)
    batch = make_batch(config, whole.learning, 0, 0)
    first, _lost = group_by_group(batch.effect)
    announced = first.micro_batches
    short = replace(first, micro_batches=tuple(replace(m, update_samples=4) for m in announced))
    expected = train_parts(whole, batch, [short], 4)
    assert train_parts(parted, batch, [first], 4) == expected  # a factor of 2 rounds nothing
    assert parted.digest() == whole.digest()


def one_of_two(number: int, root: Path, pipeline: Path, algorithm: str, port: int) -> None:
    torch.set_num_threads(1)
    config = config_in_parts(root, pipeline, algorithm)
    rank = rank_of(config, RankPlace(number, 2))
    address = rank.open_rendezvous("127.0.0.1", port) if number == 0 else Address("127.0.0.1", port)
    rank.join(address)
    rank.load_model(prompts_of(config))
    rank.build()
    batches = torch.load(root / "batches.pt", weights_only=False)
    figures = [train_parts(rank, batch, group_by_group(batch.effect), 8) for batch in batches]
    packed = rank.packed(2, 0)
    if packed is not None:
        torch.save((figures, packed), root / "two.pt")
    rank.close()


@pytest.mark.slow  # parts are tested above on one rank, and ranks on whole batches in test_learner_ranks.py
@pytest.mark.parametrize("algorithm", ["nft", "grpo"])
def test_two_ranks_in_parts_equal_one_with_the_whole_batch(
    random_pipeline: Path, tmp_path: Path, algorithm: str
) -> None:
    config = config_in_parts(tmp_path, random_pipeline, algorithm)
    rank = alone(config)
    batches: list[Batch] = []
    figures: list[tuple[float, float]] = []
    for iteration in range(2):
        batches.append(make_batch(config, rank.learning, iteration, iteration))
        figures.append(train_rank(rank, batches[-1], batches[-1].packed))
    torch.save(batches, tmp_path / "batches.pt")
    arguments = (tmp_path, random_pipeline, algorithm, *free_ports(1))
    mp.start_processes(one_of_two, arguments, nprocs=2, start_method="forkserver")
    others, packed = torch.load(tmp_path / "two.pt", weights_only=False)
    for mine, theirs in zip(figures, others, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-6)
    own = rank.packed(2, 0)
    assert own is not None
    bundle, expected = read(*packed), read(*own)
    for slot, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(bundle.tensors[slot][name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
