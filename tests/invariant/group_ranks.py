"""Living worker processes for tests of sequence-parallel groups, told what to do through pipes.

    workers = Workers(Model(pipeline, cache), count=4)
    workers.form(1, "w0", "w1")
    workers.tell("w0", "denoise"); workers.answer("w0")

They are forked from a server that has imported everything: seconds are saved for each.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spotlight.diffusion.samplers import FlowSDE
from spotlight.diffusion.schedule import RandomWindow
from spotlight.models.condition import model_input
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.rollout.engine import Engine
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel import ulysses as sequence_parallel
from spotlight.rollout.sequence_parallel.communicators import Communicator, Gloo
from spotlight.rollout.sequence_parallel.lockstep import Follower, Lead
from spotlight.rollout.sequence_parallel.membership import GroupLostError, SpGroup, SpMembership
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight_rewards.base.prompts import PromptId

PROMPTS = ("one red circle", "two blue squares", "two blue squares left of one yellow triangle, all on white")
STEPS = 5
PATIENCE_S = 120.0
"""No test waits longer for an answer; a busy machine is slow now and then."""

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Work:
    """Rollouts to start: seed ``s`` has prompt ``s % 3``."""

    seeds: tuple[int, ...]
    size: tuple[int, ...] = (16, 16)
    """Height, width, frames."""
    guidance: float = 1.0
    embedded: float | None = None
    step_cache: int = 1
    """Above 1 they are previews."""
    references: tuple[tuple[str, ...], ...] = ((), (), ())
    """Pictures that each of the prompts is about."""

    @property
    def recipe(self) -> Recipe:
        size, window = MediaSize(*self.size), RandomWindow(2)
        recipe = Recipe(size, FlowSDE(0.7), window, self.guidance, "trajectory", self.embedded)
        if self.purpose is Purpose.TRAIN:
            return recipe
        return recipe.preview(STEPS, step_cache=self.step_cache)

    @property
    def purpose(self) -> Purpose:
        return Purpose.EXPLORE if self.step_cache > 1 else Purpose.TRAIN


@dataclass(frozen=True)
class Mishap:
    """What happens to a worker within a step, before the attention of a block: kill, stop or raise."""

    kind: str
    step: int
    block: int
    forwards: int = 1
    """Of a step; it happens in the last."""


@dataclass(frozen=True)
class Model:
    """What every worker loads."""

    pipeline: Path
    cache: Path
    family: str = "qwen-image"
    max_text_tokens: int = 512
    guidance: bool = False
    """Whether halves of a group make one of guidance's passes each."""
    link: Callable[[float], Communicator] = Gloo
    """Of the groups, by the time limit of a collective."""


