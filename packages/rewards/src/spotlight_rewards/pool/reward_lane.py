"""One reward's queue and processes: idle processes take batches from what waits.

A thread per process waits for it. What a lost process leaves unscored stays with its thread, which restarts
the process and asks again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from spotlight_rewards.pool.channel import Blame, CheckPrompts, Failed, Sample
from spotlight_rewards.pool.outages import Outage
from spotlight_rewards.pool.reward_process import PoolClosedError, ProcessLost, Scorer, setup_error
from spotlight_rewards.pool.scoring import Outcome, SharedSample, score_batch
from spotlight_rewards.pool.waiting import SampleGroup, WaitingSamples
from spotlight_rewards.results import SampleResult, combine
from spotlight_rewards.reward import CODE, RewardInputError, RewardSetupError, RewardTraits
from spotlight_rewards.reward_config import RewardConfig

_CLOSED = "the reward pool is closed"
_WEIGHTS_CHANGED = "Its weights changed while they were read: start again."
_PROCESSES_MAX = 64
"""Without ``replicas``, where other machines have more cores than this one."""


class SampleAbandonedError(RuntimeError):
    """Nobody waits for this sample any more, and it was not scored yet."""


class ScorerStarter(Protocol):
    """Makes the handle of a process; see :class:`~spotlight_rewards.pool.reward_process.RewardProcess`."""

    def __call__(self, reward: RewardConfig, start_deadline_s: float, replica: int, replicas: int) -> Scorer:
        """A process that is not started yet."""


class PendingSample:
    """A sample on its way through all rewards.

    Attributes:
        result: set when the last reward is done, or at the first error.
        abandoned: whether nobody waits for it any more.
    """

    def __init__(
        self, sample: Sample, rewards: Mapping[str, RewardConfig], abandoned: Callable[[], bool]
    ) -> None:
        self.abandoned = abandoned
        self.message = SharedSample(sample)
        self.result: Future[SampleResult] = Future()
        self.result.set_running_or_notify_cancel()
        self._rewards, self._outcomes = rewards, dict[str, Outcome]()
        self._lock = threading.Lock()

    def settle(self, reward: str, outcome: Outcome) -> None:
        """Record one reward's outcome."""
        with self._lock:
            self._outcomes[reward] = outcome
            complete = len(self._outcomes) == len(self._rewards) and not self.result.done()
        if complete:
            self.result.set_result(combine(self._rewards, self._outcomes))

    def fail(self, error: BaseException) -> None:
        """Give up, unless it is done."""
        with self._lock:
            if not self.result.done():
                self.result.set_exception(error)


