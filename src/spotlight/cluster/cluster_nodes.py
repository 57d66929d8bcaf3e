"""Maps Ray's nodes to the controller's: which train, which roll out, and where their processes go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotlight.cluster.learner.ray_launcher import Placement
from spotlight.cluster.learner.spare_workers import SpareWorkers
from spotlight.cluster.local.emulation import SIGTERM_GRACE_S
from spotlight.cluster.local.local_cluster import LocalCluster
from spotlight.cluster.nodes.facts import Gpu, NodeFacts, gather
from spotlight.cluster.nodes.listing import (
    SHARE,
    SLOT,
    Part,
    RayNode,
    gpus_text,
    mixed_gpus,
    train_only,
    typed,
    unlike,
)
from spotlight.cluster.nodes.node_membership import MembershipSettings, NodeMembership
from spotlight.cluster.nodes.node_prices import Fleet, LearnerSlots, Prices
from spotlight.cluster.nodes.notice_watch import NoticeSettings
from spotlight.cluster.nodes.on_demand_nodes import OnDemandNodes
from spotlight.cluster.remote_calls import Clock, Notify, RayLostError
from spotlight.cluster.scaling.spot_scaler import SpotScaler
from spotlight.cluster.workers.worker_actor import WorkerPlacement
from spotlight.config.schema import RunConfig
from spotlight.scheduler import events as ev
from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.types import NodeId, NodeKind
from spotlight_rewards.base.errors import Problem

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster that this process has joined.

    Attributes:
        here: Ray id of this process's node.
        host: its address as other nodes reach it.
        nodes: present when this process joined.
        threads: per worker on a CPU slot, where all slots share this machine.
        learner_slots: where the learner is, kept up to date while the run goes on.
    """

    here: str
    host: str
    nodes: Sequence[RayNode]
    emulated: LocalCluster | None
    threads: int | None
    learner_slots: LearnerSlots


