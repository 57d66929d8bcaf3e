"""The actor of a rollout worker, and how the head makes one; ``worker/process.py`` says what it does."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE, SLOT
from spotlight.config.load import read_config
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.effects import StartWorker
from spotlight.scheduler.types import NodeId, WorkerId
from spotlight.worker.interfaces import Command, HeadLostError
from spotlight.worker.reports import Report

_GROUPS = {"tell": 1, "watch": 1}
"""Commands keep their order in a group of one thread; watching waits in another."""


class WorkerBlobClient:
    """The keeper as a worker's home.

    A report travels behind the worker's next step; it must have arrived before the next one leaves. So no
    more than one step's work is ever finished and not safe.

    Args:
        answer_s: longest that the keeper may take.
    """

    def __init__(self, keeper: Any, answer_s: float) -> None:
        self._keeper, self._answer_s = keeper, answer_s
        self._carrier = ThreadPoolExecutor(1, "reports")
        self._under_way: Future[Any] | None = None

    def deliver(self, report: Report) -> None:
        """See :class:`spotlight.worker.interfaces.HeadClient`; that a report failed is told by the call after
        it."""
        if self._under_way is not None:
            self._under_way.result()
        self._under_way = self._carrier.submit(self._call, "deliver", report)

    def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[StoredBlob | None]:
        """See :class:`spotlight.worker.interfaces.HeadClient`."""
        kept: list[StoredBlob | None] = self._call("fetch", kind, list(names), mark)
        return kept

    def _call(self, method: str, *args: object) -> Any:
        try:
            return ray.get(getattr(self._keeper, method).remote(*args), timeout=self._answer_s)
        except RayError as error:
            raise HeadLostError(f"the keeper does not {method}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """All that a worker's process must know to begin.

    Attributes:
        config: the resolved configuration as YAML.
        on_gpu: whether its slot is a GPU.
        gpu: which of the node's; None: the one that Ray gave.
        run: name that the processes of one run on a node share.
        threads: of its CPU work; None leaves it to torch.
    """

    config: str
    worker: WorkerId
    epoch: int
    on_gpu: bool
    gpu: int | None
    meeting: Address
    run: str
    working_directory: str
    threads: int | None


class WorkerActor:
    """One persistent process on one slot: imports and loads once, then only changes groups."""

    def __init__(self, order: WorkerOrder, keeper: Any) -> None:
        # Here, not above: diffusers is behind it, and the head imports this module only to start actors.
        from spotlight.cluster.workers.worker_process import WorkerPlace, WorkerProcess

        config = read_config(order.config, "the configuration sent to a worker")
        if os.path.isdir(order.working_directory):  # noqa: PTH112 - relative paths of the configuration
            os.chdir(order.working_directory)
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        device = _device(order)
        prepare_process(device, config.deterministic)
        place = WorkerPlace(order.worker, order.epoch, device, order.meeting, order.run)
        self._process = WorkerProcess(config, place, WorkerBlobClient(keeper, config.fleet.start_s))
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="work", daemon=True).start()

    def ready(self) -> None:
        """The process is up."""

    def tell(self, command: Command) -> None:
        """Have a command obeyed; returns at once."""
        self._process.tell(command)

    def watch(self, hang_s: float) -> None:
        """Return after ``hang_s``; raise as soon as the work has ended, and why."""
        if self._ended.wait(hang_s):
            why = "it was told to" if self._error is None else f"{type(self._error).__name__}: {self._error}"
            raise RuntimeError(f"the worker has ended: {why}") from self._error

    def _work(self) -> None:
        try:
            self._process.run()
        except BaseException as error:  # noqa: BLE001 - watch() tells it
            self._error = error
        finally:
            self._ended.set()


def _device(order: WorkerOrder) -> torch.device:
    """Every worker of a node sees all its GPUs: weights are copied between them."""
    if not order.on_gpu:
        return torch.device("cpu")
    return torch.device("cuda", int(ray.get_gpu_ids()[0]) if order.gpu is None else order.gpu)


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """A worker's actor, seen by the head: every call returns Ray's reference to the answer, at once."""

    actor: Any

    def ready(self) -> Any:
        """Answered when the process is up."""
        return self.actor.ready.remote()

    def tell(self, command: Command) -> Any:
        """Answered when the command is in the worker's inbox; commands keep their order."""
        return self.actor.tell.options(concurrency_group="tell").remote(command)

    def watch(self, hang_s: float) -> Any:
        """Answered after ``hang_s``; fails when the process or its work ends."""
        return self.actor.watch.options(concurrency_group="watch").remote(hang_s)


@dataclass(frozen=True, slots=True)
class Berth:
    """Where the workers of a node of the controller are on Ray's.

    Attributes:
        ray_id: of Ray's node.
        gpus: whether a slot is a GPU.
        threads: of each worker on a CPU slot.
        share: of a slot that a worker takes; less than 1 beside a learner rank.
        first_gpu: number of the first worker's GPU, which the others' follow; None: Ray gives each its own.
    """

    ray_id: str
    gpus: bool
    threads: int | None
    share: float = 1.0
    first_gpu: int | None = None

    def number_of(self, order: StartWorker) -> int | None:
        """Of a worker's GPU; None: Ray gives it one."""
        return None if self.first_gpu is None else self.first_gpu + order.gpu


@dataclass(frozen=True, slots=True)
class ActorStarter:
    """Starts workers as actors; a :class:`spotlight.cluster.workers.worker_pool.Starter`.

    Attributes:
        config: the resolved configuration as YAML.
        berths: of the nodes that are there.
        tail: asks for the end of what an actor of a name wrote on a node.
    """

    config: str
    keeper: Any
    meeting: Address
    run: str
    berths: dict[NodeId, Berth]
    tail: Callable[[NodeId, str], Awaitable[str]]

    def start(self, order: StartWorker) -> WorkerHandle:
        """See :class:`spotlight.cluster.workers.worker_pool.Starter`."""
        berth = self.berths[order.node]
        told = WorkerOrder(
            self.config,
            order.worker,
            order.epoch,
            berth.gpus,
            berth.number_of(order),
            self.meeting,
            self.run,
            str(Path.cwd()),
            berth.threads,
        )
        make = ray.remote(concurrency_groups=_GROUPS)(WorkerActor).options(
            name=self._name(order),
            num_cpus=0,
            num_gpus=berth.share if berth.gpus else 0,
            resources=None if berth.gpus else {SLOT: berth.share},
            max_restarts=0,
            max_task_retries=0,
            runtime_env=ALL_GPUS_VISIBLE if berth.gpus else None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(berth.ray_id, soft=False),
        )
        return WorkerHandle(make.remote(told, self.keeper))

    def kill(self, handle: WorkerHandle) -> None:
        """See :class:`spotlight.cluster.workers.worker_pool.Starter`."""
        with suppress(RayError):  # dead, or Ray itself is going down
            ray.kill(handle.actor)

    async def log_tail(self, order: StartWorker) -> str:
        """See :class:`spotlight.cluster.workers.worker_pool.Starter`."""
        return await self.tail(order.node, self._name(order))

    def _name(self, order: StartWorker) -> str:
        return f"{self.run}:{order.worker}:{order.epoch}"
