"""Scenario files: the strict YAML input of ``spotlight simulate`` and ``spotlight plan``.

A scenario names a cluster, a spot trace, a workload, and the strategies to compare. Unknown keys are errors.
Durations come from a cost profile, prices from a price source. Iterations to target are an input with a
source, because no simulator can know them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from spotlight.config.sections.exploration import SeedChoiceConfig
from spotlight.config.sections.fleet import OnDemandConfig
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler.types import WeightKind
from spotlight_plan.scenarios.profile import Source
from spotlight_plan.scenarios.profile_costs import Shard
from spotlight_plan.scenarios.strategies import LEARNS_OTHERWISE, PipelinePart, Strategy, strategy_named

Exponent: TypeAlias = tuple[PositiveFloat, PositiveFloat, PositiveFloat]
SUBSET_SPEED: Exponent = (1.55, 1.73, 1.90)
"""Least, likely and most: how many times fewer iterations 8 of 32 samples of a group take than 16 of 16
(docs/howto/train-on-a-subset.md, with which a test compares it)."""
CONTRAST_EXPONENT: Exponent = (0.36, 1.0, 1.66)
"""Least, likely and most; a test compares it with what :mod:`spotlight_plan.learning_speed` fits."""


class _ScenarioSection(BaseModel):
    """Strict, immutable base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Pool(_ScenarioSection):
    """Nodes of one kind."""

    nodes: NonNegativeInt
    """Number of nodes; for spot, the most at once."""
    gpus_per_node: PositiveInt
    """GPUs per node; sequence parallelism stays within a node."""
    gpu_type: str
    """Name as in price catalogues, such as H100."""
    usd_gpu_h: PositiveFloat | None = None
    """USD per GPU-hour; null looks it up in ``prices``."""
    cloud: str | None = None
    """Only this cloud's machines; null: as ``prices.cloud``."""
    region: str | None = None
    """Only in this region; null: as ``prices.region``."""
    machine: str | None = None
    """Only this instance type, such as p5.48xlarge; null: as ``prices.instance_type``."""


class ReservedPool(Pool):
    """Nodes that stay; they hold the learner."""

    rolls_out: bool = True
    """Their GPUs also denoise while the learner waits."""


class SpotPool(Pool):
    """Preemptible nodes; ``all_on_demand`` and ``disaggregated`` rent them on demand instead."""

    usd_gpu_h_on_demand: PositiveFloat | None = None
    """On-demand USD per GPU-hour, independent of the reserved price; null looks it up in ``prices``."""


class ClusterSection(_ScenarioSection):
    """The rented nodes."""

    reserved: ReservedPool
    """Training nodes."""
    spot: SpotPool
    """Preemptible nodes."""
    boot_s: NonNegativeFloat | None = None
    """From a machine's arrival, when it begins to cost, until its processes can start; null: as in the
    profile. Machines that are there at the start have booted."""


class OnDemandNodeSection(_ScenarioSection):
    """A node on demand for a learner that waits, as ``fleet.on_demand``; for ``all_spot_then_on_demand``."""

    after_s: NonNegativeFloat = OnDemandConfig().after_s
    """It is taken when the learner has waited this long."""
    back_after_s: NonNegativeFloat = OnDemandConfig().back_after_s
    """The learner leaves it when spot nodes have had room for this long."""


class LearnerSection(_ScenarioSection):
    """The learner; all but ``shard`` of strategies that have it on spot nodes (``all_spot``, ...)."""

    shard: Shard = "node"
    """Who holds a part of the model each, as ``learner.shard``: the GPUs of a node, all, or none."""
    gpus: PositiveInt | None = None
    """GPUs that train; so many more are spot. Null: as many as are reserved in other strategies."""
    on_demand: OnDemandNodeSection = OnDemandNodeSection()
    """A node on demand while no spot node has room."""
    head_usd_h: NonNegativeFloat = 0.4
    """Of the machine without GPUs that holds the head: about 8 cores and 32 GB on demand."""


class RewardCapacity(_ScenarioSection):
    """Scorers, which share each request's samples and take requests in order."""

    scorers: PositiveInt | None = None
    """At work at once; null: as many as the profile's figure is of."""
    usd_h: NonNegativeFloat = 0.0
    """Of each; 0 where they use CPUs or GPUs that the cluster has anyway."""


