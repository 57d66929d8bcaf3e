"""Sections of a scenario file. Strict: unknown keys are errors."""

from __future__ import annotations

import math
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
from spotlight_plan.scenarios.strategies import PipelinePart, Strategy

Name: TypeAlias = Annotated[str, Field(pattern=r"^\P{C}+$")]  # another line would be one of a launch file
Exponent: TypeAlias = tuple[PositiveFloat, PositiveFloat, PositiveFloat]
SUBSET_SPEED: Exponent = (1.55, 1.73, 1.90)
"""Least, likely and most: how many times fewer iterations 8 of 32 samples of a group take than 16 of 16
(docs/howto/train-on-a-subset.md, with which a test compares it)."""
CONTRAST_EXPONENT: Exponent = (0.36, 1.0, 1.66)
"""Least, likely and most; a test compares it with what :mod:`spotlight_plan.learning_speed` fits."""


class ScenarioSection(BaseModel):
    """Strict, immutable base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Pool(ScenarioSection):
    """Nodes of one kind."""

    nodes: NonNegativeInt
    """Number of nodes; for spot, the most at once."""
    gpus_per_node: PositiveInt
    """GPUs per node; sequence parallelism stays within a node."""
    gpu_type: Name
    """Name as in price catalogues, such as H100."""
    usd_gpu_h: PositiveFloat | None = None
    """USD per GPU-hour; null looks it up in ``prices``."""
    cloud: Name | None = None
    """Only this cloud's machines; null: as ``prices.cloud``."""
    region: Name | None = None
    """Only in this region; null: as ``prices.region``."""
    machine: Name | None = None
    """Only this instance type, such as p5.48xlarge; null: as ``prices.instance_type``."""


class ReservedPool(Pool):
    """Nodes that stay; they hold the learner."""

    rolls_out: bool = True
    """Their GPUs also denoise while the learner waits."""


class SpotPool(Pool):
    """Preemptible nodes; ``all_on_demand`` and ``disaggregated`` rent them on demand instead."""

    usd_gpu_h_on_demand: PositiveFloat | None = None
    """On-demand USD per GPU-hour, independent of the reserved price; null looks it up in ``prices``."""


class ClusterSection(ScenarioSection):
    """The rented nodes."""

    reserved: ReservedPool
    """Training nodes."""
    spot: SpotPool
    """Preemptible nodes."""
    boot_s: NonNegativeFloat | None = None
    """From a machine's arrival, when it begins to cost, until its processes can start; null: as in the
    profile. Machines that are there at the start have booted."""


class OnDemandNodeSection(ScenarioSection):
    """A node on demand for a learner that waits, as ``fleet.on_demand``; for ``all_spot_then_on_demand``."""

    after_s: NonNegativeFloat = OnDemandConfig().after_s
    """It is taken when the learner has waited this long."""
    back_after_s: NonNegativeFloat = OnDemandConfig().back_after_s
    """The learner leaves it when spot nodes have had room for this long."""


class LearnerSection(ScenarioSection):
    """The learner; all but ``shard`` of strategies that have it on spot nodes (``all_spot``, ...)."""

    shard: Shard = "node"
    """Who holds a part of the model each, as ``learner.shard``: the GPUs of a node, all, or none."""
    gpus: PositiveInt | None = None
    """GPUs that train; so many more are spot. Null: as many as are reserved in other strategies."""
    on_demand: OnDemandNodeSection = OnDemandNodeSection()
    """A node on demand while no spot node has room."""
    head_usd_h: NonNegativeFloat = 0.4
    """Of the machine without GPUs that holds the head: about 8 cores and 32 GB on demand."""


class RewardCapacity(ScenarioSection):
    """Scorers, which share each request's samples and take requests in order."""

    scorers: PositiveInt | None = None
    """At work at once; null: as many as the profile's figure is of."""
    usd_h: NonNegativeFloat = 0.0
    """Of each; 0 where they use CPUs or GPUs that the cluster has anyway."""


class EgressSection(ScenarioSection):
    """Bytes between spot nodes and a learner in another region or cloud."""

    to_spot_usd_gb: NonNegativeFloat
    """USD per 10^9 bytes of weights that spot nodes pull."""
    from_spot_usd_gb: NonNegativeFloat
    """USD per 10^9 bytes of samples that they send."""
    bytes_s: PositiveFloat
    """Bytes per second of one node."""
    source: Source
    """Source of the figures."""


class BaselinesSection(ScenarioSection):
    """The models ``spot_checkpoints`` and ``spot_redundancy``."""

    redundant_share: NonNegativeFloat = 1 / 3
    """Of a training pass, what a node computes for its neighbour in addition. One forward of three: Bamboo
    hides it in the bubbles of a pipeline of layers, which data-parallel training does not have."""


class PricesSection(ScenarioSection):
    """Source of the prices that the pools do not state."""

    source: str = "builtin"
    """As for ``spotlight prices --source``."""
    cloud: Name | None = None
    """Only this cloud; null takes the one where all required GPUs together cost least."""
    region: Name | None = None
    """Only this region; null chooses it with the cloud."""
    instance_type: Name | None = None
    """Only this instance type."""
    whole_machines: bool = True
    """A node is a whole machine with as many GPUs. If false, it may be a part of one, at its share of the
    price, which no cloud rents."""


class AlwaysOn(ScenarioSection):
    """Spot nodes are never preempted."""

    kind: Literal["always_on"] = "always_on"


class TraceFile(ScenarioSection):
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


class PublicTraceSection(ScenarioSection):
    """Spot nodes from a public trace, which you fetch once; repeated if the run is longer."""

    kind: Literal["public"] = "public"
    name: str
    """One that ``docs/howto/prices-and-traces.md`` lists, such as bamboo-p3."""
    start_h: NonNegativeFloat = 0.0
    """Offset into the trace at which the run begins."""
    notice_lead_s: NonNegativeFloat | None = None
    """Notice before each removal; 0: none; null: as in the file, which has none."""


class GeneratedTrace(ScenarioSection):
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


class EvaluationSection(ScenarioSection):
    """Validation between iterations."""

    every: PositiveInt
    """Iterations between evaluations."""
    prompts: PositiveInt
    """Held-out prompts."""
    images_per_prompt: PositiveInt = 1
    """Images per prompt."""
    steps: PositiveInt = 50
    """Denoising steps."""


class WorkSection(ScenarioSection):
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


class SimulatedRewards(ScenarioSection):
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


class PipelineSection(ScenarioSection):
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


class Target(ScenarioSection):
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


class SimulationRunSection(ScenarioSection):
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


class HeldTarget(ScenarioSection):
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


class SearchSection(ScenarioSection):
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
