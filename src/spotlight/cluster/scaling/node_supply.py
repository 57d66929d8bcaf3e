"""Has a provider hold as many nodes of a kind as the controller wants.

    NodesWanted ─► the provider is asked, again and again until it has done so ─► NodesProvided

It decides nothing, but when to ask again what has failed. The provider is asked nothing before the nodes that
the cluster had before the run have joined: they would be taken for missing ones. Head's event loop only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.remote_calls import Clock
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.providers.node_provider import NodeProvider, ProviderError

T = TypeVar("T")
LOOK_S = 1.0
JOIN_S = 60.0
"""Nodes that were there before the run are waited for so long: as long as an agent may take to start."""


@dataclass(slots=True)
class NodeSupply:
    """See the module's docstring.

    Attributes:
        present: nodes of this kind that have joined.
        awaited: whether a node that the cluster had before the run has neither joined nor gone.
        record: tells the user what has failed.
        retry_s: until the provider is asked again, also to repair what it may have lost.
        ending: nodes that may end, as they were last wanted.
    """

    kind: NodeKind
    provider: NodeProvider
    present: Callable[[], Sequence[RayNode]]
    put_event: Callable[[ev.Event], None]
    record: Callable[[str], None]
    clock: Clock
    retry_s: float
    awaited: Callable[[], bool] = lambda: False
    ending: tuple[str, ...] = ()
    _wanted: int | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failures: set[str] = field(default_factory=set)
    _call: threading.Lock = field(default_factory=threading.Lock)

    def want(self, nodes: int, ending: Sequence[str]) -> None:
        """So many are wanted; if they are too many, those of ``ending`` may end, by name."""
        self._wanted, self.ending = nodes, tuple(ending)
        self._changed.set()

    async def run(self) -> None:
        """Ask the provider until cancelled; then it gives back what it has."""
        try:
            await self._await_joined()
            while (provided := await self._attempt(self.provider.asked, self.present())) is None:
                await asyncio.sleep(self.retry_s)
            self.put_event(ev.NodesProvided(self.kind, provided))
            while True:
                provided = await self._serve(provided)
        finally:
            await asyncio.shield(self._close())

    async def _await_joined(self) -> None:
        began_s = self.clock()
        while self.awaited() and self.clock() < began_s + JOIN_S:
            await asyncio.sleep(LOOK_S)

    async def _serve(self, provided: int) -> int:
        """Wait until there is something to ask, or to ask again; returns how many are provided then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.retry_s):
                await self._changed.wait()
                while self._wanted == provided:
                    self._changed.clear()
                    await self._changed.wait()
        self._changed.clear()
        if (wanted := self._wanted) is None:
            return provided
        present = self.present()
        ending = [node for node in present if node.name in self.ending]
        found = await self._attempt(self.provider.ask, wanted, present, ending)
        now = provided if found is None else found
        if found is None or found != provided:
            self.put_event(ev.NodesProvided(self.kind, now, wanted))
        if found is not None and found < wanted:  # it does a part at a time
            await asyncio.sleep(LOOK_S)
            self._changed.set()
        return now

    async def _attempt(self, call: Callable[..., T], *args: object) -> T | None:
        try:
            return await asyncio.to_thread(self._alone, call, *args)
        except (ProviderError, OSError) as error:
            if str(error) not in self._failures:
                self._failures.add(str(error))
                self.record(f"failed, tried again in {self.retry_s:g} s: {error}")
            return None

    def _alone(self, call: Callable[..., T], *args: object) -> T:
        """In a thread: a call that nobody waits for any more, since the run ends, is over before the next."""
        with self._call:
            return call(*args)

    async def _close(self) -> None:
        try:
            await asyncio.to_thread(self._alone, self.provider.close)
        except (ProviderError, OSError) as error:
            self.record(f"not all {self.kind} nodes are given back: {error}")
