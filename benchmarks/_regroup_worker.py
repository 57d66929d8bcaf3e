"""A worker process for regroup.py: it denoises in groups, and says when what happened.

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from spotlight.diffusion.samplers import ODE
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.rollout.engine import Engine
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.communicators import Gloo
from spotlight.rollout.sequence_parallel.lockstep import Follower, Lead
from spotlight.rollout.sequence_parallel.membership import GroupLostError, SpGroup, SpMembership
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.testbed import PIPELINE_DIR
from spotlight_rewards.base.prompts import PromptId

PROMPT = "a photo of a red circle"
ROLLOUTS = 4
STEPS = 900
"""More than any round takes."""

RECIPE = Recipe(MediaSize(32, 32), ODE(), None, 1.0, "final")


@dataclass(frozen=True, slots=True)
class Ran:
    """All steps were taken; when the last was."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The group was lost; when this rank noticed, and when it had left."""

    noticed_s: float
    destroyed_s: float


class TimedGloo(Gloo):
    """Gloo that notes when it was last closed: that is, when a loss was noticed."""

    def __init__(self, collective_s: float) -> None:
        super().__init__(collective_s)
        self.closing_s = self.closed_s = 0.0

    def close(self) -> None:
        self.closing_s = time.monotonic()
        super().close()
        self.closed_s = time.monotonic()


class Worker:
    """One rank, its engine, and the rollouts it holds."""

    def __init__(self, name: WorkerId, address: Address, cache: Path) -> None:
        torch.set_num_threads(1)
        self._family = QwenImage.load(PIPELINE_DIR, device="cpu", dtype=torch.float32, embeddings_cache=cache)
        self._communicator = TimedGloo(collective_s=30.0)
        self._parallel = SequenceParallel([self._family.transformer])
        self._membership = SpMembership(
            name, rendezvous.connect(address), self._communicator, self._parallel, form_s=30.0
        )
        self._engine = Engine(self._family, max_batch=ROLLOUTS)
        self._states = self._started()

    def _started(self) -> list[RolloutState]:
        (condition,) = self._family.encode([PROMPT])
        rollouts = [
            Rollout(RolloutId(f"r{i}"), Purpose.EVAL, 0, PromptId("p"), i, i, STEPS, PolicyVersion(0))
            for i in range(ROLLOUTS)
        ]
        return self._engine.start(rollouts, [condition] * ROLLOUTS, RECIPE)

    def form(self, epoch: int, members: Sequence[WorkerId]) -> float:
        """Form a group; when it was done."""
        self._membership.form(SpGroup(epoch, tuple(members)))
        return time.monotonic()

    def run(self, steps: int | None) -> Ran | Lost:
        """Denoise together, ``steps`` steps or until the group is lost."""
        try:
            if self._membership.leads:
                self._lead(steps)
            else:
                self._follow()
        except GroupLostError:
            return Lost(self._communicator.closing_s, self._communicator.closed_s)
        return Ran(time.monotonic())

    def _lead(self, steps: int | None) -> None:
        lead = Lead(self._engine, self._membership)
        for _ in itertools.count() if steps is None else range(steps):
            self._states = lead.step("policy", self._family.transformer, self._states)
        lead.end()

    def _follow(self) -> None:
        @contextmanager
        def use(slot: str) -> Iterator[nn.Module]:
            yield self._family.transformer

        follower = Follower(self._engine, self._membership, {Purpose.EVAL: RECIPE}, use)
        try:
            follower.run()
        finally:
            self._states = list(follower.states)


def serve(name: WorkerId, pipe: Connection, address: Address, cache: Path) -> None:
    """Carry out commands (``form`` or ``run``, with arguments) until the pipe closes."""
    worker = Worker(name, address, cache)
    pipe.send(time.monotonic())
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(worker.form(*arguments) if command == "form" else worker.run(*arguments))
