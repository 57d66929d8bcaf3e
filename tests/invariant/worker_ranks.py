"""Worker loops in processes of their own, and a director who gives orders as a controller does.

ranks = Ranks(pipeline, cache, ["w0", "w1"])
epoch = ranks.form("w0", "w1"); lease = ranks.grant(rollouts)
ranks.home.wait_for(LeaseCompleted)
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import nn
from worker_world import EPOCH, Body, Kept, MemoryHome, SeededLoader, form, grant, pull

from spotlight.models.slots import Slot
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.communicators import Gloo
from spotlight.rollout.sequence_parallel.membership import SpMembership
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.scheduler.effects import StopGroup
from spotlight.scheduler.events import GroupFormed, WeightsPulled
from spotlight.scheduler.types import LeaseId, Rollout, RolloutId, WorkerId
from spotlight.worker.interfaces import Command, FollowLease, HeadLostError, Patience
from spotlight.worker.loop import WorkerLoop
from spotlight.worker.reports import Report

GRACE_S = 0.5
BATCH = 8
"""Rollouts in a forward of a worker that has enough memory."""
PATIENCE_S = 90.0
"""No test waits longer for anything; a busy machine is slow now and then."""

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Mishap:
    """What happens to a worker in its ``step``-th step from now, before the attention of a block."""

    kind: str
    step: int
    block: int = 1


@dataclass(frozen=True)
class Deadline:
    """Collectives that are not done after so long are lost."""

    collective_s: float


@dataclass(frozen=True)
class Room:
    """Memory for so many rollouts in a forward, from now on."""

    rollouts: int


@dataclass(frozen=True)
class NoRoom:
    """No memory for the weights of a slot."""

    slot: str


@dataclass
class PipeHome:
    """The test's home, from a worker's process."""

    pipe: Connection

    def deliver(self, reports: Iterable[Report]) -> None:
        self._ask("deliver", list(reports))

    def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[Kept | None]:
        return self._ask("fetch", kind, list(names), mark)  # type: ignore[no-any-return]

    def _ask(self, method: str, *arguments: object) -> object:
        try:
            self.pipe.send((method, arguments))
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise HeadLostError("the test is over") from error


def inject(transformer: nn.Module, mishap: Mishap) -> None:
    calls = 0

    def count(module: nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == mishap.step + 1:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[mishap.kind])

    transformer.transformer_blocks[mishap.block].attn.register_forward_pre_hook(count)  # type: ignore[union-attr,index]


def limit_memory(body: Body, room: Room) -> None:
    forward = type(body.family).velocity

    def velocity(model: nn.Module, latents: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if len(latents) > room.rollouts:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return forward(body.family, model, latents, *args, **kwargs)  # type: ignore[arg-type]

    body.family.velocity = velocity  # type: ignore[method-assign,assignment]
    body.engine.max_batch = max(body.engine.max_batch, BATCH)


def refuse_slot(body: Body, short: NoRoom) -> None:
    use = body.slots.use

    def used(slot: Slot, *, merged: bool = False) -> AbstractContextManager[nn.Module]:
        if slot == short.slot:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return use(slot, merged=merged)

    body.slots.use = used  # type: ignore[method-assign]


def serve(
    name: str, commands: Connection, home: Connection, address: Address, pipeline: Path, cache: Path
) -> None:
    """A worker's process."""
    torch.set_num_threads(1)
    body = Body.build(pipeline, cache)
    communicator = Gloo(collective_s=3600.0)
    parallel = SequenceParallel(body.slots.modules().values())

    def membership() -> SpMembership:
        return SpMembership(WorkerId(name), rendezvous.connect(address), communicator, parallel, form_s=30.0)

    loop = WorkerLoop(
        WorkerId(name),
        EPOCH,
        PipeHome(home),
        SeededLoader(body.slots),
        body.dependencies(membership),
        commit_every=2,
        patience=Patience(ask_again_s=30.0, grace_s=GRACE_S, pause_s=0.05),
    )

    def listen() -> None:
        while True:
            try:
                command = commands.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(command, Mishap):
                inject(body.family.transformer, command)
            elif isinstance(command, Room):
                limit_memory(body, command)
            elif isinstance(command, NoRoom):
                refuse_slot(body, command)
            elif isinstance(command, Deadline):
                communicator.collective_s = command.collective_s
            else:
                loop.commands.put(command)

    threading.Thread(target=listen, daemon=True).start()
    loop.run()


