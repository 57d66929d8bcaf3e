"""All learner ranks as one, seen by the head: calls go to every rank, answers come back, or the life is lost.

    restore() ─► starting ─► up ── prepare(), accumulate(), step() ... one after the other ──► lost()
                    └─ failed to start: reported once, tried again after a pause that grows

Invariants:
- A life ends once. A rank that dies, misses a deadline or raises what it should not ends it for all ranks:
  they are killed, :meth:`LearnerGroup.lost` returns, and every call that was made of that life raises
  :class:`~spotlight.cluster.remote_calls.AbandonedError`.
- One call is under way at a time, in the order in which they were made, so its deadline is its own.
- Errors that a person must fix (:data:`FINAL`) are raised as they are, and nothing is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from spotlight.cluster.remote_calls import AbandonedError, Notify, wait_within
from spotlight.config.errors import ConfigError
from spotlight.data.prompt_files import PromptFileError
from spotlight.models.model_errors import ModelError
from spotlight.runtime.process import DeviceMemoryError
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import MicroBatch, PolicyVersion, PromptId, Rollout, RolloutId
from spotlight.store.store_errors import StoreError
from spotlight.training.learner_state import StateError
from spotlight.training.settings import TrainingError
from spotlight.weights.bundle import WeightsManifest
from spotlight.weights.weight_errors import WeightsError

Answers = list[Any]
"""What the ranks that were asked returned, in order of rank."""

FINAL: tuple[type[Exception], ...] = (
    *(ConfigError, PromptFileError, ModelError, StoreError, StateError),
    *(TrainingError, WeightsError, DeviceMemoryError, torch.OutOfMemoryError),
)
"""Under the inline driver these end a run, with a remedy; a restart would only meet them again."""

START_FAILED: tuple[type[Exception], ...] = (AbandonedError, *FINAL)
"""What ends a life that starts."""

_RAISED_IN_A_ROW = 3
"""So many lives end in an unexpected error, without a checkpoint between: then it is no accident."""


class LearnerError(RuntimeError):
    """The learner fails again and again in the same way: says what it raised."""


class RankHandle(Protocol):
    """The process of one rank."""

    @property
    def rank(self) -> int:
        """Which one."""

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        """Begin a call, at once. The answer raises when the call does or the process dies."""

    def gone(self) -> Awaitable[Any]:
        """Answered (or raises) when the process is dead, and never before."""


class Launcher(Protocol):
    """Starts and ends processes; see :class:`spotlight.cluster.learner.learner_actor.RayLauncher`."""

    world: int

    async def start(self, life: int) -> Sequence[RankHandle]:
        """A process for every rank, in order; they may still be starting up. Raises LookupError: no room."""

    async def end(self, ranks: Sequence[RankHandle], suspects: Sequence[int]) -> str:
        """Kill them all; returns the last lines of the logs of ``suspects``."""

    def meeting_hosts(self, ranks: Sequence[RankHandle]) -> list[str]:
        """The address at which each process's machine is reached by the others."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the head waits for the ranks.

    Attributes:
        start_s: until all processes run and see the run directory.
        load_s: for loading the model, for embedding the prompts, and for building the learner: each.
        answer_s: for any other call.
        pause_s, pause_max_s: before a start that follows a failed one; doubles each time.
        suspect_s: when a rank raises, the deaths that may have caused it are waited for.
    """

    start_s: float = 600.0
    load_s: float = 7200.0
    answer_s: float = 1800.0
    pause_s: float = 1.0
    pause_max_s: float = 60.0
    suspect_s: float = 1.0

    def pause_before_s(self, doublings: int) -> float:
        """No pause for a negative number."""
        return 0.0 if doublings < 0 else min(self.pause_s * 2.0 ** min(doublings, 30), self.pause_max_s)


@dataclass(frozen=True, slots=True)
class _End:
    """Why a life ended: because of ``ranks``. ``raised``: an unexpected error; ``final``: one of FINAL."""

    detail: str
    ranks: Sequence[int] = ()
    raised: bool = False
    final: Exception | None = None


class _Life:
    """The processes of all ranks, from a start to the first failure of any of them."""

    def __init__(self, number: int, suspect_s: float) -> None:
        self.number, self._suspect_s = number, suspect_s
        self.ranks: Sequence[RankHandle] = ()
        self.up = False
        self.over: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self._deaths: list[asyncio.Future[Any]] = []

    def end(self, end: _End) -> None:
        """The first reason counts."""
        if not self.over.done():
            self.over.set_result(end)
        for death in self._deaths:
            death.cancel()

    def begin(self, ranks: Sequence[RankHandle]) -> None:
        """The processes are started: their deaths end the life from now on."""
        self.ranks = ranks
        for rank in ranks:
            death = asyncio.ensure_future(rank.gone())
            death.add_done_callback(lambda done, rank=rank.rank: self._died(rank, done))  # type: ignore[misc]
            self._deaths.append(death)

    async def ask(
        self,
        method: str,
        *args: object,
        deadline_s: float,
        first_only: bool = False,
        each: Sequence[tuple[object, ...]] | None = None,
    ) -> Answers:
        """Call all ranks, or rank 0 alone.

        Args:
            each: further arguments, different for each rank.

        Raises:
            AbandonedError: the life is over.
            Exception: one of :data:`FINAL`, which ends the life too.
        """
        async with self._turn:
            if self.over.done():
                raise AbandonedError(method)
            asked = self.ranks[:1] if first_only else self.ranks
            calls: dict[asyncio.Future[Any], int] = {
                asyncio.ensure_future(rank.call(method, *args, *(each[rank.rank] if each else ()))): rank.rank
                for rank in asked
            }
            try:
                await self._answered(calls, method, deadline_s)
                return [call.result() for call in calls]
            finally:
                for call in calls:
                    call.cancel()

    async def _answered(
        self, calls: Mapping[asyncio.Future[Any], int], method: str, deadline_s: float
    ) -> None:
        """Return once all calls are answered; else end the life, and raise."""
        clock = asyncio.get_running_loop().time
        due_s, waiting = clock() + deadline_s, set(calls)
        suspicion: tuple[int, BaseException] | None = None
        while waiting or suspicion:
            done = await wait_within({*waiting, self.over}, due_s - clock())
            if not done:
                late = sorted(calls[call] for call in waiting)
                self.end(
                    _raised(*suspicion) if suspicion else _late(late, len(self.ranks), method, deadline_s)
                )
            if self.over.done():
                raise AbandonedError(method)
            for call in sorted(done, key=calls.__getitem__):
                if (error := call.exception()) is None:
                    continue
                cause = getattr(error, "cause", error)  # Ray wraps what a process raised
                if isinstance(cause, FINAL):
                    self.end(_End(str(cause), final=cause))
                    raise cause
                if suspicion is None:
                    # A collective fails on the ranks that live: which one died becomes known a moment later.
                    suspicion, due_s = (calls[call], error), clock() + self._suspect_s
            waiting -= done

    def _died(self, rank: int, dead: asyncio.Future[Any]) -> None:
        if dead.cancelled():
            return
        error = dead.exception()
        what = "died" if self.up else "did not start"
        self.end(_End(f"learner rank {rank} {what}" + (f": {_described(error)}" if error else ""), (rank,)))


class LearnerGroup:
    """The learner, for the head. Its coroutines belong to one event loop.

    Args:
        note: receives, once for each :meth:`restore`, why the learner does not start.
    """

    def __init__(self, launcher: Launcher, note: Notify, deadlines: Deadlines | None = None) -> None:
        self._launcher, self._note = launcher, note
        self._deadlines = deadlines or Deadlines()
        self._life: _Life | None = None
        self._lives = 0
        self._lost_in_a_row = 0
        self._raised_in_a_row = 0

    @property
    def is_up(self) -> bool:
        """Whether all ranks are there and can be asked."""
        return self._life is not None and self._life.up and not self._life.over.done()

    @property
    def life(self) -> int:
        """Counts starts of all ranks; each attempt to start is one."""
        return self._lives

    # -- lives -----------------------------------------------------------------------------------------

    async def restore(self, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        """Start all ranks anew, from the state in ``checkpoint`` or the start of the run, and publish it.

        Ranks that still live are killed first. A start that fails is tried again, ever more slowly. Call
        :meth:`lost` as soon as it has returned.

        Args:
            checkpoint: the learner's folder of a checkpoint, on the shared storage.
            lineage: of what is published.

        Returns:
            The manifest of the weights that the learner stands at.

        Raises:
            AbandonedError: :meth:`restore` or :meth:`stop` was called meanwhile.
            LearnerError: it failed in the same way several times in a row.
            Exception: one of :data:`FINAL`.
        """
        await self.stop()
        for attempt in count():
            life = self._begin_life()
            urgent = self._lost_in_a_row - 2 if attempt == 0 else attempt - 1  # the first restart is
            try:
                await self._pause(life, self._deadlines.pause_before_s(urgent))
                return await self._start(life, checkpoint, lineage)
            except START_FAILED:
                detail = await self._bury(life)
            if attempt == 0:
                self._note(
                    f"the learner does not start: {detail}\n"
                    f"(start {life.number} of the learner; it is tried again)"
                )
        raise AssertionError("unreachable")

    async def lost(self) -> str:
        """Wait until the life that is up has ended, and its processes with it; returns how it ended.

        Raises:
            AbandonedError: :meth:`restore` or :meth:`stop` ended it.
            LearnerError: it failed in the same way several times in a row.
            Exception: one of :data:`FINAL`.
        """
        life = self._life
        assert life is not None, "restore() comes first"
        await asyncio.wait({life.over})
        detail = await self._bury(life)
        self._life = None
        self._lost_in_a_row += 1
        return detail

    async def stop(self) -> None:
        """End all ranks; nothing is reported any more."""
        life, self._life = self._life, None
        if life is not None:
            life.end(_End("it was stopped"))
            await self._launcher.end(life.ranks, ())

    def _begin_life(self) -> _Life:
        self._lives += 1
        self._life = _Life(self._lives, self._deadlines.suspect_s)
        return self._life

    async def _pause(self, life: _Life, seconds: float) -> None:
        if seconds > 0:
            await asyncio.wait({life.over}, timeout=seconds)
        if life.over.done():
            raise AbandonedError("restore")

    async def _start(self, life: _Life, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        wait = self._deadlines
        try:
            ranks = await self._launcher.start(life.number)
        except Exception as error:
            life.end(_End(f"learner ranks cannot be started: {_described(error)}"))
            raise AbandonedError("start") from error
        life.begin(ranks)
        await life.ask("begin", deadline_s=wait.start_s)
        address, hosts = None, self._launcher.meeting_hosts(ranks)
        if self._launcher.world > 1:
            (address,) = await life.ask("open_rendezvous", hosts[0], deadline_s=wait.start_s, first_only=True)
        await life.ask("join", address, deadline_s=wait.start_s, each=[(host,) for host in hosts])
        await life.ask("load_model", deadline_s=wait.load_s)
        await life.ask("build", deadline_s=wait.load_s)
        if checkpoint is not None:
            await life.ask("load", checkpoint, deadline_s=wait.load_s)
        manifest: WeightsManifest
        manifest, *_ = await life.ask("publish", None, lineage, deadline_s=wait.answer_s)
        life.up = True
        return manifest

    async def _bury(self, life: _Life) -> str:
        """Kill what is left of a life that is over; returns why it ended, with the end of the logs.

        Raises:
            AbandonedError: :meth:`restore` or :meth:`stop` ended it.
            LearnerError: it failed in the same way several times in a row.
            Exception: one of :data:`FINAL`.
        """
        end = life.over.result()
        if life is not self._life:
            await self._launcher.end(life.ranks, ())  # they may have started after it was ended
            raise AbandonedError("life")
        self._raised_in_a_row = self._raised_in_a_row + 1 if end.raised else 0
        try:
            log = await self._launcher.end(life.ranks, end.ranks)
        except Exception as error:  # noqa: BLE001 - logs are a courtesy
            log = f"(no log: {_described(error)})"
        if life is not self._life:
            raise AbandonedError("life")
        if end.final is not None:
            raise end.final
        detail = f"{end.detail}\n{log}" if log else end.detail
        if self._raised_in_a_row >= _RAISED_IN_A_ROW:
            raise LearnerError(f"the learner failed {self._raised_in_a_row} times in a row: {detail}")
        return detail

    # -- calls -----------------------------------------------------------------------------------------

    async def prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        digests: Mapping[RolloutId, str],
    ) -> None:
        """Hand an iteration's groups, or a part of them, to the ranks, which fetch their samples themselves.

        Args:
            rollouts: at least those of the effect.
            digests: of the weights that made each sample, under which it is stored.
        """
        members = [rollout for group in effect.groups for rollout in group.rollouts]
        await self._ask(
            "prepare",
            effect,
            {name: rollouts[name] for name in members},
            {name: digests[name] for name in members},
        )

    async def accumulate(self, micro_batch: MicroBatch) -> None:
        """Gradients of one micro-batch."""
        await self._ask("accumulate", micro_batch)

    async def step(self, samples: int) -> tuple[float, float]:
        """Apply them, of so many samples; returns loss and gradient norm."""
        loss, norm = (await self._ask("step", samples))[0]
        return loss, norm

    async def finish_batch(self) -> None:
        """Let the old policy follow."""
        await self._ask("finish_batch")

    async def publish(self, version: PolicyVersion, lineage: int) -> WeightsManifest:
        """Put the weights that rollouts use into the blob store, under their digest."""
        manifest: WeightsManifest = (await self._ask("publish", version, lineage))[0]
        return manifest

    async def send_conditions(self, prompts: Sequence[PromptId]) -> None:
        """Put embeddings of prompts into the blob store, and that of the negative prompt."""
        await self._ask("send_conditions", list(prompts), first_only=True)

    async def save(self, directory: Path) -> None:
        """Write the learner's state into a directory on the shared storage."""
        await self._ask("save", directory)
        self._lost_in_a_row = self._raised_in_a_row = 0

    async def take_log(self) -> dict[str, float]:
        """The numbers of the batches and updates since the last call, for the row of metrics."""
        row: dict[str, float] = (await self._ask("take_log"))[0]
        return row

    async def export(self) -> Path:
        """Export the judged weights into the run directory."""
        path: Path = (await self._ask("export"))[0]
        return path

    async def digest(self) -> str:
        """SHA-256 of the learner's whole state."""
        digest: str = (await self._ask("digest"))[0]
        return digest

    async def _ask(self, method: str, *args: object, first_only: bool = False) -> Answers:
        life = self._life
        if life is None or not life.up:
            raise AbandonedError(method)
        return await life.ask(method, *args, deadline_s=self._deadlines.answer_s, first_only=first_only)


def _late(ranks: Sequence[int], world: int, method: str, deadline_s: float) -> _End:
    hint = " (are the resources that they ask for free?)" if method == "begin" else ""
    which = ", ".join(map(str, ranks))
    return _End(
        f"learner ranks {which} of {world} did not answer {method} within {deadline_s:g} s{hint}", ranks
    )


def _raised(rank: int, error: BaseException) -> _End:
    return _End(f"learner rank {rank} failed: {_described(error)}", (rank,), raised=True)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()
