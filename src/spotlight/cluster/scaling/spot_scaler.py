"""Adds and drops spot nodes so that the run holds its deadline and its budget.

    an iteration ends ─► policy ─► fewer: nodes are drained as on a notice ─► the provider ends them
                                └► more: the provider is asked for them

:class:`spotlight.scheduler.scaling.target_policy.TargetPolicy` decides. A provider that fails is asked again:
what is wanted, and which nodes are drained, is kept here. It is asked nothing before the nodes that the
cluster had before the run have joined: they would be taken for missing ones. Head's event loop only.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.remote_calls import Clock
from spotlight.cluster.scaling.node_provider import ProviderError, SpotProvider
from spotlight.scheduler.scaling.forecast_words import forecast_words
from spotlight.scheduler.scaling.measured_rows import decision_row, iteration_row
from spotlight.scheduler.scaling.pace_meter import PaceMeter
from spotlight.scheduler.scaling.target_policy import Rest, TargetDecision, TargetPolicy
from spotlight.scheduler.types import Phase

T = TypeVar("T")

LOOK_S = 1.0
_WORK = (Phase.ROLLOUT, Phase.EVALUATION)


@dataclass(frozen=True, slots=True)
class Workforce:
    """The cluster's nodes now.

    Attributes:
        workers: that can roll out.
        working: spot nodes that do, or hold the learner.
        present: spot nodes, in the order in which they joined.
        other_workers: rollout slots that are not on spot nodes, less spot slots that the learner holds.
        node_workers: slots of a spot node.
        other_usd_h: of all other nodes.
        node_usd_h: of a spot node.
    """

    workers: int
    working: int
    present: Sequence[RayNode]
    other_workers: float
    node_workers: float
    other_usd_h: float
    node_usd_h: float


class NodeOwner(Protocol):
    """Whose nodes they are."""

    def announce_end(self, node: RayNode, remaining_s: float) -> None:
        """Treat a node as one that will be taken in so many seconds."""
        ...

    def cancel_end(self, node: RayNode) -> None:
        """It stays after all."""
        ...

    def holds_learner(self, node: RayNode) -> bool:
        """Whether learner ranks are on it."""
        ...


class SpotProgress(Protocol):
    """The run as far as it has come."""

    def workforce(self) -> Workforce:
        """Its nodes now."""
        ...

    def spent_usd(self) -> float:
        """What it has cost, all attempts together."""
        ...

    def decided(self, text: str) -> None:
        """Something is decided or forecast, or failed."""
        ...

    def returned(self, node: RayNode) -> None:
        """A node is given back."""
        ...


@dataclass(frozen=True, slots=True)
class ScalerLimits:
    """Goals and times; the latter in seconds.

    Attributes:
        iterations: of the run.
        deadline_at: since the epoch; None: no deadline.
        budget_usd: of the run; None: no budget.
        report_s: between two messages.
        retry_s: until a provider is asked again, also to repair what it may have lost.
        move_s: that a learner has to move off a node.
        drain_s: another node that is not empty after this is ended nevertheless.
        join_s: nodes that were there before the run are waited for so long.
    """

    iterations: int
    deadline_at: float | None
    budget_usd: float | None
    report_s: float
    retry_s: float
    move_s: float
    drain_s: float
    join_s: float


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A node that is drained, and ended at ``end_s`` at the latest; ``moves``: the learner must leave it."""

    node: RayNode
    end_s: float
    moves: bool


