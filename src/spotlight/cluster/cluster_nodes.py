"""Ray's nodes as the controller's machines, and where the processes of each go. It decides nothing."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotlight.cluster.learner.learner_rank import LOOPBACK
from spotlight.cluster.learner.ray_launcher import Placement
from spotlight.cluster.learner.spare_workers import SpareWorkers
from spotlight.cluster.local.emulation import SIGTERM_GRACE_S
from spotlight.cluster.nodes.listing import (
    SHARE,
    LearnerSlots,
    RayNode,
    gpus_text,
    mixed_gpus,
    typed,
    unlike,
)
from spotlight.cluster.nodes.node_membership import MembershipSettings, NodeMembership
from spotlight.cluster.remote_calls import Clock, Notify, RayLostError
from spotlight.cluster.workers.worker_actor import ActorStarter, WorkerPlacement
from spotlight.config.schema import RunConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_fleet.emulated.local_cluster import LocalCluster
from spotlight_fleet.facts import Gpu, NodeFacts, gather
from spotlight_fleet.notices.notice_watch import NoticeSettings
from spotlight_fleet.ray_names import SLOT


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster that this process has joined.

    Attributes:
        here: Ray id of this process's node.
        host: its address as other nodes reach it.
        nodes: present when this process joined.
        threads: per worker on a CPU slot, where all slots share this machine.
        learner_slots: where the learner is, kept up to date while the run goes on.
        give_up: see :meth:`spotlight_fleet.connection.Connection.give_up`.
    """

    here: str
    host: str
    nodes: Sequence[RayNode]
    emulated: LocalCluster | None
    threads: int | None
    learner_slots: LearnerSlots
    give_up: Callable[[Exception, Notify], None]


