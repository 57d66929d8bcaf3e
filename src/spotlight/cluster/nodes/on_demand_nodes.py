"""Nodes on demand for a learner that no spot node has room for: taken, emptied and given back.

:class:`spotlight.scheduler.learner.on_demand_policy.OnDemandPolicy` decides. A node that is given back is
treated as one with a preemption notice; it is stopped once nothing works on it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from spotlight.cluster.local.local_cluster import LocalCluster, LocalClusterError
from spotlight.cluster.nodes.listing import SUFFIX, RayNode
from spotlight.cluster.remote_calls import Clock
from spotlight.cluster.scaling.node_notes import NodeNotes
from spotlight.cluster.scaling.shell_command import ShellCommandError, run_shell_command
from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.learner.on_demand_policy import OnDemandPolicy, OnDemandStep
from spotlight.scheduler.types import NodeKind

LOOK_S = 1.0
RETRY_S = 60.0
STOPS_AT_END = 3


class OnDemandError(Exception):
    """A node was not started or not stopped."""


class OnDemandMachines(Protocol):
    """Where nodes on demand come from. Each method may take minutes, and may raise OnDemandError."""

    def start(self, name: str, slots: int) -> None:
        """Order a node that will join the cluster under this name."""
        ...

    def stop(self, name: str) -> None:
        """End a node, and what it costs."""
        ...


@dataclass(frozen=True, slots=True)
class EmulatedMachines:
    """Nodes of a Ray on this machine."""

    cluster: LocalCluster

    def start(self, name: str, slots: int) -> None:
        """See :class:`OnDemandMachines`."""
        try:
            self.cluster.add_node(name, NodeKind.ON_DEMAND, slots)
        except LocalClusterError as error:
            raise OnDemandError(str(error)) from error

    def stop(self, name: str) -> None:
        """See :class:`OnDemandMachines`."""
        try:
            self.cluster.kill(name)
        except LocalClusterError as error:
            raise OnDemandError(str(error)) from error


@dataclass(frozen=True, slots=True)
class CommandMachines:
    """Nodes of a cloud, by the user's commands (``fleet.on_demand``)."""

    start_command: str
    stop_command: str
    timeout_s: float

    def start(self, name: str, slots: int) -> None:
        """See :class:`OnDemandMachines`."""
        self._call("start", self.start_command, name, slots)

    def stop(self, name: str) -> None:
        """See :class:`OnDemandMachines`."""
        self._call("stop", self.stop_command, name, None)

    def _call(self, key: str, command: str, name: str, slots: int | None) -> None:
        variables = {"SPOTLIGHT_NODE": name} | ({} if slots is None else {"SPOTLIGHT_SLOTS": str(slots)})
        try:
            run_shell_command(f"fleet.on_demand.{key}", command, variables, self.timeout_s)
        except ShellCommandError as error:
            raise OnDemandError(str(error)) from error


class Owner(Protocol):
    """What the nodes on demand are for."""

    @property
    def learner_waits(self) -> bool:
        """Whether there is no room for the learner now."""
        ...

    @property
    def places(self) -> LearnerPlaces:
        """Where the learner may be."""
        ...

    def announce_end(self, node: RayNode, remaining_s: float) -> None:
        """Treat a node as one that will be taken in so many seconds."""
        ...

    def cancel_end(self, node: RayNode) -> None:
        """It stays after all."""
        ...


