"""A tiny learner, and batches for it, as the controller would ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.models.slots import Slot
from spotlight.rollout.engine import Engine
from spotlight.rollout.serialization import pack_sample
from spotlight.rollout.state import FinishedRollout, SampleTensors
from spotlight.runtime.build import components as build
from spotlight.runtime.build.learner_parts import Learning, assemble, fill_embeddings, prepare_model
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
    places = (f"name={name}", f"runs_dir={root}", f"cache_dir={root}/cache", f"model.path={pipeline}")
    return load_config(None, [*places, *TINY, *ALGORITHMS[algorithm]])


def inline_learning(config: RunConfig) -> Learning:
    """The parts that the inline driver has."""
    model = prepare_model(config, torch.device("cpu"))
    return assemble(config, model, fill_embeddings(config, model, prompts_of(config), Ranks()), Ranks())


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
    (name,) = learning.trainer.reward_weights
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
    states = engine.start(rollouts, conditions, learning.model.recipes.train)
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