class ClusterNodes:
    """Turns changes of Ray's nodes into events.

    The :class:`spotlight.cluster.nodes.node_membership.Listener` methods run in the membership's thread, all
    others in the head's event loop. Enter ``membership`` as a context manager.
    """

    def __init__(
        self,
        config: RunConfig,
        site: Site,
        put_event: Callable[[ev.Event], None],
        fail: Callable[[Exception], None],
        note: Notify,
        clock: Clock,
    ) -> None:
        fleet = config.fleet
        self._config, self._site, self._clock = config, site, clock
        self._put_event, self._fail, self._note = put_event, fail, note
        self._loop = asyncio.get_running_loop()
        ranks, prices = fleet.learner_ranks, Prices(fleet.price_usd_h, fleet.spot.price_usd_h)
        beside = config.pipeline.trainers_generate
        if fleet.learner_moves:
            even = config.learner.shard == "node"
            least = fleet.fewest_ranks
            self._fleet = Fleet.on_spot(ranks, prices, ranks_roll_out=beside, even=even, ranks_min=least)
        else:
            self._fleet = Fleet.plan(ranks, prices, site.nodes, ranks_roll_out=beside)
        # Ray would assign any GPU with room, but what shares a rank's GPU must know which it is.
        self._by_index = self._fleet.ranks_roll_out or any(
            reward.device == "learner" for reward in config.rewards
        )
        self._set_learner_slots()
        self._room = asyncio.Event()
        self._mixed: set[str] = set()
        self._rolling_out: set[NodeId] = set()
        self._stands = False
        self._taken_s: dict[str, float] = {}
        """By Ray id: when the cloud takes a node."""
        self._given_s: dict[str, float] = {}
        """By Ray id: when the run gives a node back."""
        self._growth: asyncio.TimerHandle | None = None
        self.on_demand: OnDemandNodes | None = None
        self.spares: SpareWorkers | None = None
        self.no_place: Callable[[str], None] = lambda _: None
        """Told the Ray id of a node that the learner has no place on any more."""
        self.scaler: SpotScaler | None = None
        self._first_gpu: Gpu | None = None
        self.placements: dict[NodeId, WorkerPlacement] = {}
        self.membership = NodeMembership(self, gather(), MembershipSettings(_notice_settings(config)))

    # -- called in the membership's thread -------------------------------------------------------------

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._join, node, facts)

    def lost(self, node: RayNode) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._lose, node)

    def noticed(self, node: RayNode, remaining_s: float, detail: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        deadline_s = self._clock() + remaining_s
        self._soon(self._ends, node, self._taken_s, deadline_s)

    def notice_cancelled(self, node: RayNode, detail: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._ends, node, self._taken_s, None)

    def refused(self, problem: Problem) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._note, f"a node is not used: {problem}")

    def ray_lost(self, why: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._fail, RayLostError(why))

    def _soon(self, then: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(then, *args)

    # -- the head's event loop -------------------------------------------------------------------------

    def _join(self, node: RayNode, facts: NodeFacts) -> None:
        node = typed(node, facts)
        if self._config.fleet.sequence_parallel.degrees[-1] > 1 and (problem := mixed_gpus(node, facts)):
            self._note(f"the slots of a node do not roll out: {problem}")
            self._mixed.add(node.ray_id)
        self._note_type(node, facts)
        for part in self._used(node, self._fleet.join(node)):
            self._put_event(ev.NodeJoined(part.node))
        if self.on_demand is not None and node.kind is NodeKind.ON_DEMAND:
            self.on_demand.joined(node)
        self._change_roles()

    def _used(self, node: RayNode, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The parts that can be used, each with a place for its workers."""
        if node.ray_id in self._mixed:
            parts = tuple(train_only(part) for part in parts if part.node.trains)
        for part in parts:
            self.placements[part.node.id] = self._placement(node, part)
            if part.node.rolls_out:
                self._rolling_out.add(part.node.id)
        return parts

    def _change_roles(self) -> None:
        """After any change of nodes, or of the learner: give nodes the roles that follow."""
        for change in self._fleet.changes():
            self._unused(change.before)
            if self.spares is not None:
                self.spares.expect(change.node.ray_id)
            parts = self._used(change.node, change.after)
            self._put_event(ev.NodeReassigned(change.before, tuple(part.node for part in parts)))
            if not any(part.node.trains for part in parts):
                self.no_place(change.node.ray_id)
        self._set_learner_slots()
        if self.spares is not None:
            self.spares.prune()
        self._await_growth()
        if sum(count for _, count in self._site.learner_slots.by_node.values()) >= self._fleet.fewest_ranks:
            self._room.set()
        else:
            self._room.clear()
        if not self._rolling_out and not self._stands:
            held = ": the learner holds all slots" if self._room.is_set() else ""
            self._note(f"waiting for nodes that roll out{held}")
        self._stands = not self._rolling_out

    def _await_growth(self) -> None:
        """Have the learner move to more ranks when there has been room for them for long enough."""
        larger = self._fleet.places is not None and self._fleet.places.larger
        if larger and self._growth is None:
            self._growth = self._loop.call_later(self._config.fleet.learner_grows_after_s, self._grow)
        elif not larger and self._growth is not None:
            self._growth.cancel()
            self._growth = None

    def _grow(self) -> None:
        self._growth = None
        self.places.grow()
        self._change_roles()

    def _unused(self, names: Sequence[NodeId]) -> None:
        for name in names:
            self._rolling_out.discard(name)
            self.placements.pop(name, None)

    def _placement(self, node: RayNode, part: Part) -> WorkerPlacement:
        shared = part.node.trains and part.node.rolls_out
        first_gpu = part.first_slot if node.gpus and self._by_index else None
        return WorkerPlacement(
            node.ray_id, node.gpus, self._site.threads, SHARE if shared else 1.0, first_gpu
        )

    def _note_type(self, node: RayNode, facts: NodeFacts) -> None:
        """Warn about a new GPU type: results differ by rounding, and it may have less memory."""
        if not (node.gpus and facts.gpus):
            return
        self._first_gpu = self._first_gpu or facts.gpus[0]
        if any(unlike(gpu, self._first_gpu) for gpu in facts.gpus):
            self._note(f"{node.name} brings {gpus_text(facts)}: it takes what its memory holds")

    def _lose(self, node: RayNode) -> None:
        names = self._fleet.lose(node.ray_id)
        self._unused(names)
        self._mixed.discard(node.ray_id)
        self._taken_s.pop(node.ray_id, None)
        self._given_s.pop(node.ray_id, None)
        if self.on_demand is not None:
            self.on_demand.lost(node)
        if self.scaler is not None:
            self.scaler.lost(node)
        for name in names:
            self._put_event(ev.NodeLost(name))
        self._change_roles()

    def _ends(self, node: RayNode, ends_s: dict[str, float], deadline_s: float | None) -> None:
        """One of two reasons for a node's end comes, changes or (None) goes: the earlier end holds."""
        if deadline_s is None:
            ends_s.pop(node.ray_id, None)
        else:
            ends_s[node.ray_id] = deadline_s
        due_s = [each[node.ray_id] for each in (self._taken_s, self._given_s) if node.ray_id in each]
        if due_s:
            self._put_for_all(node, lambda name: ev.NodeNoticed(name, min(due_s)))
        else:
            self._put_for_all(node, ev.NoticeCancelled)
        if (places := self._fleet.places) is not None:
            if due_s:
                places.notice(node.ray_id)
            else:
                places.cancel(node.ray_id)
            self._change_roles()

    def _set_learner_slots(self) -> None:
        self._site.learner_slots.by_node = self._fleet.learner_slots

    def _put_for_all(self, node: RayNode, event: Callable[[NodeId], ev.Event]) -> None:
        for name in self._fleet.known(node.ray_id):
            self._put_event(event(name))

    def acknowledge(self, node: NodeId) -> None:
        """Tell the cloud that a noticed node has no work left."""
        if (host := self._fleet.host_of(node)) is None:
            return
        if self.on_demand is not None and host.kind is NodeKind.ON_DEMAND:
            self.on_demand.emptied(host)
        if self.scaler is not None:
            self.scaler.emptied(host)
        self.membership.acknowledge(host)

    @property
    def spot_nodes(self) -> list[RayNode]:
        """Those that have joined, in this order."""
        return [node for node in self._fleet.nodes if node.kind is NodeKind.SPOT]

    def known(self, node: RayNode) -> tuple[NodeId, ...]:
        """The controller's nodes on a machine."""
        return self._fleet.known(node.ray_id)

    def machine_of(self, node: NodeId) -> str:
        """Ray id of the machine of a node; empty: it is gone."""
        host = self._fleet.host_of(node)
        return "" if host is None else host.ray_id

    def parts(self, node: NodeId) -> list[NodeId]:
        """The controller's nodes on the same machine, itself included."""
        host = self._fleet.host_of(node)
        known = () if host is None else self._fleet.known(host.ray_id)
        return [name for name in known if name in self.placements]

    async def log_tail(self, node: NodeId, actor: str) -> str:
        """Last log lines of an actor on a node; empty if the node is gone."""
        host = self._fleet.host_of(node)
        return "" if host is None else await asyncio.to_thread(self.membership.log_tail, host, None, actor)

    # -- a learner that moves --------------------------------------------------------------------------

    async def learner_room(self) -> None:
        """Wait until there is room for all learner ranks."""
        await self._room.wait()

    @property
    def learner_waits(self) -> bool:
        """Whether there is none now."""
        return not self._room.is_set()

    @property
    def places(self) -> LearnerPlaces:
        """Where a learner that moves may be."""
        assert self._fleet.places is not None
        return self._fleet.places

    def learner_ranks_at(self) -> Mapping[str, int]:
        """Ranks by Ray id of the nodes where the next learner can take over workers' processes."""
        if self._fleet.ranks_roll_out:  # a worker beside each rank needs the other half of the slot
            return {}
        return {ray_id: count for ray_id, (_, count) in self._site.learner_slots.by_node.items()}

    def worker_holds(self, node: NodeId) -> None:
        """A worker of this node has loaded the model."""
        if self._fleet.places is not None and (placement := self.placements.get(node)) is not None:
            self._fleet.places.hold(placement.ray_id)

    def announce_end(self, node: RayNode, remaining_s: float) -> None:
        """Treat a node as one that will be taken in so many seconds."""
        self._ends(node, self._given_s, self._clock() + remaining_s)

    def cancel_end(self, node: RayNode) -> None:
        """It stays after all, unless the cloud takes it."""
        self._ends(node, self._given_s, None)

    def holds_learner(self, node: RayNode) -> bool:
        """Whether learner ranks are on a node, or will be."""
        if self._fleet.places is not None:
            return self._fleet.places.held(node.ray_id) > 0
        return node.ray_id in self._fleet.learner_slots

    def learner_lost(self) -> None:
        """The learner's processes have ended; their nodes may live."""
        self.places.lost()
        self._change_roles()

    def learner_stays(self) -> None:
        """A second learner does not start; its nodes are not kept for it if the first goes on."""
        self.places.stay()
        self._change_roles()

    def learner_started(self, at: Mapping[str, int]) -> list[tuple[str, float]]:
        """The learner is up on these Ray nodes; returns their names, and USD per hour of its slots there."""
        self.places.started(at)
        self._change_roles()
        return [
            (node.name, count * self._fleet.prices.of(node.kind))
            for ray_id, count in at.items()
            if (node := self._fleet.ray_node(ray_id)) is not None
        ]

    def learner_placements(self) -> list[Placement]:
        """Where the learner's ranks go now. Any thread.

        Raises:
            LookupError: not all of them fit.
        """
        beside = self._fleet.ranks_roll_out
        share = SHARE if beside else 1.0
        places = self._site.learner_slots.by_node
        ranks = sum(count for _, count in places.values())
        if ranks < (least := self._fleet.fewest_ranks):
            raise LookupError(f"room for {ranks} of {least} learner ranks")
        own = self._config.fleet.local.threads
        return [
            Placement(
                ray_id,
                LOOPBACK if self._site.emulated else node.address,
                share if node.gpus else 0.0,
                {} if node.gpus else {SLOT: share},
                None if self._site.threads is None else own or max(1, (os.cpu_count() or 1) // ranks),
                slot if node.gpus and self._by_index else None,
            )
            for ray_id, (node, count) in places.items()
            for slot in range(count)
        ]


def _notice_settings(config: RunConfig) -> NoticeSettings:
    fleet = config.fleet
    if fleet.address is None:  # emulated nodes get SIGTERM; poll no metadata service
        return NoticeSettings(
            "none", None, SIGTERM_GRACE_S if fleet.spot.notice_s is None else fleet.spot.notice_s
        )
    return NoticeSettings(fleet.notices.cloud, fleet.notices.endpoint, fleet.notices.sigterm_grace_s)
