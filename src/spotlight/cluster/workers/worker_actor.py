"""The Ray actor of a rollout worker and its head-side handle; the work is in ``worker_process.py``.

Ray assigns it a GPU, of which :func:`gpu_index` is torch's index.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import RayError

from spotlight.cluster.blobs.blob_client import BlockingBlobClient
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.learner.learner_rank import LearnerRank, RankOrder
from spotlight.cluster.learner.spare_workers import SpareProcess
from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE
from spotlight.cluster.remote_calls import on_node
from spotlight.config.load import read_config
from spotlight.garbage import lasting
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.effects import StartWorker
from spotlight.scheduler.types import NodeId, WorkerId
from spotlight.worker.interfaces import Command, HeadLostError, Leave
from spotlight.worker.reports import Report
from spotlight_fleet.ray_names import SLOT

P = ParamSpec("P")
T = TypeVar("T")
_GROUPS = {"tell": 1, "watch": 1}
"""Concurrency groups: commands share one thread to keep their order; ``watch`` blocks another."""


class WorkerBlobClient:
    """A worker's client of the blob store, whose errors it turns into :class:`HeadLostError`.

    Reports are packed and delivered in the background of the next step, and must have arrived before the next
    ones are sent. So at most one finished step is unsaved.
    """

    def __init__(self, store: BlockingBlobClient) -> None:
        self._store = store
        self._carrier = ThreadPoolExecutor(1, "reports")
        self._under_way: Future[Any] | None = None

    def deliver(self, reports: Iterable[Report]) -> None:
        """See :class:`spotlight.worker.interfaces.HeadClient`. The next call raises if this one failed."""
        if self._under_way is not None:
            self._under_way.result()
        self._under_way = self._carrier.submit(self._carry, reports)

    def _carry(self, reports: Iterable[Report]) -> None:
        for report in reports:
            _answered(self._store.deliver, report)

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[StoredBlob | None]:
        """See :class:`spotlight.worker.interfaces.HeadClient`."""
        return _answered(self._store.fetch, kind, names, weights_digest)


def _answered(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        raise HeadLostError(f"the blob store does not {call.__name__}: {detail}") from error


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """All that a worker's process needs to start.

    Attributes:
        config: the resolved configuration as YAML.
        gpu: index among the node's visible GPUs; None: the GPU that Ray assigned.
        run: name shared by the processes of one run on a node.
        threads: for CPU work; None leaves it to torch.
        profiled_steps: denoising steps to be traced.
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
    profiled_steps: int = 0


