"""Cost profiles: measured or estimated costs of one model on some hardware, each with its source.

A profile is a strict YAML file: an unknown key, a missing figure or a figure without a source is an error. A
source begins with one of

    published:  someone else's figure          derived:  computed from published ones, as stated
    measured:   our own                        assumed:  a guess, at best a reasoned one

:func:`assumptions` lists the guesses, to be printed with results. Durations are computed from the figures in
:mod:`spotlight_plan.scenarios.profile_costs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from spotlight_fleet.gpus import GPU_TYPES, unknown_gpus
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.yaml_tree import parse_yaml

_SOURCE = r"^(published|measured|derived|assumed): \S"
_INFRASTRUCTURE = "infrastructure"
_GRID = 16

Source = Annotated[str, Field(pattern=_SOURCE)]


class _ProfileSection(BaseModel):
    """Strict, immutable base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Figure(_ProfileSection):
    """A positive number with its source."""

    value: PositiveFloat
    """The number, in the unit that its key names."""
    source: Source
    """``published:``, ``measured:``, ``derived:`` or ``assumed:``, and what or why."""


class StepPoint(_ProfileSection):
    """Time of one DiT forward."""

    height: PositiveInt
    """Image height in pixels."""
    width: PositiveInt
    """Image width in pixels."""
    batch: PositiveInt = 1
    """Samples per forward."""
    sp: PositiveInt = 1
    """Sequence-parallel degree."""
    ms: PositiveFloat
    """Milliseconds."""
    source: Source
    """Source of the figure."""


class TrainPoint(_ProfileSection):
    """Time of one forward and backward of one sample at one timestep, on one learner GPU."""

    height: PositiveInt
    """Image height in pixels."""
    width: PositiveInt
    """Image width in pixels."""
    s: PositiveFloat
    """Seconds."""
    source: Source
    """Source of the figure."""


class GpuCosts(_ProfileSection):
    """The model on one GPU type."""

    denoise: tuple[StepPoint, ...]
    """Forwards; each SP degree needs a batch-1 point at each of its resolutions. Empty: no rollouts."""
    batch_slope: Figure
    """Cost of each sample beyond the largest measured batch, as a share of that batch's time per sample."""
    train: tuple[TrainPoint, ...]
    """Forwards and backwards, without classifier-free guidance. Empty: no training."""
    decode_ms_per_megapixel: Figure
    """Decoding latents to images and committing them."""
    lease_pixels: Figure | None = None
    """Overrides the profile's ``lease_pixels`` for this type."""


class ProfileWeights(_ProfileSection):
    """Sizes of weight transfers."""

    full_bytes: Figure
    """The whole DiT, in its serving dtype."""
    adapter_bytes: Figure
    """The LoRA adapter alone."""
    learner_state_bytes: Figure
    """Checkpoint: master weights and optimizer state of the trained parameters."""


class ProfileMemory(_ProfileSection):
    """GPU memory requirements."""

    bounds: bool = False
    """The figures are what GPUs had on which the model is known to fit, not what it needs."""
    rollout_bytes: Figure
    """Rollout GPU: weights, activations of one lease, decoder."""
    learner_bytes_per_rank: Figure
    """Each learner GPU, besides its shard."""
    learner_bytes_sharded: Figure
    """Total divided among learner GPUs."""
    pass_bytes: Figure
    """Each learner GPU, per timestep of a pass after the first."""


class ProfileRewards(_ProfileSection):
    """Reward latency."""

    latency_s: Figure
    """Fixed time per request."""
    s_per_sample: Figure
    """Time per sample for the whole pool: its scorers share the samples, and requests wait for their turn."""
    scorers: Figure | None = None
    """Scorers of that pool; null: one."""


class Infrastructure(_ProfileSection):
    """Costs that do not depend on the model."""

    intra_node_bytes_s: Figure
    """Between GPUs of a node."""
    network_bytes_s: Figure
    """Between nodes."""
    store_bytes_s: Figure
    """To and from the weight store, for one reader."""
    disk_bytes_s: Figure
    """A node's local disk."""
    process_start_s: Figure
    """Starting a worker process."""
    imports_s: Figure
    """Its imports (torch, diffusers)."""
    model_load_s: Figure
    """Building the model, excluding the transfer of its bytes."""
    group_setup_s: Figure
    """Joining workers into an SP group."""
    boot_s: Figure | None = None
    """From a machine's arrival, when it begins to cost, until its system runs; null: none."""
    image_s: Figure | None = None
    """Then, pulling and unpacking the container image; null: none."""


