"""A cluster and a strategy that the planner may recommend. Pure, but for what :func:`prepared_for` reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spotlight.config.errors import ConfigError, Problem
from spotlight.planning.scenarios.prepare import Prepared, prepare
from spotlight.planning.scenarios.profile import load_profile
from spotlight.planning.scenarios.scenario_file import ScenarioFile
from spotlight.planning.scenarios.scenario_load import build_scenario
from spotlight.planning.scenarios.strategies import SpotPlaces, strategy_named

DROPPED_MAX = 0.05
"""Largest share of samples dropped because learner GPUs do not divide them."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A cluster and a strategy.

    Attributes:
        gpu_type: of reserved nodes.
        spot_gpu_type: of spot nodes or their replacements; without any, that of reserved nodes.
    """

    strategy: str
    gpu_type: str
    spot_gpu_type: str
    reserved_nodes: int
    spot_nodes: int


def grid(file: ScenarioFile) -> list[Candidate]:
    """Initial candidates: each GPU type alone, and the scenario's pair if its types differ."""
    wish, cluster = file.plan, file.cluster
    own = cluster.reserved.gpu_type, cluster.spot.gpu_type
    types = wish.gpu_types or tuple(load_profile(file.workload.profile).gpus)
    pairs = [(name, other) for name in types for other in wish.spot_gpu_types or (name,)]
    if own[0] != own[1] and own not in pairs:
        pairs.append(own)
    reserved = wish.reserved_nodes or _around(cluster.reserved.nodes)
    spot = [nodes for nodes in wish.spot_nodes or _around(cluster.spot.nodes) if nodes > 0]
    found: dict[Candidate, None] = {}
    for strategy in wish.strategies:
        alone = strategy_named(strategy).places is SpotPlaces.NOTHING
        for fixed_type, coming_type in pairs:
            for fixed in reserved:
                sizes = [(fixed_type, 0)] if alone else [(coming_type, coming) for coming in spot]
                found |= {Candidate(strategy, fixed_type, kind, fixed, n): None for kind, n in sizes}
    return list(found)


def prepared_for(file: ScenarioFile, candidate: Candidate, iterations: int, now: datetime) -> Prepared:
    """The scenario with a candidate's cluster; stated prices apply only to their own GPU types.

    Raises:
        ConfigError, PriceError: it cannot be simulated, or would drop too many samples.
    """
    tree = file.model_dump(mode="json")
    for pool, gpu_type, nodes in (
        ("reserved", candidate.gpu_type, candidate.reserved_nodes),
        ("spot", candidate.spot_gpu_type, candidate.spot_nodes),
    ):
        section = tree["cluster"][pool]
        if section["gpu_type"] != gpu_type:
            section.update({key: None for key in section if key.startswith("usd_gpu_h")})
        section["gpu_type"], section["nodes"] = gpu_type, nodes
    tree["run"]["iterations"] = iterations
    changed = build_scenario(tree, shape_of(file, candidate))
    ranks = candidate.reserved_nodes * changed.cluster.reserved.gpus_per_node
    alike = candidate.gpu_type == candidate.spot_gpu_type  # spot nodes of another type only denoise
    if strategy_named(candidate.strategy).places is SpotPlaces.ON_DEMAND and alike:
        ranks += candidate.spot_nodes * changed.cluster.spot.gpus_per_node
    if changed.samples % ranks > DROPPED_MAX * changed.samples:
        found = f"{changed.samples} samples, which {ranks} learner GPUs do not divide"
        remedy = f"More than {DROPPED_MAX:.0%} would be left out."
        raise ConfigError(changed.name, [Problem("workload.prompts", found, "a multiple", remedy)])
    return prepare(changed, (candidate.strategy,), now)


def shape_of(file: ScenarioFile, candidate: Candidate) -> str:
    """``4 reserved + 8 spot H100, spotlight``; ``4 reserved H100 + 8 spot L40S, spotlight``."""
    reserved = candidate.reserved_nodes * file.cluster.reserved.gpus_per_node
    others = candidate.spot_nodes * file.cluster.spot.gpus_per_node
    kind = "on-demand" if strategy_named(candidate.strategy).places.stays else "spot"
    more = f" + {others} {kind}" if others else ""
    if others and candidate.gpu_type != candidate.spot_gpu_type:
        more = f" {candidate.gpu_type}{more}"
    return f"{reserved} reserved{more} {candidate.spot_gpu_type}, {candidate.strategy}"


def _around(nodes: int) -> list[int]:
    doublings = [2**power for power in range(max(1, nodes).bit_length() + 2) if 2**power <= 4 * max(1, nodes)]
    return sorted({*doublings, max(1, nodes)})
