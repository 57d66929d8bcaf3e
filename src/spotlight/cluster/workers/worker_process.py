"""A rollout worker's process: assemble the model at the first weights, then run the worker loop. No Ray.

    PullWeights ─► assemble: the base from a peer on the node, or from disk ─► WorkerLoop, until Leave
                    (files that the disk lacks: from another node, or from the model hub)
    ended by Leave ─► hand_over: the base, for a learner in the same process

``worker_actor.py`` is the thin actor around it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spotlight.cluster.blobs.blob_server import NEGATIVE, TRACE
from spotlight.cluster.workers.worker_weights import BundleLoader
from spotlight.config.schema import RunConfig
from spotlight.models.condition import Condition
from spotlight.models.family import ModelFamily
from spotlight.models.kernels.cuda_graphs import release_forwards
from spotlight.models.kernels.fused import use_reference
from spotlight.models.peft_layers import eject
from spotlight.models.skeleton import base_state, filling, modules_of
from spotlight.rollout.sequence_parallel.communicators import communicator
from spotlight.rollout.sequence_parallel.membership import SpMembership
from spotlight.rollout.sequence_parallel.rendezvous import Address, connect
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.rollout.serialization import unpack_condition
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import rollout_slots
from spotlight.scheduler.effects import PullWeights
from spotlight.scheduler.events import PullFailed
from spotlight.scheduler.types import Phase, Purpose, WorkerId
from spotlight.worker.interfaces import Command, HeadClient, HeadLostError, Leave, WorkerDependencies
from spotlight.worker.loop import WorkerLoop
from spotlight.worker.reports import Report, ReportedValue
from spotlight_kernels.measure.step_profile import StepProfiler
from spotlight_weights.flat import digest_of
from spotlight_weights.node_cache import NodeCache
from spotlight_weights.peers import WeightServer, fetch_from_peer
from spotlight_weights.served_weights import ServedWeights
from spotlight_weights.weight_errors import PeerLostError, WeightsError

log = logging.getLogger(__name__)

_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker's process runs.

    Attributes:
        meeting: rendezvous store of the sequence-parallel groups.
        run: name shared by the processes of one run on a node.
    """

    worker: WorkerId
    epoch: int
    device: torch.device
    meeting: Address
    run: str