class Profile(_ProfileSection):
    """One model on some hardware."""

    name: str
    """Model and variant."""
    family: str | None = None
    """``model.family`` of the runs that it is of; null: any."""
    heads: Figure
    """Attention heads; SP degrees divide them."""
    frames: PositiveInt = 1
    """Frames per sample, above 1 for video; applies to all points."""
    train_has_log_probs: bool = False
    """``train`` includes old log-probs, evaluated again; then only such workloads can be simulated."""
    lease_pixels: Figure
    """Height times width times samples beyond which a larger forward saves no time."""
    weights: ProfileWeights
    """Bytes transferred."""
    memory: ProfileMemory
    """Bytes resident."""
    rewards: ProfileRewards
    """Scoring."""
    optimizer_step_s: Figure
    """Gradient norm, optimizer step, old-policy update."""
    prepare_s: Figure
    """Advantages and distribution of a batch, excluding old log-probs."""
    pass_share: Figure
    """Share of a single-timestep pass that a multi-timestep pass pays only once (gathering sharded weights);
    below 1."""
    switch_s: Figure
    """Switch of a GPU between training and rollout, where both do not fit in memory."""
    infrastructure: Infrastructure
    """Machines and network: a section, or the name of a shipped one."""
    gpus: Mapping[str, GpuCosts] = Field(min_length=1)
    """By GPU type."""


@dataclass(frozen=True, slots=True)
class NamedFigure:
    """A number of a profile, with its dotted key and source."""

    key: str
    value: float
    source: str


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _shipped().iterdir() if entry.is_file())
    )


def load_profile(name: str) -> Profile:
    """Read a shipped profile by name, or a YAML file by path.

    Raises:
        ConfigError: no such profile, not YAML, missing or unknown keys, figures out of range, unknown GPUs.
    """
    if name in profile_names():
        return parse_profile(_shipped().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), name)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(profile_names())
        problem = Problem("profile", name, f"a YAML file, or one of {known}", f"{error}.")
        raise ConfigError(f"the profile {name}", [problem]) from None
    return parse_profile(text, name)


def parse_profile(text: str, source: str) -> Profile:
    """Parse YAML. Raises :class:`ConfigError` with every problem found."""
    where = f"the profile {source}"
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = Problem("profile", "text that is not plain YAML", "a mapping", " ".join(str(error).split()))
        raise ConfigError(where, [problem]) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            where, [Problem("profile", type(tree).__name__, "a mapping", "Write `key: value`.")]
        )
    if isinstance(tree.get(_INFRASTRUCTURE), str):
        tree = tree | {_INFRASTRUCTURE: _infrastructure(tree[_INFRASTRUCTURE], where)}
    try:
        # JSON strict mode accepts lists for tuples but still rejects `ms: "8"`.
        profile = Profile.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(
            where, [_explain(tree, detail["loc"], detail["msg"]) for detail in error.errors()]
        ) from None
    if problems := list(_contradictions(profile)):
        raise ConfigError(where, problems)
    return profile


def figures(profile: Profile) -> tuple[NamedFigure, ...]:
    """All numbers of a profile."""
    return tuple(_figures(profile, ""))


def assumptions(profile: Profile, gpus: Sequence[str] = ()) -> tuple[NamedFigure, ...]:
    """All assumed numbers, restricted to these GPU types if any are given."""
    others = tuple(f"gpus.{name}." for name in profile.gpus if gpus and name not in gpus)
    return tuple(
        figure
        for figure in figures(profile)
        if figure.source.startswith("assumed:") and not figure.key.startswith(others)
    )


def require_memory(
    profile: Profile,
    *,
    rollout_gpus: Sequence[str],
    learner_gpu: str,
    ranks: int,
    timesteps_per_pass: int = 1,
) -> None:
    """Check that the model fits.

    Raises:
        ConfigError: names each GPU type, its memory and the requirement.
    """
    memory = profile.memory
    learner = learner_bytes(profile, ranks, timesteps_per_pass)
    needs = [("memory.rollout_bytes", gpu, memory.rollout_bytes.value) for gpu in dict.fromkeys(rollout_gpus)]
    needs.append((f"memory.learner_bytes_* on {ranks} ranks", learner_gpu, learner))
    problems = list(unknown_gpus((key, gpu) for key, gpu, _ in needs))
    for key, gpu, need in needs:
        if gpu in GPU_TYPES and need > GPU_TYPES[gpu].vram_bytes:
            has = GPU_TYPES[gpu].vram_bytes / 2**30
            more = ", or more learner ranks on a node (or learner.shard=all)." if "learner" in key else "."
            remedy = f"Take larger GPUs{more}"
            if "learner" in key and timesteps_per_pass > 1:
                remedy = f"Lower workload.timesteps_per_pass, which is {timesteps_per_pass}. {remedy}"
            wanted = math.ceil(need / 2**30 * 10) / 10  # rounded up: never what the GPU has
            problems.append(Problem(key, f"{gpu} with {has:.0f} GiB", f"at least {wanted:.1f} GiB", remedy))
    if problems:
        raise ConfigError(f"the profile {profile.name}", problems)


def learner_bytes(profile: Profile, ranks: int, timesteps_per_pass: int) -> float:
    """Memory of a learner GPU that trains this many timesteps per pass."""
    memory = profile.memory
    first = memory.learner_bytes_per_rank.value + memory.learner_bytes_sharded.value / ranks
    return first + (timesteps_per_pass - 1) * memory.pass_bytes.value


