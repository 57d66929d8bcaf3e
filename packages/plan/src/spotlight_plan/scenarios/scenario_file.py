"""Scenario files: the strict YAML input of ``spotlight simulate`` and ``spotlight plan``.

A scenario names a cluster, a spot trace, a workload, and the strategies to compare. Unknown keys are errors.
Durations come from a cost profile, prices from a price source. Iterations to target are an input with a
source, because no simulator can know them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from spotlight_plan.scenarios.scenario_sections import (
    CONTRAST_EXPONENT,
    AlwaysOn,
    BaselinesSection,
    ClusterSection,
    EgressSection,
    ExplorationSection,
    Exponent,
    HeldTarget,
    LearnerSection,
    PipelineSection,
    PricesSection,
    RewardCapacity,
    ScenarioSection,
    SearchSection,
    SimulationRunSection,
    Target,
    TraceSection,
    WorkSection,
)
from spotlight_plan.scenarios.strategies import LEARNS_OTHERWISE, PipelinePart, Strategy, strategy_named


class ScenarioFile(ScenarioSection):
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
