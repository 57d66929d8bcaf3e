"""One learner process: the actor of a rank, or what a worker's actor becomes. Knows nothing of Ray.

    begin ─► open_rendezvous (rank 0) ─► join ─► load_model ─► build ─► [load] ─► publish ─► train ...

Every rank gets the same calls in the same order, and fetches its own share of the samples
(:mod:`spotlight.training.batching.redistribute`). Values move between rank and blob store, bypassing the
head. Computation and error classes are the inline driver's, since both drive the same
:class:`~spotlight.training.learner.Learner`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

import spotlight
from spotlight.cluster.blobs.blob_client import BlockingBlobClient
from spotlight.cluster.blobs.blob_server import NEGATIVE
from spotlight.cluster.blobs.blob_store import BlobAddress
from spotlight.cluster.learner.rank_folder import RankFolder
from spotlight.config.load import read_config
from spotlight.config.schema import RunConfig
from spotlight.models.family import ModelFamily
from spotlight.models.shared.sharded import gathered
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.serialization import pack_condition, unpack_sample
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import (
    Learning,
    Model,
    assemble,
    fill_embeddings,
    prepare_model,
    published_slots,
)
from spotlight.runtime.clock import PhaseClock
from spotlight.runtime.conclusion import export_judged
from spotlight.runtime.process import explain_out_of_memory, prepare_process
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Phase, Rollout, RolloutId
from spotlight.store.run_directory import RunPaths
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.redistribute import passes_of, share_of
from spotlight.training.settings import traced_phases
from spotlight.training.sharding import Meeting, Ranks, process_group
from spotlight_kernels.measure.step_profile import StepProfiler
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.files import open_to_append
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_weights.bundle import WeightsManifest, pack
from spotlight_weights.flat import digest_of

log = logging.getLogger("spotlight.learner")

LOOPBACK = "127.0.0.1"
SAMPLE, CONDITION, WEIGHTS = "sample", "condition", "weights"
"""Kinds of blobs."""
_FETCHED_AT_ONCE = 32
_MEETING_S = 120.0
"""Rendezvous timeout; all processes are up by then."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Identity of a rank's process.

    Attributes:
        gpu: index among its visible GPUs; None: the only one.
        per_node: consecutive ranks on each node; empty: all on one.
    """

    rank: int
    world: int
    gpu: int | None = None
    per_node: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankOrder:
    """All that a rank's process needs to start.

    Attributes:
        config: the resolved configuration as YAML (``dump_config``).
        token: see :class:`RankFolder`.
        directory: the head's working directory, the base of relative paths.
        log: file for the process's output; None: it stays where it goes.
        version: of the head's package.
        threads: for CPU work; None leaves it to torch.
        profiled_steps: micro-batches traced at most, into the run directory: from the second that this
            process trains to the end of that one's iteration.
    """

    config: str
    place: RankPlace
    token: str = ""
    directory: str = "."
    log: str | None = None
    version: str = spotlight.__version__
    threads: int | None = None
    profiled_steps: int = 0


class LearnerRank:
    """The learner rank of this process; at most one per process.

    Args:
        store: its errors propagate.
        held: the model, if this process holds it already; it stays on its device.
    """

    def __init__(self, order: RankOrder, store: BlockingBlobClient, held: ModelFamily | None = None) -> None:
        # Nothing here may fail: what an actor's constructor raises reaches the head without its class.
        self.order, self.place, self.store = order, order.place, store
        self._held = held
        self._clock = PhaseClock()
        self._stack = ExitStack()
        self._served: Store | None = None
        self._ranks: Ranks | None = None
        self._loaded: tuple[Model, Conditions] | None = None
        self._learning: Learning | None = None

    def alive(self) -> None:
        """Never return: the call fails when the process ends."""
        threading.Event().wait()

    # -- beginning -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check that this process can be the rank, and send its output to the log.

        Output stays in Ray's logs where this node does not share the run directory.

        Raises ConfigError: another version of the package, or see :attr:`config`.
        """
        order = self.order
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
        if order.log is not None and self.folder.shared:
            _write_to(Path(order.log), "" if self._held is None else ", which was a worker")

    @cached_property
    def folder(self) -> RankFolder:
        """Where files of the run go and come from."""
        config = read_config(self.order.config, "the configuration sent to a learner rank")
        return RankFolder(config, self.order.token, self.store, self._stack)

    @cached_property
    def config(self) -> RunConfig:
        """Raises ConfigError: it is invalid, or its batches do not fit the rank count."""
        config = self.folder.config
        planned = max(self.place.world, config.fleet.learner_ranks)
        if problems := list(config.rank_problems(planned, self.place.per_node)):
            raise ConfigError(f"this configuration on {planned} ranks", problems)
        return config

    @cached_property
    def _device(self) -> torch.device:
        """Raises ConfigError: CUDA is missing."""
        if self._held is not None:
            return self._held.device
        device = build.pick_device(self.config)
        if self.place.gpu is not None and device.type == "cuda":
            return torch.device("cuda", self.place.gpu)
        return device

    @cached_property
    def _profiler(self) -> StepProfiler:
        folder = RunPaths(self.config.runs_dir / self.config.name).profile
        steps = self.order.profiled_steps
        traced = traced_phases(self.config.learner, self._device, log.warning) if steps else ()
        return StepProfiler(folder, traced, steps, log.warning)

    def open_rendezvous(self, host: str, port: int = 0) -> Address | None:
        """On rank 0 of several: serve the rendezvous, on ``host`` alone. Raises OSError."""
        if self.place.rank or self.place.world == 1:
            return None
        self._served, address = rendezvous.serve(host, port, self._meeting_s)
        return address

    def join(self, address: Address | None, hosts: Sequence[str] = ()) -> None:
        """Join the other ranks. Collective: every rank must call it.

        Args:
            address: rank 0's rendezvous; None for a single rank.
            hosts: each rank's machine as others reach it; collectives listen there alone. Empty: loopback.

        Raises:
            ConnectionError: nothing listens at ``address``.
            RuntimeError: the others did not join in time.
        """
        prepare_process(self._device, self.config.deterministic, self.config.model.tf32)
        place = self.place
        if place.world > 1 and address is None:
            raise ValueError(f"rank {place.rank} of {place.world} got no address to meet at")
        meeting = None
        if address is not None:
            store = self._served or rendezvous.connect(address, self._meeting_s)
            meeting = Meeting(store, place.rank, place.world, place.per_node)
            own = hosts[place.rank] if hosts else LOOPBACK
            self._stack.enter_context(rendezvous.listening_only_on(own))
        limit_s = self.config.fleet.learner_collective_s
        self._ranks = self._stack.enter_context(process_group(self._device, limit_s, meeting))

    def load_model(self, prompts: Sequence[Prompt]) -> None:
        """Load the model and embed the uncached ones of the run's ``prompts``. Collective.

        Files that are missing here come from another node if one has them.

        Raises ModelError or ConfigError, as in the inline driver.
        """
        from spotlight.cluster.model_fetch import fetch_model_files

        with self._in(Phase.SETUP):
            device = self._device  # a held model's, which is let go below
            if self._held is None:
                fetch_model_files(self.config)
            model = prepare_model(self.config, device, self._held)
            self._held = None
            self._loaded = model, fill_embeddings(self.config, model, prompts, self.ranks)

    def build(self) -> None:
        """Create the weight slots and the learner. Collective. Raises ModelError."""
        if self._loaded is None:
            raise RuntimeError("build() before load_model()")
        with self._in(Phase.SETUP):
            self._learning = assemble(self.config, *self._loaded, self.ranks)

    def load(self, directory: Path) -> None:
        """Load the learner state saved in ``directory``. Collective. Raises StateError."""
        with self.folder.read(directory) as here:
            self.learning.learner.load(here)

    # -- an iteration ----------------------------------------------------------------------------------

    def train(
        self,
        effect: ef.TrainEffect,
        rollouts: Mapping[RolloutId, Rollout],
        stored: Mapping[RolloutId, BlobAddress],
    ) -> ev.Event:
        """Prepare, train a micro-batch, step or finish a batch. Collective.

        Args:
            rollouts: those of the groups to prepare.
            stored: where their samples are.

        Returns:
            The event that says so to the controller.

        Raises:
            LookupError: a sample is not stored.
            ValueError: a sample is invalid.
            TrainingError: the gradient is not finite, or samples are missing.
        """
        with self._in(Phase.TRAINING):
            learner = self.learning.learner
            match effect:
                case ef.PrepareBatch(iteration):
                    self._prepare(effect, rollouts, stored)
                    return ev.BatchPrepared(iteration)
                case ef.TrainMicroBatch(batch, index):
                    with self._profiler.step(Phase.TRAINING):
                        for each in passes_of(batch, self.place.world, self._planned):
                            learner.accumulate(each.rollouts, each.update_samples)
                    return ev.MicroBatchTrained(batch.iteration, batch.update, index)
                case ef.StepOptimizer(iteration, update, samples, zeros):
                    report = learner.step(samples, zeros)
                    return ev.OptimizerStepped(iteration, update, report.sums.loss, report.grad_norm)
                case ef.FinishBatch(iteration):
                    self._profiler.close()
                    self.folder.deliver(RunPaths(self.config.runs_dir / self.config.name).profile)
                    learner.finish_batch()
                    return ev.BatchFinished(iteration)

    def _prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        stored: Mapping[RolloutId, BlobAddress],
    ) -> None:
        share = share_of(effect, self.place.rank, self.place.world, self._planned)
        held = {name: unpack_sample(data) for name, data in self._fetched(share, stored)}
        passes = tuple(
            each
            for batch in effect.micro_batches
            for each in passes_of(batch, self.place.world, self._planned)
        )
        self.learning.feed.prepare(replace(effect, micro_batches=passes), rollouts, held)

    def _fetched(
        self, share: Sequence[RolloutId], stored: Mapping[RolloutId, BlobAddress]
    ) -> Iterator[tuple[RolloutId, bytes]]:
        for weights_digest in sorted({stored[rollout].weights_digest for rollout in share}):
            names = [rollout for rollout in share if stored[rollout].weights_digest == weights_digest]
            for start in range(0, len(names), _FETCHED_AT_ONCE):
                some = names[start : start + _FETCHED_AT_ONCE]
                found = self.store.fetch(SAMPLE, [stored[name].name for name in some], weights_digest)
                for name, kept in zip(some, found, strict=True):
                    if kept is None:
                        raise LookupError(
                            f"no sample of rollout {name} made with weights {weights_digest!r} is stored"
                        )
                    yield name, kept.data

    @property
    def _planned(self) -> int:
        """Ranks that micro-batches are planned for."""
        return max(self.place.world, self.config.fleet.learner_ranks)

    def take_log(self) -> dict[str, float]:
        """This rank's training metrics since the last call."""
        return self.learning.learner.log.take()

    # -- what leaves the learner -----------------------------------------------------------------------

    def publish(self, version: int | None, lineage: int) -> WeightsManifest | None:
        """Store what :meth:`packed` packs under its digest. Collective. None except on rank 0."""
        packed = self.packed(version, lineage)
        if packed is None:
            return None
        manifest, data = packed
        self.store.put(WEIGHTS, manifest.digest, data)
        return manifest

    def packed(self, version: int | None, lineage: int) -> tuple[WeightsManifest, bytearray] | None:
        """Pack the weights that workers need next, gathered from all ranks. Collective.

        Args:
            version: the version the controller expects; None: whatever the learner holds.

        Returns:
            Manifest and packed weights on rank 0; None on the others.

        Raises:
            RuntimeError: the learner does not hold ``version``.
            WeightsError: there is nothing to bind.
        """
        learning = self.learning
        held = learning.learner.steps
        if version not in (None, held):
            raise RuntimeError(
                f"version {version} is to be published, but the learner has made {held} optimizer "
                "steps: it was restored from another checkpoint than the controller"
            )
        dtype = build.torch_dtype(self.config.fleet.published_dtype(self.config))
        # A whole model that is gathered from its shards does not fit on one device.
        stay = self.config.learner.mode == "lora" or self.ranks.world == 1
        with self._in(Phase.WEIGHT_SYNC):
            states: dict[str, dict[str, Tensor]] = {
                slot: gathered(learning.slots.state(slot), self.ranks.is_main, stay=stay)
                for slot in published_slots(self.config, learning.model.algorithm, learning.learner.batches)
            }
            if not self.ranks.is_main:
                return None
            manifest, data = pack(held, lineage, states, learning.slots.modules_bound, dtype=dtype)
            return replace(manifest, base=digest_of(learning.slots.packed())), data

    def save(self, directory: Path) -> None:
        """Write the learner's state. Collective, with the same directory on every rank."""
        with self._in(Phase.CHECKPOINT), self.folder.written(directory) as here:
            self.learning.learner.save(here)

    def export(self) -> Path | None:
        """Export the judged weights into the run directory. Collective. Only rank 0 gets the path there."""
        learning = self.learning
        exported = export_judged(self.config, learning.model.family, learning.slots, self.ranks)
        return None if exported is None else self.folder.deliver(exported)

    def send_conditions(self, prompts: Sequence[PromptId]) -> None:
        """On rank 0: store the embeddings of ``prompts`` and of the negative prompt."""
        if not self.ranks.is_main:
            return
        self.store.put(CONDITION, NEGATIVE, pack_condition(self.learning.negative))
        for prompt in prompts:
            self.store.put(CONDITION, prompt, pack_condition(self.learning.conditions[prompt]))

    def digest(self) -> str:
        """SHA-256 of the learner's whole state, equal on all ranks. Collective."""
        return self.learning.learner.digest()

    def close(self) -> None:
        """Leave the process group."""
        self._stack.close()

    # -- parts -----------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks:
        """The process group. RuntimeError before :meth:`join`."""
        if self._ranks is None:
            raise RuntimeError("this rank has not joined the others yet: join() comes first")
        return self._ranks

    @property
    def learning(self) -> Learning:
        """The learner and its surroundings. RuntimeError before :meth:`build`."""
        if self._learning is None:
            raise RuntimeError("this rank has no learner yet: build() comes first")
        return self._learning

    @property
    def _meeting_s(self) -> float:
        return min(_MEETING_S, self.config.fleet.learner_collective_s)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        with explain_out_of_memory(self._clock), self._clock.phase(phase):
            yield


def _write_to(path: Path, note: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with open_to_append(path) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.write(2, f"learner rank in process {os.getpid()} on {socket.gethostname()}{note}\n".encode())