class RewardLane:
    """One reward: its waiting samples, its processes, and one thread per process.

    Args:
        replicas: processes; None: one, or as many as the reward declares.
    """

    def __init__(
        self,
        reward: RewardConfig,
        replicas: int | None,
        start_deadline_s: float,
        merges: bool,
        starter: ScorerStarter,
    ) -> None:
        self.reward, self.traits = reward, RewardTraits()
        on_gpu = reward.device in ("cuda", "learner")  # what a reward declares is about cores
        self._chosen, self._starter = replicas or (1 if on_gpu else None), starter
        self._start_deadline_s = start_deadline_s
        self._free: queue.SimpleQueue[Scorer] = queue.SimpleQueue()
        self._waiting: WaitingSamples[PendingSample] = WaitingSamples(reward.batch_size, merges, False)
        self._lock, self._closed = threading.Lock(), False
        self.outage = Outage(reward)
        self.processes: tuple[Scorer, ...] = ()
        self._threads = ThreadPoolExecutor(
            max_workers=replicas or max(os.cpu_count() or 1, _PROCESSES_MAX),
            thread_name_prefix=f"reward-{reward.curve}",
        )

    def start(self) -> list[Future[None]]:
        """Start the processes, or one to learn how many there should be."""
        return self._start(self._chosen or 1, self._chosen or 1)

    def start_more(self) -> list[Future[None]]:
        """Once those of :meth:`start` run: read what the reward declares, and start the other processes."""
        self.traits = traits = self.processes[0].traits
        self._waiting.by_group = traits.takes_groups
        self._waiting.batch_size = self.reward.batch_size or traits.batch_size
        if self._chosen is not None or traits.cores_per_process is None:
            return []
        wanted = self.processes[0].cores // traits.cores_per_process
        wanted = max(1, min(wanted, max(os.cpu_count() or 1, _PROCESSES_MAX)))
        return self._start(wanted - 1, wanted)

    def require_one_scorer(self) -> None:
        """Raise RewardSetupError if the processes do not score by the same weights."""
        scorers = sorted({str(each.scored_by) for each in self.processes})
        if len(scorers) > 1:
            several = " in one process and ".join(map(repr, scorers))
            by_code = any(scorer.startswith(CODE) for scorer in scorers)
            raise RewardSetupError(
                f"reward {self.reward.curve!r} is scored by {several} in another; expected the same. "
                + ("Give every node the same file." if by_code else _WEIGHTS_CHANGED)
            )

    def check(self, request: CheckPrompts) -> Future[None]:
        """Let the reward check the prompts, in one process."""
        return self._submit(self._check, request)

    def put(self, samples: Sequence[tuple[PendingSample, SampleGroup]]) -> None:
        """Add the samples of one submission. Raises PoolClosedError."""
        with self._lock:
            self._waiting.put(samples)
        for _ in range(min(len(samples), len(self.processes))):
            self._submit(self._work)

    def interrupt(self) -> None:
        """Kill the processes for good; what waits fails with PoolClosedError."""
        self._closed = True
        self.outage.close()
        for each in self.processes:
            each.interrupt()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fail_waiting()

    def close(self) -> None:
        """After :meth:`interrupt`: wait for threads and processes."""
        self._threads.shutdown(wait=True)
        self._fail_waiting()
        for each in self.processes:
            each.close()

    def _start(self, number: int, replicas: int) -> list[Future[None]]:
        begun = len(self.processes)
        added = tuple(
            self._starter(self.reward, self._start_deadline_s, begun + index, replicas)
            for index in range(number)
        )
        self.processes += added
        for each in added:
            self._free.put(each)
        return [self._submit(each.start) for each in added]

    def _submit(self, work: object, *arguments: object) -> Future[None]:
        try:
            return self._threads.submit(work, *arguments)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise PoolClosedError(_CLOSED) from error

    def _fail_waiting(self) -> None:
        while batch := self._take()[0]:
            for each in batch:
                each.fail(PoolClosedError("the reward pool was closed before this was scored"))

    def _take(self) -> tuple[list[PendingSample], SampleGroup | None]:
        with self._lock:
            return self._waiting.take()

    def _work(self) -> None:
        process = self._free.get()
        try:
            while not self._closed and (taken := self._take())[0]:
                if wanted := self._still_wanted(taken[0]):
                    self._score(process, wanted, taken[1])
        finally:
            self._free.put(process)

    def _still_wanted(self, batch: Sequence[PendingSample]) -> list[PendingSample]:
        wanted = []
        for each in batch:
            if each.abandoned():
                each.fail(SampleAbandonedError("nobody waits for this sample any more"))
            else:
                wanted.append(each)
        return wanted

    def _score(self, process: Scorer, batch: Sequence[PendingSample], group: SampleGroup | None) -> None:
        try:
            messages = [each.message for each in batch]
            size = None if group is None else group.size

            def score(which: Sequence[int]) -> list[Outcome]:
                return score_batch(process, self.reward, [messages[at] for at in which], size)

            outcomes = self.outage.outlast(score, len(batch), together=group is not None)
        except BaseException as error:  # noqa: BLE001 - what waits for a sample raises it
            for each in batch:
                each.fail(error)
            return
        for each, outcome in zip(batch, outcomes, strict=True):
            each.settle(self.reward.curve, outcome)

    def _check(self, request: CheckPrompts) -> None:
        name, process = self.reward.curve, self._free.get()
        try:
            reply = process.ask(request)
        except ProcessLost as lost:
            raise setup_error(f"the check of reward {name!r} failed", lost) from None
        finally:
            self._free.put(process)
        if isinstance(reply, Failed):
            if reply.blame is Blame.INPUT:
                raise RewardInputError(reply.message)
            prefix = "" if reply.blame is Blame.SETUP else f"the check of reward {name!r} "
            raise RewardSetupError(prefix + reply.message)
