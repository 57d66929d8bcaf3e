"""The fleet of a run, with the policies that its plan names. The others are not imported."""

from __future__ import annotations

from spotlight.registry import FLEET_POLICIES
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.fleet.reserved_learner import ReservedLearner
from spotlight.scheduler.plan import Plan


def make_fleet(plan: Plan, cluster: Cluster) -> Fleet:
    """No machine is there yet."""
    moves, fleet = plan.cluster.learner_moves, plan.fleet
    built_in = {"spot-learner": moves, "target": fleet.target is not None}
    used = {name: None for name, on in built_in.items() if on} | dict(plan.added)
    policies = [
        each
        for name in FLEET_POLICIES
        if name in used
        for each in FLEET_POLICIES.load(name).of(plan, used[name])
    ]
    if fleet.reserved is not None and not moves:
        learner = ReservedLearner(plan.ranks, fleet.reserved, ranks_roll_out=fleet.ranks_roll_out)
        policies.insert(0, learner)
    return Fleet(cluster, policies)