class EgressSection(_ScenarioSection):
    """Bytes between spot nodes and a learner in another region or cloud."""

    to_spot_usd_gb: NonNegativeFloat
    """USD per 10^9 bytes of weights that spot nodes pull."""
    from_spot_usd_gb: NonNegativeFloat
    """USD per 10^9 bytes of samples that they send."""
    bytes_s: PositiveFloat
    """Bytes per second of one node."""
    source: Source
    """Source of the figures."""


class BaselinesSection(_ScenarioSection):
    """The models ``spot_checkpoints`` and ``spot_redundancy``."""

    redundant_share: NonNegativeFloat = 1 / 3
    """Of a training pass, what a node computes for its neighbour in addition. One forward of three: Bamboo
    hides it in the bubbles of a pipeline of layers, which data-parallel training does not have."""


class PricesSection(_ScenarioSection):
    """Source of the prices that the pools do not state."""

    source: str = "builtin"
    """As for ``spotlight prices --source``."""
    cloud: str | None = None
    """Only this cloud; null takes the one where all required GPUs together cost least."""
    region: str | None = None
    """Only this region; null chooses it with the cloud."""
    instance_type: str | None = None
    """Only this instance type."""
    whole_machines: bool = True
    """A node is a whole machine with as many GPUs. If false, it may be a part of one, at its share of the
    price, which no cloud rents."""


class AlwaysOn(_ScenarioSection):
    """Spot nodes are never preempted."""

    kind: Literal["always_on"] = "always_on"


class TraceFile(_ScenarioSection):
    """Spot nodes from a trace file, repeated if the run is longer."""

    kind: Literal["file"] = "file"
    path: Path
    """Any format that ``spotlight traces`` reads; relative to the scenario file."""
    start_h: NonNegativeFloat = 0.0
    """Offset into the trace at which the run begins."""
    use_prices: bool = False
    """Use the trace's prices over time."""
    notice_lead_s: NonNegativeFloat | None = None
    """Notice before each removal; 0: none; null: as in the file."""


class PublicTraceSection(_ScenarioSection):
    """Spot nodes from a public trace, which you fetch once; repeated if the run is longer."""

    kind: Literal["public"] = "public"
    name: str
    """One that ``docs/howto/prices-and-traces.md`` lists, such as bamboo-p3."""
    start_h: NonNegativeFloat = 0.0
    """Offset into the trace at which the run begins."""
    notice_lead_s: NonNegativeFloat | None = None
    """Notice before each removal; 0: none; null: as in the file, which has none."""


class GeneratedTrace(_ScenarioSection):
    """Randomly generated spot nodes."""

    kind: Literal["generated"] = "generated"
    mean_uptime_h: PositiveFloat = 2.0
    """Mean time until a node is preempted on its own."""
    mean_downtime_s: NonNegativeFloat = 600.0
    """Mean time until it is replaced."""
    zones: PositiveInt = 1
    """Availability zones that the nodes are in, in turn."""
    bursts_per_h: NonNegativeFloat = 0.0
    """Rate of correlated preemptions, in each zone."""
    burst_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a zone's nodes that a burst preempts."""
    burst_spread_s: NonNegativeFloat = 180.0
    """Within which it preempts them: of joint interruptions of one type in one zone, more than 92 % lie
    within three minutes (arXiv 2604.16457)."""
    notice_lead_s: NonNegativeFloat = 30.0
    """Notice before each removal; 0: none."""


TraceSection = Annotated[
    AlwaysOn | TraceFile | PublicTraceSection | GeneratedTrace, Field(discriminator="kind")
]


class EvaluationSection(_ScenarioSection):
    """Validation between iterations."""

    every: PositiveInt
    """Iterations between evaluations."""
    prompts: PositiveInt
    """Held-out prompts."""
    images_per_prompt: PositiveInt = 1
    """Images per prompt."""
    steps: PositiveInt = 50
    """Denoising steps."""


