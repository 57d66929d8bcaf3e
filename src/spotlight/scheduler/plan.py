"""The controller's settings, and its requirements on them and on prompts.

Exploration and pipeline are sections of the configuration, validated where a configuration or a scenario is
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.config.section import Section
from spotlight.config.sections.algorithm import AdvantagesOver, SilentGroups, TrainPolicy
from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.config.sections.fleet import OnDemandConfig
from spotlight.config.sections.learner_section import UpdateSplit
from spotlight.config.sections.pipeline import NO_OVERLAP, PipelineConfig
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler.types import NodeId, WeightKind
from spotlight_rewards.base.prompts import Prompt, PromptId


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
        answer_s: timeout of a command, after which it is resent, and finally the worker restarted; a worker
            in a step has longer, as measured (see :mod:`spotlight.scheduler.cluster.answer_limits`).
        start_s: the same for starting a process, pulling full weights, and the first steps of a process.
        drain_margin_s: a noticed node stops work this long before its deadline.
        learner_moves: the learner is on spot nodes. A checkpoint ends every iteration, behind the rollouts of
            the next, and trained samples are kept until it is durable.
        learner_ranks_min: see :attr:`Plan.ranks_min`; None: the plan's number of ranks.
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
    learner_moves: bool = False
    learner_ranks_min: int | None = None

    @property
    def sp_pays(self) -> bool:
        """Whether samples are large enough for a higher degree to shorten a step."""
        return self.pixels * self.latent_frames >= self.sp_pays_from_pixels


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What machines do, and how many are wanted, beside the default.

    Attributes:
        reserved: ranks by reserved node where a learner that does not move starts; None: nodes have their
            roles when they join.
        ranks_roll_out: GPUs to which ranks are given also roll out while the learner waits.
        even_ranks: it has equally many ranks on each node.
        grows_after_s: it moves to more ranks when there has been room for them for so long.
        on_demand: when it takes a node on demand; None: never.
        target: goals that the number of spot nodes follows; None: there are none.
        spot_gpus, spot_usd_h: of a spot node, before there has been one.
        move_s: that a learner has to move off a node that is given back.
        drain_s: another node that is not empty after this ends nevertheless.
    """

    reserved: Mapping[NodeId, int] | None = None
    ranks_roll_out: bool = False
    even_ranks: bool = False
    grows_after_s: float = 60.0
    on_demand: OnDemandConfig | None = None
    target: TargetConfig | None = None
    spot_gpus: int = 1
    spot_usd_h: float = 0.0
    move_s: float = 4200.0
    drain_s: float = 120.0


def latent_frames(frames: int, per_latent: int = 4) -> int:
    """Latent frames of a video: the first alone, then one per ``per_latent`` frames.

    Four in the causal VAEs of HunyuanVideo and Wan 2.1 (technical reports: temporal compression 4).
    """
    return 1 + (frames - 1) // per_latent


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """What of the generated samples is trained.

    Attributes:
        samples: of each group; None: all.
        policy: how they are chosen.
        over: samples whose spread scales the advantages.
        silent_groups: what becomes of groups whose chosen rewards are all equal.
    """

    samples: int | None = None
    policy: TrainPolicy = "max_variance"
    over: AdvantagesOver = "trained"
    silent_groups: SilentGroups = "train"

    @property
    def leaves_out(self) -> bool:
        """Whether scored samples of complete groups may remain untrained."""
        return self.samples is not None or self.silent_groups != "train"

    def of_group(self, size: int) -> int:
        """Samples trained of a group of ``size``."""
        return size if self.samples is None else min(self.samples, size)


TRAINS_ALL = TrainingChoice()


