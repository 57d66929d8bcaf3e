"""A :class:`~spotlight_plan.simulation.costs.CostModel` computed from a profile. Pure.

Times are interpolated between measured resolutions of one SP degree as a power of the pixel count (a DiT has
terms linear and quadratic in tokens, so the exponent lies between 1 and 2), and linearly between measured
batches. Beyond the largest batch, each further sample adds ``batch_slope`` of that batch's time per sample.
Nothing is extrapolated to other resolutions, SP degrees or GPUs: a missing figure is an error with its key.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from spotlight.scheduler.types import WeightKind
from spotlight_plan.scenarios.profile import GpuCosts, Profile
from spotlight_rewards.base.errors import ConfigError, Problem

Shard: TypeAlias = Literal["none", "node", "all"]
_FLOAT32 = 2
"""Bytes of gradients per byte of published adapters, which are bfloat16."""


@dataclass(frozen=True, slots=True)
class LearnerShape:
    """How the learner's GPUs share its model.

    Attributes:
        gpus_per_node: of the nodes that train.
        shard: who holds a part of the model each, as ``learner.shard``; ``none``: nothing is gathered.
        micro_batch: samples per forward of a GPU.
    """

    ranks: int = 1
    gpus_per_node: int = 1
    shard: Shard = "none"
    micro_batch: int = 4

    @property
    def parts(self) -> int:
        """GPUs that the model is divided among."""
        if self.shard == "none":
            return 1
        return self.ranks if self.shard == "all" else min(self.ranks, self.gpus_per_node)

    @property
    def crosses_nodes(self) -> bool:
        """Whether the learner is on several nodes."""
        return self.ranks > self.gpus_per_node


@dataclass(frozen=True, slots=True)
class ProfiledWorkload:
    """What the model is used for.

    Attributes:
        pixels: height times width.
        trained_timesteps: per sample and optimizer step.
        guidance: classifier-free: two forwards per step, in rollouts and in training.
        recomputes_log_probs: one more evaluation of every trained timestep before the first update.
        timesteps_per_pass: trained in one forward and backward, which share its fixed cost.
        resident: GPUs that train and roll out keep both working sets in memory and switch for free.
        lease_samples: samples per lease; None: as many as fill the profile's ``lease_pixels``.
        switch_s: of a GPU between training and rollouts; None: the profile's, unless ``resident``.
        scorers: of rewards, at work at once; None: those of the profile's figure.
        learner: its GPUs, and who holds what of the model.
    """

    pixels: int
    trained_timesteps: int
    learner_gpu: str
    guidance: bool = False
    recomputes_log_probs: bool = False
    timesteps_per_pass: int = 1
    resident: bool = True
    lease_samples: int | None = None
    switch_s: float | None = None
    scorers: int | None = None
    learner: LearnerShape = LearnerShape()

    @property
    def forwards(self) -> int:
        """Forwards per denoising step."""
        return 2 if self.guidance else 1


@dataclass(frozen=True, slots=True)
class ProfileCosts:
    """Durations of a workload.

    Methods that take a size, degree or GPU type raise :class:`ConfigError` if the profile lacks a figure.

    Raises:
        ConfigError: the profile's training includes old log-probs, which the workload does not evaluate.
    """

    profile: Profile
    workload: ProfiledWorkload
    _known: dict[tuple[str, int, int, int], float] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.profile.train_has_log_probs and not self.workload.recomputes_log_probs:
            remedy = (
                "Its seconds of training include old log-probs, which cannot be taken out: recompute them "
                "(in a run: algorithm.old_log_probs=recompute), or calibrate with a run that does not."
            )
            problem = Problem("workload.recomputes_log_probs", "false", "true", remedy)
            raise ConfigError(f"the profile {self.profile.name}", [problem])

    def denoise_step_s(self, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
        """See :class:`CostModel`."""
        key = (gpu_type, pixels, batch, sp_degree)
        if key not in self._known:  # asked at every simulated step
            self._known[key] = self.workload.forwards * forward_s(self.profile, *key)
        return self._known[key]

    def decode_s(self, gpu_type: str, pixels: int, batch: int) -> float:
        """See :class:`CostModel`."""
        ms = _gpu(self.profile, gpu_type).decode_ms_per_megapixel.value
        return ms / 1000 * pixels / 1e6 * batch

    def lease_size(self, gpu_type: str, pixels: int, sp_degree: int) -> int:
        """The workload's, else samples that fill ``lease_pixels`` on every GPU of the group, at least one."""
        if self.workload.lease_samples is not None:
            return self.workload.lease_samples
        filling = _gpu(self.profile, gpu_type).lease_pixels or self.profile.lease_pixels
        return max(1, int(filling.value * sp_degree // pixels))

    def reward_s(self, samples: int) -> float:
        """See :class:`CostModel`."""
        return self.profile.rewards.latency_s.value + self.scoring_s(samples)

    def scoring_s(self, samples: int) -> float:
        """See :class:`CostModel`. Time is inversely proportional to the number of scorers."""
        rewards, scorers = self.profile.rewards, self.workload.scorers
        measured = rewards.scorers.value if rewards.scorers else 1
        return samples * rewards.s_per_sample.value * (measured / scorers if scorers else 1)

    def prepare_s(self, samples: int, ranks: int) -> float:
        """See :class:`CostModel`."""
        work = self.workload
        if not work.recomputes_log_probs or self.profile.train_has_log_probs:
            return self.profile.prepare_s.value
        one_s = work.forwards * forward_s(self.profile, work.learner_gpu, work.pixels, 1, 1)
        each = math.ceil(samples / ranks)
        passes = math.ceil(each / work.learner.micro_batch) * work.trained_timesteps
        return self.profile.prepare_s.value + max(
            each * work.trained_timesteps * one_s, passes * self.gather_s
        )

    def train_s(self, gpu_type: str, pixels: int, samples: int, ranks: int) -> float:
        """See :class:`CostModel`.

        Sharded weights of the next layers are gathered while a layer computes (FSDP2), once in the forward
        and once in the backward of a pass: the longer of both counts.
        """
        work = self.workload
        one_s = work.forwards * train_point_s(self.profile, gpu_type, pixels)
        passes = math.ceil(work.trained_timesteps / work.timesteps_per_pass)
        share = self.profile.pass_share.value
        timesteps = (1 - share) * work.trained_timesteps + share * passes
        each = math.ceil(samples / ranks)
        gathers = 2 * passes * math.ceil(each / work.learner.micro_batch)
        return max(each * timesteps * one_s, gathers * self.gather_s)

    @property
    def gather_s(self) -> float:
        """Until a GPU has all layers, one after another, of which it holds one part."""
        learner, site = self.workload.learner, self.profile.infrastructure
        across = learner.shard == "all" and learner.crosses_nodes
        rate = site.network_bytes_s.value if across else site.intra_node_bytes_s.value
        return (1 - 1 / learner.parts) * self.profile.weights.full_bytes.value / rate

    def switch_s(self) -> float:
        """See :class:`CostModel`."""
        if self.workload.switch_s is not None:
            return self.workload.switch_s
        return 0.0 if self.workload.resident else self.profile.switch_s.value

    def optimizer_s(self) -> float:
        """The step, and before it the sum of all ranks' gradients (float32, ring all-reduce)."""
        learner, site = self.workload.learner, self.profile.infrastructure
        rate = site.network_bytes_s.value if learner.crosses_nodes else site.intra_node_bytes_s.value
        moved = 2 * (1 - 1 / learner.ranks) * _FLOAT32 * self.profile.weights.adapter_bytes.value
        return self.profile.optimizer_step_s.value + moved / rate

    def publish_s(self, kind: WeightKind) -> float:
        """See :class:`CostModel`."""
        return self._bytes(kind) / self._store_bytes_s

    def pull_s(self, kind: WeightKind, from_peer: bool) -> float:
        """Transfer; for full weights, also building the model."""
        site = self.profile.infrastructure
        build_s = site.model_load_s.value if kind is WeightKind.FULL else 0.0
        return build_s + self._bytes(kind) / (
            site.intra_node_bytes_s.value if from_peer else self._store_bytes_s
        )

    def worker_start_s(self) -> float:
        """See :class:`CostModel`."""
        return self.profile.infrastructure.process_start_s.value + self.profile.infrastructure.imports_s.value

    def group_setup_s(self, sp_degree: int) -> float:
        """See :class:`CostModel`."""
        return self.profile.infrastructure.group_setup_s.value if sp_degree > 1 else 0.0

    def checkpoint_s(self) -> float:
        """See :class:`CostModel`."""
        return self.profile.weights.learner_state_bytes.value / self.profile.infrastructure.disk_bytes_s.value

    def restore_s(self, *, cold: bool = False) -> float:
        """See :class:`CostModel`."""
        site = self.profile.infrastructure
        rate = min(site.disk_bytes_s.value, self._store_bytes_s) if cold else site.disk_bytes_s.value
        whole = self.profile.weights.full_bytes.value / rate
        return self.worker_start_s() + site.model_load_s.value + whole + self.checkpoint_s()

    def boot_s(self) -> float:
        """From a machine's arrival until its processes can start: its system and the container image."""
        site = self.profile.infrastructure
        return sum(figure.value for figure in (site.boot_s, site.image_s) if figure is not None)

    def _bytes(self, kind: WeightKind) -> float:
        weights = self.profile.weights
        return (weights.full_bytes if kind is WeightKind.FULL else weights.adapter_bytes).value

    @property
    def _store_bytes_s(self) -> float:
        site = self.profile.infrastructure
        return min(site.network_bytes_s.value, site.store_bytes_s.value)


def forward_s(profile: Profile, gpu_type: str, pixels: int, batch: int, sp_degree: int) -> float:
    """Seconds of one forward of ``batch`` samples on an SP group. Raises :class:`ConfigError`."""
    gpu = _gpu(profile, gpu_type)
    times: dict[int, dict[int, float]] = {}  # pixels -> batch -> ms
    for point in gpu.denoise:
        if point.sp == sp_degree:
            times.setdefault(point.height * point.width, {})[point.batch] = point.ms
    if not times:
        degrees = sorted({point.sp for point in gpu.denoise})
        only = f", only of {', '.join(map(str, degrees))}" if degrees else ""
        found = f"no point of sp {sp_degree}{only}"
        raise _missing(profile, f"gpus.{gpu_type}.denoise", found, "a point of that degree")
    slope = gpu.batch_slope.value
    line = {size: _at_batch(by_batch, batch, slope) for size, by_batch in times.items()}
    return _at_pixels(profile, f"gpus.{gpu_type}.denoise (sp {sp_degree})", line, pixels) / 1000


def train_point_s(profile: Profile, gpu_type: str, pixels: int) -> float:
    """Seconds of one forward and backward of one sample at one timestep. Raises :class:`ConfigError`."""
    line = {point.height * point.width: point.s for point in _gpu(profile, gpu_type).train}
    return _at_pixels(profile, f"gpus.{gpu_type}.train", line, pixels)


def sp_degrees(profile: Profile, gpu_type: str, pixels: int) -> tuple[int, ...]:
    """SP degrees with figures at this size. Raises :class:`ConfigError`."""
    sizes: dict[int, list[int]] = {}
    for point in _gpu(profile, gpu_type).denoise:
        sizes.setdefault(point.sp, []).append(point.height * point.width)
    return tuple(sorted(degree for degree, known in sizes.items() if min(known) <= pixels <= max(known)))


def _gpu(profile: Profile, gpu_type: str) -> GpuCosts:
    if gpu_type not in profile.gpus:
        found = f"nothing for {gpu_type}, only for {', '.join(profile.gpus)}"
        raise _missing(profile, f"gpus.{gpu_type}", found, "figures of that GPU type")
    return profile.gpus[gpu_type]


def _at_batch(by_batch: Mapping[int, float], batch: int, slope: float) -> float:
    batches = sorted(by_batch)
    largest = batches[-1]
    if batch >= largest:
        return by_batch[largest] * (1 + slope * (batch - largest) / largest)
    above = batches[bisect_left(batches, batch)]
    if above == batch:
        return by_batch[batch]
    below = batches[batches.index(above) - 1]
    share = (batch - below) / (above - below)
    return by_batch[below] + share * (by_batch[above] - by_batch[below])


def _at_pixels(profile: Profile, key: str, line: Mapping[int, float], pixels: int) -> float:
    sizes: Sequence[int] = sorted(line)
    if not sizes:
        raise _missing(profile, key, "no figure", f"one for {pixels} pixels")
    if not sizes[0] <= pixels <= sizes[-1]:
        known = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        raise _missing(profile, key, f"figures for {known} pixels", f"one for {pixels} pixels")
    above = sizes[bisect_left(sizes, pixels)]
    if above == pixels:
        return line[pixels]
    below = sizes[sizes.index(above) - 1]
    share = math.log(pixels / below) / math.log(above / below)
    return line[below] * math.pow(line[above] / line[below], share)


def _missing(profile: Profile, key: str, found: str, expected: str) -> ConfigError:
    remedy = "Add it with its source, or change the scenario."
    return ConfigError(f"the profile {profile.name}", [Problem(key, found, expected, remedy)])