def timesteps_that_fit(profile: Profile, gpu: str, ranks: int, wanted: int, held_bytes: float) -> int:
    """Timesteps per pass that fit on a learner GPU beside ``held_bytes``, from 1 to ``wanted``."""
    free = GPU_TYPES[gpu].vram_bytes - held_bytes
    fitting = (k for k in range(wanted, 1, -1) if learner_bytes(profile, ranks, k) <= free)
    return next(fitting, 1)


def require_size(profile: Profile, height: int, width: int) -> None:
    """Check the image size.

    If all sizes in a profile are multiples of 16, the model requires it: 8 for the VAE times 2 for the patch.

    Raises:
        ConfigError: a side is not a multiple of 16.
    """
    points = [point for gpu in profile.gpus.values() for point in gpu.denoise]
    if any(point.height % _GRID or point.width % _GRID for point in points):
        return
    problems = [
        Problem(
            f"workload.{name}",
            str(side),
            f"a multiple of {_GRID}, as all sizes of the profile {profile.name}",
            f"For example {max(_GRID, round(side / _GRID) * _GRID)}.",
        )
        for name, side in (("height", height), ("width", width))
        if side % _GRID
    ]
    if problems:
        raise ConfigError("the scenario", problems)


def _shipped() -> Traversable:
    return files("spotlight_plan.scenarios").joinpath("profiles")


def _infrastructure(name: str, where: str) -> object:
    folder = _shipped().joinpath(_INFRASTRUCTURE)
    known = {entry.name.removesuffix(".yaml"): entry for entry in folder.iterdir()}
    if name not in known:
        expected = f"a section, or one of {', '.join(sorted(known))}"
        raise ConfigError(where, [Problem(_INFRASTRUCTURE, repr(name), expected, "Change the name.")])
    return parse_yaml(known[name].read_text(encoding="utf-8"))


def _explain(tree: object, loc: Sequence[int | str], message: str) -> Problem:
    key = ".".join(map(str, loc)) or "profile"
    found = tree
    for part in loc:
        try:
            found = found[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return Problem(
                key, "nothing", "a figure", "Add the key: a guess is fine if its source says assumed."
            )
    if message == "Extra inputs are not permitted":
        return Problem(key, "an unknown key", "one that docs/howto/prices-and-traces.md lists", "Remove it.")
    if "pattern" in message:
        expected = "a source that begins with published:, measured:, derived: or assumed:"
        return Problem(key, repr(found), expected, "Say where the figure comes from.")
    return Problem(key, repr(found), message.removeprefix("Input should be "), "Change the value.")


def _contradictions(profile: Profile) -> Iterator[Problem]:
    if (share := profile.pass_share.value) >= 1:
        yield Problem("pass_share.value", f"{share:g}", "below 1", "It is a share of the time of a pass.")
    for name, gpu in profile.gpus.items():
        key = f"gpus.{name}"
        yield from unknown_gpus([(key, name)])
        seen: set[tuple[int, int, int]] = set()
        for index, point in enumerate(gpu.denoise):
            place = (point.height * point.width, point.sp, point.batch)
            if profile.heads.value % point.sp:
                expected = f"a divisor of the {profile.heads.value:g} heads"
                yield Problem(f"{key}.denoise.{index}.sp", str(point.sp), expected, "Change the degree.")
            if place in seen:
                yield Problem(
                    f"{key}.denoise.{index}", "a second point", "one a size, batch and sp", "Remove it."
                )
            seen.add(place)
        for pixels, sp, _ in sorted(seen):
            if (pixels, sp, 1) not in seen:
                found = f"no batch 1 at {pixels} pixels and sp {sp}"
                yield Problem(f"{key}.denoise", found, "one", "Add the point.")
        sizes = [point.height * point.width for point in gpu.train]
        if len(set(sizes)) < len(sizes):
            yield Problem(f"{key}.train", "two points of one size", "one", "Remove one.")


def _figures(section: BaseModel, prefix: str) -> Iterator[NamedFigure]:
    if isinstance(section, Figure):
        yield NamedFigure(prefix, section.value, section.source)
    elif isinstance(section, StepPoint):
        label = f"{prefix}[{section.height}x{section.width}, batch {section.batch}, sp {section.sp}].ms"
        yield NamedFigure(label, section.ms, section.source)
    elif isinstance(section, TrainPoint):
        yield NamedFigure(f"{prefix}[{section.height}x{section.width}].s", section.s, section.source)
    else:
        for name in type(section).model_fields:
            value: object = getattr(section, name)
            key = f"{prefix}.{name}" if prefix else name
            yield from _deeper(value, key)


def _deeper(value: object, key: str) -> Iterator[NamedFigure]:
    if isinstance(value, BaseModel):
        yield from _figures(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _deeper(item, f"{key}.{name}")
    elif isinstance(value, tuple):
        for item in value:
            yield from _deeper(item, key)