@dataclass(slots=True)
class SpotScaler:
    """See the module's docstring.

    Attributes:
        wanted: nodes to ask for at first; None: as many as the provider provides already.
        done: iterations trained.
        expected: Ray ids of spot nodes that the cluster had before the run and that have not joined yet.
    """

    policy: TargetPolicy
    meter: PaceMeter
    provider: SpotProvider
    owner: NodeOwner
    progress: SpotProgress
    limits: ScalerLimits
    clock: Clock
    wanted: int | None
    done: int
    expected: set[str] = field(default_factory=set)
    _asked: int | None = None
    _decision: TargetDecision | None = None
    _leaving: dict[str, _Leaving] = field(default_factory=dict)
    """By Ray id."""
    _empty: set[str] = field(default_factory=set)
    _returned: set[str] = field(default_factory=set)
    _last_order: tuple[int, frozenset[str]] | None = None
    """What the provider was asked last: how many, and which nodes to end."""
    _next_s: float = -math.inf
    _began_s: float = 0.0
    _said_s: float = 0.0
    _failures: set[str] = field(default_factory=set)
    _call: threading.Lock = field(default_factory=threading.Lock)

    async def run(self) -> None:
        """Look after the nodes until cancelled; then the provider gives back what it has."""
        self._began_s = self._said_s = self.clock()
        self.meter.begin(self.clock(), self._level)
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.shield(self._close())

    @property
    def _level(self) -> int:
        return len(self.progress.workforce().present) if self.wanted is None else self.wanted

    # -- called by the head ----------------------------------------------------------------------------

    def iterated(self, iteration: int, seconds: Mapping[Phase, float]) -> dict[str, float]:
        """An iteration, counted from 0, is trained; decide. Returns figures for the metrics.

        Args:
            seconds: of all workers, by phase, since the last one.
        """
        self._observe()
        self.done = iteration + 1
        measured = self.meter.end_iteration(self.clock(), sum(seconds.get(phase, 0.0) for phase in _WORK))
        self._decide()
        return iteration_row(measured, self._level) | decision_row(self._decision)

    def interrupted(self, iteration: int) -> None:
        """The run goes back to the beginning of an iteration."""
        self.meter.interrupt(self.done - iteration)
        self.done = iteration

    def lost(self, node: RayNode) -> None:
        """A node is gone."""
        self.expected.discard(node.ray_id)
        self._leaving.pop(node.ray_id, None)
        self._empty.discard(node.ray_id)

    def emptied(self, node: RayNode) -> None:
        """Nothing works any more on a node whose end was announced."""
        if node.ray_id in self._leaving:
            self._empty.add(node.ray_id)

    # -- deciding --------------------------------------------------------------------------------------

    def _observe(self) -> None:
        force = self.progress.workforce()
        self.meter.observe(self.clock(), force.workers, force.working)

    def _rest(self) -> Rest:
        force, limits = self.progress.workforce(), self.limits
        return Rest(
            iterations=limits.iterations - self.done,
            left_s=None if limits.deadline_at is None else limits.deadline_at - time.time(),
            left_usd=None if limits.budget_usd is None else limits.budget_usd - self.progress.spent_usd(),
            asked=self._level,
            other_workers=force.other_workers,
            node_workers=force.node_workers,
            other_usd_h=force.other_usd_h,
            node_usd_h=force.node_usd_h,
        )

    def _decide(self) -> None:
        rest, before = self._rest(), self._decision
        decision = self._decision = self.policy.decide(rest, self.meter)
        if decision is None:
            return
        if decision.nodes != rest.asked:
            self.wanted = decision.nodes
            self.meter.ask(self.clock(), decision.nodes)
        if decision.nodes != rest.asked or before is None or before.reachable != decision.reachable:
            self._say(decision, rest)

    def _say(self, decision: TargetDecision, rest: Rest) -> None:
        self._said_s = self.clock()
        self.progress.decided(forecast_words(decision, rest))

    def _report(self) -> None:
        if self.clock() - self._said_s < self.limits.report_s:
            return
        rest = self._rest()
        if (decision := self.policy.outlook(rest, self.meter)) is not None:
            self._say(decision, rest)

    # -- nodes -----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        self._observe()
        self._report()
        present = list(self.progress.workforce().present)
        self.expected -= {node.ray_id for node in present}
        if self.expected and self.clock() < self._began_s + self.limits.join_s:
            return
        if self._asked is None:
            if self.clock() >= self._next_s:
                self._asked = await self._attempt(self.provider.asked, present)
            if self._asked is None:
                return
            if self.wanted is None:
                self.wanted = min(max(self._asked, self.policy.nodes_min), self.policy.nodes_max)
                self.meter.begin(self.clock(), self.wanted)
        assert self.wanted is not None
        self._drain(present, self.wanted)
        ready = [node for node in present if self._is_ready(node)]
        order = max(self.wanted, len(present) - len(ready)), frozenset(node.ray_id for node in ready)
        if (order != self._last_order and order[0] != self._asked) or self.clock() >= self._next_s:
            self._last_order, self._next_s = order, self.clock() + self.limits.retry_s
            for node in ready:
                if node.ray_id not in self._returned:
                    self._returned.add(node.ray_id)
                    self.progress.returned(node)
            asked = await self._attempt(self.provider.ask, order[0], present, ready)
            if asked is not None:
                self._asked = asked
                if asked < order[0]:
                    self._next_s = self.clock()

    def _is_ready(self, node: RayNode) -> bool:
        if node.ray_id not in self._leaving:
            return False
        return node.ray_id in self._empty or self.clock() > self._leaving[node.ray_id].end_s

    def _drain(self, present: Sequence[RayNode], wanted: int) -> None:
        """Announce the end of as many nodes as are too many, and of no more."""
        surplus = max(0, len(present) - wanted)
        # Not the learner's, if possible; then the newest: their workers have the least to lose.
        stay = [node for node in present if node.ray_id not in self._leaving]
        stay.sort(key=self.owner.holds_learner, reverse=True)
        for node in stay[max(0, len(stay) - (surplus - len(self._leaving))) :]:
            self._announce_end(node)
        for ray_id, leaving in list(self._leaving.items())[surplus:]:
            del self._leaving[ray_id]
            self._empty.discard(ray_id)
            self._returned.discard(ray_id)
            self.owner.cancel_end(leaving.node)
        for leaving in list(self._leaving.values()):
            if leaving.moves and not self.owner.holds_learner(leaving.node):
                self._announce_end(leaving.node)  # what else is on it needs no such time

    def _announce_end(self, node: RayNode) -> None:
        moves = self.owner.holds_learner(node)
        limit_s = self.limits.move_s if moves else self.limits.drain_s
        self._leaving[node.ray_id] = _Leaving(node, self.clock() + limit_s, moves)
        self.owner.announce_end(node, self.limits.move_s if moves else 0.0)

    async def _attempt(self, call: Callable[..., T], *args: object) -> T | None:
        try:
            return await asyncio.to_thread(self._alone, call, *args)
        except (ProviderError, OSError) as error:
            self._next_s = self.clock() + self.limits.retry_s
            if str(error) not in self._failures:
                self._failures.add(str(error))
                self.progress.decided(f"failed, tried again in {self.limits.retry_s:g} s: {error}")
            return None

    def _alone(self, call: Callable[..., T], *args: object) -> T:
        """In a thread: a call that nobody waits for any more, since the run ends, is over before the next."""
        with self._call:
            return call(*args)

    async def _close(self) -> None:
        try:
            await asyncio.to_thread(self._alone, self.provider.close)
        except (ProviderError, OSError) as error:
            self.progress.decided(f"not all spot nodes are given back: {error}")
