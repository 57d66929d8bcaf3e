"""Strategies to compare: who trains, who denoises, and what overlaps.

A strategy is data: what replaces the spot nodes, when it explores, and which pipeline parts are on. A new one
is a line in :data:`STRATEGIES`; pipeline parts are appended to its name: ``disaggregated+gap+tsp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import Literal, TypeAlias

from spotlight.config.sections.exploration import PreviewTime
from spotlight_rewards.base.errors import Problem, did_you_mean

LearnerPlacement: TypeAlias = Literal["reserved", "spot", "spot_then_on_demand"]
SpotBaseline: TypeAlias = Literal["checkpoints", "redundancy"]


class UnknownStrategyError(ValueError):
    """Unknown strategy, or one that cannot have the given parts."""

    def __init__(self, name: str, expected: str, remedy: str) -> None:
        super().__init__(name, expected, remedy)
        self.name, self.expected, self.remedy = name, expected, remedy

    def problem(self, key: str) -> Problem:
        """As a problem of the key that holds the name."""
        return Problem(key, repr(self.name), self.expected, self.remedy)


class SpotPlaces(StrEnum):
    """What takes the places of the scenario's spot nodes."""

    NOTHING = "nothing"
    SPOT = "spot"
    ON_DEMAND = "on_demand"
    """On-demand nodes that also train."""
    ROLLOUT = "rollout"
    """On-demand nodes that only roll out."""

    @property
    def stays(self) -> bool:
        """Whether these nodes are rented on demand."""
        return self in {SpotPlaces.ON_DEMAND, SpotPlaces.ROLLOUT}


class PipelinePart(StrEnum):
    """An overlap of generation and training, or what else changes how a strategy learns."""

    GAP = "gap"
    SLICES = "slices"
    TSP = "tsp"
    TAG = "tag"
    STEAL = "steal"
    TCSS = "tcss"
    EXPLORATION = "exploration"
    SUBSET = "subset"


PARTS: Mapping[PipelinePart, str] = MappingProxyType(
    {
        PipelinePart.GAP: "whole groups are trained as they complete",
        PipelinePart.SLICES: "slices of groups are trained as they complete",
        PipelinePart.TSP: "several timesteps of a sample in one pass",
        PipelinePart.TAG: "idle trainers roll out, as far as that ends sooner",
        PipelinePart.STEAL: "idle trainers roll out whatever waits",
        PipelinePart.TCSS: "some of the next iteration's rollouts are made before this one is trained",
        PipelinePart.EXPLORATION: "previews for the next iteration while the learner trains",
        PipelinePart.SUBSET: "groups twice as large, of which half as many samples are trained; no previews",
    }
)
"""What each does."""