class WorkerActor:
    """One persistent process on one slot: imports and loads once, then only changes groups.

    It may end as a worker and become a learner rank, with the base weights that it holds.
    """

    def __init__(self, order: WorkerOrder, store: Any) -> None:
        # Imported late: it pulls in diffusers, and the head needs this module only to start actors.
        with lasting():
            from spotlight.cluster.model_fetch import fetch_model_files
            from spotlight.cluster.workers.worker_process import WorkerPlace, WorkerProcess

        config = read_config(order.config, "the configuration sent to a worker")
        if os.path.isdir(order.working_directory):  # noqa: PTH112 - base of the config's relative paths
            os.chdir(order.working_directory)
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        self._device = _device(order)
        self._precision = config.deterministic, config.model.tf32
        place = WorkerPlace(order.worker, order.epoch, self._device, order.meeting, order.run)
        home = WorkerBlobClient(BlockingBlobClient(store, config.fleet.start_s))
        self._process = WorkerProcess(config, place, home, fetch_model_files, order.profiled_steps)
        self._rank: LearnerRank | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="work", daemon=True).start()

    def ready(self) -> None:
        """Returns once the process is up."""

    def tell(self, command: Command) -> None:
        """Queue a command; returns at once."""
        self._process.commands.put(command)

    def watch(self, hang_s: float) -> None:
        """Return after ``hang_s``; raise the cause as soon as the work has ended."""
        if self._ended.wait(hang_s):
            why = "it was told to" if self._error is None else f"{type(self._error).__name__}: {self._error}"
            raise RuntimeError(f"the worker has ended: {why}") from self._error

    def become_learner(self, order: RankOrder, store: BlockingBlobClient, wait_s: float) -> str:
        """End the work, then be the process of a learner rank; returns the digest of the base weights.

        Raises:
            RuntimeError: the work does not end within ``wait_s``, or ended with an error.
            WeightsError: see :meth:`WorkerProcess.hand_over`.
        """
        self._process.commands.put(Leave())
        if not self._ended.wait(wait_s):
            raise RuntimeError(f"the worker's step did not end within {wait_s:g} s")
        if self._error is not None:
            raise RuntimeError("the worker has failed") from self._error
        prepare_process(self._device, *self._precision)  # here, too: graphs and caches are freed there
        family, digest = self._process.hand_over()
        self._rank = LearnerRank(order, store, family)
        return digest

    def do(self, method: Callable[Concatenate[LearnerRank, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the rank that this process has become."""
        if self._rank is None:
            raise RuntimeError("become_learner() comes first")
        return method(self._rank, *args, **kwargs)

    def alive(self) -> None:
        """Never return: the call fails when the process ends."""
        threading.Event().wait()

    def _work(self) -> None:
        try:
            prepare_process(self._device, *self._precision)  # here: the current GPU is a thread's
            self._process.run()
        except BaseException as error:  # noqa: BLE001 - watch() raises it
            self._error = error
        finally:
            self._ended.set()


def _device(order: WorkerOrder) -> torch.device:
    """This worker's device. Workers see all GPUs of their node so that weights can be copied between them."""
    if not order.on_gpu:
        return torch.device("cpu")
    if order.gpu is not None:
        return torch.device("cuda", order.gpu)
    return torch.device("cuda", gpu_index(ray.get_gpu_ids()[0], os.environ.get("CUDA_VISIBLE_DEVICES")))


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """Head-side handle of a worker's actor: every call returns a Ray reference at once."""

    actor: Any

    def ready(self) -> Any:
        """Completes when the process is up."""
        return self.actor.ready.remote()

    def tell(self, command: Command) -> Any:
        """Completes when the command is queued; commands keep their order."""
        return self.actor.tell.options(concurrency_group="tell").remote(command)

    def watch(self, hang_s: float) -> Any:
        """Completes after ``hang_s``; fails when the process or its work ends."""
        return self.actor.watch.options(concurrency_group="watch").remote(hang_s)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where a controller node's workers run on Ray.

    Attributes:
        gpus: whether a slot is a GPU.
        threads: of each worker on a CPU slot.
        share: fraction of a slot per worker; below 1 beside a learner rank.
        first_gpu: index of the first worker's GPU, the others follow; None: Ray assigns GPUs.
    """

    ray_id: str
    gpus: bool
    threads: int | None
    share: float = 1.0
    first_gpu: int | None = None

    def number_of(self, order: StartWorker) -> int | None:
        """GPU index of a worker; None: Ray assigns one."""
        return None if self.first_gpu is None else self.first_gpu + order.gpu


@dataclass(slots=True)
class ActorStarter:
    """Starts workers as actors, and ends them.

    Attributes:
        config: the resolved configuration as YAML.
        tail: fetches the last log lines of a named actor on a node.
        profiled_steps: denoising steps that a worker which starts is to trace, by the worker, Ray's id of its
            node, and those of all nodes.
    """

    config: str
    store: Any
    meeting: Address
    run: str
    placements: dict[NodeId, WorkerPlacement]
    tail: Callable[[NodeId, str], Awaitable[str]]
    profiled_steps: Callable[[WorkerId, str, Collection[str]], int]

    def start(self, order: StartWorker) -> WorkerHandle:
        """Start a process without waiting; raises LookupError if the node is gone."""
        placement = self.placements[order.node]
        nodes = {each.ray_id for each in self.placements.values()}
        worker_order = WorkerOrder(
            self.config,
            order.worker,
            order.epoch,
            placement.gpus,
            placement.number_of(order),
            self.meeting,
            self.run,
            str(Path.cwd()),
            placement.threads,
            self.profiled_steps(order.worker, placement.ray_id, nodes),
        )
        make = ray.remote(concurrency_groups=_GROUPS)(WorkerActor).options(
            name=self._name(order),
            **on_node(placement.ray_id),
            num_gpus=placement.share if placement.gpus else 0,
            resources=None if placement.gpus else {SLOT: placement.share},
            runtime_env=ALL_GPUS_VISIBLE if placement.gpus else None,
        )
        return WorkerHandle(make.remote(worker_order, self.store))

    @staticmethod
    def kill(handle: SpareProcess) -> None:
        """SIGKILL a process; no effect if it is dead."""
        with suppress(RayError):  # dead already, or Ray is shutting down
            ray.kill(handle.actor)

    async def log_tail(self, order: StartWorker) -> str:
        """The last log lines of the process, or an empty string."""
        return await self.tail(order.node, self._name(order))

    def _name(self, order: StartWorker) -> str:
        return f"{self.run}:{order.worker}:{order.epoch}"


# -- from the GPU that Ray assigned to torch's index of it -------------------------------------------------


_KEY = "CUDA_VISIBLE_DEVICES"


def gpu_index(assigned: int | str, visible: str | None) -> int:
    """Torch's index of a GPU in a process that sees several.

    Ray names a GPU as its node's ``CUDA_VISIBLE_DEVICES`` does: by number, UUID or MIG instance. CUDA counts
    from 0 in the order of that list.

    Args:
        assigned: an entry of ``ray.get_gpu_ids()``.
        visible: ``CUDA_VISIBLE_DEVICES`` of this process; None: not set, so that numbers are indices.

    Raises:
        ValueError: the GPU is not in the list, or the list is not set and it has no number.
    """
    gpu = str(assigned)
    if visible is None:
        if gpu.isdecimal():
            return int(gpu)
        raise ValueError(
            f"Ray assigns the GPU {gpu!r}, but {_KEY} is not set here: expected a number; start Ray on this "
            f"node with {_KEY} set to its GPUs, and do not unset it for workers"
        )
    entries = [entry.strip() for entry in visible.split(",")]
    if gpu in entries:
        return entries.index(gpu)
    # CUDA takes beginnings of UUIDs; Ray may know either form.
    alike = [i for i, entry in enumerate(entries) if _same_uuid(entry, gpu)]
    if len(alike) == 1:
        return alike[0]
    raise ValueError(
        f"Ray assigns the GPU {gpu!r}, which {_KEY}={visible!r} has {len(alike)} times; expected once: give "
        f"workers the {_KEY} that Ray was started with on this node, each GPU once"
    )


def _same_uuid(one: str, other: str) -> bool:
    if not one.startswith(("GPU-", "MIG-")) or not other.startswith(("GPU-", "MIG-")):
        return False
    return one.startswith(other) or other.startswith(one)
