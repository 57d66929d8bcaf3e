"""Processes that rows start; spawned where there is CUDA, which does not survive a fork."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor

from benchmarks.gpu import lab as model
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.runner import die_with_parent
from spotlight.models.skeleton import base_state, modules_of
from spotlight.rollout.commits import Committer, latents_of, restore
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.communicators import communicator
from spotlight.rollout.state import RolloutState
from spotlight.training.learner import Learner
from spotlight.training.sharding import shard_module
from spotlight_plan.commands.gpu.random_blocks import random_adapters
from spotlight_weights.peers import WeightServer
from spotlight_weights.served_weights import ServedWeights

DIGEST = "base"
STEPS = 8
_START_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a child works: what :class:`Lab` is made of."""

    home: Path
    device: str
    tiny: bool

    def lab(self) -> Lab:
        """A lab of the child's own."""
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return Lab(self.home, device, tiny=self.tiny)


def place(lab: Lab) -> Place:
    """Beside this process's lab."""
    return Place(lab.home, str(lab.device), lab.tiny)


class Child:
    """A child process: ``work(place, pipe, *arguments)`` sends values; :meth:`receive` gets them."""

    def __init__(self, work: Callable[..., None], lab: Lab, *arguments: object) -> None:
        method = "spawn" if lab.device.type == "cuda" else "forkserver"
        context: Any = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(work, place(lab), theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = _START_S) -> Any:
        """The next value.

        Raises:
            TimeoutError: none came in time.
            RuntimeError: the child raised, or ended.
        """
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"{self.process.name} said nothing for {timeout_s:g} s")
        try:
            value = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            raise RuntimeError(f"a child ended with exit code {self.process.exitcode}") from None
        if isinstance(value, Raised):
            raise RuntimeError(f"in a child: {value.what}")
        return value

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.pipe.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """A child's exception."""

    what: str


def _run(work: Callable[..., None], where: Place, pipe: Connection, *arguments: object) -> None:
    die_with_parent()
    try:
        work(where, pipe, *arguments)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send(Raised(f"{type(error).__name__}: {str(error).strip()[:500]}"))


# -- rollouts ----------------------------------------------------------------------------------------------


def roll_out_and_commit(where: Place, pipe: Connection) -> None:
    """Denoise, commit every step, and say which."""
    lab = where.lab()
    family, shape = lab.fresh(lab.scale.few_layers), lab.scale.small
    engine = lab.engine(family, shape)
    states, committer = lab.start(family, engine, shape, STEPS, stochastic=True), Committer()
    while not all(state.done for state in states):
        states = engine.step(family.transformer, states)
        aside = where.home / "commit.part"
        aside.mkdir()
        for value in committer.begin(states):
            folder = where.home if value.latent else aside
            (folder / f"{value.rollout}{value.latent}").write_bytes(value.data)
        aside.rename(where.home / f"commit{states[0].step}")
        pipe.send(states[0].step)
    pipe.send("done")


def _restored(commit: Path, of: RolloutState, device: torch.device) -> RolloutState:
    data = (commit / of.rollout.id).read_bytes()
    latents = [(commit.parent / f"{of.rollout.id}{name}").read_bytes() for name in latents_of(data)]
    return restore(data, latents, of.condition, of.recipe, device)


def resume_and_compare(where: Place, pipe: Connection) -> None:
    """Continue from the newest commit, then run again without interruption: values that differ."""
    lab = where.lab()
    family, shape = lab.fresh(lab.scale.few_layers), lab.scale.small
    engine = lab.engine(family, shape)
    newest = max(where.home.glob("commit[0-9]*"), key=lambda path: int(path.name.removeprefix("commit")))
    fresh = lab.start(family, engine, shape, STEPS, stochastic=True)
    kept = [_restored(newest, state, lab.device) for state in fresh]
    began = {state.step for state in kept}
    resumed = model.all_steps(engine, family.transformer, kept)
    whole = model.all_steps(engine, family.transformer, fresh)
    different = sum(
        int((a != b).sum())
        for one, other in zip(resumed, whole, strict=True)
        for a, b in (
            (one.latents, other.latents),
            (torch.stack(one.kept), torch.stack(other.kept)),
            (torch.stack(one.log_probs), torch.stack(other.log_probs)),
        )
    )
    finite = all(bool(state.latents.isfinite().all()) for state in whole)
    pipe.send((different if finite else float("nan"), sorted(began)))


