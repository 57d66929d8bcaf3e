"""The reward pool: every reward in its own processes, with deadlines, in parallel with the rollouts.

    with RewardPool([RewardConfig(name="ocr"), RewardConfig(name="my_rewards:brightness")]) as pool:
        pool.check(prompts, metadata)                       # before any work
        pending = pool.submit(images, prompts, metadata)    # returns at once
        ...
        for sample in pending.result().samples: ...

Every reward gets every batch in one call (rewards may compare its images). One thread waits per process; no
lock is held while a reward works. Every sample ends up scored, or failed with a reason.
"""

from __future__ import annotations

import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from spotlight.config.sections.rewards import RewardConfig
from spotlight.rewards.pool.channel import Batch, Blame, CheckPrompts, Failed
from spotlight.rewards.pool.reward_process import PoolClosedError, ProcessLost, RewardProcess, setup_error
from spotlight.rewards.pool.scoring import Outcome, SharedBatch, score_batch
from spotlight.rewards.results import RewardBatch, combine
from spotlight.rewards.reward import Image, RewardInputError, RewardSetupError

Part = TypeVar("Part")
Whole = TypeVar("Whole")


@dataclass(frozen=True, slots=True)
class _Lane:
    """One reward: its processes, the idle ones among them, and one thread per process."""

    reward: RewardConfig
    processes: tuple[RewardProcess, ...]
    free: queue.SimpleQueue[RewardProcess]
    threads: ThreadPoolExecutor


