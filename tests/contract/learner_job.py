"""A tiny learner, and batches for it, as the controller would ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spotlight.cluster.blobs.blob_store import BlobAddress, StoredBlob
from spotlight.cluster.learner.learner_rank import LearnerRank, RankOrder, RankPlace
from spotlight.config.load import dump_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.models.family import ModelFamily
from spotlight.models.slots import Slot
from spotlight.rollout.engine import Engine
from spotlight.rollout.serialization import pack_sample
from spotlight.rollout.state import FinishedRollout, SampleTensors
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import Learning, assemble, fill_embeddings, prepare_model
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.seeds import prompts_of_iteration
from spotlight.scheduler.types import Group, MicroBatch, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.settings import autocast_type
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import Prompt

TINY = (
    "device=cpu",
    "data.tags=[]",
    "iterations=4",
    "rollout.height=16",
    "rollout.width=16",
    "rollout.steps=3",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "evaluation.prompts=2",
    "evaluation.steps=2",
    "evaluation.every=1",
    "learner.lora.rank=4",
    "learner.lora.alpha=8.0",
    "learner.learning_rate=0.001",
    "learner.epsilon=1e-6",
    "learner.micro_batch_size=2",
    "rewards=[{name: jpeg_size}]",
    "data.train=testbed",
    "data.test=testbed",
)
ALGORITHMS = {
    "nft": ("algorithm.name=diffusion-nft", "algorithm.train_timesteps=2", "learner.ema.every=1"),
    "grpo": ("algorithm.name=flow-grpo", "algorithm.kl_weight=0.01", "rollout.sampler=flow-sde"),
    "full": ("algorithm.name=diffusion-nft", "algorithm.train_timesteps=2", "learner.mode=full"),
}


def config_of(root: Path, pipeline: Path, algorithm: str, name: str = "job") -> RunConfig:
    return load_config(None, [*overrides_of(root, pipeline, name), *ALGORITHMS[algorithm]])


def overrides_of(root: Path, pipeline: Path, name: str = "job") -> tuple[str, ...]:
    places = (f"name={name}", f"runs_dir={root}", f"cache_dir={root}/cache", f"model.path={pipeline}")
    return (*places, *TINY)


def inline_learning(config: RunConfig) -> Learning:
    """The parts that the inline driver has."""
    model = prepare_model(config, torch.device("cpu"))
    return assemble(config, model, fill_embeddings(config, model, prompts_of(config), Ranks()), Ranks())


@dataclass
class Blobs:
    """A blob store."""

    kept: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[StoredBlob | None]:
        found = [self.kept.get((kind, name)) for name in names]
        return [None if data is None else StoredBlob(0, data) for data in found]

    def put(self, kind: str, name: str, data: bytes | bytearray) -> None:
        self.kept[kind, name] = data


def rank_of(config: RunConfig, place: RankPlace, held: ModelFamily | None = None) -> LearnerRank:
    return LearnerRank(RankOrder(dump_config(config), place), Blobs(), held)


def alone(config: RunConfig, held: ModelFamily | None = None) -> LearnerRank:
    """A learner of one rank."""
    rank = rank_of(config, RankPlace(0, 1), held)
    rank.join(None)
    rank.load_model(prompts_of(config))
    rank.build()
    return rank


def train_rank(
    rank: LearnerRank,
    batch: Batch,
    packed: dict[RolloutId, bytes],
    parts: Sequence[PrepareBatch] | None = None,
    samples: int | None = None,
) -> tuple[float, float]:
    """Train a batch, whose samples are in the blob store, as a whole or in parts; returns loss and norm."""
    stored = {name: BlobAddress(name, "") for name in batch.rollouts}
    for name, data in packed.items():
        rank.store.put("sample", name, data)
    iteration = batch.effect.iteration
    for part in parts or [batch.effect]:
        members = {rollout for group in part.groups for rollout in group.rollouts}
        rank.train(part, {name: batch.rollouts[name] for name in members}, stored)
        for index, micro_batch in enumerate(part.micro_batches):
            rank.train(ef.TrainMicroBatch(micro_batch, index), {}, {})
    stepped = rank.train(ef.StepOptimizer(iteration, 0, samples or len(batch.rollouts), 0), {}, {})
    assert isinstance(stepped, ev.OptimizerStepped)
    rank.train(ef.FinishBatch(iteration), {}, {})
    return stepped.loss, stepped.grad_norm


def prompts_of(config: RunConfig) -> list[Prompt]:
    """As the head reads them."""
    return build.load_prompts(config).used(config)


@dataclass(frozen=True)
class Batch:
    """An iteration's work for the learner."""

    effect: PrepareBatch
    rollouts: dict[RolloutId, Rollout]
    finished: dict[RolloutId, FinishedRollout]

    @property
    def tensors(self) -> dict[RolloutId, SampleTensors]:
        return {name: sample.tensors for name, sample in self.finished.items()}

    @property
    def packed(self) -> dict[RolloutId, bytes]:
        return {name: pack_sample(sample) for name, sample in self.finished.items()}


def make_batch(
    config: RunConfig, learning: Learning, iteration: int, version: int, slot: Slot | None = None
) -> Batch:
    """Real rollouts by the weights as they are, with made-up rewards; one update of four micro-batches.

    Args:
        slot: default: the behaviour policy's.
    """
    (name,) = learning.feed.reward_weights
    prompts = prompts_of_iteration(build.load_prompts(config).train, config.run_seed, iteration, 2)
    rollouts = [
        Rollout(
            id=RolloutId(f"{iteration}/{index}/{member}"),
            purpose=Purpose.TRAIN,
            iteration=iteration,
            prompt_id=prompt.id,
            member=member,
            seed=1000 * iteration + 10 * index + member,
            steps=config.rollout.steps,
            version=PolicyVersion(version),
        )
        for index, prompt in enumerate(prompts)
        for member in range(config.rollout.group_size)
    ]
    autocast = autocast_type(config.learner, learning.model.family.dtype)
    engine = Engine(learning.model.family, max_batch=8, negative=learning.negative, autocast=autocast)
    conditions = learning.conditions.of(rollout.prompt_id for rollout in rollouts)
    states = engine.start(rollouts, conditions, learning.model.recipes[Purpose.TRAIN])
    with torch.no_grad(), learning.slots.use(slot or learning.model.algorithm.rollout_slot) as model:
        for _ in range(config.rollout.steps):
            states = engine.step(model, states)
    finished = {each.rollout.id: each for each in engine.finish(states) if isinstance(each, FinishedRollout)}
    groups = tuple(
        Group(prompt.id, tuple(rollout.id for rollout in rollouts if rollout.prompt_id == prompt.id))
        for prompt in prompts
    )
    scores = {rollout.id: {name: float(7 * rollout.seed % 97) / 97} for rollout in rollouts}
    order = [rollout.id for rollout in rollouts]
    micro_batches = tuple(
        MicroBatch(iteration, 0, tuple(order[start : start + 4]), len(order))
        for start in range(0, len(order), 4)
    )
    effect = PrepareBatch(iteration, groups, scores, micro_batches)
    return Batch(effect, {rollout.id: rollout for rollout in rollouts}, finished)