def roll_out_forever(where: Place, pipe: Connection, layers: int) -> None:
    """Denoise on request: each message is a number of seconds; answers with steps a second."""
    lab = where.lab()
    family, shape = lab.fresh(layers), lab.scale.small
    engine = lab.engine(family, shape)
    states = lab.start(family, engine, shape, STEPS)
    engine.step(family.transformer, states)
    pipe.send("ready")
    while True:
        seconds = pipe.recv()
        steps, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            engine.step(family.transformer, states)[0].latents.sum().item()  # wait for the device
            steps += 1
        pipe.send(steps / (time.monotonic() - began))


# -- weights -----------------------------------------------------------------------------------------------


def serve_weights(where: Place, pipe: Connection, layers: int, bucket_bytes: int) -> None:
    """Hold the model and serve it until killed; says its number of bytes."""
    lab = where.lab()
    base = base_state(lab.fresh(layers).transformer)
    with WeightServer(
        where.home / "peers", "w0", ServedWeights(base, modules_of(base), DIGEST), bucket_bytes=bucket_bytes
    ):
        pipe.send(sum(tensor.nbytes for tensor in base.values()))
        pipe.recv()


# -- groups ------------------------------------------------------------------------------------------------


def gradients_on_a_mesh(where: Place, pipe: Connection) -> None:
    """Gradients before and after sharding over a mesh of one rank: their distance; whether it sharded."""
    lab = where.lab()
    family, shape = lab.fresh(lab.scale.few_layers), lab.scale.train_small
    slots = random_adapters(family, lab.scale.rank)
    samples = lab.samples(family, slots, shape, 4)
    alone = lab.learner(family, slots, shape, recompute="blocks")
    model.accumulate(alone, samples)
    expected = {name: grad.clone() for name, grad in _gradients(alone).items()}
    alone.optimizer.zero_grad(set_to_none=True)
    store, _ = rendezvous.serve()
    backend = "nccl" if lab.device.type == "cuda" else "gloo"
    index = lab.device if lab.device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=index)
    for module in slots.modules().values():
        shard_module(module, family.dtype)
    sharded = lab.learner(family, slots, shape, recompute="blocks")
    model.accumulate(sharded, samples)
    found = {name: _whole(grad) for name, grad in _gradients(sharded).items()}
    error = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    length = sum(float(value.double().square().sum()) for value in expected.values())
    sharded.step()
    trained = list(sharded.slots.trainable_parameters().values())
    pipe.send(((error / length) ** 0.5, all(isinstance(parameter, DTensor) for parameter in trained)))
    dist.destroy_process_group()


def _gradients(learner: Learner) -> dict[str, torch.Tensor]:
    # The last block's text goes nowhere: its adapters have none.
    parameters = learner.slots.trainable_parameters()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def open_and_close(where: Place, pipe: Connection, times: int, collective_s: float) -> None:
    """A group of one, again and again: seconds of each time, and bytes lost from the third on."""
    lab = where.lab()
    store, _ = rendezvous.serve()
    group = communicator(lab.device, collective_s)
    seconds, held = [], []
    for turn in range(times):
        began = time.monotonic()
        group.open(PrefixStore(str(turn), store), 0, 1)
        with group.bounded():
            ones = torch.ones(1, device=lab.device)
            dist.all_reduce(ones)
        group.close()
        seconds.append(time.monotonic() - began)
        held.append(_held_bytes(lab.device))
    pipe.send((seconds, held[-1] - held[2]))


def _held_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_group(
    where: Place, pipe: Connection, address: rendezvous.Address, rank: int, limit_s: float
) -> None:
    """Try to open a group of two under a limit; says the error's name, or ``opened``, and seconds."""
    lab = where.lab()
    store = rendezvous.connect(address)
    group = communicator(lab.device, limit_s)
    pipe.send("begins")
    began = time.monotonic()
    try:
        group.open(PrefixStore("two", store), rank, 2)
        with group.bounded():
            dist.all_reduce(torch.ones(1, device=lab.device))
    except RuntimeError as error:
        pipe.send((type(error).__name__, str(error)[:300], time.monotonic() - began))
    else:
        pipe.send(("opened", "", time.monotonic() - began))
    pipe.recv()  # the others may still need this process
