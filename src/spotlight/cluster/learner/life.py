"""One life of the learner: the processes of all its ranks, from a start to the first failure of any."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from spotlight.cluster.learner.learner_rank import LearnerRank
from spotlight.cluster.remote_calls import AbandonedError, wait_within
from spotlight.runtime.process import DeviceMemoryError
from spotlight.scheduler import effects as ef
from spotlight.scheduler.cluster.answer_limits import AGREE, REMEMBERED, longest_s
from spotlight.training.learner_state import StateError
from spotlight.training.settings import TrainingError
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_weights.bundle import WeightsManifest
from spotlight_weights.weight_errors import WeightsError

P = ParamSpec("P")
T = TypeVar("T")

FINAL: tuple[type[Exception], ...] = (
    *(ConfigError, ModelError, StoreError, StateError, TrainingError, WeightsError),
    *(DeviceMemoryError, torch.OutOfMemoryError),
)
"""These end an inline run with a remedy too; a restart would only raise them again."""


class RemoteCall(Protocol):
    """Starts a call of a method of a rank at once. The answer raises if the call does or the process dies."""

    def __call__(
        self, method: Callable[Concatenate[LearnerRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """``method(rank, *args, **kwargs)``."""


@dataclass(frozen=True, slots=True)
class RankActor:
    """Head-side handle of a rank's actor.

    Attributes:
        host: of its machine, as other nodes reach it.
    """

    rank: int
    host: str
    life: int
    actor: Any
    call: RemoteCall

    def gone(self) -> Any:
        """Completes (or raises) when the process is dead, never before."""
        return self.actor.alive.options(concurrency_group="watch").remote()


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of calls to the ranks, in seconds.

    Attributes:
        start_s: until all processes run and see the run directory.
        load_s: for each of loading the model, embedding the prompts, and building the learner.
        answer_s: for any other call, until calls of its kind were measured; see :class:`CallLimits`.
        step_s: then at least, for a call that trains; ``start_s`` for one that may wait for files.
        pause_s, pause_max_s: before a start that follows a failed one; doubles each time.
        suspect_s: after a rank raises, how long to wait for a death that may have caused it.
    """

    start_s: float = 600.0
    load_s: float = 7200.0
    answer_s: float = 1800.0
    step_s: float = 120.0
    pause_s: float = 1.0
    pause_max_s: float = 60.0
    suspect_s: float = 1.0

    def of(self, method: Callable[..., object]) -> float | None:
        """For a method of :class:`LearnerRank` that starts a life; None: for any other."""
        if method in (LearnerRank.begin, LearnerRank.open_rendezvous, LearnerRank.join):
            return self.start_s
        if method in (LearnerRank.load_model, LearnerRank.build, LearnerRank.load):
            return self.load_s
        return None

    def pause_before_s(self, doublings: int) -> float:
        """0 if ``doublings`` is negative."""
        return 0.0 if doublings < 0 else min(self.pause_s * 2.0 ** min(doublings, 30), self.pause_max_s)


CallKind: TypeAlias = tuple[str, int]
"""What is asked for, and of how much: calls that are alike take about as long."""


def kind_of(method: Callable[..., object], args: Sequence[object]) -> CallKind:
    """Of a call to the ranks."""
    match args:
        case [ef.TrainMicroBatch(micro_batch), *_]:
            return "TrainMicroBatch", len(micro_batch.rollouts)
        case [ef.PrepareBatch() as effect, *_]:
            return "PrepareBatch", len(effect.micro_batches)
        case [ef.StepOptimizer(_, update), *_]:
            return "StepOptimizer", min(update, 1)  # the first may compute old log-probs
    return method.__name__, 0


