"""Nodes on demand for a learner that no spot node has room for: taken, emptied and given back.

:class:`spotlight.scheduler.learner.on_demand_policy.OnDemandPolicy` decides. A node that is given back is
treated as one with a preemption notice; it is stopped once nothing works on it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spotlight.cluster.local.local_cluster import LocalCluster, LocalClusterError
from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.remote_calls import Clock
from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.learner.on_demand_policy import OnDemandPolicy, OnDemandStep
from spotlight.scheduler.types import NodeKind

LOOK_S = 1.0
RETRY_S = 60.0
_OUTPUT = 500
"""Characters of a failed command that are shown."""


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
        told = {"SPOTLIGHT_NODE": name} | ({} if slots is None else {"SPOTLIGHT_SLOTS": str(slots)})
        try:
            done = subprocess.run(
                command, shell=True, env=os.environ | told, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=self.timeout_s, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OnDemandError(f"fleet.on_demand.{key}: {error}") from error
        if done.returncode:
            raise OnDemandError(
                f"fleet.on_demand.{key} ended with status {done.returncode}: {done.stdout[-_OUTPUT:].strip()}"
            )


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

    A node whose stop fails is stopped again every ``RETRY_S``; a node that is lost is stopped, too, since its
    machine may live and cost.

    Attributes:
        slots: of each: all learner ranks.
        price_usd_h: of these.
        move_s: time that the learner has to move away from one.
        record: told every decision, its node, and why; or that a command failed (None).
    """

    policy: OnDemandPolicy
    machines: OnDemandMachines
    owner: Owner
    clock: Clock
    slots: int
    price_usd_h: float
    move_s: float
    record: Callable[[OnDemandStep | None, str, str], None]
    _coming: str | None = None
    _there: RayNode | None = None
    _ending: dict[str, float] = field(default_factory=dict)
    """Nodes to stop, and when."""
    _ended: set[str] = field(default_factory=set)
    _starting: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Look after them until cancelled; then those that are there, or coming, are stopped."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.shield(self._end_all())

    def joined(self, node: RayNode) -> None:
        """A node on demand is there; perhaps one that an earlier attempt took."""
        if self._there is None:
            self._coming, self._there = None, node
        else:
            self._ending[node.name] = self.clock()

    def lost(self, node: RayNode) -> None:
        """A node is gone, of any kind."""
        if self._there is not None and self._there.ray_id == node.ray_id:
            self._there = None
            if node.name not in self._ended:
                self._ending[node.name] = self.clock()

    def emptied(self, node: RayNode) -> None:
        """Nothing works any more on a node whose end was announced."""
        if self._there is not None and self._there.ray_id == node.ray_id:
            self._ending[node.name] = self.clock()

    async def _look(self) -> None:
        there, places = self._there, self.owner.places
        for name, at_s in list(self._ending.items()):
            if at_s <= self.clock():
                await self._stop(name)
        decision = self.policy.decide(
            self.clock(),
            waits=self.owner.learner_waits,
            spot_room=places.spot_room,
            is_there=there is not None,
            holds=there is not None and places.held(there.ray_id) > 0,
        )
        match decision:
            case OnDemandStep.TAKE:
                self._coming = name = f"on-demand-{secrets.token_hex(3)}"
                self._tell(decision, name, "no spot node has room for the learner")
                self._starting = asyncio.create_task(self._attempt(self.machines.start, name, self.slots))
            case OnDemandStep.CANCEL if self._coming is not None:
                self._tell(decision, self._coming, "it has not joined in time")
                self._ending[self._coming] = self.clock()
                self._coming = None
            case OnDemandStep.LEAVE if there is not None:
                self._tell(decision, there.name, "spot nodes have room for the learner")
                self.owner.announce_end(there, self.move_s)
            case OnDemandStep.STAY if there is not None:
                self._tell(decision, there.name, "spot nodes have no room any more")
                self.owner.cancel_end(there)
            case OnDemandStep.EMPTY if there is not None:
                self._tell(decision, there.name, "the learner is on spot nodes")
                self.owner.announce_end(there, 0.0)

    def _tell(self, decision: OnDemandStep, name: str, why: str) -> None:
        self.record(decision, name, f"{why}; ${self.price_usd_h:g}/h")

    async def _end_all(self) -> None:
        if self._starting is not None:
            await self._starting  # stopped before it is there, it would come afterwards
        there = None if self._there is None else self._there.name
        up = [self._coming, there, *self._ending]
        for name in dict.fromkeys(name for name in up if name is not None and name not in self._ended):
            await self._stop(name)

    async def _stop(self, name: str) -> None:
        if await self._attempt(self.machines.stop, name):
            self._ending.pop(name, None)
            self._ended.add(name)
        else:
            self._ending[name] = self.clock() + RETRY_S

    async def _attempt(self, call: Callable[..., None], *args: object) -> bool:
        try:
            await asyncio.to_thread(call, *args)
        except OnDemandError as error:
            self.record(None, str(args[0]), str(error))
            return False
        return True
