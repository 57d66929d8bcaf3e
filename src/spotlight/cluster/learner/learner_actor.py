"""Learner ranks as Ray actors: one process per rank, on nodes that the head chooses.

A :class:`LearnerActor` forwards calls to its :class:`LearnerRank` and moves values between rank and blob
store, bypassing the head. A worker's actor may become one. :class:`RayLauncher` starts and ends the actors in
its own thread, because those Ray calls may block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
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

import torch

import spotlight
from spotlight.cluster.blobs.blob_server import NEGATIVE
from spotlight.cluster.blobs.blob_store import BlobAddress
from spotlight.cluster.learner.learner_rank import LOOPBACK, LearnerRank, RankPlace
from spotlight.cluster.learner.life import RankHandle
from spotlight.cluster.learner.spare_workers import SpareProcess, Spares, SpareWorkers
from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE
from spotlight.cluster.remote_calls import cause_of
from spotlight.models.family import ModelFamily
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Rollout, RolloutId
from spotlight.weights.bundle import WeightsManifest
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.prompts import Prompt, PromptId

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SAMPLE, CONDITION, WEIGHTS = "sample", "condition", "weights"
"""Kinds of blobs."""
_FETCHED_AT_ONCE = 32
_TAIL_BYTES, _TAIL_LINES = 16 * 1024, 20
_CALL_S = 10.0
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


@dataclass(frozen=True, slots=True)
class RankOrder:
    """All that a rank's process needs to start.

    Attributes:
        config: the resolved configuration as YAML.
        token: what the head wrote to the run directory.
        directory: the head's working directory, the base of relative paths.
        version: of the head's package.
        profiled_steps: see :class:`LearnerRank`.
    """

    config: str
    place: RankPlace
    token: str
    directory: str
    log: str
    version: str
    store_s: float
    threads: int | None
    profiled_steps: int = 0


class LearnerActor:
    """The process of one rank. ``held``: the model, if the process holds it already."""

    def __init__(self, order: RankOrder, store: ActorHandle[Any], held: ModelFamily | None = None) -> None:
        self._order, self._store, self._held = order, store, held
        self._rank: LearnerRank | None = None

    def alive(self) -> None:
        """Never return: the call fails when the process ends."""
        threading.Event().wait()

    def do(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of this class, or else of the rank; its errors propagate."""
        own: dict[str, Callable[..., Any]] = {
            "begin": self.begin,
            "prepare": self.prepare,
            "publish": self.publish,
            "send_conditions": self.send_conditions,
            "load_model": self.load_model,
        }
        return own[method](*args) if method in own else getattr(self.rank, method)(*args)

    def begin(self) -> None:
        """Build the rank.

        Raises:
            ConfigError: another version of the package.
            StoreError: the run directory is not the head's.
        """
        order = self._order
        if order.version != spotlight.__version__:
            problem = Problem(
                f"spotlight on {socket.gethostname()}",
                spotlight.__version__,
                f"{order.version}, as on the head",
                "Install the same version on every node.",
            )
            raise ConfigError("this cluster", [problem])
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        with suppress(FileNotFoundError):  # relative paths then fail below, with a clear error
            os.chdir(order.directory)
        rank = LearnerRank(order.config, order.place, order.profiled_steps, self._held)
        rank.check_storage(order.token)
        _write_to(Path(order.log), "" if self._held is None else ", which was a worker")
        self._held = None
        self._rank = rank

    def load_model(self, prompts: Sequence[Prompt]) -> None:
        """See :meth:`LearnerRank.load_model`; missing files come from another node if one has them."""
        from spotlight.cluster.model_files.model_fetch import with_model_files

        self.rank.load_model(prompts, with_model_files)

    @property
    def rank(self) -> LearnerRank:
        """The rank. RuntimeError before :meth:`begin`."""
        if self._rank is None:
            raise RuntimeError("begin() comes first")
        return self._rank

    def prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        stored: Mapping[RolloutId, BlobAddress],
    ) -> None:
        """Fetch this rank's share of the samples for :meth:`LearnerRank.prepare`."""
        samples: dict[RolloutId, bytes] = {}
        share = self.rank.share_of(effect)
        for mark in sorted({stored[rollout].mark for rollout in share}):
            names = [rollout for rollout in share if stored[rollout].mark == mark]
            for start in range(0, len(names), _FETCHED_AT_ONCE):
                some = names[start : start + _FETCHED_AT_ONCE]
                found = self._stored_blob("fetch", SAMPLE, [stored[name].name for name in some], mark)
                for name, kept in zip(some, found, strict=True):
                    if kept is None:
                        raise LookupError(f"no sample of rollout {name} with mark {mark!r} is stored")
                    samples[name] = kept.data
        self.rank.prepare(effect, rollouts, samples)

    def publish(self, version: int | None, lineage: int) -> WeightsManifest | None:
        """Store the rollout weights under their digest."""
        packed = self.rank.publish(version, lineage)
        if packed is None:
            return None
        manifest, data = packed
        self._stored_blob("put", WEIGHTS, manifest.digest, data)
        return manifest

    def send_conditions(self, prompts: Sequence[PromptId]) -> None:
        """Store the embeddings of ``prompts`` and of the negative prompt."""
        self._stored_blob("put", CONDITION, NEGATIVE, self.rank.negative())
        for start in range(0, len(prompts), _FETCHED_AT_ONCE):
            some = prompts[start : start + _FETCHED_AT_ONCE]
            for prompt, packed in zip(some, self.rank.conditions(some), strict=True):
                self._stored_blob("put", CONDITION, prompt, packed)

    def _stored_blob(self, method: str, *args: object) -> Any:
        """Call the blob store; its errors propagate without Ray's wrapping."""
        import ray

        try:
            return ray.get(getattr(self._store, method).remote(*args), timeout=self._order.store_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


# -- the head's side -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankActor:
    """Head-side handle of a rank's actor."""

    rank: int
    host: str
    life: int
    actor: Any

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        """See :class:`spotlight.cluster.learner.life.RankHandle`."""
        answer: Awaitable[Any] = self.actor.do.remote(method, args)
        return answer

    def gone(self) -> Awaitable[Any]:
        """See :class:`spotlight.cluster.learner.life.RankHandle`."""
        end: Awaitable[Any] = self.actor.alive.options(concurrency_group="watch").remote()
        return end


class RayLauncher:
    """Starts learner ranks as actors; see :class:`spotlight.cluster.learner.learner_group.Launcher`.

    Args:
        config: the resolved configuration as YAML.
        placements: of all ranks, whose number may differ from start to start; asked before each. May raise
            LookupError, saying why there is no room.
        room: waits until there is room for all ranks; None: there always is, or a start fails.
        spares: workers that become ranks where there are any; None: every rank is a new process.
        yield_s: within which a worker has ended its step.
        token: what :func:`~spotlight.cluster.learner.learner_rank.write_token` wrote.
        logs: directory for the ranks' output, on shared storage.
        exchange_s: timeout of a collective.
        store_s: timeout of a blob store call.
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
        exchange_s: float = 600.0,
        store_s: float = 300.0,
        room: Callable[[], Awaitable[None]] | None = None,
        spares: SpareWorkers | None = None,
        yield_s: float = 30.0,
        profiled_steps: int = 0,
    ) -> None:
        self._room, self._profiled_steps = room, profiled_steps
        self._spares, self._yield_s = spares, yield_s
        self._at: dict[int, Mapping[str, int]] = {}
        self._config, self._placements, self._store, self._token = config, placements, store, token
        self._logs, self._exchange_s, self._store_s = logs.absolute(), exchange_s, store_s
        self._thread = ThreadPoolExecutor(1, "learner-launcher")

    async def start(self, life: int, beside: int | None = None) -> Sequence[RankHandle]:
        """See :class:`spotlight.cluster.learner.learner_group.Launcher`."""
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

    async def end(self, ranks: Sequence[RankHandle], suspects: Sequence[int]) -> str:
        """See :class:`spotlight.cluster.learner.learner_group.Launcher`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._end, ranks, suspects)

    async def stayed(self, lives: Sequence[int]) -> Collection[int]:
        """See :class:`spotlight.cluster.learner.learner_group.Launcher`. RayLostError: no answer."""
        from spotlight.cluster.nodes.node_membership import list_nodes

        rows = await asyncio.get_running_loop().run_in_executor(self._thread, list_nodes)
        there = {row["NodeID"] for row in rows if row["Alive"]}
        return [life for life in lives if self._at[life].keys() <= there]

    def meeting_hosts(self, ranks: Sequence[RankHandle]) -> list[str]:
        """See :class:`spotlight.cluster.learner.learner_group.Launcher`. Loopback if all are on one node."""
        hosts = [rank.host for rank in ranks if isinstance(rank, RankActor)]
        return [LOOPBACK] * len(hosts) if len(set(hosts)) == 1 else hosts

    def close(self) -> None:
        """Finish pending work, then end the thread."""
        self._thread.shutdown(wait=True)

    def _start(self, life: int, spares: Spares, beside: int | None) -> list[RankHandle]:
        try:
            placements = self._placements()
            taken = set() if beside is None else self._at[beside].keys()
            if any(placement.node in taken for placement in placements):
                raise LookupError("there is no room any more beside the learner that works")
            return self._start_all(life, placements, spares)
        finally:
            for left in spares.values():
                _kill(left)

    def _start_all(self, life: int, placements: Sequence[Placement], spares: Spares) -> list[RankHandle]:
        per_node = tuple(len([*ranks]) for _, ranks in groupby(placements, lambda placement: placement.node))
        self._at[life] = Counter(placement.node for placement in placements)
        places = [
            RankPlace(rank, len(placements), self._exchange_s, placement.gpu, per_node)
            for rank, placement in enumerate(placements)
        ]
        orders = [self._order(life, *each) for each in zip(places, placements, strict=True)]
        workers = [kept.pop() if (kept := spares.get(each.node)) else None for each in placements]
        actors = self._yielded(orders, workers)
        started: list[RankActor] = []
        try:
            for order, placement in zip(orders, placements, strict=True):
                actor = actors.get(order.place.rank) or self._new_actor(order, placement)
                started.append(RankActor(order.place.rank, placement.host, life, actor))
        except Exception:
            _kill(started)
            raise
        return list(started)

    def _yielded(
        self, orders: Sequence[RankOrder], workers: Sequence[SpareProcess | None]
    ) -> dict[int, ActorHandle[Any]]:
        """Have each worker become its order's rank; those that cannot are ended. By rank.

        Workers whose base weights differ are all ended: which of them are right is not known here.
        """
        import ray

        asked = {
            order.place.rank: (worker, worker.actor.become_learner.remote(order, self._store, self._yield_s))
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
            version=spotlight.__version__,
            store_s=self._store_s,
            threads=placement.threads,
            profiled_steps=0 if place.rank else self._profiled_steps,
        )

    def _new_actor(self, order: RankOrder, placement: Placement) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote: Any = ray.remote  # its annotations lack concurrency groups
        return (
            remote(concurrency_groups={"watch": 1})(LearnerActor)
            .options(
                num_cpus=0,
                num_gpus=placement.gpus,
                resources=dict(placement.resources),
                runtime_env=None if placement.gpu is None else ALL_GPUS_VISIBLE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(placement.node, soft=False),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(order, self._store)
        )

    def _end(self, ranks: Sequence[RankHandle], suspects: Sequence[int]) -> str:
        ours = [rank for rank in ranks if isinstance(rank, RankActor)]
        _kill(ours)
        tails = [_tail(self._log(each.life, each.rank)) for each in ours if each.rank in suspects]
        return "\n".join(tail for tail in tails if tail)

    def _log(self, life: int, rank: int) -> Path:
        return self._logs / f"learner-{life:03d}-rank-{rank}.log"


def _kill(ranks: Sequence[RankActor | SpareProcess]) -> None:
    import ray
    from ray.exceptions import RayError

    for rank in ranks:
        with suppress(RayError):  # the others hold GPUs, too
            ray.kill(rank.actor, no_restart=True)


def _write_to(path: Path, note: str) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.write(2, f"learner rank in process {os.getpid()} on {socket.gethostname()}{note}\n".encode())


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([f"{path} ends with:", *(f"    {line}" for line in lines[-_TAIL_LINES:])])