class ClusterNodes:
    """Turns changes of Ray's nodes into events, and knows the Ray node of each machine by its name.

    The :class:`spotlight.cluster.nodes.node_membership.Listener` methods run in the membership's thread, all
    others in the head's event loop. Enter ``membership`` as a context manager.

    Attributes:
        machines: Ray nodes that the controller knows, as they joined.
        parts: what each is to the controller.
        placements: where the workers of each part go.
        spares: of a learner that moves.
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
        self._config, self._site = config, site
        self._put_event, self._fail, self._note = put_event, fail, note
        self._loop = asyncio.get_running_loop()
        self._ranks_roll_out = config.pipeline.trainers_generate
        # Ray would assign any GPU with room, but what shares a rank's GPU must know which it is.
        self._by_index = self._ranks_roll_out or any(reward.device == "learner" for reward in config.rewards)
        self.machines: dict[NodeId, RayNode] = {}
        self.parts: dict[NodeId, tuple[Node, ...]] = {}
        self.placements: dict[NodeId, WorkerPlacement] = {}
        self._first: dict[NodeId, RayNode] = {NodeId(node.name): node for node in site.nodes}
        """Nodes that were there at the start: the learner may begin on them before they have joined."""
        self._arrived: deque[RayNode] = deque()
        """In the order of their :class:`NodeJoined`."""
        self._room = asyncio.Event()
        if not config.fleet.learner_moves:
            self._room.set()
        self._stands = False
        self._first_gpu: Gpu | None = None
        moves = config.fleet.learner_moves
        self.spares = SpareWorkers(ActorStarter.kill, self.learner_ranks_at) if moves else None
        gcs = "" if site.emulated is None else site.emulated.address
        settings = MembershipSettings(_notice_settings(config), mortal_gcs=gcs)
        self.membership = NodeMembership(self, gather(), settings, clock, known=site.nodes)

    # -- called in the membership's thread -------------------------------------------------------------

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._join, node, facts)

    def happened(self, event: ev.Event) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._put_event, event)

    def told(self, text: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._note, text)

    def ray_lost(self, why: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        error = RayLostError(why)
        self._soon(self._note, f"ending the run: {why}")
        self._soon(self._fail, error)
        self._site.give_up(error, self._note)

    def _soon(self, then: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(then, *args)

    # -- the head's event loop -------------------------------------------------------------------------

    def _join(self, node: RayNode, facts: NodeFacts) -> None:
        node, name, fleet = typed(node, facts), NodeId(node.name), self._config.fleet
        mixed = mixed_gpus(node, facts) if fleet.sequence_parallel.degrees[-1] > 1 else None
        if mixed is not None:
            self._note(f"the slots of a node do not roll out: {mixed}")
        if node.kind is NodeKind.ON_DEMAND and node.slots < fleet.learner_ranks:
            self._note(
                f"{node.name} brings {node.slots} slots; expected {fleet.learner_ranks} "
                "(fleet.learner_ranks): change fleet.on_demand.start"
            )
        self._note_type(node, facts)
        if node.slots:
            price_usd_h = node.slots * self._slot_usd_h(node.kind)
            self._arrived.append(node)
            self._put_event(
                ev.NodeJoined(
                    Node(name, node.kind, node.slots, node.gpu_type, price_usd_h, False, mixed is None)
                )
            )

    def enter(self, machine: Node) -> None:
        """A machine has joined, as the controller is about to know."""
        self.machines[machine.id] = self._arrived.popleft()
        self._place(machine.id, (machine,))

    def _slot_usd_h(self, kind: NodeKind) -> float:
        fleet = self._config.fleet
        return fleet.spot.price_usd_h if kind is NodeKind.SPOT else fleet.price_usd_h

    def _note_type(self, node: RayNode, facts: NodeFacts) -> None:
        """Warn about a new GPU type: results differ by rounding, and it may have less memory."""
        if not (node.gpus and facts.gpus):
            return
        self._first_gpu = self._first_gpu or facts.gpus[0]
        if any(unlike(gpu, self._first_gpu) for gpu in facts.gpus):
            self._note(f"{node.name} brings {gpus_text(facts)}: it takes what its memory holds")

    def _place(self, machine: NodeId, parts: tuple[Node, ...]) -> list[NodeId]:
        node, first_slot = self.machines[machine], 0
        before = [part.id for part in self.parts.pop(machine, ())]
        for name in before:
            del self.placements[name]
        for part in parts:
            self.placements[part.id] = WorkerPlacement(
                node.ray_id,
                node.gpus,
                self._site.threads,
                SHARE if part.trains and part.rolls_out else 1.0,
                first_slot if node.gpus and self._by_index else None,
            )
            first_slot += part.gpus
        if parts:
            self.parts[machine] = parts
        return before

    def assign(self, effect: ef.AssignRoles) -> list[NodeId]:
        """A machine is other nodes from now on; returns what it was. Does nothing for one that is gone."""
        return self._place(effect.machine, effect.parts) if effect.machine in self.machines else []

    def forget(self, machine: NodeId) -> list[NodeId]:
        """A machine is gone; returns what it was."""
        self._first.pop(machine, None)
        before = self._place(machine, ()) if machine in self.machines else []
        self.machines.pop(machine, None)
        return before

    def report_standstill(self) -> None:
        """Tell the user when nothing rolls out any more; call it after every change."""
        stands = not any(part.rolls_out for parts in self.parts.values() for part in parts)
        if stands and not self._stands:
            held = ": the learner holds all slots" if self._room.is_set() else ""
            self._note(f"waiting for nodes that roll out{held}")
        self._stands = stands

    def acknowledge(self, machine: NodeId) -> None:
        """Tell the cloud that a noticed machine has no work left."""
        if (node := self.machines.get(machine)) is not None:
            self.membership.acknowledge(node)

    def of_kind(self, kind: NodeKind) -> list[RayNode]:
        """Those that have joined, in this order."""
        return [node for node in self.machines.values() if node.kind is kind]

    def awaits(self, kind: NodeKind) -> bool:
        """Whether one that was there at the start has neither joined nor gone."""
        first = self._first.items()
        return any(node.kind is kind and node.slots and name not in self.machines for name, node in first)

    async def log_tail(self, node: NodeId, actor: str) -> str:
        """Last log lines of an actor on a node; empty if the node is gone."""
        placement = self.placements.get(node)
        hosts = (each for each in self.machines.values() if placement and each.ray_id == placement.ray_id)
        host = next(hosts, None)
        return "" if host is None else await asyncio.to_thread(self.membership.log_tail, host, actor)

    # -- the learner -----------------------------------------------------------------------------------

    def place_learner(self, ranks: Mapping[NodeId, int]) -> None:
        """The learner is formed there next, or is there."""
        known = self._first | self.machines
        by_node = {known[name].ray_id: (known[name], count) for name, count in ranks.items() if name in known}
        self._site.learner_slots.by_node = by_node
        if self.spares is not None:
            self.spares.prune()
        if sum(count for _, count in by_node.values()) >= self._config.fleet.fewest_ranks:
            self._room.set()
        else:
            self._room.clear()

    async def learner_room(self) -> None:
        """Wait until there is room for all learner ranks."""
        await self._room.wait()

    @property
    def learner_waits(self) -> bool:
        """Whether there is none now."""
        return not self._room.is_set()

    def learner_ranks_at(self) -> Mapping[str, int]:
        """Ranks by Ray id of the nodes where the next learner can take over workers' processes."""
        if self._ranks_roll_out:  # a worker beside each rank needs the other half of the slot
            return {}
        return {ray_id: count for ray_id, (_, count) in self._site.learner_slots.by_node.items()}

    def ranks_by_machine(self, at: Mapping[str, int]) -> dict[NodeId, int]:
        """Ranks by machine, of those by Ray id; machines that are gone are left out."""
        return {name: at[node.ray_id] for name, node in self.machines.items() if node.ray_id in at}

    def prices_of(self, ranks: Mapping[NodeId, int]) -> list[tuple[str, float]]:
        """Machines that train, and USD per hour of the learner's slots there."""
        return [
            (name, count * self._slot_usd_h(self.machines[name].kind))
            for name, count in ranks.items()
            if name in self.machines
        ]

    def learner_placements(self) -> list[Placement]:
        """Where the learner's ranks go now. Any thread.

        Raises:
            LookupError: not all of them fit.
        """
        beside = self._ranks_roll_out
        share = SHARE if beside else 1.0
        places = self._site.learner_slots.by_node
        ranks = sum(count for _, count in places.values())
        if ranks < (least := self._config.fleet.fewest_ranks):
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
