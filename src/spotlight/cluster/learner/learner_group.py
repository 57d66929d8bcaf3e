"""All learner ranks as one, seen by the head: calls go to every rank, answers come back, or the life is lost.

    restore ─► starting ─► up ── prepare, accumulate, step ... one after the other ──► lost ─► restore ...
                  └─ failed to start: told once, tried again after a pause that grows

Invariants:
- Nothing here blocks: processes answer with futures, whose callbacks are handed over to the head's loop.
- A life ends once. A rank that dies, misses a deadline or raises what it should not ends it for all ranks:
  they are killed, ``lost`` is told once, and nothing that was asked of that life is answered afterwards.
- One call is under way at a time, so its deadline is its own.
- Errors that a person must mend (:data:`FINAL`) are told as they are, and nothing is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from spotlight.config.errors import ConfigError
from spotlight.data.prompt_files import PromptFileError
from spotlight.models.model_errors import ModelError
from spotlight.runtime.process_memory import DeviceMemoryError
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import MicroBatch, PolicyVersion, PromptId, Rollout, RolloutId
from spotlight.store.store_errors import StoreError
from spotlight.training.learner_state import StateError
from spotlight.training.settings import TrainingError
from spotlight.weights.bundle import Manifest
from spotlight.weights.weight_errors import WeightsError

Answers = list[Any]
"""What the ranks that were asked returned, in order of rank."""
T = TypeVar("T")

FINAL: tuple[type[Exception], ...] = (
    *(ConfigError, PromptFileError, ModelError, StoreError, StateError),
    *(TrainingError, WeightsError, DeviceMemoryError, torch.OutOfMemoryError),
)
"""Under the inline driver these end a run, with a remedy; a restart would only meet them again."""

_RAISED_IN_A_ROW = 3
"""So many lives end in an unexpected error, without a checkpoint between: then it is no accident."""


class LearnerError(RuntimeError):
    """The learner fails again and again in the same way: says what it raised."""


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> object:
        """Do not make it."""


class Loop(Protocol):
    """The head's loop, in which everything here runs; asyncio's loops are such."""

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object:
        """Call from the loop, soon; may be used from any thread."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        """Call from the loop after so many seconds."""


class Process(Protocol):
    """The process of one rank."""

    @property
    def rank(self) -> int:
        """Which one."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Begin a call; returns at once. The future fails when the call raises or the process dies."""

    def gone(self) -> Future[Any]:
        """Done (or failed) when the process is dead, and never before."""


class Launcher(Protocol):
    """Starts and ends processes; see :class:`spotlight.cluster.learner.learner_actor.RayLauncher`."""

    world: int

    def start(self, life: int) -> Future[Sequence[Process]]:
        """A process for every rank, in order; they may still be starting up."""

    def end(self, processes: Sequence[Process], ranks: Sequence[int]) -> Future[str]:
        """Kill them all; then the last lines of the logs of ``ranks``."""

    def meeting_hosts(self, processes: Sequence[Process]) -> list[str]:
        """The address at which each process's machine is reached by the others."""


class Listener(Protocol):
    """Hears, in the head's loop, what becomes of the learner beside the answers to calls."""

    def lost(self, detail: str) -> None:
        """The learner is gone; only :meth:`LearnerGroup.restore` brings it back."""

    def failed(self, error: Exception) -> None:
        """It cannot go on, and a restart would not help: the run ends with this error."""

    def trouble(self, detail: str) -> None:
        """It does not start; more attempts follow by themselves. Told once for each restore."""


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