@dataclass(frozen=True, slots=True)
class Plan:
    """The controller's settings.

    Attributes:
        micro_batch_size: samples of one forward/backward over all ranks, a multiple of ``ranks``.
        update_split: how an iteration's samples are divided among its optimizer steps.
        whole_groups: the loss compares the samples of a group, so that no micro-batch may cut one.
        max_drop_share: the run stops when a larger share of an iteration's samples is dropped; None: at the
            first.
        exploration: None: random seeds.
        keeps_previews: a preview by current weights with all of a rollout's steps is that rollout, and kept.
        bounded: GPUs that train take only rollouts that end training earlier; otherwise whatever waits while
            the learner idles.
        compares: rewards compare the samples of a group, and so need them together.
        added: settings of policies of other packages, by name.
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
    exploration: ExplorationConfig | None = None
    keeps_previews: bool = False
    pipeline: PipelineConfig = NO_OVERLAP
    bounded: bool = False
    update_split: UpdateSplit = "groups"
    whole_groups: bool = False
    choice: TrainingChoice = TRAINS_ALL
    fleet: FleetSettings = FleetSettings()
    compares: bool = False
    added: Mapping[str, Section] = field(default_factory=dict)

    @property
    def policies(self) -> dict[str, Section | None]:
        """The names of the policies that are used, with the settings of those of other packages."""
        used = {
            "next-iteration": self.pipeline.next_share > 0,
            "exploration": self.exploration is not None,
            "overlap": self.pipeline.trains_parts,
            "subset": self.choice.leaves_out,
            "trainers": self.bounded,
            "whole-groups": self.compares,
        }
        return {name: None for name, on in used.items() if on} | dict(self.added)

    @property
    def issued_at_once(self) -> int:
        """Samples of a group that are queued one after the other, before those of the next group."""
        return self.pipeline.slice_size if self.pipeline.axis == "generation" else self.group_size

    @property
    def ranks_min(self) -> int:
        """The fewest ranks that the learner is formed with."""
        return self.cluster.learner_ranks_min or self.ranks

    @property
    def trained_share(self) -> float:
        """Share of a whole group that is trained."""
        return self.choice.of_group(self.group_size) / self.group_size

    @property
    def pool_max(self) -> int | None:
        """Previews per prompt up to which idle workers deepen pools; None: they do not."""
        explores = self.exploration
        return None if explores is None else explores.seeds_max(self.group_size, self.rollout_steps)

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
    if plan.choice.samples is not None and not plan.pipeline.waits_for_groups:
        raise ValueError(
            f"slices compared by pipeline.baseline={plan.pipeline.baseline} are trained before their group "
            f"is whole, but {plan.choice.samples} samples of it are to be chosen"
        )
    if plan.update_split != "groups" and (plan.pipeline.trains_parts or plan.whole_groups):
        raise ValueError(
            f"samples are divided among updates as update_split={plan.update_split}, but groups are trained "
            "whole, or before the others are there"
        )
    if plan.ranks % plan.ranks_min:
        raise ValueError(
            f"{plan.ranks} learner ranks are no multiple of the fewest allowed, {plan.ranks_min}"
        )
    if plan.fleet.on_demand is not None and not plan.cluster.learner_moves:
        raise ValueError("only a learner that moves takes a node on demand; set learner_moves")
    if plan.cluster.learner_moves and plan.checkpoint_every != 1:
        raise ValueError(
            f"a learner that moves is saved after every iteration, not after {plan.checkpoint_every}"
        )
    _require_degrees(plan.cluster)
    known: dict[PromptId, Prompt] = {}
    for prompt in (*train, *test):
        if known.setdefault(prompt.id, prompt) != prompt:
            raise ValueError(f"two prompts share the id {prompt.id}; ids must tell prompts apart")


def _require_degrees(cluster: ClusterPlan) -> None:
    degrees = cluster.degrees
    if not degrees or any(cluster.heads % degree for degree in degrees) or [*degrees] != sorted({*degrees}):
        raise ValueError(
            f"degrees of sequence parallelism are {degrees}; expected at least one, ascending, each of them "
            f"dividing {cluster.heads} attention heads"
        )
