"""Clusters and strategies that the planner may recommend. Pure, but for what :func:`prepared_for` reads.

Nodes are whole machines of the scenario's price source, each pool's in its own cloud and region, or the
scenario's own nodes where it states their price.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product

from spotlight_plan.prices.quotes import Quote
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.pricing import Crossing, crossing_of, wish_of
from spotlight_plan.scenarios.profile import Profile, load_profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import build_scenario
from spotlight_plan.scenarios.scenario_sections import Pool, TraceFile
from spotlight_plan.scenarios.strategies import PipelinePart, SpotPlaces, strategy_named, variants
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.yaml_tree import parse_yaml

DROPPED_MAX = 0.05
"""Largest share of samples dropped because learner GPUs do not divide them."""


@dataclass(frozen=True, slots=True, order=True)
class Machine:
    """What a node is.

    Attributes:
        gpus: of the machine.
        cloud, region: empty: unknown.
        name: instance type; empty: the scenario's own node, at its price.
    """

    gpu_type: str
    gpus: int
    cloud: str = ""
    region: str = ""
    name: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Cloud and region."""
        return self.cloud, self.region


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cluster and a strategy.

    Attributes:
        reserved: machine of the reserved nodes; of the learner's, where it is on spot nodes.
        spot: machine of spot nodes or their replacements; without any, that of reserved nodes.
        next_share: ``pipeline.next_share``; None: the scenario's.
        previews: per prompt, and their steps; None: the scenario's.
    """

    strategy: str
    reserved: Machine
    spot: Machine
    reserved_nodes: int
    spot_nodes: int
    next_share: float | None = None
    previews: tuple[int, int] | None = None

    @property
    def crossing(self) -> Crossing:
        """What lies between the pools."""
        return crossing_of(self.reserved.place, self.spot.place) if self.spot_nodes else ""


@dataclass(frozen=True, slots=True)
class MachinePrice:
    """A machine with its dollars an hour; None: the scenario's own node."""

    machine: Machine
    usd_h: float | None

    @property
    def usd_gpu_h(self) -> float:
        """Per GPU; 0 for the scenario's own node, of which there is only one."""
        return 0.0 if self.usd_h is None else self.usd_h / self.machine.gpus


def gpu_types_of(file: ScenarioFile) -> tuple[str, ...]:
    """GPU types that may be planned with, reserved or spot."""
    pools = file.cluster
    own = pools.reserved.gpu_type, pools.spot.gpu_type
    return tuple(dict.fromkeys((*_types(file), *file.plan.spot_gpu_types, *own)))


def _types(file: ScenarioFile) -> tuple[str, ...]:
    return file.plan.gpu_types or tuple(load_profile(file.workload.profile).gpus)


def grid(file: ScenarioFile, quotes: Sequence[Quote]) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Initial candidates, and what is left out and why.

    Each GPU type alone, and the scenario's pair if its types differ; of each type and pool the machine sizes
    that are cheapest per GPU; of each pair of sizes the places that no other pair beats in both prices.
    """
    wish, pools = file.plan, file.cluster
    own = pools.reserved.gpu_type, pools.spot.gpu_type
    pairs = [(name, other) for name in _types(file) for other in wish.spot_gpu_types or (name,)]
    if own[0] != own[1] and own not in pairs:
        pairs.append(own)
    found: dict[Candidate, None] = {}
    left_out: list[tuple[str, str]] = []
    for strategy in wish.strategies:
        for fixed_type, coming_type in pairs:
            try:
                rented = list(rentals(file, strategy, fixed_type, coming_type, quotes))
            except ConfigError as error:
                left_out.append((f"{fixed_type}, {strategy}", error.problems[0].found))
                continue
            for fixed, coming in rented:
                found |= dict.fromkeys(_sizes(file, strategy, fixed, coming))
    return list(found), left_out


def rentals(
    file: ScenarioFile, strategy: str, fixed_type: str, coming_type: str, quotes: Sequence[Quote]
) -> Iterator[tuple[Machine, Machine]]:
    """Machines of the two pools that are worth a try.

    Raises:
        ConfigError: there is no price of one.
    """
    named = strategy_named(strategy)
    places = named.places
    if named.learner_moves:  # all nodes are alike
        for size in _sizes_of(
            file, _offers(file, file.cluster.spot, "spot", coming_type, quotes, on_demand=False)
        ):
            best = min(size, key=lambda one: one.usd_gpu_h).machine
            yield best, best
        return
    fixed = _offers(file, file.cluster.reserved, "reserved", fixed_type, quotes, on_demand=True)
    if places is SpotPlaces.NOTHING:
        for size in _sizes_of(file, fixed):
            best = min(size, key=lambda one: one.usd_gpu_h).machine
            yield best, best
        return
    coming = _offers(file, file.cluster.spot, "spot", coming_type, quotes, on_demand=places.stays)
    pairs = list(product(_sizes_of(file, fixed), _sizes_of(file, coming)))
    for one, other in pairs:
        yield from _places(one, other, apart=places is SpotPlaces.SPOT)
    if places.stays and not any(_places(one, other, apart=False) for one, other in pairs):
        found, remedy = "no place with prices of both", "State them, or name other types."
        raise ConfigError(
            file.name, [Problem("cluster", found, f"a region with {fixed_type} and {coming_type}", remedy)]
        )


def own_machine(pool: Pool) -> Machine:
    """The scenario's own node, whose price it states or parts of machines give."""
    return Machine(pool.gpu_type, pool.gpus_per_node, pool.cloud or "", pool.region or "")


