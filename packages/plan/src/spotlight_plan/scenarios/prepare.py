"""Read a scenario's profile, prices and trace, and reject what cannot work before anything is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from spotlight_plan.prices.quotes import Quote
from spotlight_plan.scenarios.fleet_events import require_usable
from spotlight_plan.scenarios.prepared_scenario import Prepared, trace_of_scenario
from spotlight_plan.scenarios.pricing import Pricing, pricing_of
from spotlight_plan.scenarios.profile import Profile, load_profile, require_size
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import PipelinePart, SpotPlaces, Strategy, strategy_named
from spotlight_plan.scenarios.strategy_scenario import comes_and_goes, terms_of
from spotlight_rewards.base.errors import ConfigError, Problem


def prepare(
    file: ScenarioFile,
    strategies: tuple[str, ...],
    now: datetime,
    quotes: Sequence[Quote] | None = None,
    profile: Profile | None = None,
) -> Prepared:
    """Read the scenario's files and check that every strategy can be simulated.

    Args:
        strategies: those to simulate.
        now: for the age of prices.
        quotes, profile: of the scenario's price source and workload, already read; None reads them.

    Raises:
        ConfigError, TraceError, PriceError: missing figures or prices, too little memory, an unusable trace.
    """
    chosen = [strategy_named(name) for name in strategies]
    profile = profile or load_profile(file.workload.profile)
    require_size(profile, file.workload.height, file.workload.width)
    if file.cluster.spot.nodes == 0 and (
        needy := [one for one in chosen if one.places is not SpotPlaces.NOTHING]
    ):
        names = ", ".join(strategy.name for strategy in needy)
        remedy = "Ask for spot nodes, or simulate reserved_only alone."
        raise ConfigError(file.name, [Problem("cluster.spot.nodes", "0", f"1 or more for {names}", remedy)])
    _require_fresh(file, chosen)
    pricing = _pricing(file, chosen, now, quotes)
    prepared = Prepared(file, profile, pricing, trace_of_scenario(file, file.cluster.spot.nodes))
    for strategy in chosen:
        if comes_and_goes(strategy):
            require_usable(prepared.trace_of(strategy), prepared.spot_offer)
        _require_costs(prepared, strategy)
    return prepared


def _pricing(
    file: ScenarioFile, chosen: Sequence[Strategy], now: datetime, quotes: Sequence[Quote] | None
) -> Pricing:
    return pricing_of(
        file,
        reserved=any(not one.is_all_spot for one in chosen),
        on_demand=any(one.places.stays or one.placement == "spot_then_on_demand" for one in chosen),
        spot=any(one.places is SpotPlaces.SPOT for one in chosen),
        now=now,
        quotes=quotes,
    )


def _require_fresh(file: ScenarioFile, chosen: Sequence[Strategy]) -> None:
    """Refuse what the learner would: see ``config/sections/pipeline.py``."""
    early = [one for one in chosen if PipelinePart.TCSS in one.parts]
    problems = [Problem(*file.stale_problem)] if early and file.stale_problem else []
    if file.pipeline.next_share == 1 and any(one.explore for one in early):
        remedy = "Groups that start early have random seeds, and these would be all: lower it."
        problems.append(Problem("pipeline.next_share", "1", "less than 1 with exploration", remedy))
    if problems:
        raise ConfigError(file.name, problems)


def _require_costs(prepared: Prepared, strategy: Strategy) -> None:
    """Query every figure that the simulation may need. Raises :class:`ConfigError`."""
    terms = terms_of(prepared, strategy)
    costs, plan = terms.costs, terms.plan
    for gpu in terms.rolls_out:
        for degree in plan.cluster.degrees:
            size = costs.lease_size(gpu, plan.cluster.pixels, degree)
            costs.denoise_step_s(gpu, plan.cluster.pixels, size, degree)
            costs.decode_s(gpu, plan.cluster.pixels, size)
    costs.train_s(costs.workload.learner_gpu, plan.cluster.pixels, 1, plan.ranks)
    costs.prepare_s(1, plan.ranks)
