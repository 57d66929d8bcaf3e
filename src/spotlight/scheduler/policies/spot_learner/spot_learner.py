"""Where a learner that moves is formed, which machines train with it, and when it moves to more ranks."""

from __future__ import annotations

from spotlight.config.section import Section
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import PlaceLearner
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetPolicy
from spotlight.scheduler.fleet.supply import Supply
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces
from spotlight.scheduler.policies.spot_learner.on_demand import OnDemand, since
from spotlight.scheduler.types import NodeKind


class SpotLearner(FleetPolicy):
    """Spot nodes, and those on demand, train where :class:`LearnerPlaces` says."""

    name = "spot_learner"

    @classmethod
    def of(cls, plan: Plan, settings: Section | None) -> list[FleetPolicy]:
        """The policies of a learner that moves; with a node on demand if the plan says when."""
        learner = cls(plan)
        if (on_demand := plan.fleet.on_demand) is None:
            return [learner]
        supply = Supply(NodeKind.ON_DEMAND, plan.fleet.move_s, plan.fleet.drain_s)
        return [learner, OnDemand(on_demand, plan, learner.places, supply), supply]

    def __init__(self, plan: Plan) -> None:
        self.places = LearnerPlaces(plan.ranks, plan.ranks_min, plan.fleet.even_ranks)
        self._ranks_roll_out, self._grows_after_s = plan.fleet.ranks_roll_out, plan.fleet.grows_after_s
        self._room_since_s: float | None = None
        self._placed = PlaceLearner({})
        self._seen: tuple[object, ...] = ()

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        places = self.places
        match event:
            case ev.NodeJoined(node):
                if node.id in places.slots:
                    places.lose(node.id)
                if node.kind is not NodeKind.RESERVED:
                    places.join(node.id, node.gpus, on_demand=node.kind is NodeKind.ON_DEMAND)
            case ev.NodeLost(name):
                places.lose(name)
            case ev.LearnerStarted(ranks):
                places.started(ranks)
            case ev.LearnerLost():
                places.lost()
            case ev.LearnerPrepared(formed=False):
                places.stay()
            case ev.WeightsPulled(name):
                worker, machine = fleet.cluster.workers.get(name), fleet.machine_of(name)
                if worker is not None and worker.based and machine is not None:
                    places.hold(machine.node.id)

    def place(self, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        places = self.places
        if self._seen[:1] != (fleet.changes,):
            places.advised = {name for name in places.slots if fleet.machines[name].advised}
            for name in places.slots:
                ends = fleet.machines[name].ends_s is not None
                if ends and name not in places.leaving:
                    places.notice(name)
                elif not ends and name in places.leaving:
                    places.cancel(name)
        self._grow(fleet.now)
        if places.target != self._placed.ranks:
            self._placed = PlaceLearner(dict(places.target))
            fleet.effects.append(self._placed)
        if self._seen != (fleet.changes, places.target, places.running):
            for name in places.slots:
                fleet.assign(fleet.machines[name], places.held(name), ranks_roll_out=self._ranks_roll_out)
            self._seen = fleet.changes, places.target, places.running

    def _grow(self, now: float) -> None:
        """Move to more ranks once there has been room for them for long enough."""
        self._room_since_s = since(self._room_since_s, bool(self.places.larger), now)
        if self._room_since_s is not None and now >= self._room_since_s + self._grows_after_s:
            self._room_since_s = None
            self.places.grow()

    def next_s(self, fleet: Fleet) -> float | None:
        """See :class:`FleetPolicy`."""
        return None if self._room_since_s is None else self._room_since_s + self._grows_after_s