@dataclass
class Worker:
    """The process's side."""

    name: WorkerId
    family: ModelFamily
    membership: SpMembership
    parallel: SequenceParallel
    communicator: Communicator
    engine: Engine
    work: Work = field(default_factory=lambda: Work(()))
    states: dict[RolloutId, RolloutState] = field(default_factory=dict)

    def form(self, epoch: int, members: Sequence[WorkerId]) -> tuple[int, bool]:
        self.membership.form(SpGroup(epoch, tuple(members)))
        return self.membership.group.degree, self.parallel.active

    def part(self) -> None:
        self.membership.part()

    def patience(self, collective_s: float, form_s: float) -> None:
        self.communicator.collective_s, self.membership._form_s = collective_s, form_s

    def link(self, method: str, *arguments: object) -> Any:
        """Call the communicator."""
        return getattr(self.communicator, method)(*arguments)

    def start(self, work: Work) -> None:
        """The rollouts at pure noise, in the leader; followers get them from it."""
        inputs = [
            model_input(*each, " ", MediaSize(*work.size))
            for each in zip(PROMPTS, work.references, strict=True)
        ]
        conditions = self.family.encode([inputs[seed % 3] for seed in work.seeds])
        rollouts = [
            Rollout(RolloutId(f"r{s}"), work.purpose, 3, PromptId(f"p{s % 3}"), s, s, STEPS, PolicyVersion(2))
            for s in work.seeds
        ]
        self.expect(work)
        self.states = {s.rollout.id: s for s in self.engine.start(rollouts, conditions, work.recipe)}

    def expect(self, work: Work) -> None:
        self.work, self.states = work, {}

    def keep(self, ids: Sequence[RolloutId]) -> None:
        """Go on with these of the states held."""
        self.states = {name: self.states[name] for name in ids}

    def denoise(self, steps: int = STEPS, mishap: Mishap | None = None) -> tuple[str, float]:
        """Take part in up to ``steps`` steps; (why the group was lost, when), if it was."""
        with self._injected(mishap):
            try:
                if self.membership.leads:
                    self._lead(steps)
                else:
                    self._follow()
            except GroupLostError as error:
                return str(error), time.monotonic()
        return "", 0.0

    def _lead(self, steps: int) -> None:
        lead = Lead(self.engine, self.membership)
        for _ in range(steps):
            ids, before = list(self.states), list(self.states.values())
            after = lead.step("policy", self.family.transformer, before)
            self.states = dict(zip(ids, after, strict=True))
        lead.end()

    def _follow(self) -> None:
        @contextmanager
        def use(slot: str) -> Iterator[nn.Module]:
            assert slot == "policy"
            yield self.family.transformer

        follower = Follower(self.engine, self.membership, {self.work.purpose: self.work.recipe}, use)
        try:
            follower.run()
        finally:
            self.states = {state.rollout.id: state for state in follower.states}

    def results(self) -> dict[str, tuple[int, Tensor]]:
        """Steps taken and latents of all that is held."""
        return {name: (state.step, state.latents) for name, state in self.states.items()}

    def velocity(self, image_tokens: int, text_tokens: int, batch: int, masked: bool) -> Tensor:
        """One forward on inputs that every worker draws alike; image tokens in one row."""
        with torch.no_grad():
            return velocity(self.family.transformer, image_tokens, text_tokens, batch, masked)

    def theirs(self, image_tokens: int, text_tokens: int, batch: int, masked: bool) -> Tensor:
        """The same forward with diffusers' own hooks, in its mode for lengths that do not divide."""
        self.parallel.leave()
        config = sequence_parallel._config(dist.group.WORLD)
        config.context_parallel_config.ulysses_anything = True
        config.context_parallel_config._flattened_mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        transformer = self.family.transformer
        apply_context_parallel(transformer, config.context_parallel_config, transformer._cp_plan)
        sequence_parallel._set_config(sequence_parallel._attentions(transformer), config)
        try:
            return self.velocity(image_tokens, text_tokens, batch, masked)
        finally:
            remove_context_parallel(transformer, transformer._cp_plan)
            self.parallel.leave()

    def gradients(self) -> None:
        with torch.enable_grad():
            velocity(self.family.transformer, 4, 4, 1, False)

    def hooks(self) -> int:
        """What splitting leaves in the transformer."""
        modules = list(self.family.transformer.modules())
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    @contextmanager
    def _injected(self, mishap: Mishap | None) -> Iterator[None]:
        if mishap is None:
            yield
            return
        calls = 0

        def inject(module: nn.Module, args: object) -> None:
            nonlocal calls
            calls += 1
            if calls == (mishap.step + 1) * mishap.forwards:
                if mishap.kind == "raise":
                    raise ArithmeticError("this rank's own failure")
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[mishap.kind])

        handles = [
            sequence_parallel_modules(part)[mishap.block].register_forward_pre_hook(inject)
            for part in denoisers(self.family.transformer).values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def velocity(transformer: nn.Module, image_tokens: int, text_tokens: int, batch: int, masked: bool) -> Tensor:
    """See :meth:`Worker.velocity`; with a mask, row ``i`` has ``i`` text tokens less."""
    generator = torch.Generator().manual_seed(image_tokens * 1000 + text_tokens)
    lengths = torch.tensor([max(1, text_tokens - row) for row in range(batch)])
    mask = torch.arange(text_tokens) < lengths[:, None] if masked else None
    result: Tensor = transformer(
        hidden_states=torch.randn(batch, image_tokens, 48, generator=generator),
        encoder_hidden_states=torch.randn(batch, text_tokens, 64, generator=generator),
        encoder_hidden_states_mask=mask,
        timestep=torch.full((batch,), 0.5),
        img_shapes=[[(1, 1, image_tokens)]] * batch,
        return_dict=False,
    )[0]
    return result


def sequence_parallel_modules(transformer: nn.Module) -> list[nn.Module]:
    """The attention modules that are split, in order; each runs once per forward."""
    return [m for m in transformer.modules() if hasattr(getattr(m, "processor", None), "_parallel_config")]


def serve(name: WorkerId, pipe: Connection, address: Address, model: Model) -> None:
    """Carry out commands until the pipe closes."""
    torch.set_num_threads(1)
    family = FAMILIES.load(model.family).load(
        model.pipeline,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=model.cache,
        max_text_tokens=model.max_text_tokens,
    )
    communicator = model.link(60.0)
    parallel = SequenceParallel([family.transformer], guidance=model.guidance)
    membership = SpMembership(name, rendezvous.connect(address), communicator, parallel, form_s=60.0)
    engine = Engine(family, max_batch=16, negative=family.encode([" "])[0])
    worker = Worker(name, family, membership, parallel, communicator, engine)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", getattr(worker, command)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the test's side raises it
            pipe.send(("failed", error))


class Workers:
    """The test's side: processes by name, all with the same weights."""

    def __init__(self, model: Model, count: int) -> None:
        self.store, self.address = rendezvous.serve()
        self.model = model
        self._processes: dict[str, tuple[BaseProcess, Connection]] = {}
        self._epoch = 0
        for i in range(count):
            self.spawn(f"w{i}")
        for name in list(self._processes):
            self.ask(name, "part")

    def spawn(self, name: str) -> None:
        """A new process under a name whose bearer is dead."""
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=serve, args=(name, theirs, self.address, self.model), daemon=True)
        process.start()
        theirs.close()
        self._processes[name] = (process, ours)

    def revive(self) -> None:
        """Put processes in the place of dead ones, so that a test that failed harms no other."""
        for name, (process, _) in list(self._processes.items()):
            if not process.is_alive():
                self.spawn(name)

    def tell(self, name: str, command: str, *arguments: object) -> None:
        self._processes[name][1].send((command, arguments))

    def answer(self, name: str) -> Any:
        """The answer to what it was told; its exception is raised here."""
        pipe = self._processes[name][1]
        assert pipe.poll(PATIENCE_S), f"{name} does not answer"
        outcome, value = pipe.recv()
        if outcome == "failed":
            raise value
        return value

    def ask(self, name: str, command: str, *arguments: object) -> Any:
        self.tell(name, command, *arguments)
        return self.answer(name)

    def all(self, names: Sequence[str], command: str, *arguments: object) -> list[Any]:
        """Tell all at once, then take all answers."""
        for name in names:
            self.tell(name, command, *arguments)
        return [self.answer(name) for name in names]

    def form(self, *names: str) -> int:
        """Form a group under a new epoch, which is returned."""
        self._epoch += 1
        degree = len(names)
        assert self.all(names, "form", self._epoch, names) == [(degree, degree > 1)] * degree
        return self._epoch

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def denoise(self, work: Work, *names: str) -> dict[str, tuple[int, Tensor]]:
        """Make rollouts in the group of ``names``; all of them must end with equal bits."""
        self.ask(names[0], "start", work)
        self.all(names[1:], "expect", work)
        assert self.all(names, "denoise") == [("", 0.0)] * len(names)
        first, *others = self.all(names, "results")
        for held in others:
            assert held.keys() == first.keys()
            assert all(torch.equal(held[name][1], first[name][1]) for name in first)
        return dict(first)

    def gone(self, name: str) -> bool:
        """Wait for a process to die."""
        process = self._processes[name][0]
        process.join(PATIENCE_S)
        return not process.is_alive()

    def signal(self, name: str, number: int) -> None:
        pid = self._processes[name][0].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process, pipe in self._processes.values():
            pipe.close()
            process.kill()
            process.join()


