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
    used = {"spot-learner": moves, "target": fleet.target is not None}
    policies = [each for name, is_used in used.items() if is_used for each in FLEET_POLICIES.load(name)(plan)]
    if fleet.reserved is not None and not moves:
        learner = ReservedLearner(plan.ranks, fleet.reserved, ranks_roll_out=fleet.ranks_roll_out)
        policies.insert(0, learner)
    return Fleet(cluster, policies)