def _offers(
    file: ScenarioFile, pool: Pool, name: str, gpu_type: str, quotes: Sequence[Quote], *, on_demand: bool
) -> list[MachinePrice]:
    """The machines of a pool, each size and place at its lowest price."""
    stated = pool.usd_gpu_h
    if name == "spot" and on_demand:
        stated = file.cluster.spot.usd_gpu_h_on_demand
    by_trace = name == "spot" and isinstance(file.trace, TraceFile) and file.trace.use_prices
    if gpu_type == pool.gpu_type and (stated is not None or (by_trace and not on_demand)):
        return [MachinePrice(own_machine(pool), None)]
    wish = wish_of(file.prices.model_copy(update={"whole_machines": False}), pool)
    best: dict[tuple[int, str, str], MachinePrice] = {}
    for quote in quotes:
        usd_h = quote.on_demand_usd_h if on_demand else quote.spot_usd_h
        if quote.gpu != gpu_type or usd_h is None or not wish.takes(quote):
            continue
        machine = Machine(gpu_type, quote.gpus, quote.cloud, quote.region, quote.instance_type)
        key = quote.gpus, quote.cloud, quote.region
        if key not in best or (usd_h, machine) < (best[key].usd_h, best[key].machine):
            best[key] = MachinePrice(machine, usd_h)
    if not best:
        kind = "on-demand" if on_demand else "spot"
        raise ConfigError(
            file.name,
            [Problem(f"cluster.{name}", f"no {kind} price of {gpu_type}", "one", "State it, or see prices.")],
        )
    return list(best.values())


def _sizes_of(file: ScenarioFile, offers: Sequence[MachinePrice]) -> list[list[MachinePrice]]:
    """Offers by size of machine, those with the cheapest GPUs first, at most ``plan.machine_sizes_max``."""
    by_size: dict[int, list[MachinePrice]] = {}
    for offer in offers:
        by_size.setdefault(offer.machine.gpus, []).append(offer)
    ordered = sorted(by_size.values(), key=lambda size: min(one.usd_gpu_h for one in size))
    return ordered[: file.plan.machine_sizes_max]


def _places(
    fixed: Sequence[MachinePrice], coming: Sequence[MachinePrice], *, apart: bool
) -> list[tuple[Machine, Machine]]:
    """Pairs that no other beats in both prices: among those of one place, and among those that cross.

    What crosses costs about the same between any two clouds: of these only each cloud's cheapest matter.

    Args:
        apart: also those that cross; nodes on demand are in the learner's place.
    """
    together = [(one, other) for one, other in product(fixed, coming) if not _crossing(one, other)]
    if not apart:
        return _unbeaten(together)
    across = [
        (one, other) for one, other in product(_by_cloud(fixed), _by_cloud(coming)) if _crossing(one, other)
    ]
    kinds = [together]
    kinds += [[pair for pair in across if _crossing(*pair) == kind] for kind in ("region", "cloud")]
    return [pair for kind in kinds for pair in _unbeaten(kind)]


def _crossing(one: MachinePrice, other: MachinePrice) -> Crossing:
    return crossing_of(one.machine.place, other.machine.place)


