"""What a scenario pays beside GPUs: scorers, the head's machine, bytes between regions. Pure.

Prices of bytes, where a scenario does not say: list prices of North America in 2026, between regions of one
cloud, and from each cloud to the internet, which is how bytes reach another cloud. Arriving bytes are free.
"""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.scheduler.plan import latent_frames
from spotlight.scheduler.types import WeightKind
from spotlight_plan.scenarios.pricing import Pricing, crossing_of
from spotlight_plan.scenarios.profile import Profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import EgressSection
from spotlight_plan.scenarios.strategies import SpotPlaces, Strategy
from spotlight_plan.simulation.machines.egress import Egress

_BETWEEN_REGIONS_USD_GB: Mapping[str, float] = {"aws": 0.02, "azure": 0.02, "gcp": 0.02}
_INTERNET_USD_GB: Mapping[str, float] = {"aws": 0.09, "azure": 0.087, "gcp": 0.12}
_OTHER_USD_GB = 0.12
"""Of a cloud that is not listed: the dearest."""
_PICTURE_BYTES = 3
"""Per pixel and frame."""
_LATENT_BYTES = 1
"""Of a state, per pixel and latent frame: 16 channels in float32, an eighth of each side (Qwen-Image, FLUX.1,
HunyuanVideo, Wan 2.1).
"""
_BYTES_S = 0.625e9
"""One flow's 5 Gbit/s, to which AWS limits what leaves a placement group."""


def egress_between(learner: tuple[str, str] | None, spot: tuple[str, str] | None) -> EgressSection | None:
    """For a learner and spot nodes in these places; None: in one region, as far as is known.

    Args:
        learner, spot: cloud and region (empty: unknown); None: unknown.
    """
    crossing = crossing_of(learner, spot)
    if learner is None or spot is None or not crossing:
        return None
    if crossing == "cloud":
        prices = [_INTERNET_USD_GB.get(cloud, _OTHER_USD_GB) for cloud, _ in (learner, spot)]
        origin = f"list prices to the internet, {learner[0]} and {spot[0]}"
    else:
        prices = [_BETWEEN_REGIONS_USD_GB.get(learner[0], _OTHER_USD_GB)] * 2
        origin = f"list price between regions of {learner[0]}"
    return EgressSection(
        to_spot_usd_gb=prices[0],
        from_spot_usd_gb=prices[1],
        bytes_s=_BYTES_S,
        source=f"published: {origin}, 2026, North America; 5 Gbit/s of one flow",
    )


def standing_usd_h(file: ScenarioFile, profile: Profile, strategy: Strategy) -> dict[str, float]:
    """Dollars per hour beside machines with GPUs, by what they are for."""
    measured = profile.rewards.scorers
    scorers = file.rewards.scorers or (measured.value if measured else 1)
    paid = {"rewards": scorers * file.rewards.usd_h}
    if strategy.learner_moves:
        paid["head"] = file.learner.head_usd_h
    return {name: usd_h for name, usd_h in paid.items() if usd_h}


def egress_section(file: ScenarioFile, pricing: Pricing, strategy: Strategy) -> EgressSection | None:
    """Between spot nodes and the learner, if they are in different regions."""
    if strategy.is_all_spot or strategy.places is not SpotPlaces.SPOT:
        return None
    learner, spot = (tag.place if tag else None for tag in (pricing.reserved, pricing.spot))
    return file.egress or egress_between(learner, spot)


def egress_of(file: ScenarioFile, profile: Profile, pricing: Pricing, strategy: Strategy) -> Egress | None:
    """The same, with the sizes of what crosses."""
    section, weights = egress_section(file, pricing, strategy), profile.weights
    if section is None:
        return None
    work, picture = file.workload, _PICTURE_BYTES * file.pixels * profile.frames
    # Of each trained timestep the states before and after it, and those committed on the way.
    states = 2 * work.trained_timesteps + work.steps // file.run.commit_every
    latent = _LATENT_BYTES * file.pixels * latent_frames(profile.frames)
    return Egress(
        section.to_spot_usd_gb,
        section.from_spot_usd_gb,
        section.bytes_s,
        {WeightKind.FULL: weights.full_bytes.value, WeightKind.ADAPTER: weights.adapter_bytes.value},
        picture + states * latent,
        picture,
    )
