"""One learner process, without Ray.

    check_storage ─► open_rendezvous (rank 0) ─► join ─► load_model ─► build ─► [load] ─► prepare ...

Every rank gets the same calls in the same order; only the sample bytes differ: each rank gets its own share
(:func:`share_of`). Computation and error classes are the inline driver's, since both feed the same
:class:`~spotlight.training.batching.feed.Trainer`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.models.family import ModelFamily
from spotlight.models.kernels.step_profile import StepProfiler
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.serialization import pack_condition, unpack_sample
from spotlight.runtime.build import components as build
from spotlight.runtime.build.learner_parts import (
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
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import MicroBatch, Phase, Rollout, RolloutId
from spotlight.store.run_directory import RunPaths
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.redistribute import neighbours
from spotlight.training.lora_export import whole_state
from spotlight.training.sharding import Meeting, Ranks, process_group
from spotlight.weights.bundle import WeightsManifest, pack
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.base.yaml_tree import parse_yaml

log = logging.getLogger("spotlight.learner")

LOOPBACK = "127.0.0.1"
_STORAGE_SETTLES_S = 10.0
"""A network file system may take seconds to show a new file to other machines."""
_LOOKS_AGAIN_S = 0.2
_MEETING_S = 120.0
"""Rendezvous timeout; all processes are up by then."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Identity of a rank's process.

    Attributes:
        timeout_s: of one collective.
        gpu: index among its visible GPUs; None: the only one.
        per_node: consecutive ranks on each node; empty: all on one.
    """

    rank: int
    world: int
    timeout_s: float = 1800.0
    gpu: int | None = None
    per_node: tuple[int, ...] = ()


def share_of(effect: PrepareBatch, rank: int, world: int, planned: int = 0) -> tuple[RolloutId, ...]:
    """Samples whose tensors a rank receives: equally many of every micro-batch, so none must move later, and
    neighbours, so that they share prompts.

    Args:
        planned: see :func:`passes_of`.
    """
    return tuple(
        rollout
        for micro_batch in effect.micro_batches
        for each in passes_of(micro_batch, world, planned)
        for rollout in neighbours(each.rollouts, rank, world)
    )


def passes_of(micro_batch: MicroBatch, world: int, planned: int = 0) -> tuple[MicroBatch, ...]:
    """A micro-batch for ``planned`` ranks, as fewer ranks train it: in turn, as many samples at a time.

    Args:
        planned: a multiple of ``world`` that divides its samples; 0: ``world``.
    """
    times = (planned or world) // world
    size = len(micro_batch.rollouts) // times
    return tuple(
        replace(micro_batch, rollouts=micro_batch.rollouts[start : start + size])
        for start in range(0, size * times, size)
    )


class LearnerRank:
    """The learner rank of this process; at most one per process.

    Args:
        config: the resolved configuration as YAML (``dump_config``).
        profiled_steps: micro-batches traced at most, into the run directory: from the second that this
            process trains to the end of that one's iteration.
        held: the model, if this process holds it already; it stays on its device.

    Raises:
        ConfigError: invalid configuration, batches that do not fit the rank count, or CUDA is missing.
    """

    def __init__(
        self, config: str, place: RankPlace, profiled_steps: int = 0, held: ModelFamily | None = None
    ) -> None:
        self.config = _parsed(config)
        self._planned = max(place.world, self.config.fleet.learner_ranks)
        if problems := list(self.config.rank_problems(self._planned, place.per_node)):
            raise ConfigError(f"this configuration on {self._planned} ranks", problems)
        self.place = place
        folder = RunPaths(self.config.runs_dir / self.config.name).profile
        kinds = (Phase.TRAINING,) if profiled_steps else ()
        self._profiler = StepProfiler(folder, kinds, profiled_steps, log.warning)
        self._clock = PhaseClock()
        self._stack = ExitStack()
        self._served: Store | None = None
        self._ranks: Ranks | None = None
        self._loaded: tuple[Model, Conditions] | None = None
        self._learning: Learning | None = None
        self._held = held
        self._device = build.pick_device(self.config) if held is None else held.device
        if held is None and place.gpu is not None and self._device.type == "cuda":
            self._device = torch.device("cuda", place.gpu)

    # -- beginning -------------------------------------------------------------------------------------

    def check_storage(self, token: str) -> None:
        """Check that this run directory holds the head's ``token`` (:func:`write_token`), else StoreError."""
        path = _token_path(self.config)
        give_up = time.monotonic() + _STORAGE_SETTLES_S
        while (found := _content(path)) != token:
            if time.monotonic() >= give_up:
                raise StoreError(
                    f"{path.parent.absolute()} on {socket.gethostname()} is not the run directory that the "
                    f"head sees: found {found or 'nothing'} in {path.name}, expected {token}. Every learner "
                    "rank writes its share of a checkpoint there: put runs_dir on storage that all nodes "
                    "share that train, under the same path"
                )
            _list_again(path.parent)
            time.sleep(_LOOKS_AGAIN_S)

    def open_rendezvous(self, host: str, port: int = 0) -> Address:
        """On rank 0: serve the rendezvous, on ``host`` alone. Raises OSError."""
        self._served, address = rendezvous.serve(host, port, self._meeting_s)
        return address

    def join(self, address: Address | None, host: str = LOOPBACK) -> None:
        """Join the other ranks. Collective: every rank must call it.

        Args:
            address: rank 0's rendezvous; None for a single rank.
            host: this machine's address as others reach it; collectives listen there alone.

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
            meeting = Meeting(self._store(address), place.rank, place.world, place.per_node)
            _listen_only_on(host)
        self._ranks = self._stack.enter_context(process_group(self._device, place.timeout_s, meeting))

    def load_model(
        self, prompts: Sequence[Prompt], located: Callable[[RunConfig], RunConfig] | None = None
    ) -> None:
        """Load the model and embed the uncached ones of the run's ``prompts``. Collective.

        Args:
            located: sees to it that the model's files are here; returns the configuration that finds them.

        Raises ModelError or ConfigError, as in the inline driver.
        """
        with self._in(Phase.SETUP):
            config = self.config if located is None or self._held is not None else located(self.config)
            model = prepare_model(config, self._device, self.ranks, self._held)
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
        self.learning.learner.load(directory)

    # -- an iteration ----------------------------------------------------------------------------------

    def prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        samples: Mapping[RolloutId, bytes],
    ) -> None:
        """Take all or part of an iteration's groups. Collective.

        Args:
            samples: this rank's share, packed (:func:`spotlight.rollout.serialization.pack_sample`).

        Raises ValueError if a sample of the share is invalid or missing.
        """
        wanted = self.share_of(effect)
        passes = tuple(each for batch in effect.micro_batches for each in self._passes(batch))
        missing = [rollout for rollout in wanted if rollout not in samples]
        if missing:
            raise ValueError(
                f"rank {self.place.rank} got {len(samples)} of the {len(wanted)} samples of its share; "
                f"the first missing is {missing[0]}"
            )
        with self._in(Phase.TRAINING):
            held = {rollout: unpack_sample(samples[rollout]) for rollout in wanted}
            self.learning.trainer.prepare(replace(effect, micro_batches=passes), rollouts, held)

    def share_of(self, effect: PrepareBatch) -> tuple[RolloutId, ...]:
        """The samples whose tensors this rank receives."""
        return share_of(effect, self.place.rank, self.place.world, self._planned)

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Accumulate the gradients of one micro-batch. Collective."""
        with self._in(Phase.TRAINING), self._profiler.step(Phase.TRAINING):
            for each in self._passes(micro_batch):
                self.learning.trainer.accumulate(each)

    def _passes(self, micro_batch: MicroBatch) -> tuple[MicroBatch, ...]:
        return passes_of(micro_batch, self.place.world, self._planned)

    def step(self, samples: int, zeros: int = 0) -> tuple[float, float]:
        """Apply the gradients of ``samples`` samples, over all ranks; ``zeros`` more count as 0. Collective.

        Returns the loss and the gradient norm before clipping.

        Raises:
            TrainingError: the gradient is not finite, or samples are missing.
        """
        with self._in(Phase.TRAINING):
            return self.learning.trainer.step(samples, zeros)

    def finish_batch(self) -> None:
        """Update the old policy. Collective."""
        self._profiler.close()
        self.learning.trainer.finish_batch()

    def take_log(self) -> dict[str, float]:
        """This rank's training metrics since the last call."""
        return self.learning.trainer.log.take()

    # -- what leaves the learner -----------------------------------------------------------------------

    def publish(self, version: int | None, lineage: int) -> tuple[WeightsManifest, bytes] | None:
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
        with self._in(Phase.WEIGHT_SYNC):
            states: dict[str, dict[str, Tensor]] = {
                slot: whole_state(learning.slots, slot, keep=self.ranks.is_main, dtype=dtype)
                for slot in published_slots(self.config, learning.model.algorithm, learning.learner.batches)
            }
            if not self.ranks.is_main:
                return None
            return pack(held, lineage, states, learning.slots.modules_bound)

    def save(self, directory: Path) -> None:
        """Write the learner's state. Collective, with the same shared directory on every rank."""
        with self._in(Phase.CHECKPOINT):
            self.learning.learner.save(directory)

    def export(self) -> Path | None:
        """Export the judged weights into the run directory. Collective. Only rank 0 gets the path."""
        learning = self.learning
        return export_judged(self.config, learning.model.family, learning.slots, self.ranks)

    def conditions(self, prompts: Iterable[PromptId]) -> list[bytes]:
        """Packed embeddings of prompts, in their order."""
        if self._loaded is None:
            raise RuntimeError("conditions() before load_model()")
        return [pack_condition(condition) for condition in self._loaded[1].of(prompts)]

    def negative(self) -> bytes:
        """Packed embedding of the negative prompt."""
        return pack_condition(self.learning.negative)

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

    def _store(self, address: Address) -> Store:
        return self._served or rendezvous.connect(address, self._meeting_s)

    @property
    def _meeting_s(self) -> float:
        return min(_MEETING_S, self.place.timeout_s)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        with explain_out_of_memory(self._clock), self._clock.phase(phase):
            yield


def write_token(config: RunConfig, token: str) -> Path:
    """Write ``token`` to the run directory for :meth:`LearnerRank.check_storage`. Remove it afterwards."""
    path = _token_path(config)
    path.write_text(token)
    return path


def _token_path(config: RunConfig) -> Path:
    return RunPaths(config.runs_dir / config.name).path / "storage-token"


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _list_again(directory: Path) -> None:
    try:
        os.listdir(directory)  # noqa: PTH208
    except OSError:
        return


def _parsed(config: str) -> RunConfig:
    tree = parse_yaml(config)
    if not isinstance(tree, dict):
        raise ValueError(f"the configuration sent to a learner rank is {type(tree).__name__}, not a mapping")
    return build_config(tree, "the configuration sent to a learner rank")


def _listen_only_on(host: str) -> None:
    """Bind gloo and NCCL to the interface of ``host``: gloo's default is often the loopback.

    Interfaces set by the user are respected.
    """
    if (interface := _interface_of(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_of(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