def _by_cloud(offers: Sequence[MachinePrice]) -> list[MachinePrice]:
    best: dict[str, MachinePrice] = {}
    for offer in sorted(offers, key=lambda one: (one.usd_gpu_h, one.machine)):
        best.setdefault(offer.machine.cloud, offer)
    return list(best.values())


def _unbeaten(pairs: Sequence[tuple[MachinePrice, MachinePrice]]) -> list[tuple[Machine, Machine]]:
    kept: list[tuple[Machine, Machine]] = []
    least = float("inf")
    ordered = sorted(
        pairs, key=lambda pair: (*(one.usd_gpu_h for one in pair), *(one.machine for one in pair))
    )
    for one, other in ordered:
        if other.usd_gpu_h < least:
            kept.append((one.machine, other.machine))
            least = other.usd_gpu_h
    return kept


def _sizes(file: ScenarioFile, strategy: str, fixed: Machine, coming: Machine) -> Iterator[Candidate]:
    """Candidates of all sizes: as many GPUs whatever the machine, unless the scenario lists nodes."""
    wish, pools, named = file.plan, file.cluster, strategy_named(strategy)
    trained = file.ranks if named.learner_moves else _gpus(pools.reserved)
    reserved = wish.reserved_nodes or _around(trained, fixed.gpus)
    if named.places is SpotPlaces.NOTHING:
        yield from (Candidate(strategy, fixed, fixed, nodes, 0) for nodes in reserved)
        return
    spot = [nodes for nodes in wish.spot_nodes or _around(_gpus(pools.spot), coming.gpus) if nodes > 0]
    yield from (Candidate(strategy, fixed, coming, one, other) for one, other in product(reserved, spot))


def ways(file: ScenarioFile, strategy: str) -> list[tuple[str, float | None, tuple[int, int] | None]]:
    """Every way to run a strategy on a cluster: parts of the pipeline, share that begins early, previews."""
    return [
        (name, share, arm)
        for name in variants(strategy, file.usable_parts)
        for share in shares_of(file, name)
        for arm in previews_of(file, name)
    ]


def shares_of(file: ScenarioFile, strategy: str) -> tuple[float | None, ...]:
    """Values of ``next_share`` to try, the scenario's (None) first."""
    early = PipelinePart.TCSS in strategy_named(strategy).parts
    return (None, *(one for one in file.plan.next_shares if early and one != file.pipeline.next_share))


def previews_of(file: ScenarioFile, strategy: str) -> tuple[tuple[int, int] | None, ...]:
    """Previews to try, the scenario's (None) first."""
    explores = strategy_named(strategy).explore is not None
    return (None, *(file.plan.previews if explores else ()))


def prepared_for(
    file: ScenarioFile,
    candidate: Candidate,
    iterations: int,
    now: datetime,
    quotes: Sequence[Quote] | None = None,
    profile: Profile | None = None,
) -> Prepared:
    """The scenario with a candidate's cluster.

    Args:
        quotes, profile: already read; None reads them.

    Raises:
        ConfigError, PriceError: it cannot be simulated, or would drop too many samples.
    """
    changed = file_of(file, candidate, iterations)
    require_shares(changed, candidate)
    return prepare(changed, (candidate.strategy,), now, quotes, profile)


def require_shares(file: ScenarioFile, candidate: Candidate) -> None:
    """Refuse a learner whose GPUs do not divide what it trains.

    Raises:
        ConfigError: it would drop too many samples, or has no GPU.
    """
    samples = file.run_as(strategy_named(candidate.strategy)).samples
    ranks = candidate.reserved_nodes * candidate.reserved.gpus
    alike = candidate.reserved.gpu_type == candidate.spot.gpu_type  # spot nodes of another type only denoise
    if strategy_named(candidate.strategy).places is SpotPlaces.ON_DEMAND and alike:
        ranks += candidate.spot_nodes * candidate.spot.gpus
    if ranks == 0:
        remedy = "The learner needs one: reserve a node, or take a strategy that has it on spot nodes."
        raise ConfigError(file.name, [Problem("cluster.reserved.nodes", "0", "1 or more", remedy)])
    if samples % ranks > DROPPED_MAX * samples:
        found = f"{samples} samples, which {ranks} learner GPUs do not divide"
        remedy = f"More than {DROPPED_MAX:.0%} would be left out."
        raise ConfigError(file.name, [Problem("workload.prompts", found, "a multiple", remedy)])