_ONE_OF = (
    frozenset({PipelinePart.GAP, PipelinePart.SLICES}),
    frozenset({PipelinePart.TAG, PipelinePart.STEAL}),
    frozenset({PipelinePart.SLICES, PipelinePart.SUBSET}),
    frozenset({PipelinePart.EXPLORATION, PipelinePart.SUBSET}),
)
LEARNS_OTHERWISE = frozenset({PipelinePart.TCSS, PipelinePart.SUBSET})
"""Parts with which random seeds take another number of iterations."""
_OVERLAPPING = frozenset(PipelinePart) - {PipelinePart.TSP, PipelinePart.SUBSET}


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run the workload.

    Attributes:
        about: description printed below the table.
        places: what takes the places of the spot nodes.
        explore: when previews are made; None: never.
        parts: pipeline parts that are on.
        placement: of the learner, as ``fleet.learner_placement``; anywhere but on reserved nodes, spot GPUs
            take the places of the reserved ones, too.
        like: the strategy whose iterations to target apply; empty: its own.
        switches: GPUs that train and roll out switch between both, whatever ``workload.resident`` says.
        baseline: a model of how others run on spot nodes; None: our controller runs it.
    """

    name: str
    about: str
    places: SpotPlaces
    explore: PreviewTime | None
    parts: frozenset[PipelinePart] = frozenset()
    placement: LearnerPlacement = "reserved"
    like: str = ""
    switches: bool = False
    baseline: SpotBaseline | None = None

    @property
    def learner_moves(self) -> bool:
        """Whether our learner is on spot nodes."""
        return self.is_all_spot and self.baseline is None

    @property
    def is_all_spot(self) -> bool:
        """Whether spot nodes take the places of the reserved ones."""
        return self.placement != "reserved"

    @property
    def all_train(self) -> bool:
        """Whether no GPU only rolls out."""
        return self.places in {SpotPlaces.NOTHING, SpotPlaces.ON_DEMAND} or self.baseline is not None

    @property
    def learns_as(self) -> str:
        """The strategy without the parts that leave learning unchanged; its iterations to target apply."""
        base = self.like or self.name.split("+")[0]
        learns = (part for part in (PipelinePart.EXPLORATION, PipelinePart.SUBSET) if part in self.parts)
        return "+".join([base, *learns])

    def trainers_roll_out(self, wished: bool) -> bool:
        """Whether training GPUs also denoise.

        They must if they are alone, and do if all nodes are on demand and none only rolls out. In a
        pipeline, only if one of its parts says so.

        Args:
            wished: the scenario's setting, used where both are possible.
        """
        if self.all_train or self.parts & _ONE_OF[1]:
            return True
        pipelined = self.parts & {PipelinePart.GAP, PipelinePart.SLICES, PipelinePart.TCSS}
        return wished and self.places is SpotPlaces.SPOT and not pipelined


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy("reserved_only", "the reserved GPUs alone", SpotPlaces.NOTHING, None),
            Strategy(
                "all_on_demand",
                "as many GPUs, all at the on-demand price, never taken back; all denoise, then all train",
                SpotPlaces.ON_DEMAND,
                None,
            ),
            Strategy(
                "colocated",
                "as all_on_demand, and all GPUs switch between denoising and training",
                SpotPlaces.ON_DEMAND,
                None,
                like="all_on_demand",
                switches=True,
            ),
            Strategy(
                "spot_checkpoints",
                "a model: as colocated, all spot; after a preemption the job restarts from a checkpoint",
                SpotPlaces.SPOT,
                None,
                placement="spot",
                like="all_on_demand",
                switches=True,
                baseline="checkpoints",
            ),
            Strategy(
                "spot_redundancy",
                "a model: as colocated, all spot; each node also computes its neighbour's part (as Bamboo)",
                SpotPlaces.SPOT,
                None,
                placement="spot",
                like="all_on_demand",
                switches=True,
                baseline="redundancy",
            ),
            Strategy(
                "disaggregated",
                "as many GPUs, all at the on-demand price; the reserved ones train, the others denoise",
                SpotPlaces.ROLLOUT,
                None,
            ),
            Strategy(
                "spot_rollout_only",
                "spot GPUs denoise, and idle while the reserved ones train",
                SpotPlaces.SPOT,
                None,
            ),
            Strategy(
                "critical_path",
                "previews choose the seeds before each iteration's rollouts",
                SpotPlaces.SPOT,
                "critical_path",
            ),
            Strategy(
                "spotlight",
                "previews for the next iteration on spot GPUs while the reserved ones train",
                SpotPlaces.SPOT,
                "idle",
            ),
            Strategy(
                "all_spot",
                "as many GPUs, all spot: the learner moves off preempted nodes, and waits for others",
                SpotPlaces.SPOT,
                "idle",
                placement="spot",
                like="spotlight",
            ),
            Strategy(
                "all_spot_then_on_demand",
                "as all_spot, and a learner that waits takes a node on demand until there is room again",
                SpotPlaces.SPOT,
                "idle",
                placement="spot_then_on_demand",
                like="spotlight",
            ),
        )
    }
)
"""Without a pipeline. ``all_on_demand`` is what others call colocated, without switching."""


@cache
def strategy_named(name: str) -> Strategy:
    """Parse a name: one of :data:`STRATEGIES` with pipeline parts, each after a ``+``.

    Raises:
        UnknownStrategyError: an unknown strategy or part, or an invalid combination.
    """
    base_name, *added = name.split("+")
    base = STRATEGIES.get(base_name)
    if base is None:
        remedy = did_you_mean(base_name, STRATEGIES, "Remove it.")
        raise UnknownStrategyError(name, f"one of {', '.join(STRATEGIES)}", remedy)
    if unknown := [part for part in added if part not in set(PipelinePart)]:
        known = ", ".join(f"+{part}" for part in PipelinePart)
        raise UnknownStrategyError(name, f"parts {known}", f"Remove +{unknown[0]}.")
    parts = frozenset(PipelinePart(part) for part in added)
    if len(parts) < len(added):
        raise UnknownStrategyError(name, "each part once", "Remove the second.")
    _require_together(name, base, parts)
    explore: PreviewTime | None = "idle" if PipelinePart.EXPLORATION in parts else base.explore
    explore = None if PipelinePart.SUBSET in parts else explore
    about = "; ".join([base.about, *(PARTS[part] for part in PipelinePart if part in parts)])
    return replace(base, name=name, about=about, explore=explore, parts=parts)


def with_parts(name: str, parts: Iterable[PipelinePart]) -> str:
    """Name of the strategy with those parts that it allows, in :class:`PipelinePart`'s order.

    Of two that exclude each other, the first.
    """
    wanted = set(parts)
    for part in PipelinePart:
        if part in wanted and _allows(name, part):
            name = f"{name}+{part}"
    added = strategy_named(name).parts
    return "+".join([name.split("+")[0], *(part for part in PipelinePart if part in added)])


def variants(name: str, parts: Iterable[PipelinePart]) -> tuple[str, ...]:
    """Names of the strategy with every combination of these parts that it allows, the fewest first."""
    chosen = [part for part in PipelinePart if part in set(parts)]
    found = (
        with_parts(name, some) for count in range(len(chosen) + 1) for some in combinations(chosen, count)
    )
    return tuple(dict.fromkeys(found))


def _allows(name: str, part: PipelinePart) -> bool:
    try:
        strategy_named(f"{name}+{part}")
    except UnknownStrategyError:
        return False
    return True


def _require_together(name: str, base: Strategy, parts: frozenset[PipelinePart]) -> None:
    for either in _ONE_OF:
        if either <= parts:
            raise UnknownStrategyError(name, f"one of {' and '.join(sorted(either))}", "Remove the other.")
    if base.all_train and (overlapping := parts & _OVERLAPPING):
        expected = f"GPUs that only roll out, with {', '.join(sorted(overlapping))}"
        raise UnknownStrategyError(name, expected, f"Of {base.name} all train: take disaggregated.")
    if PipelinePart.SUBSET in parts and base.baseline is not None:
        raise UnknownStrategyError(name, "a strategy that runs here", f"Remove +{PipelinePart.SUBSET}.")
    if PipelinePart.TCSS in parts and base.explore == "critical_path":
        expected = "no rollouts before previews have chosen their seeds"
        raise UnknownStrategyError(name, expected, f"Remove +{PipelinePart.TCSS}, or take spotlight.")
    if PipelinePart.EXPLORATION in parts and base.explore is not None:
        raise UnknownStrategyError(name, f"exploration once: {base.name} has it", "Remove +exploration.")
