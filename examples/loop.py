"""The whole loop in one file: sample, score, advantage, step.

    python examples/loop.py [CONFIG.yaml] [KEY=VALUE ...]

Its parts are those of `spotlight train`, without what makes that a product: evaluation, checkpoints, ledger,
resume, several ranks, a cluster. Its curve is that of the command's run, on a CPU to the bit; it refuses a
configuration of which that would not hold (:func:`require_plain`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from spotlight.algorithms.advantages import advantages
from spotlight.cli.config_command import split_arguments
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import Learning, assemble, fill_embeddings, prepare_model
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.seeds import derive_seed, prompts_of_iteration
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.batching.batch import TrainingSample
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.results import ScoredSample


def require_plain(config: RunConfig, comparing: Iterable[str]) -> None:
    """Raise ValueError at what changes the curve and is left out here, or if rewards compare whole groups."""
    loss = config.algorithm
    asked = {
        "exploration": config.exploration, "algorithm.train_samples": loss.train_samples,
        "policies": config.policies, "pipeline": config.pipeline.trains_parts or config.pipeline.next_share,
        "learner.update_split": config.learner.update_split != "groups",
        "algorithm.silent_groups": loss.silent_groups != "train",
        "algorithm.name": loss.needs_gradients or loss.trains_on_stored or loss.compares_groups,
    }  # fmt: skip
    if left_out := [*(key for key, value in asked.items() if value), *comparing]:
        raise ValueError(f"the loop in one file is without {', '.join(left_out)}; use `spotlight train`")


def groups_of(
    config: RunConfig, prompts: Sequence[Prompt], iteration: int, version: int
) -> list[list[Rollout]]:
    """The iteration's prompts, each with a group of seeds; everything random is a hash of the run's seed."""
    rollout, seed = config.rollout, config.run_seed
    drawn = prompts_of_iteration(prompts, seed, iteration, rollout.prompts_per_iteration)
    return [
        [
            Rollout(
                RolloutId(f"{iteration}-{slot}-{member}"), Purpose.TRAIN, iteration, prompt.id, member,
                derive_seed(seed, "train", iteration, slot, member), rollout.steps, PolicyVersion(version),
            )
            for member in range(rollout.group_size)
        ]
        for slot, prompt in enumerate(drawn)
    ]  # fmt: skip


def sample(
    config: RunConfig, learning: Learning, engine: Engine, rollouts: Sequence[Rollout]
) -> Iterator[FinishedRollout]:
    """Denoise, a batch at a time, with the weights that the algorithm samples with."""
    slot, recipe = learning.model.algorithm.rollout_slot, learning.model.recipes[Purpose.TRAIN]
    for start in range(0, len(rollouts), config.rollout.batch_size):
        batch = rollouts[start : start + config.rollout.batch_size]
        conditions = learning.conditions.of(rollout.prompt_id for rollout in batch)
        states = engine.start(batch, conditions, recipe)
        with learning.slots.use(slot, merged=engine.autocast is None) as model:
            for _ in range(config.rollout.steps):
                states = engine.step(model, states)
        for result in engine.finish(states):
            assert isinstance(result, FinishedRollout), "not finite: the weights have diverged"
            yield result


def step(
    config: RunConfig, learning: Learning, groups: Sequence[Sequence[Rollout]],
    finished: Sequence[FinishedRollout], scores: Sequence[dict[str, float]],
) -> None:  # fmt: skip
    """Rewards become advantages within each group, and the learner takes its optimizer steps."""
    learner, size = learning.learner, config.rollout.group_size
    weights = {reward.curve: reward.weight for reward in config.rewards}
    rewards = [{name: each[name] for name in weights} for each in scores]
    by_group = [rewards[at : at + size] for at in range(0, len(rewards), size)]
    found = advantages(by_group, weights, learner.advantage)
    samples = [
        TrainingSample(
            key=rollout.id, group=group[0].id, advantage=advantage,
            condition=learning.conditions[rollout.prompt_id], seed=rollout.seed, version=rollout.version,
            tensors=finished[slot * size + member].tensors,
        )
        for slot, group in enumerate(groups)
        for member, (rollout, advantage) in enumerate(zip(group, found[slot], strict=True))
    ]  # fmt: skip
    keys = [each.key for each in samples]
    whole, micro = len(keys) // config.learner.updates_per_batch, config.learner.micro_batch_size
    updates = [keys[at : at + whole] for at in range(0, len(keys), whole)]
    cut = [[update[at : at + micro] for at in range(0, whole, micro)] for update in updates]
    learner.prepare(samples, [part for update in cut for part in update])
    for update in cut:
        for part in update:
            learner.accumulate(part, whole)
        learner.step()
    learner.finish_batch()


def train(config: RunConfig) -> list[dict[str, float]]:
    """The curve: a row per iteration."""
    device = build.pick_device(config)
    prepare_process(device, config.deterministic, config.model.tf32)
    prompts = build.load_prompts(config)
    rows = []
    with build.make_reward_pool(config) as pool:
        require_plain(config, pool.compares_groups)
        used = prompts.used(config)
        pool.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
        model = prepare_model(config, device)
        conditions = fill_embeddings(config, model, used, Ranks())
        learning = assemble(config, model, conditions, Ranks())
        engine = build.make_engine(config, model.family, learning.negative)
        by_id = prompts.by_id
        for iteration in range(config.iterations):
            groups = groups_of(config, prompts.train, iteration, learning.learner.steps)
            rollouts = [rollout for group in groups for rollout in group]
            finished = list(sample(config, learning, engine, rollouts))
            asked = [by_id[rollout.prompt_id] for rollout in rollouts]
            scored = pool.score(
                [each.image for each in finished],
                [each.text for each in asked],
                [each.metadata for each in asked],
            )
            scores = []
            for rollout, result in zip(rollouts, scored.samples, strict=True):
                assert isinstance(result, ScoredSample), result
                scores.append(dict(result.curves()))
                learning.learner.log.scored(rollout, scores[-1])
            step(config, learning, groups, finished, scores)
            rows.append(learning.learner.log.take())
            print(f"iteration {iteration + 1}: reward {rows[-1]['rollout/reward']:.4f}  "
                  f"loss {rows[-1]['train/loss']:.4g}", flush=True)  # fmt: skip
    return rows


if __name__ == "__main__":
    train(load_config(*split_arguments(sys.argv[1:])))
