"""Where a run's rewards will run, in how many processes, and the memory of their weights. Loads no model."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts
from spotlight.dry_run.memory_plan import Estimate
from spotlight.dry_run.model_plan import downloaded, shapes_in
from spotlight_files.pipeline_files import is_hub_id
from spotlight_rewards.base.files import at_home
from spotlight_rewards.registry import REWARDS, resolve
from spotlight_rewards.results import require_names
from spotlight_rewards.reward import RewardSetupError, RewardTraits
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import facts_of, load

_CHECKPOINTS = (".bin", ".pt", ".pth")
_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_CONTEXT_BYTES = 0.4 * 2**30
"""Of CUDA, in every process that uses a GPU."""


@dataclass(frozen=True, slots=True)
class RewardPlace:
    """One reward's processes.

    Attributes:
        replicas: processes; None: known only where it runs, or declared by a reward that is not imported.
        place: in words.
        asks: host and port of the server that it asks; empty: none.
        weights_bytes: in memory, per process; None: some weights are not here yet.
        missing: names of the weights that are not here.
    """

    reward: str
    weight: float
    replicas: int | None
    place: str
    asks: str
    weights_bytes: float | None
    missing: tuple[str, ...]


def require_rewards(config: RunConfig) -> None:
    """Import the rewards and compare their params with their functions, none of which is called.

    Raises:
        RewardSetupError: as :func:`spotlight_rewards.reward_registry.load`, or a reserved name.
    """
    require_names(config.rewards)
    for reward in config.rewards:
        load(reward.name, reward.params)


def require_scorable(config: RunConfig, prompts: Prompts) -> None:
    """Let built-in rewards that need no download check the prompts, as they do before a run.

    Raises RewardInputError for one that cannot be scored.
    """
    used = prompts.used(config)
    for reward in config.rewards:
        facts = facts_of(reward.name) if reward.name in REWARDS.built_in else None
        if facts is None or facts.runs_on != "CPU" or any(map(is_hub_id, facts.weights)):
            continue
        with suppress(RewardSetupError):  # what it lacks here may be where the run is
            if (check := load(reward.name, reward.params).check) is not None:
                check([prompt.text for prompt in used], [prompt.metadata for prompt in used])


def reward_places(config: RunConfig) -> tuple[RewardPlace, ...]:
    return tuple(_place_of(config, reward) for reward in config.rewards)


def shares_gpu(config: RunConfig, reward: RewardConfig) -> bool:
    """Whether its processes may use the GPU that trains."""
    inline = config.fleet.driver == "inline"
    return config.device != "cpu" and (reward.device == "learner" or (inline and reward.device == "auto"))


def reward_parts(
    config: RunConfig, places: Sequence[RewardPlace], *, unknown_bytes: float = 0.0
) -> list[Estimate]:
    """Memory of the GPU that trains, for models of rewards that score on it.

    Args:
        places: of the rewards, in their order.
        unknown_bytes: taken for weights that are not here yet.
    """
    parts = []
    for reward, place in zip(config.rewards, places, strict=True):
        if place.weights_bytes == 0 or not shares_gpu(config, reward):
            continue
        weights = unknown_bytes if place.weights_bytes is None else place.weights_bytes
        number = place.replicas or 1
        formula = "weights" if place.weights_bytes is not None else "weights unknown, not here yet"
        formula += f" and CUDA's context, x {number} (rewards.device)"
        parts.append(Estimate(f"reward {place.reward}", number * (weights + _CONTEXT_BYTES), formula))
    return parts


def _place_of(config: RunConfig, reward: RewardConfig) -> RewardPlace:
    function = resolve(REWARDS.locate(reward.name)) if reward.name in REWARDS.built_in else None
    traits: RewardTraits = getattr(function, "traits", RewardTraits())
    number_bytes = _FLOAT32_BYTES
    named = {} if function is None else _weights(reward, function)
    model = reward.params.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("path"), str):
        named = {"model": model["path"]}
        half = model.get("dtype", "auto") != "float32" and (
            reward.device != "cpu" or model.get("dtype", "auto") != "auto"
        )
        number_bytes = _HALF_BYTES if half else _FLOAT32_BYTES
    found = {source: _numbers(source) for source in named.values()}
    missing = tuple(source for source, numbers in found.items() if numbers is None)
    held = None if missing else float(sum(each or 0 for each in found.values()) * number_bytes)
    return RewardPlace(
        reward.curve,
        reward.weight,
        _replicas(config, reward, traits, own=function is None),
        _where(config, reward),
        _server(reward.params),
        held,
        missing,
    )


def _replicas(config: RunConfig, reward: RewardConfig, traits: RewardTraits, *, own: bool) -> int | None:
    chosen = reward.replicas or config.reward_policy.workers
    if chosen is not None:
        return chosen
    if reward.device in ("cuda", "learner"):
        return 1
    if own:
        return None
    if traits.cores_per_process is None:
        return 1
    elsewhere = config.fleet.driver == "ray" and config.fleet.address is not None
    return None if elsewhere else max(1, (os.cpu_count() or 1) // traits.cores_per_process)


def _where(config: RunConfig, reward: RewardConfig) -> str:
    ray, cluster = config.fleet.driver == "ray", config.fleet.address is not None
    places = {
        "auto": "beside each rank, with the GPUs it finds",
        "cpu": "beside each rank, without GPUs",
        "cuda": "a GPU each that no trainer uses",
        "learner": f"beside the trainer, on its {'CPU' if config.device == 'cpu' else 'GPU if it has one'}",
    }
    if ray and reward.is_beside_command:
        return "beside this command"
    if ray:
        cpus = "CPUs of nodes set aside for rewards, else of reserved nodes"
        places = {
            "auto": cpus if cluster else "beside this command, with the GPUs it finds",
            "cpu": cpus,
            "spot": "idle CPUs of spot nodes",
            "cuda": "a GPU each, on nodes set aside for rewards",
            "learner": "on the learner's GPUs in turn, or where it has none on its CPUs"
            if cluster
            else "beside the learner, on its CPU",
        }
    return places[reward.device]


def _server(params: Mapping[str, Any]) -> str:
    for key in ("endpoint", "server"):
        place = params.get(key)
        url = place.get("base_url") if isinstance(place, Mapping) else None
        if isinstance(url, str):
            return urlsplit(url).netloc.rpartition("@")[2]  # never a password
    return ""


def _weights(reward: RewardConfig, function: Any) -> dict[str, str]:
    """Hub ids or paths by the parameter that names them: one whose default is among the weights."""
    facts = facts_of(reward.name)
    known = () if facts is None else facts.weights
    return {
        name: str(reward.params.get(name, each.default))
        for name, each in inspect.signature(function).parameters.items()
        if each.default in known and reward.params.get(name, each.default)
    }


def _numbers(source: str) -> int | None:
    """Numbers in the weights of a directory, a file or a downloaded model; None if they are not here."""
    local = at_home(source)
    folder = local if local.exists() else downloaded(source)
    if folder is None:
        return None
    if folder.is_file():
        return _in_files([folder])
    here = _in_files(_weight_files(folder))
    if here is not None or any(_weight_files(folder)):
        return here
    below = [files for each in sorted(folder.iterdir()) if each.is_dir() and (files := _weight_files(each))]
    counts = [_in_files(files) for files in below]
    return sum(each for each in counts if each is not None) if counts and None not in counts else None


def _weight_files(folder: Path) -> list[Path]:
    """What is loaded of a folder: what its index lists, else safetensors before other checkpoints."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            return sorted(
                {
                    folder / name
                    for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                }
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [index]  # not readable as weights
    files = sorted(folder.iterdir())
    return [each for each in files if each.suffix == ".safetensors"] or [
        each for each in files if each.suffix in _CHECKPOINTS
    ]


def _in_files(files: Sequence[Path]) -> int | None:
    try:
        if files and all(each.suffix in _CHECKPOINTS for each in files):
            return sum(each.stat().st_size for each in files) // _FLOAT32_BYTES
        shapes = [shape for each in files for shape in shapes_in(each).values()]
        return sum(map(prod, shapes)) if files else None
    except (OSError, SafetensorError):  # loading will say what is wrong with it
        return None