TOLERANCE = 1e-5
"""Largest difference of latents (standard deviation about 1) that a degree may make; measured: below 3e-6."""

ALL = ("w0", "w1", "w2", "w3")
PLAIN = Work((0, 1, 2))
"""One batch of three prompts of different length."""


def assert_same(results: dict[str, tuple[int, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, (step, latents) in results.items():
        assert step == STEPS
        assert (latents - expected[name]).abs().max() <= TOLERANCE


def kill_and_go_on(
    workers: Workers, undisturbed: dict[str, Tensor], victim: str, mishap: Mishap, work: Work = PLAIN
) -> None:
    """One of four dies within a step; two survivors go on together and one alone, from what they hold."""
    workers.form(*ALL)
    workers.ask("w0", "start", work)
    workers.all(ALL[1:], "expect", work)
    for name in ALL:
        workers.tell(name, "denoise", STEPS, mishap if name == victim else None)
    assert workers.gone(victim)
    pair, single = [name for name in ALL if name != victim][:2], [name for name in ALL if name != victim][2]
    for name in (*pair, single):
        why, _ = workers.answer(name)
        assert "lost the group of w0, w1, w2, w3" in why
        assert workers.ask(name, "hooks") == 0  # alone already, before it is told anything
        held = workers.ask(name, "results")
        assert {step for step, _ in held.values()} == {mishap.step}
    workers.all(pair, "keep", ["r0", "r2"])
    workers.ask(single, "keep", ["r1"])
    workers.form(*pair)
    workers.form(single)
    assert workers.all((*pair, single), "denoise") == [("", 0.0)] * 3
    finished = workers.ask(pair[1], "results") | workers.ask(single, "results")
    assert finished.keys() == undisturbed.keys()
    assert_same(finished, undisturbed)
    workers.spawn(victim)  # and the group is whole again
    workers.form(*ALL)
    assert_same(workers.denoise(work, *ALL), undisturbed)