class WorkerProcess:
    """The work of a process; :meth:`run` belongs to the thread that owns the model.

    Args:
        fetch: has the model's files here before it is loaded, if another node has them.
        profiled_steps: of training rollouts, to be traced where this worker leads; the trace is stored as
            blob ``TRACE``, named by the phase.

    Attributes:
        commands: any thread may put.
    """

    def __init__(
        self,
        config: RunConfig,
        place: WorkerPlace,
        home: HeadClient,
        fetch: Callable[[RunConfig], None],
        profiled_steps: int = 0,
    ) -> None:
        self._config, self._place, self._home, self._fetch = config, place, home, fetch
        self._profiled_steps = profiled_steps
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._server: WeightServer | None = None
        self._held: tuple[ModelFamily, str] | None = None
        self._cache = NodeCache(place.run)

    def run(self) -> None:
        """Run until told to leave. Raises whatever ends the process; the head then starts another."""
        try:
            loop: WorkerLoop | None = None
            while loop is None:
                command = self.commands.get()
                if isinstance(command, Leave):
                    return
                if isinstance(command, PullWeights) and command.epoch == self._place.epoch:
                    loop = self._begin(command)
            loop.run()
        finally:
            if self._server is not None:
                self._server.close()
            self._cache.close()

    def hand_over(self) -> tuple[ModelFamily, str]:
        """The model as it was loaded, without adapters, and the digest of its weights; after :meth:`run`.

        Raises:
            WeightsError: there is none to hand over, or its weights are not those that were loaded.
        """
        held, self._held, self._server = self._held, None, None
        if held is None:
            raise WeightsError("this worker holds no base weights that a learner could use")
        family, loaded = held
        release_forwards(family.transformer)
        use_reference(family.transformer)
        eject(family.transformer)
        gc.collect()
        if family.device.type == "cuda":
            torch.cuda.empty_cache()
        if (found := digest_of(base_state(family.transformer))) != loaded:
            raise WeightsError(
                f"the base weights have digest {found[:12]}, expected {loaded[:12]}, as when they were "
                "loaded: look at the memory of this node"
            )
        return family, loaded

    # -- the model -------------------------------------------------------------------------------------

    def _begin(self, pull: PullWeights) -> WorkerLoop | None:
        (negative,) = self._home.fetch("condition", [NEGATIVE])
        if negative is None:  # not there yet: the learner stores it before the run starts
            self._put_off(pull)
            return None
        return self._assemble(self._family(pull), unpack_condition(negative.data), pull)

    def _put_off(self, pull: PullWeights) -> None:
        """Decline this time; the controller asks again at once and may name another source."""
        time.sleep(_PAUSE_S)
        failed = PullFailed(self._place.worker, self._place.epoch, pull.version, pull.lineage)
        self._home.deliver([Report(self._place.worker, "", (), (failed,))])

    def _family(self, pull: PullWeights) -> ModelFamily:
        """Load the model: its transformer from the peer the controller names, or everything from disk.

        In a full fine-tune each version brings the transformer, so peers have no base to share.
        """
        config, place = self._config, self._place
        self._fetch(config)
        serves = config.learner.mode == "lora"
        family = self._from_peer(config, pull.peer) if pull.peer is not None and serves else None
        if family is None:
            family = build.load_family(config, place.device)
        if serves:
            tensors = base_state(family.transformer)
            self._held = family, digest_of(tensors)
            served = ServedWeights(tensors, modules_of(tensors), self._base_mark())
            self._server = WeightServer(self._cache.directory, _file_name(place.worker), served)
        return family

    def _from_peer(self, config: RunConfig, peer: WorkerId) -> ModelFamily | None:
        """Load from a peer; None if it is gone or does not share, and the disk must do."""
        family = build.load_family(config, self._place.device, read_transformer=False)
        try:
            with filling(family.transformer) as targets:
                socket = self._cache.directory / f"{_file_name(peer)}.sock"
                fetch_from_peer(socket, self._base_mark(), targets, modules_of(targets))
        except PeerLostError as error:
            log.warning("base weights are read from disk: %s", error)
            return None
        return family

    def _base_mark(self) -> str:
        model = self._config.model
        return f"{model.family}:{model.path}:{model.revision}:{model.dtype}:{model.quantize}"

    def _assemble(self, family: ModelFamily, negative: Condition, pull: PullWeights) -> WorkerLoop:
        config, place = self._config, self._place
        algorithm = build.make_algorithm(config)
        slots = build.make_slots(config, family, algorithm)
        engine = build.make_engine(config, family, negative)
        fleet = config.fleet
        train, judged = algorithm.rollout_slot, config.evaluation.weights

        def membership() -> SpMembership:
            store = connect(place.meeting)
            guidance = fleet.sequence_parallel.guidance
            parallel = SequenceParallel(slots.modules().values(), guidance=guidance)
            link = communicator(place.device, fleet.collective_s)
            return SpMembership(place.worker, store, link, parallel, fleet.answer_s / 2)

        profiler = self._profiler()
        dependencies = WorkerDependencies(
            engine=engine,
            slots=slots,
            recipes=build.make_recipes(config, algorithm),
            slot_of={Purpose.TRAIN: train, Purpose.EXPLORE: train, Purpose.EVAL: judged},
            membership=membership,
            around=profiler.step,
            rested=profiler.close,
        )
        dtype = build.torch_dtype(fleet.published_dtype(config))
        used, base = rollout_slots(config, algorithm), digest_of(slots.packed())
        loader = BundleLoader(self._home, self._cache, slots, used, dtype, base)
        return WorkerLoop(
            place.worker,
            place.epoch,
            self._home,
            loader,
            dependencies,
            fleet.commit_every,
            commands=self.commands,
            first=pull,
        )

    def _profiler(self) -> StepProfiler:
        kinds = (Phase.ROLLOUT,) if self._profiled_steps else ()
        return StepProfiler(None, kinds, self._profiled_steps, log.warning, self._send_trace)

    def _send_trace(self, path: Path) -> None:
        trace = ReportedValue(TRACE, Phase.ROLLOUT, path.read_bytes())
        try:
            self._home.deliver([Report(self._place.worker, "", (trace,), ())])
        except HeadLostError as error:  # the loop's next report ends it, where that is the cause
            log.warning("the trace is not delivered: %s", error)


def _file_name(worker: WorkerId) -> str:
    """Short safe file name of a worker: socket paths are limited to about 100 bytes."""
    return hashlib.sha256(worker.encode()).hexdigest()[:16]
