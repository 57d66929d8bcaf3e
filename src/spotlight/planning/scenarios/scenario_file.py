"""Scenario files: what ``spotlight simulate`` and ``spotlight plan`` are asked, as strict YAML.

A scenario names a cluster, the trace of its spot nodes, the work, and the strategies to compare. An
unknown key is an error. Durations come from a cost profile, prices from a price source; how many iterations a
strategy needs to its target is an input with a source, because no simulator can know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from spotlight.planning.scenarios.profile import Source
from spotlight.planning.scenarios.strategies import PipelinePart, Strategy
from spotlight.scheduler.exploration.selection import SelectionPolicy
from spotlight.scheduler.types import Baseline, WeightKind


class _ScenarioSection(BaseModel):
    """A strict, immutable part of a scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Pool(_ScenarioSection):
    """Nodes of one kind."""

    nodes: NonNegativeInt
    """How many; of spot nodes, at most so many at once."""
    gpus_per_node: PositiveInt
    """GPUs of one node: sequence parallelism does not reach beyond it."""
    gpu_type: str
    """As in price catalogues: H100."""
    usd_gpu_h: PositiveFloat | None = None
    """Price of one GPU; null asks the source in ``prices``."""


class ReservedPool(Pool):
    """Nodes that stay: they hold the learner."""

    rolls_out: bool = True
    """Its GPUs denoise too, while the learner waits."""


class SpotPool(Pool):
    """Nodes that the cloud may take back, and that ``all_on_demand`` and ``disaggregated`` rent for good."""

    usd_gpu_h_on_demand: PositiveFloat | None = None
    """Price of one of its GPUs on demand, whatever reserved ones cost; null asks the source in ``prices``."""


class ClusterSection(_ScenarioSection):
    """What is rented."""

    reserved: ReservedPool
    """Nodes that train."""
    spot: SpotPool
    """Nodes that the cloud may take back."""


class PricesSection(_ScenarioSection):
    """Where prices come from that the pools do not state."""

    source: str = "builtin"
    """As for ``spotlight prices --source``."""
    cloud: str | None = None
    """Only this cloud; null: of those that have all prices wanted, where all GPUs together cost least."""
    region: str | None = None
    """Only this region; null: chosen with the cloud."""
    instance_type: str | None = None
    """Only this machine."""


class AlwaysOn(_ScenarioSection):
    """No spot node is ever taken back."""

    kind: Literal["always_on"] = "always_on"


class TraceFile(_ScenarioSection):
    """Spot nodes as in a trace file, repeated when the run is longer."""

    kind: Literal["file"] = "file"
    path: Path
    """Any form that ``spotlight traces`` reads; relative to the scenario file."""
    start_h: NonNegativeFloat = 0.0
    """The run begins so late in the trace."""
    use_prices: bool = False
    """Nodes cost what the trace says, over time."""
    notice_lead_s: NonNegativeFloat | None = None
    """A notice so long before each removal; 0: none; null: as the file says."""