class CallLimits:
    """How long calls may take, from what such calls took in any life; the rule is that of workers.

    A process's first call of a kind may compile, so it is not measured, and has ``answer_s``.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self._took: dict[CallKind, deque[float]] = {}

    def limit_s(self, kind: CallKind, *, warm: bool) -> float:
        """Of the next call; ``warm``: these processes have answered one."""
        deadlines, took = self.deadlines, sorted(self._took.get(kind, ()))
        if len(took) < AGREE:
            return deadlines.answer_s
        trains = kind[0] in _TRAINS
        least_s = min(deadlines.answer_s, deadlines.step_s if trains else deadlines.start_s)
        return longest_s([took], deadlines.answer_s, least_s, warm=warm)

    def measured(self, kind: CallKind, seconds: float) -> None:
        """A call was answered, not the first of its kind."""
        self._took.setdefault(kind, deque(maxlen=REMEMBERED)).append(seconds)

    def expired(self, kind: CallKind) -> None:
        """A limit passed: what was measured may not tell how long such calls take now."""
        self._took.pop(kind, None)


_TRAINS = frozenset({"TrainMicroBatch", "PrepareBatch", "StepOptimizer"})


@dataclass(frozen=True, slots=True)
class End:
    """Why a life ended, through which ``ranks``.

    Attributes:
        died: the process of a rank is dead.
        raised: a rank raised an unexpected error.
        final: one of :data:`FINAL`.
    """

    detail: str
    ranks: Sequence[int] = ()
    died: bool = False
    raised: bool = False
    final: Exception | None = None


class Life:
    """The processes of all ranks.

    Attributes:
        up: they are ready for the head's calls.
        answered: calls that were answered since.
        over: done once it ends.
    """

    def __init__(self, number: int, limits: CallLimits) -> None:
        self.number, self._limits = number, limits
        self._met: set[CallKind] = set()
        self.ranks: Sequence[RankActor] = ()
        self.up, self.answered = False, 0
        self.over: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self._deaths: list[asyncio.Future[Any]] = []

    def end(self, end: End) -> None:
        """End it, unless it is over."""
        if not self.over.done():
            self.over.set_result(end)
        for death in self._deaths:
            death.cancel()

    def begin(self, ranks: Sequence[RankActor]) -> None:
        """Watch its processes."""
        self.ranks = ranks
        for rank in ranks:
            death = asyncio.ensure_future(rank.gone())
            death.add_done_callback(lambda done, rank=rank.rank: self._died(rank, done))
            self._deaths.append(death)

    async def ask(
        self, method: Callable[Concatenate[LearnerRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of all ranks, after earlier calls; returns rank 0's answer.

        Raises AbandonedError if the life is over, or one of :data:`FINAL`, which also ends it.
        """
        async with self._turn:
            if self.over.done():
                raise AbandonedError(method.__name__)
            calls: dict[asyncio.Future[T], int] = {
                asyncio.ensure_future(rank.call(method, *args, **kwargs)): rank.rank for rank in self.ranks
            }
            kind, clock = kind_of(method, args), asyncio.get_running_loop().time
            limit_s, began_s = self._limits.deadlines.of(method), clock()
            if limit_s is None:
                limit_s = self._limits.limit_s(kind, warm=kind in self._met)
            try:
                if not await self._answered(calls, method.__name__, limit_s):
                    self._limits.expired(kind)
                    raise AbandonedError(method.__name__)
                if kind in self._met:
                    self._limits.measured(kind, clock() - began_s)
                self._met.add(kind)
                self.answered += self.up
                return next(iter(calls)).result()
            finally:
                for call in calls:
                    call.cancel()

    async def publish(self, version: int | None, lineage: int) -> WeightsManifest:
        """Store the rollout weights under their digest; see :meth:`LearnerRank.publish`."""
        manifest = await self.ask(LearnerRank.publish, version, lineage)
        assert manifest is not None, "rank 0 publishes"
        return manifest

    async def _answered(
        self, calls: Mapping[asyncio.Future[Any], int], method: str, deadline_s: float
    ) -> bool:
        """Wait for all; False: one is late, which ends the life."""
        clock = asyncio.get_running_loop().time
        due_s, waiting = clock() + deadline_s, set(calls)
        suspicion: tuple[int, BaseException] | None = None
        while waiting or suspicion:
            done = await wait_within({*waiting, self.over}, due_s - clock())
            if not done and suspicion is None:
                late = sorted(calls[call] for call in waiting)
                self.end(_late(late, len(self.ranks), method, deadline_s))
                return False
            if not done and suspicion is not None:
                failed, failure = suspicion
                self.end(End(f"learner rank {failed} failed: {described(failure)}", (failed,), raised=True))
            if self.over.done():
                raise AbandonedError(method)
            for call in sorted(done, key=calls.__getitem__):
                if (error := call.exception()) is None:
                    continue
                cause = getattr(error, "cause", error)  # Ray wraps what a process raised
                if isinstance(cause, FINAL):
                    self.end(End(str(cause), final=cause))
                    raise cause
                if suspicion is None:
                    # A collective fails first on the surviving ranks; the death that caused it shows later.
                    suspicion, due_s = (calls[call], error), clock() + self._limits.deadlines.suspect_s
            waiting -= done
        return True

    def _died(self, rank: int, dead: asyncio.Future[Any]) -> None:
        if dead.cancelled():
            return
        error = dead.exception()
        what = "died" if self.up else "did not start"
        detail = f"learner rank {rank} {what}" + (f": {described(error)}" if error else "")
        self.end(End(detail, (rank,), died=True))


def _late(ranks: Sequence[int], world: int, method: str, deadline_s: float) -> End:
    hint = " (are the resources that they ask for free?)" if method == "begin" else ""
    which = ", ".join(map(str, ranks))
    return End(
        f"learner ranks {which} of {world} did not answer {method} within {deadline_s:g} s{hint}", ranks
    )


def described(error: BaseException) -> str:
    """Its type and message."""
    return f"{type(error).__name__}: {error}".strip()
