"""What the controller needs of the configuration, and what it demands of a run's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotlight.core.types import Prompt, PromptId, WeightKind


class Explore(StrEnum):
    """When previews are made: before the rollouts they choose seeds for, or while the learner trains."""

    CRITICAL_PATH = "critical_path"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ExplorationPlan:
    """Preview more seeds than a group needs, and keep those with the highest and the lowest rewards.

    Attributes:
        seeds_per_prompt: previews of each prompt.
        steps: denoising steps of a preview.
    """

    where: Explore
    seeds_per_prompt: int
    steps: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """How workers of a cluster are grouped, and how long the controller waits for them.

    Attributes:
        pixels: height times width of an image or of a video's frame.
        latent_frames: that the model denoises of a sample: more than 1 for video.
        sp_pays_from_pixels: a sample of so many, over all its latent frames, gains from sequence parallelism.
        heads: attention heads of the model, which every degree of sequence parallelism divides.
        degrees: of sequence parallelism that a group may have, ascending; the smallest is one whose memory
            suffices.
        tail_steps: a group is re-formed for the tail of a batch only when a rollout has more steps to go.
        answer_s: a command not answered for this long is sent again, and at last the worker restarted.
        start_s: the same for starting a process and for pulling all weights.
        drain_margin_s: a noticed node stops its work this long before the deadline.
        publishes: what a new policy version changes.
    """

    pixels: int = 512 * 512
    latent_frames: int = 1
    sp_pays_from_pixels: int = 1024 * 1024
    heads: int = 1
    degrees: tuple[int, ...] = (1,)
    tail_steps: int = 2
    answer_s: float = 10.0
    start_s: float = 600.0
    drain_margin_s: float = 25.0
    publishes: WeightKind = WeightKind.ADAPTER

    @property
    def sp_pays(self) -> bool:
        """Whether a step is long enough for a higher degree to shorten it."""
        return self.pixels * self.latent_frames >= self.sp_pays_from_pixels


@dataclass(frozen=True, slots=True)
class Plan:
    """What the controller needs of the configuration.

    Attributes:
        ranks: learner ranks; every rank must train equally many samples.
        micro_batch_size: samples of one forward/backward over all ranks: a multiple of ``ranks``.
        evaluate_every: iterations between evaluations; the start and the end are always evaluated.
        max_drop_share: the run stops when a larger share of an iteration's samples cannot be scored;
            None stops at the first.
        cluster: nothing a driver without nodes ever uses.
        exploration: None trains on random seeds.
    """

    run_seed: int
    iterations: int
    prompts_per_iteration: int
    group_size: int
    rollout_steps: int
    evaluation_steps: int
    evaluation_images: int
    evaluate_every: int
    updates_per_batch: int
    micro_batch_size: int
    checkpoint_every: int
    lease_s: float
    max_drop_share: float | None
    ranks: int = 1
    cluster: ClusterPlan = ClusterPlan()
    exploration: ExplorationPlan | None = None


def require_usable(plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise ValueError for a plan or prompts that no schedule can carry out."""
    if not train:
        raise ValueError("no training prompts; data.train must name at least one")
    if plan.micro_batch_size % plan.ranks:
        raise ValueError(
            f"micro-batches of {plan.micro_batch_size} samples do not divide by {plan.ranks} ranks; "
            f"give every rank equally many"
        )
    if plan.exploration is not None and plan.exploration.seeds_per_prompt < plan.group_size:
        raise ValueError(
            f"exploration of {plan.exploration.seeds_per_prompt} seeds per prompt cannot choose "
            f"{plan.group_size}; preview at least as many seeds as a group has members"
        )
    _require_degrees(plan.cluster)
    known: dict[PromptId, Prompt] = {}
    for prompt in (*train, *test):
        if known.setdefault(prompt.id, prompt) != prompt:
            raise ValueError(f"two prompts share the id {prompt.id}; ids must tell prompts apart")


def divisors(heads: int, low: int, high: int) -> tuple[int, ...]:
    """Degrees of sequence parallelism that a model of so many heads allows, within two bounds, ascending."""
    return tuple(degree for degree in range(low, high + 1) if heads % degree == 0)


def _require_degrees(cluster: ClusterPlan) -> None:
    degrees = cluster.degrees
    if not degrees or any(cluster.heads % degree for degree in degrees) or [*degrees] != sorted({*degrees}):
        raise ValueError(
            f"degrees of sequence parallelism are {degrees}; expected at least one, ascending, each of them "
            f"dividing {cluster.heads} attention heads"
        )
