"""``spotlight train --smoke``: a recipe on a small random pipeline of its family, on this machine.

Rewards with weights score with small random models of the same classes. Where no prompts are set, as in a
preset, they are the rewards' own examples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spotlight.config.requires import value_at
from spotlight.config.training_stages import without_stage
from spotlight.data.datasets import load_held_out, unset_keys
from spotlight.store.run_store import stored_runs

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig
    from spotlight.config.sections.fleet import FleetConfig
    from spotlight.models.family import ModelFamily

ITERATIONS = 2
_GROUP, _EVALUATED = 4, 2
_TRAINED = [
    f"{light} in {season}"
    for light in ("by day", "by night")
    for season in ("spring", "summer", "autumn", "winter")
]
_HELD_OUT = ["in the rain", "in the fog"]
_OF_THIS_MACHINE: dict[str, object] = {
    **dict.fromkeys(("address", "on_demand.start", "on_demand.stop")),
    "head": "reserved",
    "target.provider": "auto",
    "target.params": {},
}
"""Of ``fleet``, where no cluster has an address."""
_SIDE_MIN_PX = 32
"""Rewards cannot read much on smaller pictures."""


def smoke_overrides(config: RunConfig, given: Sequence[str] = ()) -> list[str]:
    """Overrides that make a recipe run here in minutes; writes the pipeline that they name.

    The pipeline stands in the cache directory, and is written again each time.

    Args:
        given: the overrides that the recipe had, to which these are added.

    Raises:
        RegistryError: the family is unknown.
        RewardSetupError: a reward is unknown or cannot be imported.
        ConfigError, PromptFileError: see :func:`spotlight.data.datasets.load_held_out`.
        StoreError: the pipeline cannot be written.
    """
    import shutil

    from spotlight.registry import FAMILIES
    from spotlight_rewards.base.file_errors import storage_errors

    family = FAMILIES.load(config.model.family)
    folder = config.cache / "smoke" / config.model.family
    with storage_errors("cannot write a small pipeline", folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        family.tiny(folder, seed=0)
        name = f"{without_stage(config.name, given)}-smoke"
        replaced = [("name", name), *_replaced(config, family, folder), *_rewards(config, folder / "rewards")]
    return [f"{key}={value}" for key, value in replaced]


def _replaced(config: RunConfig, family: type[ModelFamily], folder: Path) -> Iterator[tuple[str, object]]:
    yield "iterations", ITERATIONS
    if stored_runs(config.runs_dir) is not None:
        yield "runs_dir", type(config).model_fields["runs_dir"].default
    yield "model.path", folder
    for key in ("revision", "transformer", "lora"):
        if getattr(config.model, key) is not None:
            yield f"model.{key}", "null"
    if len(unset := unset_keys(config)) == 2:  # as in a preset; one of two is left to be refused
        yield from zip(unset, _write_prompts(config, folder / "prompts"), strict=True)
    if config.device == "cuda" and not _cuda():
        yield "device", "cpu"
    if config.model.attention is not None and not _has_attention(config.model.attention):
        yield "model.attention", "null"
    yield from _size(config, family, folder)
    yield from _counts(config)
    yield from _fleet(config.fleet)


def _fleet(fleet: FleetConfig) -> Iterator[tuple[str, object]]:
    """A cluster of this machine, where a learner has one rank."""
    if fleet.address is not None:
        for key, value in _OF_THIS_MACHINE.items():
            if value_at(fleet, key) != value:
                yield f"fleet.{key}", "null" if value is None else value
        if fleet.only_learner_slots or fleet.local.rollout_slots == 0:
            yield "fleet.local.rollout_slots", 1
    for key in ("learner_ranks", "learner_ranks_min"):
        if (getattr(fleet, key) or 1) > 1:
            yield f"fleet.{key}", 1
    if fleet.sequence_parallel.degrees != (1,):
        yield "fleet.sequence_parallel.degrees", "[1]"
    if fleet.sequence_parallel.guidance:
        yield "fleet.sequence_parallel.guidance", "false"


def _write_prompts(config: RunConfig, folder: Path) -> Iterator[object]:
    """Training and held-out prompts that every reward can score, as far as rewards say what they read."""
    from spotlight_rewards.reward_check import example_record
    from spotlight_rewards.reward_facts import Reads
    from spotlight_rewards.reward_registry import facts_of

    every = [facts for reward in config.rewards if (facts := facts_of(reward.name)) is not None]
    examples = [(facts.reads, facts.example) for facts in every if facts.example is not None]
    if not examples:
        yield from ("testbed", "testbed")
        return
    folder.mkdir()
    metadata = {key: value for _, each in examples for key, value in example_record(each, folder).items()}
    text = max(examples, key=lambda each: (each[0] is Reads.TEXT, len(each[1].prompt)))[1].prompt
    for name, settings in (("train", _TRAINED), ("test", _HELD_OUT)):
        lines = [json.dumps({"prompt": f"{text}, {setting}", **metadata}) for setting in settings]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        yield path


def _rewards(config: RunConfig, folder: Path) -> Iterator[tuple[str, object]]:
    """All rewards again, if one has weights or a GPU that is not here: a list is overridden as a whole."""
    from spotlight_rewards.reward_registry import tiny_params

    rewards = [each.model_dump(mode="json", exclude_defaults=True) for each in config.rewards]
    changed, elsewhere = False, config.fleet.driver == "ray" or not _cuda()
    for index, reward in enumerate(rewards):
        if elsewhere and reward.get("device") == "cuda":
            reward["device"], changed = "cpu", True
        params = tiny_params(reward["name"], folder / str(index), reward.get("params", {}))
        if params is not None:
            reward["params"], changed = reward.get("params", {}) | params, True
    if changed:
        yield "rewards", json.dumps(rewards)


def _counts(config: RunConfig) -> Iterator[tuple[str, object]]:
    """The fewest samples that take the recipe's way: every update has groups, every group is compared."""
    from spotlight_rewards.reward_registry import compares_groups

    evaluation, exploration = config.evaluation, config.exploration
    per_prompt = 2 if any(compares_groups(reward.name) for reward in config.rewards) else 1
    updates, prompts, group = config.learner.updates_per_batch, 2, _GROUP
    if exploration is not None:
        prompts = max(prompts, math.ceil(exploration.sampled_prompts / updates))
        group = max(group, exploration.drawn_seeds)
    prompts = min(prompts * updates, config.rollout.prompts_per_iteration)
    if config.pipeline.axis == "generation":
        group = max(group, 2 * config.pipeline.slice_size)
    group = trained = min(group, config.rollout.group_size)
    if config.algorithm.train_samples is not None:
        trained = config.algorithm.train_samples
        if trained >= group:
            trained = max(2, group // 2)
            yield "algorithm.train_samples", trained
    if 0 < config.pipeline.next_share < 1 / prompts:
        yield "pipeline.next_share", 1 / prompts
    micro = _micro_batch(config, prompts * trained // updates, trained)
    if micro != config.learner.micro_batch_size:
        yield "learner.micro_batch_size", micro
    for key, found, most in (
        ("rollout.prompts_per_iteration", config.rollout.prompts_per_iteration, prompts),
        ("rollout.group_size", config.rollout.group_size, group),
        ("evaluation.prompts", evaluation.prompts or len(load_held_out(config)), _EVALUATED),
        ("evaluation.images_per_prompt", evaluation.images_per_prompt, per_prompt),
        ("evaluation.grid_images", evaluation.grid_images or 0, 1),
        ("evaluation.steps", evaluation.steps, config.rollout.steps),
    ):
        if found > most:
            yield key, most


def _micro_batch(config: RunConfig, update_samples: int, trained: int) -> int:
    """The largest that divides an update, and cuts no group that is compared, up to the recipe's."""
    most = config.learner.micro_batch_size
    if config.pipeline.trains_parts:
        most = min(most, update_samples // 2)
    if most >= update_samples:
        return most
    step = trained if config.algorithm.compares_groups else 1
    sizes = (size for size in range(step, most + 1, step) if update_samples % size == 0)
    return max(sizes, default=step)


def _size(config: RunConfig, family: type[ModelFamily], folder: Path) -> Iterator[tuple[str, object]]:
    from spotlight_files.pipeline_files import PipelineFiles

    dimensions, rollout = family.read_dimensions(PipelineFiles(folder)), config.rollout
    unit, shorter = dimensions.unit_px or dimensions.patch_px, min(rollout.height, rollout.width)
    least = math.ceil(_SIDE_MIN_PX / unit)
    for key, side in (("height", rollout.height), ("width", rollout.width)):
        yield f"rollout.{key}", unit * min(round(least * side / shorter), 2 * least)
    if rollout.frames > 1:
        yield "rollout.frames", min(rollout.frames, 1 + dimensions.frames_per_latent)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_attention(name: str) -> bool:
    import torch

    from spotlight.models.kernels.attention import missing

    return missing(name, torch.device("cuda" if _cuda() else "cpu")) is None