@dataclass(slots=True)
class OnDemandNodes:
    """Looks after them. Head's event loop only.

    One is in use. Others that join (of an attempt that was killed, or too late) are stopped, and the learner
    does not start there. So is a node that is lost, since its machine may live and cost, and one of an
    attempt that was killed that does not join in time. Stops that fail are repeated.

    Attributes:
        notes: for the nodes that are taken and not stopped; None: they end with the head.
        slots: of each: all learner ranks.
        price_usd_h: of these.
        move_s: time that the learner has to move away from one.
        record: called with every decision, its node, and why; or that something failed (None).
    """

    policy: OnDemandPolicy
    machines: OnDemandMachines
    owner: Owner
    clock: Clock
    slots: int
    price_usd_h: float
    move_s: float
    record: Callable[[OnDemandStep | None, str, str], None]
    notes: NodeNotes | None = None
    _coming: str | None = None
    _there: RayNode | None = None
    _failed: bool = False
    _calls: dict[str, threading.Lock] = field(default_factory=dict)
    """By node: its commands run one after the other, also where nobody waits for them any more."""
    _starting: set[asyncio.Task[None]] = field(default_factory=set)
    _to_stop: dict[str, float] = field(default_factory=dict)
    """Nodes, and when to stop them."""
    _older: set[str] = field(default_factory=set)
    """Nodes that an attempt before took, and that have not joined this one."""
    _not_started: set[str] = field(default_factory=set)
    _stopped: set[str] = field(default_factory=set)
    _failures: set[tuple[str, str]] = field(default_factory=set)
    """Told already."""
    _stopping: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Look after them until cancelled; then those that are there, or coming, are stopped."""
        self._older = self._noted() - {"" if self._there is None else self._there.name}
        self._to_stop |= dict.fromkeys(self._older, self.clock() + self.policy.start_s)
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.shield(self._stop_all())

    def joined(self, node: RayNode) -> None:
        """A node on demand is there: the one that is coming, or one of another attempt."""
        node = replace(node, name=node.name.partition(SUFFIX)[0])  # it was started under this name
        few = node.slots < self.slots
        if few:
            found = f"it brings {node.slots} slots; expected {self.slots} (fleet.learner_ranks)"
            self.record(None, node.name, f"{found}: change fleet.on_demand.start")
        self._failed |= few and node.name == self._coming
        if node.name in self._older:
            self._older.discard(node.name)
            del self._to_stop[node.name]
        late = node.name in self._to_stop or node.name in self._stopped
        if few or self._there is not None or late:
            self._stopped.discard(node.name)  # it came nevertheless
            self._stop_later(node.name)
            self.owner.announce_end(node, 0.0)
            return
        if self._coming not in (None, node.name):
            self._stop_later(self._coming)
        self._coming, self._there = None, node

    def lost(self, node: RayNode) -> None:
        """A node is gone, of any kind."""
        if (there := self._there) is not None and there.ray_id == node.ray_id:
            self._there = None
            self._stop_later(there.name)

    def emptied(self, node: RayNode) -> None:
        """Nothing works any more on a node whose end was announced."""
        if self._there is not None and self._there.ray_id == node.ray_id:
            self._stop_later(self._there.name)

    async def _look(self) -> None:
        for name, at_s in list(self._to_stop.items()):
            if at_s <= self.clock():
                await asyncio.shield(self._stop(name))  # to its end, also when the run ends meanwhile
        there, places = self._there, self.owner.places
        decision = self.policy.decide(
            self.clock(),
            waits=self.owner.learner_waits,
            spot_room=places.spot_room,
            is_there=there is not None,
            holds=there is not None and places.held(there.ray_id) > 0,
            failed=self._failed or self._coming in self._not_started,
        )
        match decision:
            case OnDemandStep.TAKE:
                self._coming, self._failed = f"on-demand-{secrets.token_hex(3)}", False
                self._record(decision, self._coming, "no spot node has room for the learner")
                self._note(self._noted() | {self._coming})
                starting = asyncio.create_task(self._start(self._coming))
                self._starting.add(starting)
                starting.add_done_callback(self._starting.discard)
            case OnDemandStep.CANCEL if self._coming is not None:
                self._record(decision, self._coming, "it does not join")
                self._stop_later(self._coming)
                self._coming = None
            case OnDemandStep.LEAVE if there is not None:
                self._record(decision, there.name, "spot nodes have room for the learner")
                self.owner.announce_end(there, self.move_s)
            case OnDemandStep.STAY if there is not None:
                self._record(decision, there.name, "spot nodes have no room any more")
                self.owner.cancel_end(there)
            case OnDemandStep.EMPTY if there is not None:
                self._record(decision, there.name, "the learner is on spot nodes")
                self.owner.announce_end(there, 0.0)

    def _record(self, decision: OnDemandStep, name: str, why: str) -> None:
        self.record(decision, name, f"{why}; ${self.price_usd_h:g}/h")

    def _stop_later(self, name: str | None) -> None:
        if name is not None and name not in self._stopped:
            self._to_stop.setdefault(name, self.clock())

    async def _stop_all(self) -> None:
        self._stop_later(self._coming)
        self._stop_later(None if self._there is None else self._there.name)
        for turn in range(STOPS_AT_END):
            if turn and self._to_stop:
                await asyncio.sleep(RETRY_S / 10)
            for name in list(self._to_stop):
                await self._stop(name)
        for name in self._to_stop:
            self.record(None, name, "it may still cost money: stop it by hand (fleet.on_demand.stop)")

    async def _stop(self, name: str) -> None:
        async with self._stopping:
            if name in self._stopped:
                return  # meanwhile
            why = await self._attempt(self.machines.stop, name)
            if not why or name in self._not_started:  # of the latter a part may be there: it is stopped once
                self._to_stop.pop(name, None)
                self._older.discard(name)
                self._stopped.add(name)
                with suppress(OSError):  # a full disk: the next attempt stops it once more
                    self._note(self._noted() - {name})
            else:
                self._to_stop[name] = self.clock() + RETRY_S
                self._complain(name, why)

    async def _start(self, name: str) -> None:
        if why := await self._attempt(self.machines.start, name, self.slots):
            self._not_started.add(name)
            self._complain(name, why)

    def _complain(self, name: str, why: str) -> None:
        if (name, why) not in self._failures:
            self._failures.add((name, why))
            self.record(None, name, why)

    async def _attempt(self, call: Callable[..., None], name: str, *args: object) -> str:
        """Call it in a thread; returns why it failed."""
        lock = self._calls.setdefault(name, threading.Lock())

        def alone() -> None:
            with lock:  # stopped before it is there, it would come afterwards
                call(name, *args)

        try:
            await asyncio.to_thread(alone)
        except (OnDemandError, OSError) as error:
            return str(error)
        return ""

    def _noted(self) -> set[str]:
        return set() if self.notes is None else set(self.notes.read())

    def _note(self, names: set[str]) -> None:
        if self.notes is not None:
            self.notes.write(sorted(names))