class WorkSection(_ScenarioSection):
    """The RL workload."""

    profile: str
    """Cost profile: the name of a shipped one, or a path."""
    height: PositiveInt
    """Image height in pixels."""
    width: PositiveInt
    """Image width in pixels."""
    prompts: PositiveInt
    """Prompts per iteration."""
    group_size: Annotated[int, Field(ge=2)]
    """Images per prompt."""
    train_samples: Annotated[int, Field(ge=2)] | None = None
    """Of these, images trained, as ``algorithm.train_samples``; null: all."""
    steps: PositiveInt
    """Denoising steps per rollout."""
    trained_timesteps: PositiveInt
    """Timesteps trained per sample."""
    guidance: bool = False
    """Classifier-free guidance: two forwards per step."""
    recomputes_log_probs: bool = False
    """The learner evaluates each trained timestep once more."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per iteration."""
    micro_batch_per_gpu: PositiveInt = 4
    """Samples per forward and backward on a learner GPU."""
    timesteps_per_pass: PositiveInt | None = None
    """Timesteps per forward and backward, for strategies with ``+tsp``; null: as many as fit in memory."""
    resident: bool = True
    """Trainer GPUs that also roll out keep both working sets in memory; if false, each switch takes the
    profile's ``switch_s``."""
    publishes: WeightKind = WeightKind.ADAPTER
    """Weights that each policy version publishes: adapter or full."""
    checkpoint_every: PositiveInt = 5
    """Iterations between checkpoints."""
    evaluation: EvaluationSection | None = None
    """Null: none."""


class SimulatedRewards(_ScenarioSection):
    """How well simulated previews rank; the defaults are the testbed's, not a large model's."""

    exponent: PositiveFloat = 1.66
    """Previews of T of S steps correlate by 1 - (1 - T/S) ** exponent; ODE: 1.66, SDE: 0.82."""
    staleness: Annotated[float, Field(ge=0, le=1)] = 0.97
    """Correlation of rewards under weights one iteration apart."""
    spread: NonNegativeFloat = 0.2
    """Median standard deviation of a prompt's rewards."""
    variety: NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of the prompts' spreads."""
    flat_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of prompts whose rewards are all equal."""


class ExplorationSection(SeedChoiceConfig):
    """Previews, for strategies that explore."""

    rewards: SimulatedRewards = SimulatedRewards()
    """Rewards of simulated samples."""
    contrast_exponent: Exponent = CONTRAST_EXPONENT
    """Where iterations to target are not stated, they are those with random seeds over the realised contrast
    to this power, ``[least, likely, most]``. The default is fitted on a tiny DiT (docs/benchmarks.md)."""


_pipeline = lru_cache(maxsize=128)(PipelineConfig)
"""Of equal settings the same: a plan asks for those of thousands of ways."""


class PipelineSection(_ScenarioSection):
    """Settings of the pipeline parts, for strategies that have them."""

    slice_size: PositiveInt = 4
    """Members of a group trained together, with ``+slices``."""
    baseline: Literal["group", "slice", "exploration"] = "slice"
    """Baseline of a slice: group (slices wait for it), slice, or exploration."""
    next_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the next iteration's groups that may start with the previous weights, with ``+tcss``."""

    def of(self, strategy: Strategy, switch_s: float = 0.0) -> PipelineConfig:
        """The pipeline of a strategy.

        Args:
            switch_s: a GPU's switch between training and rollouts.
        """
        slices, whole = PipelinePart.SLICES in strategy.parts, PipelinePart.GAP in strategy.parts
        return _pipeline(
            axis="prompt" if whole else "generation" if slices else "none",
            slice_size=self.slice_size,
            baseline=self.baseline if slices else "group",
            switch_s=switch_s,
            next_share=self.next_share if PipelinePart.TCSS in strategy.parts else 0.0,
        )


class Target(_ScenarioSection):
    """Iterations to target: an assumption, not a result."""

    value: PositiveInt | tuple[PositiveInt, PositiveInt, PositiveInt]
    """Iterations until the policy is good enough: a number, or ``[fewest, likely, most]``."""
    source: Source
    """``published:``, ``measured:``, ``derived:`` or ``assumed:``, and what or why."""

    @property
    def iterations(self) -> int:
        """The number, without its interval."""
        return self.value if isinstance(self.value, int) else self.value[1]

    @property
    def ends(self) -> tuple[int, int]:
        """Fewest and most iterations."""
        return (self.value, self.value) if isinstance(self.value, int) else (self.value[0], self.value[2])

    def with_subset(self) -> Target:
        """The same where half of a group twice as large is trained."""
        least, likely, most = SUBSET_SPEED
        fewest, longest = self.ends
        value = math.ceil(fewest / most), math.ceil(self.iterations / likely), math.ceil(longest / least)
        source = (
            f"derived: {self.iterations} / {likely} [{least} to {most}], measured on a tiny DiT with 8 of 32 "
            f"samples trained in place of 16 of 16; random seeds: {self.source}"
        )
        return Target(value=value, source=source)


