"""Starts and ends learner ranks as Ray actors: one process per rank, on nodes that the head chooses.

A rank is an actor of its own (:class:`LearnerRank`), or what a worker's actor has become. Those Ray calls may
block, so they have a thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight.cluster.blobs.blob_client import BlockingBlobClient
from spotlight.cluster.learner.learner_rank import LOOPBACK, LearnerRank, RankOrder, RankPlace
from spotlight.cluster.learner.life import RankActor
from spotlight.cluster.learner.spare_workers import SpareProcess, Spares, SpareWorkers
from spotlight.cluster.nodes.agent import last_lines
from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE
from spotlight.cluster.remote_calls import cause_of, on_node

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_TAIL_BYTES, _TAIL_LINES = 16 * 1024, 20
_CALL_S, _STORE_S = 10.0, 300.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank runs.

    Attributes:
        gpus: GPU share of the rank: 0, 1, or a fraction beside a worker.
        threads: for its CPU work; None: one, Ray's default for an actor without reserved CPUs.
        gpu: index of its GPU on the node; None: whichever Ray assigns.
    """

    node: str
    host: str
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None
    gpu: int | None = None


class RayLauncher:
    """Starts learner ranks as actors, and ends them.

    Args:
        config: the resolved configuration as YAML.
        placements: of all ranks, whose number may differ from start to start; asked before each. May raise
            LookupError, saying why there is no room.
        room: waits until there is room for all ranks; None: there always is, or a start fails.
        spares: workers that become ranks where there are any; None: every rank is a new process.
        yield_s: within which a worker has ended its step.
        token: what :func:`~spotlight.cluster.learner.rank_folder.write_token` wrote.
        logs: directory for the output of ranks that share the run directory.
        profiled_steps: micro-batches that rank 0 traces.
    """

    def __init__(
        self,
        config: str,
        placements: Callable[[], Sequence[Placement]],
        store: ActorHandle[Any],
        token: str,
        logs: Path,
        *,
        room: Callable[[], Awaitable[None]] | None = None,
        spares: SpareWorkers | None = None,
        yield_s: float = 30.0,
        profiled_steps: int = 0,
    ) -> None:
        self._room, self._profiled_steps = room, profiled_steps
        self._spares, self._yield_s = spares, yield_s
        self._at: dict[int, Mapping[str, int]] = {}
        self._config, self._placements, self._token = config, placements, token
        self._blobs = BlockingBlobClient(store, _STORE_S)
        self._logs = logs.absolute()
        self._thread = ThreadPoolExecutor(1, "learner-launcher")

    async def start(self, life: int, beside: int | None = None) -> Sequence[RankActor]:
        """Start one process per rank, in order; they may still be initialising. LookupError: no room.

        Args:
            beside: a life that works, none of whose nodes may be used.
        """
        if self._room is not None:
            await self._room()
        spares: Spares = {}
        if self._spares is not None:
            spares = await self._spares.take({placement.node for placement in self._placements()})
        start = partial(self._start, life, spares, beside)
        return await asyncio.get_running_loop().run_in_executor(self._thread, start)

    def nodes_of(self, life: int) -> Mapping[str, int]:
        """Ray ids of the nodes on which a life was started, with the number of ranks; empty: nowhere yet."""
        return self._at.get(life, {})

    async def end(self, ranks: Sequence[RankActor], suspects: Sequence[int]) -> str:
        """Kill all processes; returns the last log lines of ``suspects``."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._end, ranks, suspects)

    async def stayed(self, lives: Sequence[int]) -> Collection[int]:
        """Those of ``lives`` whose nodes are all still there. RayLostError: no answer."""
        from spotlight.cluster.nodes.node_list import list_nodes

        rows = await asyncio.get_running_loop().run_in_executor(self._thread, list_nodes)
        there = {row["NodeID"] for row in rows if row["Alive"]}
        return [life for life in lives if self._at[life].keys() <= there]

    def meeting_hosts(self, ranks: Sequence[RankActor]) -> list[str]:
        """For each process, the address at which others reach its machine; loopback if all are on one."""
        hosts = [rank.host for rank in ranks]
        return [LOOPBACK] * len(hosts) if len(set(hosts)) == 1 else hosts

    def close(self) -> None:
        """Finish pending work, then end the thread."""
        self._thread.shutdown(wait=True)

    def _start(self, life: int, spares: Spares, beside: int | None) -> list[RankActor]:
        try:
            placements = self._placements()
            taken = set() if beside is None else self._at[beside].keys()
            if any(placement.node in taken for placement in placements):
                raise LookupError("there is no room any more beside the learner that works")
            return self._start_all(life, placements, spares)
        finally:
            for left in spares.values():
                _kill(left)

    def _start_all(self, life: int, placements: Sequence[Placement], spares: Spares) -> list[RankActor]:
        per_node = tuple(len([*ranks]) for _, ranks in groupby(placements, lambda placement: placement.node))
        self._at[life] = Counter(placement.node for placement in placements)
        orders = [
            self._order(life, RankPlace(rank, len(placements), placement.gpu, per_node), placement)
            for rank, placement in enumerate(placements)
        ]
        able = [kept.pop() if (kept := spares.get(each.node)) else None for each in placements]
        workers = self._yielded(orders, able)
        started: list[RankActor] = []
        try:
            for order, placement in zip(orders, placements, strict=True):
                rank = order.place.rank
                actor = workers.get(rank) or self._new_actor(order, placement)
                # A rank's own actor runs the method itself; a worker's hands it to the rank inside.
                call = actor.do.remote if rank in workers else actor.__ray_call__.remote
                started.append(RankActor(rank, placement.host, life, actor, call))
        except Exception:
            _kill(started)
            raise
        return started

    def _yielded(
        self, orders: Sequence[RankOrder], workers: Sequence[SpareProcess | None]
    ) -> dict[int, ActorHandle[Any]]:
        """Have each worker become its order's rank; those that cannot are ended. By rank.

        Workers whose base weights differ are all ended: which of them are right is not known here.
        """
        import ray

        asked = {
            order.place.rank: (worker, worker.actor.become_learner.remote(order, self._blobs, self._yield_s))
            for order, worker in zip(orders, workers, strict=True)
            if worker is not None
        }
        give_up_s, digests = time.monotonic() + self._yield_s + _CALL_S, dict[int, str]()
        for rank, (worker, answer) in asked.items():
            try:
                digests[rank] = ray.get(answer, timeout=max(0.0, give_up_s - time.monotonic()))
            except ray.exceptions.RayError as error:
                _log.warning("a worker does not become learner rank %d: %s", rank, cause_of(error))
                _kill([worker])
        if len({*digests.values()}) > 1:
            _log.warning("workers that were to be the learner hold different base weights: %s", digests)
            _kill([asked[rank][0] for rank in digests])
            return {}
        return {rank: asked[rank][0].actor for rank in digests}

    def _order(self, life: int, place: RankPlace, placement: Placement) -> RankOrder:
        return RankOrder(
            config=self._config,
            place=place,
            token=self._token,
            directory=str(Path.cwd()),
            log=str(self._log(life, place.rank)),
            threads=placement.threads,
            profiled_steps=0 if place.rank else self._profiled_steps,
        )

    def _new_actor(self, order: RankOrder, placement: Placement) -> Any:
        import ray

        remote: Any = ray.remote  # its annotations lack concurrency groups
        return (
            remote(concurrency_groups={"watch": 1})(LearnerRank)
            .options(
                **on_node(placement.node),
                num_gpus=placement.gpus,
                resources=dict(placement.resources),
                runtime_env=None if placement.gpu is None else ALL_GPUS_VISIBLE,
            )
            .remote(order, self._blobs)
        )

    def _end(self, ranks: Sequence[RankActor], suspects: Sequence[int]) -> str:
        _kill(ranks)
        tails = [_tail(self._log(each.life, each.rank)) for each in ranks if each.rank in suspects]
        return "\n".join(tail for tail in tails if tail)

    def _log(self, life: int, rank: int) -> Path:
        return self._logs / f"learner-{life:03d}-rank-{rank}.log"


def _kill(ranks: Sequence[RankActor | SpareProcess]) -> None:
    import ray
    from ray.exceptions import RayError

    for rank in ranks:
        with suppress(RayError):  # the others hold GPUs, too
            ray.kill(rank.actor, no_restart=True)


def _tail(path: Path) -> str:
    try:
        lines = last_lines(path, _TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join([f"{path} ends with:", *(f"    {line}" for line in lines[-_TAIL_LINES:])])
