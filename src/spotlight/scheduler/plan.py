"""The controller's settings, and its requirements on settings and prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import PlannerConfig
from spotlight.scheduler.exploration.bandit import Arm, arm_grid
from spotlight.scheduler.exploration.selection import SelectionPolicy
from spotlight.scheduler.types import Baseline, Prompt, PromptId, WeightKind


class Explore(StrEnum):
    """When previews are made: before the rollouts they choose seeds for, or while the learner trains."""

    CRITICAL_PATH = "critical_path"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ExplorationPlan:
    """Preview more seeds than a group needs and keep those whose rewards differ most.

    Attributes:
        seeds_per_prompt, steps: the arm played without a planner.
        contrast_min: a prompt whose preview rewards lie within this range chooses nothing.
        spare_prompts: maximum of prompts without contrast replaced per iteration.
        sampled_prompts: groups per iteration that keep seeds drawn at random, to measure ranking fidelity.
        drawn_seeds: number of these per group, at least 2 to measure it.
        fidelity_min: Kendall's tau between preview and regenerated rewards below which previews do not
            choose; None: they always do.
        undo_selection: weight samples so that selection leaves no bias. Every group then keeps drawn seeds,
            unless the policy itself draws, and no prompt is replaced.
        seeds_per_prompt_max: idle workers deepen pools up to this. Incompatible with undoing a choice by
            rank: the deeper the pool, the larger the weights of drawn seeds.
    """

    where: Explore
    seeds_per_prompt: int
    steps: int
    policy: SelectionPolicy = SelectionPolicy.MAX_VARIANCE
    contrast_min: float = 0.0
    spare_prompts: int = 0
    sampled_prompts: int = 0
    drawn_seeds: int = 2
    fidelity_min: float | None = None
    undo_selection: bool = False
    planner: PlannerConfig | None = None
    seeds_per_prompt_max: int | None = None

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms that may be played."""
        if self.planner is None:
            return (Arm(self.seeds_per_prompt, self.steps),)
        return arm_grid(self.planner.seed_counts, self.planner.step_counts)


class Axis(StrEnum):
    """How a batch is cut into parts to train while the rest is generated."""

    PROMPT = "prompt"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What overlaps of generation and training; by default nothing.

    Attributes:
        axis: train groups, or slices of groups, as they complete; None: only a complete batch.
        slice_size: group members per slice.
        bounded: the learner's GPUs take only rollouts that end training earlier; otherwise whatever waits
            while the learner idles.
        switch_s: seconds one of them takes to switch between training and rolling out.
        next_share: fraction of the next iteration's groups that may be rolled out before this one is trained,
            one published version stale.
    """

    axis: Axis | None = None
    slice_size: int = 4
    baseline: Baseline = Baseline.GROUP
    bounded: bool = False
    switch_s: float = 0.0
    next_share: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """How workers are grouped, and how long the controller waits for them.

    Attributes:
        pixels: height times width of an image or video frame.
        latent_frames: per sample; more than 1 for video.
        sp_pays_from_pixels: pixels times latent frames from which sequence parallelism pays.
        heads: attention heads, divisible by every degree.
        degrees: of sequence parallelism, ascending; the smallest fits in memory.
        tail_steps: groups are re-formed for a batch's tail only if a rollout has more steps to go.
        answer_s: timeout of a command, after which it is resent, and finally the worker restarted.
        start_s: the same for starting a process and for pulling full weights.
        drain_margin_s: a noticed node stops work this long before its deadline.
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
        """Whether samples are large enough for a higher degree to shorten a step."""
        return self.pixels * self.latent_frames >= self.sp_pays_from_pixels


@dataclass(frozen=True, slots=True)
class Plan:
    """The controller's settings.

    Attributes:
        micro_batch_size: samples of one forward/backward over all ranks, a multiple of ``ranks``.
        max_drop_share: the run stops when a larger share of an iteration's samples is dropped; None: at the
            first.
        exploration: None: random seeds.
    """

    run_seed: int
    iterations: int
    prompts_per_iteration: int
    group_size: int
    rollout_steps: int
    evaluation: EvaluationConfig
    updates_per_batch: int
    micro_batch_size: int
    checkpoint_every: int
    lease_s: float
    max_drop_share: float | None
    ranks: int = 1
    cluster: ClusterPlan = ClusterPlan()
    exploration: ExplorationPlan | None = None
    pipeline: PipelinePlan = PipelinePlan()

    @property
    def early_groups(self) -> int:
        """Number of groups per iteration that may be rolled out while the previous one is trained."""
        # Binary rounding: 0.29 * 100 is slightly below 29.
        return math.floor(self.pipeline.next_share * self.prompts_per_iteration + 1e-9)