class SimulationRunSection(_ScenarioSection):
    """What is simulated."""

    iterations: PositiveInt = 30
    """Iterations to simulate; time and cost to target are extrapolated from these."""
    starts: PositiveInt = 5
    """Starts to simulate each strategy from. Start k has the seed + k, and begins later in a trace file: by
    that share of its length."""
    until_h: PositiveFloat = 336.0
    """Time limit in simulated hours."""
    seed: NonNegativeInt = 0
    """Seed of noise and generated traces."""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Standard deviation of log durations; 0: exact."""
    commit_every: PositiveInt = 5
    """Denoising steps between commits of progress."""


class HeldTarget(_ScenarioSection):
    """A deadline and a budget that the run itself holds, as ``fleet.target`` (docs/howto/hold-a-deadline.md).

    They are of all ``run.iterations``. The spot nodes of the scenario are the market, of which it takes some.
    """

    deadline_h: PositiveFloat | None = None
    """Hours from start to end."""
    budget_usd: PositiveFloat | None = None
    """Dollars of the whole run."""
    nodes_min: NonNegativeInt = 1
    """Fewest spot nodes asked for."""
    nodes_first: PositiveInt = 2
    """Spot nodes that it asks for before anything is measured."""

    def for_nodes(self, nodes_max: int, node_s: float) -> TargetConfig | None:
        """As a run's configuration; None: there is no goal.

        Args:
            node_s: until a new node works, before one has been measured.
        """
        if self.deadline_h is None and self.budget_usd is None:
            return None
        return TargetConfig(
            deadline_h=self.deadline_h,
            budget_usd=self.budget_usd,
            nodes_min=min(self.nodes_min, nodes_max),
            nodes_max=nodes_max,
            node_s=node_s,
        )


class SearchSection(_ScenarioSection):
    """Search space of ``spotlight plan``; empty lists: around the scenario's cluster."""

    strategies: tuple[str, ...] = ("reserved_only", "spotlight", "all_spot", "all_spot_then_on_demand")
    """Strategies that may be recommended."""
    gpu_types: tuple[str, ...] = ()
    """GPU types of reserved and spot nodes alike. Empty: every type with profile figures, a price and enough
    memory. If the scenario's two pools differ in type, that pair is tried as well."""
    spot_gpu_types: tuple[str, ...] = ()
    """Spot GPU types, each combined with each of ``gpu_types``. Empty: same as reserved."""
    parts: tuple[PipelinePart, ...] = (
        PipelinePart.GAP,
        PipelinePart.TSP,
        PipelinePart.TAG,
        PipelinePart.TCSS,
        PipelinePart.SUBSET,
    )
    """Pipeline parts to try; those that do not pay are left off."""
    next_shares: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.25, 0.5)
    """Values of ``pipeline.next_share`` to try beside the scenario's, with ``+tcss``."""
    previews: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """Previews per prompt and their steps to try beside the scenario's. The stated iterations to target are
    taken to hold for them too."""
    machine_sizes_max: PositiveInt = 2
    """Sizes of machine to try for each GPU type and pool, those with the cheapest GPUs first."""
    reserved_nodes: tuple[PositiveInt, ...] = ()
    """Numbers of machines to try."""
    spot_nodes: tuple[NonNegativeInt, ...] = ()
    """Numbers of machines to try."""
    iterations: Annotated[int, Field(ge=2)] = 5
    """Iterations of each simulation that confirms a candidate."""