class GeneratedTrace(_ScenarioSection):
    """Spot nodes that come and go at random."""

    kind: Literal["generated"] = "generated"
    mean_uptime_h: PositiveFloat = 2.0
    """Until a node is preempted alone."""
    mean_downtime_s: NonNegativeFloat = 600.0
    """Until its place has another."""
    bursts_per_h: NonNegativeFloat = 0.0
    """How often nodes are lost together."""
    burst_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the fleet that a burst takes."""
    notice_lead_s: NonNegativeFloat = 30.0
    """A notice so long before each removal; 0: none."""


TraceSection = Annotated[AlwaysOn | TraceFile | GeneratedTrace, Field(discriminator="kind")]


class EvaluationSection(_ScenarioSection):
    """Validation between iterations."""

    every: PositiveInt
    """Iterations."""
    prompts: PositiveInt
    """Held-out prompts."""
    images_per_prompt: PositiveInt = 1
    """Pictures of each."""
    steps: PositiveInt = 50
    """Denoising steps."""


class WorkSection(_ScenarioSection):
    """One run of reinforcement learning."""

    profile: str
    """Cost profile: the name of a shipped one, or a path."""
    height: PositiveInt
    """Of a picture, in pixels."""
    width: PositiveInt
    """Of a picture, in pixels."""
    prompts: PositiveInt
    """Of an iteration."""
    group_size: Annotated[int, Field(ge=2)]
    """Pictures of a prompt."""
    steps: PositiveInt
    """Denoising steps of a rollout."""
    trained_timesteps: PositiveInt
    """Of each sample."""
    guidance: bool = False
    """Classifier-free: two forwards a step."""
    recomputes_log_probs: bool = False
    """The learner evaluates each trained timestep once more."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps of an iteration."""
    micro_batch_per_gpu: PositiveInt = 4
    """Samples of one forward and backward on a learner GPU."""
    timesteps_per_pass: PositiveInt | None = None
    """Trained in one forward and backward, by strategies with ``+tsp``; null: as many as fit memory."""
    resident: bool = True
    """GPUs that train and roll out hold all they need for both; else they turn in the profile's
    ``switch_s``."""
    publishes: WeightKind = WeightKind.ADAPTER
    """What a new policy version changes: adapter, or full."""
    checkpoint_every: PositiveInt = 5
    """Iterations."""
    evaluation: EvaluationSection | None = None
    """Null: none."""


class ArmPlanner(_ScenarioSection):
    """A bandit chooses how much to explore, iteration by iteration."""

    seed_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Previews of a prompt: the choices; each at least the group size."""
    step_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Denoising steps of a preview: the choices."""
    alpha: NonNegativeFloat = 0.5
    """Weight of trying what is uncertain; 0 always takes the best so far."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Of what was learnt, by every later iteration."""
    sharing: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Evidence that a choice gives of its neighbours."""
    caution: NonNegativeFloat = 1.0
    """Standard deviations by which an expected window is taken smaller."""


class SimulatedRewards(_ScenarioSection):
    """How well previews rank, in a simulation: the testbed's figures, not those of a large model."""

    exponent: PositiveFloat = 1.66
    """Previews of T of S steps correlate by 1 - (1 - T/S) ** exponent; ODE: 1.66, SDE: 0.82."""
    staleness: Annotated[float, Field(ge=0, le=1)] = 0.97
    """Correlation of rewards under weights one iteration apart."""
    spread: NonNegativeFloat = 0.2
    """Median standard deviation of a prompt's rewards."""
    variety: NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of prompts' spreads."""
    flat_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of prompts whose rewards are all equal."""


class ExplorationSection(_ScenarioSection):
    """Previews, for the strategies that make them."""

    seeds_per_prompt: PositiveInt
    """Previews of a prompt; at least the group size."""
    seeds_per_prompt_max: PositiveInt | None = None
    """Previews of a prompt at most, where spot GPUs still idle when what was planned is made; null: 16 times
    the group size, or what is planned if that is more."""
    steps: PositiveInt
    """Denoising steps of a preview."""
    policy: SelectionPolicy = SelectionPolicy.MAX_VARIANCE
    """Which previewed seeds form the group."""
    spare_prompts: NonNegativeInt = 0
    """So many prompts an iteration that show no contrast are replaced by others."""
    sampled_prompts: NonNegativeInt = 0
    """Groups an iteration that keep seeds drawn at random, to measure how well previews rank."""
    drawn_seeds: NonNegativeInt = 2
    """So many each."""
    fidelity_min: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Kendall's tau of previews with regenerated rewards below which they do not choose; null: no bound."""
    planner: ArmPlanner | None = None
    """Null: always ``seeds_per_prompt`` and ``steps``."""
    rewards: SimulatedRewards = SimulatedRewards()
    """What simulated samples score."""


