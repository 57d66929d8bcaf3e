"""What holds for the ranks of a learner that moves, after every event."""

from __future__ import annotations

from spotlight.scheduler.policies.spot_learner.spot_learner import SpotLearner
from spotlight.scheduler.stages import Stage
from spotlight_plan.simulation.virtual_driver import Simulation


def check_ranks(simulation: Simulation) -> None:
    """Raise AssertionError if a learner has a wrong number of ranks, or GPUs are kept for it in vain."""
    controller, plan = simulation.controller, simulation.scenario.plan
    life = controller.learner
    found = [each for each in controller.fleet.policies if isinstance(each, SpotLearner)]
    if not found:
        return
    moving = found[0].places
    for places in (moving.target, moving.running):
        ranks = sum(places.values())
        assert not ranks or (plan.ranks % ranks == 0 and ranks >= plan.ranks_min), f"{ranks} learner ranks"
    if not (life.up and moving.running) or life.ending or controller.stage in (Stage.IDLE, Stage.OVER):
        return
    running, kept = sum(moving.running.values()), sum(moving.target.values())
    assert life.ranks == running, f"the controller believes that {running} learner ranks are {life.ranks}"
    nodes = [host.node for host in controller.cluster.hosts.values()]
    known = {node.id.partition("/")[0]: node.gpus for node in nodes if node.trains}
    moves = moving.target != moving.running and moving.leaving.isdisjoint(moving.target)
    if kept and moves and known == {**moving.running, **moving.target}:
        assert life.preparing, f"{kept} GPUs are kept for a second learner that nobody forms"