class ScenarioFile(_ScenarioSection):
    """A scenario."""

    name: str
    """Name for titles."""
    cluster: ClusterSection
    """The rented nodes."""
    learner: LearnerSection = LearnerSection()
    """The learner, where it is on spot nodes."""
    rewards: RewardCapacity = RewardCapacity()
    """Capacity and cost of rewards."""
    egress: EgressSection | None = None
    """Between spot nodes and the learner; null: list prices if their prices are of different regions, else
    nothing."""
    baselines: BaselinesSection = BaselinesSection()
    """Models of how others run on spot nodes."""
    prices: PricesSection = PricesSection()
    """Source of prices."""
    trace: TraceSection = AlwaysOn()
    """Spot availability: ``kind`` is always_on, file, public or generated."""
    workload: WorkSection
    """The RL workload."""
    exploration: ExplorationSection | None = None
    """Previews, for strategies that explore."""
    pipeline: PipelineSection = PipelineSection()
    """How generation and training overlap, for strategies that do."""
    strategies: tuple[str, ...]
    """Strategies to compare, with pipeline parts appended: ``disaggregated+gap+tsp``."""
    iterations_to_target: Mapping[str, Target] = {}
    """By strategy; with pipeline parts, defaults to the strategy without them. With exploration, defaults to
    those with random seeds, fewer by the realised contrast. Without any, time and cost to target are
    unknown."""
    target: HeldTarget = HeldTarget()
    """Goals that the number of spot nodes follows, for strategies with spot nodes."""
    run: SimulationRunSection = SimulationRunSection()
    """What is simulated."""
    plan: SearchSection = SearchSection()
    """Search space of ``spotlight plan``."""

    def target_of(self, strategy: Strategy) -> Target | None:
        """Iterations to target that a strategy's are, or are derived from; None: there are none."""
        stated = self.stated_target(strategy)
        return self.random_target if stated is None and strategy.explore is not None else stated

    def stated_target(self, strategy: Strategy) -> Target | None:
        """Iterations to target of a strategy, if stated, or measured for what it trains."""
        known = self.iterations_to_target
        stated = known.get(strategy.name, known.get(strategy.learns_as))
        if stated is None and PipelinePart.SUBSET in strategy.parts and self.random_target is not None:
            return self.random_target.with_subset()
        return stated

    def run_as(self, strategy: Strategy) -> ScenarioFile:
        """The scenario with what the strategy changes of its workload."""
        if PipelinePart.SUBSET not in strategy.parts:
            return self
        size = self.workload.group_size
        changed = {"group_size": 2 * size, "train_samples": size // 2}
        return self.model_copy(update={"workload": self.workload.model_copy(update=changed)})

    @property
    def too_few_for_subsets(self) -> bool:
        """Whether half of a group is fewer than the two samples that an advantage takes."""
        return self.workload.group_size < 4

    @property
    def contrast_exponent(self) -> Exponent:
        """Of contrast in the speed of learning."""
        return self.exploration.contrast_exponent if self.exploration else CONTRAST_EXPONENT

    @property
    def random_target(self) -> Target | None:
        """Iterations to target with random seeds: the most stated for a strategy that does not explore."""
        stated = (
            target
            for name, target in self.iterations_to_target.items()
            if strategy_named(name).explore is None and not strategy_named(name).parts & LEARNS_OTHERWISE
        )
        return max(stated, key=lambda target: target.iterations, default=None)

    @property
    def usable_parts(self) -> tuple[PipelinePart, ...]:
        """Of ``plan.parts``, those that the learner accepts with this workload."""
        return tuple(
            part
            for part in self.plan.parts
            if not (part is PipelinePart.TCSS and self.stale_problem)
            and not (
                part is PipelinePart.SUBSET and (self.workload.train_samples or self.too_few_for_subsets)
            )
        )

    @property
    def stale_problem(self) -> tuple[str, str, str, str] | None:
        """Key, value, expectation and remedy, where the learner refuses rollouts of an older version."""
        if self.workload.recomputes_log_probs:
            remedy = (
                "Stale samples are weighted by the policy that made them, whose log-probs only the rollout "
                "has: set it to false (old log-probs of the rollout), or leave +tcss out."
            )
            return "workload.recomputes_log_probs", "true", "false with +tcss", remedy
        share = self.pipeline.next_share
        if share * self.workload.prompts < 1 - 1e-9:
            remedy = "This is no whole group: raise it, or leave +tcss out."
            return (
                "pipeline.next_share",
                f"{share:g}",
                f"one of {self.workload.prompts} groups or more",
                remedy,
            )
        return None

    @property
    def ranks(self) -> int:
        """GPUs that train where the learner moves."""
        reserved = self.cluster.reserved
        return self.learner.gpus or reserved.nodes * reserved.gpus_per_node

    def learner_gpu(self, strategy: Strategy) -> str:
        """Type of the GPUs that train."""
        pools = self.cluster
        return pools.spot.gpu_type if strategy.is_all_spot else pools.reserved.gpu_type

    def spot_nodes(self, strategy: Strategy) -> int:
        """Most spot nodes at once: where all are spot, as many GPUs more as are reserved elsewhere."""
        spot = self.cluster.spot
        return spot.nodes + (math.ceil(self.ranks / spot.gpus_per_node) if strategy.is_all_spot else 0)

    @property
    def pixels(self) -> int:
        """Pixels per image."""
        return self.workload.height * self.workload.width

    @property
    def samples(self) -> int:
        """Samples trained per iteration."""
        return self.workload.prompts * (self.workload.train_samples or self.workload.group_size)