def file_of(file: ScenarioFile, candidate: Candidate, iterations: int) -> ScenarioFile:
    """The scenario with a candidate's cluster; stated prices apply only to the scenario's own nodes.

    Raises:
        ConfigError: a contradiction.
    """
    tree = file.model_dump(mode="json")
    pools = [("spot", candidate.spot, candidate.spot_nodes)]
    if strategy_named(candidate.strategy).learner_moves:
        tree["learner"]["gpus"] = candidate.reserved_nodes * candidate.reserved.gpus
    else:
        pools.append(("reserved", candidate.reserved, candidate.reserved_nodes))
    for pool, machine, nodes in pools:
        section = tree["cluster"][pool]
        if machine.name or section["gpu_type"] != machine.gpu_type:
            section.update({key: None for key in section if key.startswith("usd_gpu_h")})
        if machine.name:
            section |= {"cloud": machine.cloud, "region": machine.region or None, "machine": machine.name}
        section |= {"gpu_type": machine.gpu_type, "gpus_per_node": machine.gpus, "nodes": nodes}
    if candidate.next_share is not None:
        tree["pipeline"]["next_share"] = candidate.next_share
    if candidate.previews is not None:
        tree["exploration"] |= dict(zip(("seeds_per_prompt", "steps"), candidate.previews, strict=True))
    tree["run"]["iterations"] = iterations
    return build_scenario(tree, shape_of(candidate))


def overrides_of(file: ScenarioFile, candidate: Candidate) -> list[str]:
    """What ``spotlight simulate`` is given beside the scenario, to simulate this candidate."""
    before, after = (
        file.model_dump(mode="json"),
        file_of(file, candidate, file.run.iterations).model_dump(mode="json"),
    )
    return [f"{key}={_yaml(value)}" for key, value in _differences(before, after)]


def order_of(candidate: Candidate) -> tuple[object, ...]:
    """Sort key: what is not set comes first."""
    way = candidate.next_share or 0.0, candidate.previews or (0, 0)
    cluster = candidate.reserved, candidate.spot, candidate.reserved_nodes, candidate.spot_nodes
    return (candidate.strategy, *cluster, *way)


def shape_of(candidate: Candidate) -> str:
    """``4 reserved + 8 spot H100, spotlight``; machines and clouds are named, if they are chosen."""
    fixed, coming = candidate.reserved, candidate.spot
    gpus, others = candidate.reserved_nodes * fixed.gpus, candidate.spot_nodes * coming.gpus
    kind = "on-demand" if strategy_named(candidate.strategy).places.stays else "spot"
    alike = not others or fixed.gpu_type == coming.gpu_type
    both = bool(others) and alike and not fixed.name
    held = "learner" if strategy_named(candidate.strategy).learner_moves else "reserved"
    first = (
        f"{gpus} {held}" + ("" if both else f" {fixed.gpu_type}") + _named(fixed, candidate.reserved_nodes)
    )
    more = f" + {others} {kind} {coming.gpu_type}{_named(coming, candidate.spot_nodes)}" if others else ""
    share = "" if candidate.next_share is None else f", next_share {candidate.next_share:g}"
    arm = "" if candidate.previews is None else ", {} previews of {} steps".format(*candidate.previews)
    return f"{first}{more}, {candidate.strategy}{share}{arm}"


def _named(machine: Machine, nodes: int) -> str:
    if not machine.name:
        return ""
    return f" ({nodes} x {machine.name}, {' '.join(filter(None, machine.place))})"


def _gpus(pool: Pool) -> int:
    """Of the pool, or of its first node if it has none."""
    return max(1, pool.nodes) * pool.gpus_per_node


def _around(wanted: int, gpus: int) -> list[int]:
    """Machines of ``gpus`` each with about so many GPUs: 1, 2, 3, 4, 6, 8, 12 ... up to four times."""
    doublings = [2**power for power in range(wanted.bit_length() + 2)]
    steps = {wanted, *doublings, *(3 * number // 2 for number in doublings)}
    return sorted({-(-number // gpus) for number in steps if number <= 4 * wanted})


def _differences(before: object, after: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in after:
            yield from _differences(before.get(name), after[name], f"{key}.{name}" if key else name)
    elif before != after:
        yield key, after


def _yaml(value: object) -> str:
    """A word as it stands if YAML reads it so; Norway's ``NO`` is no."""
    word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]*", value)
    return str(value) if word and parse_yaml(str(value)) == value else json.dumps(value)