class RewardPool:
    """Starts the processes of all rewards and waits until they are loaded.

    Args:
        rewards: the rewards; names must differ.
        workers: processes per reward.
        start_deadline_s: limit for starting a process and loading its reward, and for ``check``.

    Raises:
        RewardSetupError: a reward cannot be loaded; no process is left running.
        ValueError: no rewards, duplicate names, or ``workers`` < 1.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        workers: int = 1,
        *,
        start_deadline_s: float = 120.0,
    ) -> None:
        _require_distinct(rewards)
        if workers < 1:
            raise ValueError(f"workers of the reward pool is {workers}; expected 1 or more")
        self._start_deadline_s = start_deadline_s
        self._lanes = tuple(_lane(reward, workers, start_deadline_s) for reward in rewards)
        # Also runs when the pool is garbage collected, and at exit.
        self._shut_down = weakref.finalize(self, _shut_down, self._lanes)
        try:
            starts = [lane.threads.submit(each.start) for lane in self._lanes for each in lane.processes]
            for start in wait(starts, return_when=FIRST_EXCEPTION).done:
                start.result()
            for lane in self._lanes:
                _require_one_scorer(lane)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names, in order."""
        return tuple(lane.reward.curve for lane in self._lanes)

    @property
    def scored_by(self) -> dict[str, str]:
        """What scores, by the name of a reward that tells it."""
        told = {lane.reward.curve: lane.processes[0].scored_by for lane in self._lanes}
        return {name: scorer for name, scorer in told.items() if scorer}

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes running now."""
        return tuple(each.pid for lane in self._lanes for each in lane.processes if each.pid is not None)

    def log_to(self, directory: Path, prefix: str = "reward") -> None:
        """Append all output of the rewards to ``directory/PREFIX-NAME-INDEX.log``, one file per process.

        Includes earlier output. Without this call, output appears in errors only.
        """
        for lane in self._lanes:
            for index, each in enumerate(lane.processes):
                each.log_to(directory / f"{prefix}-{_file_part(lane.reward.curve)}-{index}.log")

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Let every reward check all prompts, before any work.

        Raises:
            RewardInputError: a reward cannot score a prompt.
            RewardSetupError: a reward lacks something it needs, or its check itself failed.
            ValueError: ``prompts`` and ``metadata`` differ in length.
            PoolClosedError: the pool is closed.
        """
        if len(prompts) != len(metadata):
            raise ValueError(f"{len(prompts)} prompts and {len(metadata)} metadata; expected as many")
        request = CheckPrompts(list(prompts), _plain(metadata), self._start_deadline_s)
        for pending in [self._dispatch(lane, _check, request) for lane in self._lanes]:
            pending.result()

    def submit(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Future[RewardBatch]:
        """Score a batch in the background.

        Args:
            images: uint8 [height, width, 3], or [frames, height, width, 3]; must not be modified until the
                result is available.
            prompts: one per image.
            metadata: one per image, picklable values.

        Returns:
            The results, in the order of ``images``; :class:`PoolClosedError` if the pool is closed first.

        Raises:
            ValueError: arguments differ in length, or an image has the wrong type or shape.
            PoolClosedError: the pool is closed.
        """
        _require_pictures(images, len(prompts), len(metadata))
        if not images:
            nothing: Future[RewardBatch] = Future()
            nothing.set_result(RewardBatch((), {}))
            return nothing
        batch = SharedBatch(Batch(list(images), list(prompts), _plain(metadata)))
        rewards = {lane.reward.curve: lane.reward for lane in self._lanes}

        def finish(parts: list[tuple[list[Outcome], float]]) -> RewardBatch:
            outcomes = [
                dict(zip(rewards, each, strict=True))
                for each in zip(*(part[0] for part in parts), strict=True)
            ]
            wall_s = {name: part[1] for name, part in zip(rewards, parts, strict=True)}
            return RewardBatch(tuple(combine(rewards, each) for each in outcomes), wall_s)

        return _when_all([self._dispatch(lane, _score, batch) for lane in self._lanes], finish)

    def score(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> RewardBatch:
        """Score a batch and wait; see :meth:`submit`."""
        return self.submit(images, prompts, metadata).result()

    def close(self) -> None:
        """Kill all processes and wait for them. Idempotent."""
        self._shut_down()

    def _dispatch(self, lane: _Lane, work: Callable[[_Lane, Any], Part], what: object) -> Future[Part]:
        try:
            return lane.threads.submit(work, lane, what)
        except RuntimeError as error:
            raise PoolClosedError("the reward pool is closed") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lane(reward: RewardConfig, workers: int, start_deadline_s: float) -> _Lane:
    processes = tuple(RewardProcess(reward, start_deadline_s) for _ in range(workers))
    free: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
    for each in processes:
        free.put(each)
    threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix=f"reward-{reward.curve}")
    return _Lane(reward, processes, free, threads)


def _require_one_scorer(lane: _Lane) -> None:
    scorers = sorted({str(each.scored_by) for each in lane.processes})
    if len(scorers) > 1:
        raise RewardSetupError(
            f"reward {lane.reward.curve!r} is scored by {' in one process and '.join(map(repr, scorers))} in "
            "another; expected the same. Its weights changed while they were read: start again."
        )


def _file_part(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _shut_down(lanes: Sequence[_Lane]) -> None:
    processes = [each for lane in lanes for each in lane.processes]
    for each in processes:
        each.interrupt()
    for lane in lanes:
        lane.threads.shutdown(wait=True, cancel_futures=True)
    for each in processes:
        each.close()


def _score(lane: _Lane, batch: SharedBatch) -> tuple[list[Outcome], float]:
    process = lane.free.get()
    started_s = time.monotonic()
    try:
        return score_batch(process, lane.reward, batch), time.monotonic() - started_s
    finally:
        lane.free.put(process)


def _check(lane: _Lane, request: CheckPrompts) -> None:
    process = lane.free.get()
    try:
        reply = process.ask(request)
    except ProcessLost as lost:
        raise setup_error(f"the check of reward {lane.reward.curve!r} failed", lost) from None
    finally:
        lane.free.put(process)
    if isinstance(reply, Failed):
        if reply.blame is Blame.INPUT:
            raise RewardInputError(reply.message)
        prefix = "" if reply.blame is Blame.SETUP else f"the check of reward {lane.reward.curve!r} "
        raise RewardSetupError(prefix + reply.message)


def _when_all(parts: Sequence[Future[Part]], finish: Callable[[list[Part]], Whole]) -> Future[Whole]:
    whole: Future[Whole] = Future()
    whole.set_running_or_notify_cancel()  # its parts are already running: it cannot be cancelled
    missing = len(parts)
    lock = threading.Lock()

    def one_done(_: Future[Part]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        if any(part.cancelled() for part in parts):
            whole.set_exception(PoolClosedError("the reward pool was closed before this was scored"))
            return
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(finish([part.result() for part in parts]))

    for part in parts:
        part.add_done_callback(one_done)
    return whole


def _plain(metadata: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(each) for each in metadata]  # read-only mappings cannot be pickled


def _require_distinct(rewards: Sequence[RewardConfig]) -> None:
    if not rewards:
        raise ValueError("the reward pool has no rewards; expected at least one")
    names = [reward.curve for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} rewards are called {name!r}; give them different labels")


def _require_pictures(images: Sequence[Image], prompts: int, metadata: int) -> None:
    if not len(images) == prompts == metadata:
        raise ValueError(
            f"{len(images)} images, {prompts} prompts and {metadata} metadata; expected as many of each"
        )
    for index, image in enumerate(images):
        if (
            not isinstance(image, np.ndarray)
            or image.dtype != np.uint8
            or image.ndim not in (3, 4)
            or image.shape[-1] != 3
        ):
            found = (
                f"{image.dtype} {list(image.shape)}"
                if isinstance(image, np.ndarray)
                else type(image).__name__
            )
            raise ValueError(
                f"image {index} is {found}; expected a numpy array of uint8, "
                "[height, width, 3] or [frames, height, width, 3]"
            )