def require_usable(plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise ValueError for a plan or prompts that cannot be scheduled."""
    if not train:
        raise ValueError("no training prompts; data.train must name at least one")
    if plan.micro_batch_size % plan.ranks:
        raise ValueError(
            f"micro-batches of {plan.micro_batch_size} samples do not divide by {plan.ranks} ranks; "
            f"give every rank equally many"
        )
    if plan.exploration is not None:
        _require_exploration(plan, plan.exploration)
    _require_pipeline(plan, plan.pipeline)
    _require_degrees(plan.cluster)
    known: dict[PromptId, Prompt] = {}
    for prompt in (*train, *test):
        if known.setdefault(prompt.id, prompt) != prompt:
            raise ValueError(f"two prompts share the id {prompt.id}; ids must tell prompts apart")


def divisors(heads: int, low: int, high: int) -> tuple[int, ...]:
    """Possible sequence-parallel degrees: divisors of ``heads`` from ``low`` to ``high``, ascending."""
    return tuple(degree for degree in range(low, high + 1) if heads % degree == 0)


def _require_exploration(plan: Plan, exploration: ExplorationPlan) -> None:
    for arm in exploration.arms:
        if arm.seeds_per_prompt < plan.group_size:
            raise ValueError(
                f"exploration of {arm.seeds_per_prompt} seeds per prompt cannot choose "
                f"{plan.group_size}; preview at least as many seeds as a group has members"
            )
        if arm.steps < 1:
            raise ValueError(f"previews of {arm.steps} denoising steps; expected at least 1")
    most, limit = max(arm.seeds_per_prompt for arm in exploration.arms), exploration.seeds_per_prompt_max
    if limit is not None and (exploration.where is not Explore.IDLE or limit < most):
        raise ValueError(
            f"idle workers are to preview up to {limit} seeds per prompt, where {most} are planned, with "
            f"exploration.where {exploration.where.value}; expected no fewer than planned, and where idle"
        )
    if not 0 <= exploration.drawn_seeds <= plan.group_size:
        raise ValueError(
            f"{exploration.drawn_seeds} of {plan.group_size} seeds are to be drawn at random; "
            f"expected 0 to {plan.group_size}"
        )
    if exploration.sampled_prompts and exploration.drawn_seeds < 2:
        raise ValueError(
            f"{exploration.sampled_prompts} prompts are to measure ranking fidelity with "
            f"{exploration.drawn_seeds} drawn seeds each; expected at least 2, of which a pair is made"
        )
    by_rank = not exploration.policy.draws
    if exploration.undo_selection and by_rank and limit is not None:
        raise ValueError(
            f"idle workers are to preview up to {limit} seeds per prompt, of which few drawn ones stand for "
            "most: weights that undo a choice by rank waste deeper pools; leave seeds_per_prompt_max out, or "
            "choose by the policy proportional"
        )
    if exploration.undo_selection and by_rank and exploration.drawn_seeds == 0:
        raise ValueError(
            f"no weights undo a selection by {exploration.policy.value}: some seeds are never chosen; "
            "let every group draw a seed or two (drawn_seeds), or choose by the policy proportional"
        )

    if exploration.undo_selection and exploration.spare_prompts:
        raise ValueError(
            f"no weights undo that prompts without contrast are replaced, and spare_prompts is "
            f"{exploration.spare_prompts}; set it to 0, or leave out undo_selection"
        )


def _require_pipeline(plan: Plan, pipeline: PipelinePlan) -> None:
    if not 0 <= pipeline.next_share <= 1:
        raise ValueError(f"next_share is {pipeline.next_share}; expected a share of the next groups, 0 to 1")
    explores = plan.exploration
    if pipeline.next_share and explores and explores.where is Explore.CRITICAL_PATH:
        raise ValueError(
            "rollouts of the next iteration cannot begin before previews on the critical path have chosen "
            "their seeds; set next_share to 0, or explore on idle GPUs"
        )
    if pipeline.baseline is Baseline.EXPLORATION and explores is None:
        raise ValueError("the baseline exploration needs previews; set exploration, or another baseline")
    least = 3 if pipeline.baseline is Baseline.SLICE else 1
    if pipeline.axis is Axis.GENERATION and pipeline.slice_size < least:
        raise ValueError(
            f"slices of {pipeline.slice_size} members cannot be trained with the baseline "
            f"{pipeline.baseline.value}; expected at least {least}"
        )


def _require_degrees(cluster: ClusterPlan) -> None:
    degrees = cluster.degrees
    if not degrees or any(cluster.heads % degree for degree in degrees) or [*degrees] != sorted({*degrees}):
        raise ValueError(
            f"degrees of sequence parallelism are {degrees}; expected at least one, ascending, each of them "
            f"dividing {cluster.heads} attention heads"
        )