class State(StrEnum):
    """Where a life stands."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"


@dataclass(frozen=True, slots=True)
class _Ask:
    """A call of all ranks, or of rank 0 alone. ``each``: further arguments, different for each rank."""

    method: str
    args: tuple[object, ...] = ()
    deadline_s: float = 0.0
    first_only: bool = False
    each: Sequence[tuple[object, ...]] | None = None


@dataclass(slots=True)
class _Flight:
    """An ask under way."""

    ask: _Ask
    on_answers: Callable[[Answers], None]
    waiting: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    timer: Timer | None = None


@dataclass(slots=True)
class _Life:
    """What goes when a life ends. ``open``: futures not done, because Ray forgets calls that nobody holds."""

    number: int
    processes: Sequence[Process] = ()
    asks: deque[tuple[_Ask, Callable[[Answers], None]]] = field(default_factory=deque)
    flight: _Flight | None = None
    suspicion: tuple[int, Exception] | None = None
    timers: list[Timer] = field(default_factory=list)
    open: set[Future[Any]] = field(default_factory=set)


class LearnerGroup:
    """The learner, for the head. Every method is to be called in the head's loop, and returns at once.

    Calls are ignored while the learner is lost: what they ask for is void then.
    """

    def __init__(
        self, launcher: Launcher, loop: Loop, listener: Listener, deadlines: Deadlines | None = None
    ) -> None:
        self._launcher, self._loop, self._listener = launcher, loop, listener
        self._deadlines = deadlines or Deadlines()
        self._state = State.DOWN
        self._life = _Life(0)
        self._beginning: Callable[[], Generator[_Ask, Answers, None]] | None = None
        self._told_trouble = False
        self._starts = 0
        self._lost_in_a_row = 0
        self._raised_in_a_row = 0

    @property
    def state(self) -> State:
        """Whether the ranks are there."""
        return self._state

    @property
    def life(self) -> int:
        """Counts starts of all ranks; each attempt is one."""
        return self._life.number

    # -- lives -----------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path | None, lineage: int, on_done: Callable[[Manifest], None]) -> None:
        """Start all ranks anew, from the state in ``checkpoint`` or the start of the run, and publish it.

        Ranks that still live are killed first. What was asked before is not answered any more.

        Args:
            checkpoint: the learner's folder of a checkpoint, on the shared storage.
            lineage: of what is published.
            on_done: gets the manifest of the weights that the learner stands at.
        """
        self._end_life(())
        self._state, self._told_trouble, self._starts = State.STARTING, False, 0
        self._beginning = lambda: self._begin(checkpoint, lineage, on_done)
        self._start_after(self._pause_s(self._lost_in_a_row - 2))  # the first restart is urgent

    def stop(self) -> None:
        """End all ranks; nothing is told any more."""
        self._end_life(())
        self._state = State.DOWN

    def _begin(
        self, checkpoint: Path | None, lineage: int, on_done: Callable[[Manifest], None]
    ) -> Generator[_Ask, Answers, None]:
        wait = self._deadlines
        yield _Ask("begin", deadline_s=wait.start_s)
        address, hosts = None, self._launcher.meeting_hosts(self._life.processes)
        if self._launcher.world > 1:
            (address,) = yield _Ask("open_rendezvous", (hosts[0],), wait.start_s, first_only=True)
        yield _Ask("join", (address,), wait.start_s, each=[(host,) for host in hosts])
        yield _Ask("load_model", (), wait.load_s)
        yield _Ask("build", (), wait.load_s)
        if checkpoint is not None:
            yield _Ask("load", (checkpoint,), wait.load_s)
        manifest, *_ = yield _Ask("publish", (None, lineage), wait.answer_s)
        self._state = State.UP
        on_done(manifest)

    def _start_after(self, pause_s: float) -> None:
        if pause_s > 0:
            self._life.timers.append(self._loop.call_later(pause_s, self._start, self._life.number))
        else:
            self._start(self._life.number)

    def _start(self, life: int) -> None:
        if life != self._life.number:
            return
        self._when_done(self._launcher.start(life), lambda done: self._launched(life, done))

    def _launched(self, life: int, done: Future[Sequence[Process]]) -> None:
        error = done.exception()
        if life != self._life.number:
            if error is None:
                self._launcher.end(done.result(), ())
            return
        if error is not None:
            self._give_up(f"learner ranks cannot be started: {_told(error)}", ())
            return
        self._life.processes = done.result()
        for process in self._life.processes:
            self._listen(life, process.gone(), partial(self._died, process.rank))
        assert self._beginning is not None
        steps = self._beginning()
        self._go_on(steps, None)

    def _go_on(self, steps: Generator[_Ask, Answers, None], answers: Answers | None) -> None:
        try:
            ask = next(steps) if answers is None else steps.send(answers)
        except StopIteration:
            return
        self._put(ask, lambda told: self._go_on(steps, told))

    def _died(self, rank: int, dead: Future[Any]) -> None:
        error = dead.exception()
        what = "died" if self._state is State.UP else "did not start"
        self._give_up(f"learner rank {rank} {what}" + (f": {_told(error)}" if error else ""), (rank,))

    def _give_up(self, detail: str, ranks: Sequence[int], *, raised: bool = False) -> None:
        """End the life, because of ``ranks``: lost when it was up, else tried again."""
        was_up = self._state is State.UP
        number = self._life.number
        ended = self._end_life(ranks)
        self._raised_in_a_row = self._raised_in_a_row + 1 if raised else 0
        self._state = State.DOWN if was_up else State.STARTING
        waiting = self._life.number

        def told(log: Future[str]) -> None:
            if waiting != self._life.number:
                return
            text = f"{detail}{_log_of(log)}"
            if self._raised_in_a_row >= _RAISED_IN_A_ROW:
                self._fail(LearnerError(f"the learner failed {self._raised_in_a_row} times in a row: {text}"))
            elif was_up:
                self._lost_in_a_row += 1
                self._listener.lost(text)
            else:
                self._again(f"{text}\n(start {number} of the learner; it is tried again)")

        self._when_done(ended, told)

    def _again(self, detail: str) -> None:
        self._starts += 1
        self._start_after(self._pause_s(self._starts - 1))
        if not self._told_trouble:
            self._told_trouble = True
            self._listener.trouble(detail)

    def _fail(self, error: Exception) -> None:
        self._end_life(())
        self._state = State.DOWN
        self._listener.failed(error)

    def _end_life(self, ranks: Sequence[int]) -> Future[str]:
        old, self._life = self._life, _Life(self._life.number + 1)
        for timer in (*old.timers, *([old.flight.timer] if old.flight and old.flight.timer else [])):
            timer.cancel()
        return self._launcher.end(old.processes, ranks)

    def _pause_s(self, doublings: int) -> float:
        """No pause for a negative number."""
        wait = self._deadlines
        return 0.0 if doublings < 0 else min(wait.pause_s * 2.0 ** min(doublings, 30), wait.pause_max_s)

    # -- calls -----------------------------------------------------------------------------------------

    def prepare(
        self,
        effect: PrepareBatch,
        rollouts: Mapping[RolloutId, Rollout],
        marks: Mapping[RolloutId, str],
        on_done: Callable[[], None],
    ) -> None:
        """Hand an iteration's groups, or a part of them, to the ranks, which fetch their samples themselves.

        Args:
            rollouts: at least those of the effect.
            marks: under which each sample is kept.
        """
        members = [rollout for group in effect.groups for rollout in group.rollouts]
        mine = {rollout: rollouts[rollout] for rollout in members}
        kept_as = {rollout: marks[rollout] for rollout in members}
        self._ask("prepare", (effect, mine, kept_as), lambda _: on_done())

    def accumulate(self, micro_batch: MicroBatch, on_done: Callable[[], None]) -> None:
        """Gradients of one micro-batch."""
        self._ask("accumulate", (micro_batch,), lambda _: on_done())

    def step(self, samples: int, on_done: Callable[[float, float], None]) -> None:
        """Apply them, of so many samples; ``on_done(loss, gradient norm)``."""
        self._ask("step", (samples,), lambda answers: on_done(*answers[0]))

    def finish_batch(self, on_done: Callable[[], None]) -> None:
        """Let the old policy follow."""
        self._ask("finish_batch", (), lambda _: on_done())

    def publish(self, version: PolicyVersion, lineage: int, on_done: Callable[[Manifest], None]) -> None:
        """Put the weights that rollouts use into the keeper, under their digest."""
        self._ask("publish", (version, lineage), lambda answers: on_done(answers[0]))

    def send_conditions(self, prompts: Sequence[PromptId], on_done: Callable[[], None]) -> None:
        """Put embeddings of prompts into the keeper, and that of the negative prompt."""
        self._ask("send_conditions", (list(prompts),), lambda _: on_done(), first_only=True)

    def save(self, directory: Path, on_done: Callable[[], None]) -> None:
        """Write the learner's state into a directory on the shared storage."""

        def saved(_: Answers) -> None:
            self._lost_in_a_row = self._raised_in_a_row = 0
            on_done()

        self._ask("save", (directory,), saved)

    def take_log(self, on_done: Callable[[dict[str, float]], None]) -> None:
        """The numbers of the batches and updates since the last call, for the row of metrics."""
        self._ask("take_log", (), lambda answers: on_done(answers[0]))

    def export(self, on_done: Callable[[Path], None]) -> None:
        """Export the judged weights into the run directory."""
        self._ask("export", (), lambda answers: on_done(answers[0]))

    def digest(self, on_done: Callable[[str], None]) -> None:
        """SHA-256 of the learner's whole state."""
        self._ask("digest", (), lambda answers: on_done(answers[0]))

    def _ask(
        self,
        method: str,
        args: tuple[object, ...],
        on_answers: Callable[[Answers], None],
        *,
        first_only: bool = False,
    ) -> None:
        if self._state is State.UP:
            self._put(_Ask(method, args, self._deadlines.answer_s, first_only), on_answers)

    def _put(self, ask: _Ask, on_answers: Callable[[Answers], None]) -> None:
        self._life.asks.append((ask, on_answers))
        self._next()

    def _next(self) -> None:
        life = self._life
        if life.flight is not None or not life.asks:
            return
        ask, on_answers = life.asks.popleft()
        asked = life.processes[:1] if ask.first_only else life.processes
        flight = life.flight = _Flight(ask, on_answers, {process.rank for process in asked})
        flight.timer = self._loop.call_later(ask.deadline_s, self._late, life.number)
        for process in asked:
            each = () if ask.each is None else ask.each[process.rank]
            answer = process.call(ask.method, *ask.args, *each)
            self._listen(life.number, answer, partial(self._answered, process.rank))

    def _listen(self, life: int, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        self._life.open.add(future)

        def told(done: Future[Any]) -> None:
            if life == self._life.number:
                self._life.open.discard(done)
                then(done)

        self._when_done(future, told)

    def _when_done(self, future: Future[T], then: Callable[[Future[T]], None]) -> None:
        """Call ``then`` in the head's loop."""

        def hand_over(done: Future[T]) -> None:
            with suppress(RuntimeError):  # asyncio's, when the head is over already: nobody listens then
                self._loop.call_soon_threadsafe(then, done)

        future.add_done_callback(hand_over)

    def _answered(self, rank: int, done: Future[Any]) -> None:
        flight = self._life.flight
        error = done.exception()
        if error is not None:
            self._raised(rank, error)
            return
        assert flight is not None, "an answer to nothing"
        flight.answers[rank] = done.result()
        flight.waiting.discard(rank)
        if flight.waiting:
            return
        if flight.timer is not None:
            flight.timer.cancel()
        self._life.flight = None
        flight.on_answers([flight.answers[rank] for rank in sorted(flight.answers)])
        self._next()

    def _raised(self, rank: int, error: BaseException) -> None:
        cause = getattr(error, "cause", error)  # Ray wraps what a process raised
        if isinstance(cause, FINAL):
            self._fail(cause)
        elif self._life.suspicion is None:
            # A collective fails on the ranks that live: which rank died is told a moment later.
            self._life.suspicion = (rank, error if isinstance(error, Exception) else RuntimeError(error))
            wait = self._loop.call_later(self._deadlines.suspect_s, self._confirmed, self._life.number)
            self._life.timers.append(wait)

    def _confirmed(self, life: int) -> None:
        if life != self._life.number or self._life.suspicion is None:
            return
        rank, error = self._life.suspicion
        self._give_up(f"learner rank {rank} failed: {_told(error)}", (rank,), raised=True)

    def _late(self, life: int) -> None:
        flight = self._life.flight
        if life != self._life.number or flight is None:
            return
        late = sorted(flight.waiting)
        ranks = ", ".join(map(str, late))
        hint = " (are the resources that they ask for free?)" if flight.ask.method == "begin" else ""
        self._give_up(
            f"learner ranks {ranks} of {self._launcher.world} did not answer {flight.ask.method} within "
            f"{flight.ask.deadline_s:g} s{hint}",
            late,
        )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _log_of(log: Future[str]) -> str:
    if log.exception() is not None or not log.result():
        return ""
    return f"\n{log.result()}"