class PipelineSection(_ScenarioSection):
    """How the parts of a pipeline work, for the strategies that have them."""

    slice_size: PositiveInt = 4
    """Members of a group that are trained together, with ``+slices``."""
    baseline: Baseline = Baseline.SLICE
    """What slices are compared with: group (they wait for it), slice, or exploration."""
    next_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the next iteration's groups that may begin with the previous weights, with ``+tcss``."""


class Target(_ScenarioSection):
    """How long learning takes: an assumption of the scenario, not a result."""

    value: PositiveInt
    """Iterations until the policy is as good as wanted."""
    source: Source
    """``published:``, ``measured:``, ``derived:`` or ``assumed:``, and what or why."""


class SimulationRunSection(_ScenarioSection):
    """What is simulated of it."""

    iterations: PositiveInt = 30
    """Simulated; time and cost to target are extrapolated from these."""
    until_h: PositiveFloat = 336.0
    """Stop there, though the iterations are not done."""
    seed: NonNegativeInt = 0
    """Of noise and generated traces."""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Standard deviation of the logarithm of durations; 0: exact."""
    commit_every: PositiveInt = 5
    """Denoising steps between two commits of progress."""


class SearchSection(_ScenarioSection):
    """Where ``spotlight plan`` looks; empty lists: around the cluster of the scenario."""

    strategies: tuple[str, ...] = ("reserved_only", "spotlight")
    """Which strategies may be recommended."""
    gpu_types: tuple[str, ...] = ()
    """For reserved and spot nodes alike. Empty: every type with figures in the profile, a price, and memory
    enough. If the scenario's two pools differ in type, this pair is tried besides."""
    spot_gpu_types: tuple[str, ...] = ()
    """For spot nodes, each beside each of ``gpu_types``. Empty: as the reserved ones."""
    parts: tuple[PipelinePart, ...] = (
        PipelinePart.GAP,
        PipelinePart.TSP,
        PipelinePart.TAG,
        PipelinePart.TCSS,
    )
    """Parts of the pipeline that the strategies may have besides; those that do not pay are left off."""
    reserved_nodes: tuple[PositiveInt, ...] = ()
    """Numbers to try."""
    spot_nodes: tuple[NonNegativeInt, ...] = ()
    """Numbers to try."""
    iterations: Annotated[int, Field(ge=2)] = 6
    """Simulated of each candidate."""
    candidates_max: PositiveInt = 80
    """Stop after so many."""


class ScenarioFile(_ScenarioSection):
    """A scenario."""

    name: str
    """Of the scenario, for titles."""
    cluster: ClusterSection
    """What is rented."""
    prices: PricesSection = PricesSection()
    """Where prices come from."""
    trace: TraceSection = AlwaysOn()
    """When spot nodes come and go: ``kind`` is always_on, file or generated."""
    workload: WorkSection
    """The run."""
    exploration: ExplorationSection | None = None
    """Previews, for the strategies that make them."""
    pipeline: PipelineSection = PipelineSection()
    """How generation and training overlap, for the strategies that let them."""
    strategies: tuple[str, ...]
    """What is compared; parts of the pipeline stand behind a strategy's name: ``disaggregated+gap+tsp``."""
    iterations_to_target: Mapping[str, Target] = {}
    """By strategy; of one with parts of the pipeline, else those of the strategy without them hold. Without
    any, time and cost to target are unknown."""
    run: SimulationRunSection = SimulationRunSection()
    """What is simulated of it."""
    plan: SearchSection = SearchSection()
    """Where ``spotlight plan`` looks."""

    def target_of(self, strategy: Strategy) -> Target | None:
        """Iterations to the target of a strategy."""
        return self.iterations_to_target.get(strategy.name, self.iterations_to_target.get(strategy.learns_as))

    @property
    def pixels(self) -> int:
        """Of a picture."""
        return self.workload.height * self.workload.width

    @property
    def samples(self) -> int:
        """Of an iteration."""
        return self.workload.prompts * self.workload.group_size