@dataclass
class Ranks:
    """The test's side: processes by name, one home for all, and what a controller would have decided."""

    pipeline: Path
    cache: Path
    home: MemoryHome
    epoch: int = 0
    lease: int = 0
    members: tuple[str, ...] = ()
    processes: dict[str, tuple[BaseProcess, Connection]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store, self.address = rendezvous.serve()

    def spawn(self, *names: str) -> None:
        """New processes, with weights."""
        for name in names:
            ours, theirs = _processes.Pipe()
            home_ours, home_theirs = _processes.Pipe()
            arguments = (name, theirs, home_theirs, self.address, self.pipeline, self.cache)
            process = _processes.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            home_theirs.close()
            self.processes[name] = (process, ours)
            threading.Thread(target=self._keep, args=(home_ours,), daemon=True).start()
            self.tell(name, pull(name=name))
        for name in names:
            self.until(lambda name=name: any(e.worker == name for e in self.home.of(WeightsPulled)))

    def revive(self, *names: str) -> None:
        """Processes in the place of dead ones; everything reported so far is forgotten."""
        self.home.clear()
        self.spawn(*[n for n in names if n not in self.processes or not self.processes[n][0].is_alive()])
        self.home.clear()

    def _keep(self, pipe: Connection) -> None:
        while True:
            try:
                method, arguments = pipe.recv()
                pipe.send(getattr(self.home, method)(*arguments))
            except (EOFError, OSError):
                return

    def tell(self, name: str, what: Command | Mishap | Deadline | Room | NoRoom) -> None:
        self.processes[name][1].send(what)

    def form(self, *names: str) -> int:
        """A group under a new epoch, which is returned."""
        self.epoch, self.members = self.epoch + 1, names
        for name in names:
            self.tell(name, form(self.epoch, *names))
        wanted = GroupFormed(WorkerId(names[0]), self.epoch)
        self.until(lambda: wanted in self.home.of(GroupFormed))
        return self.epoch

    def grant(self, rollouts: Sequence[Rollout], resume: dict[RolloutId, int] | None = None) -> int:
        """A lease for the group formed last: its number is returned."""
        self.lease += 1
        leader, *others = self.members
        granted = grant(self.lease, rollouts, self.epoch, leader)
        self.tell(leader, dataclasses.replace(granted, resume=resume or {}))
        for name in others:
            self.tell(name, FollowLease(WorkerId(leader), self.epoch, LeaseId(self.lease)))
        return self.lease

    def stop(self, leader: str, epoch: int, *names: str) -> None:
        command = StopGroup(WorkerId(leader), epoch, tuple(WorkerId(name) for name in names))
        for name in names:
            self.tell(name, command)

    def until(self, condition, timeout_s: float = PATIENCE_S) -> None:  # type: ignore[no-untyped-def]
        with self.home._changed:
            assert self.home._changed.wait_for(condition, timeout_s), f"in vain; {self.home.events}"

    def gone(self, name: str) -> None:
        """Wait for a process to die."""
        process = self.processes[name][0]
        process.join(PATIENCE_S)
        assert not process.is_alive()

    def stopped(self, name: str) -> None:
        """Wait for a process to stand still."""
        stat = Path(f"/proc/{self.processes[name][0].pid}/stat")
        deadline_s = time.monotonic() + PATIENCE_S
        while stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def signal(self, name: str, number: int) -> None:
        pid = self.processes[name][0].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process, pipe in self.processes.values():
            pipe.close()
            process.kill()
            process.join()
