"""The reward pool: every reward in its own processes, with deadlines, in parallel with the rollouts.

    with RewardPool([RewardConfig(name="ocr"), RewardConfig(name="my_rewards:brightness")]) as pool:
        pool.check(prompts, metadata)                       # before any work
        pending = pool.submit(images, prompts, metadata)    # returns at once
        ...
        for sample in pending.result().samples: ...

Each reward has a queue of its own, from which its idle processes take batches (``reward_lane.py``). No lock
is held while a reward works. Every sample ends up scored, or failed with a reason.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, Self

import numpy as np

from spotlight_rewards.pool.channel import CheckPrompts, Sample
from spotlight_rewards.pool.reward_lane import PendingSample, RewardLane, ScorerStarter
from spotlight_rewards.pool.reward_process import RewardProcess
from spotlight_rewards.pool.waiting import SampleGroup
from spotlight_rewards.results import RewardBatch, SampleResult
from spotlight_rewards.reward import Image
from spotlight_rewards.reward_config import RewardConfig


class RewardPool:
    """Starts the processes of all rewards and waits until they are loaded.

    Args:
        rewards: the rewards; names must differ.
        workers: processes per reward that names no ``replicas``; None: as many as the reward likes.
        start_deadline_s: limit for starting a process and loading its reward, and for ``check``.
        merges: batches may hold samples of several submissions; then what is in one depends on the time.
        starter: starts a process of a reward; default: on this machine.

    Raises:
        RewardSetupError: a reward cannot be loaded; no process is left running.
        ValueError: no rewards, duplicate names, or ``workers`` < 1.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        workers: int | None = None,
        *,
        start_deadline_s: float = 120.0,
        merges: bool = False,
        starter: ScorerStarter = RewardProcess,
    ) -> None:
        _require_distinct(rewards)
        if workers is not None and workers < 1:
            raise ValueError(f"workers of the reward pool is {workers}; expected 1 or more")
        self._start_deadline_s = start_deadline_s
        self._lanes = tuple(
            RewardLane(reward, reward.replicas or workers, start_deadline_s, merges, starter)
            for reward in rewards
        )
        # Also runs when the pool is garbage collected, and at exit.
        self._shut_down = weakref.finalize(self, _shut_down, self._lanes)
        try:
            starts = [start for lane in self._lanes for start in lane.start()]
            for start in wait(starts, return_when=FIRST_EXCEPTION).done:
                start.result()
            more = [start for lane in self._lanes for start in lane.start_more()]
            for start in wait(more, return_when=FIRST_EXCEPTION).done:
                start.result()
            for lane in self._lanes:
                lane.require_one_scorer()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names, in order."""
        return tuple(lane.reward.curve for lane in self._lanes)

    @property
    def compares_groups(self) -> tuple[str, ...]:
        """Names of the rewards that compare the samples of a group, and so need all of them at once."""
        return tuple(lane.reward.curve for lane in self._lanes if lane.traits.takes_groups)

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Names of the rewards that weigh in and cannot be differentiated."""
        return tuple(
            lane.reward.curve
            for lane in self._lanes
            if lane.reward.weight != 0 and not lane.traits.differentiable
        )

    @property
    def reads_files(self) -> tuple[str, ...]:
        """Names of the rewards that open files which the metadata of a sample names."""
        return tuple(lane.reward.curve for lane in self._lanes if lane.traits.reads_files)

    @property
    def scored_by(self) -> dict[str, str]:
        """What scores, by the name of a reward that says so."""
        scorers = {lane.reward.curve: lane.processes[0].scored_by for lane in self._lanes}
        return {name: scorer for name, scorer in scorers.items() if scorer}

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes running on this machine now."""
        return tuple(each.pid for lane in self._lanes for each in lane.processes if each.pid is not None)

    def log_to(self, directory: Path, prefix: str = "reward") -> None:
        """Append all output of the rewards to ``directory/PREFIX-NAME-INDEX.log``, one file per process.

        Includes earlier output. Without this call, output appears in errors only.
        """
        for lane in self._lanes:
            for index, each in enumerate(lane.processes):
                each.log_to(directory / f"{prefix}-{_file_part(lane.reward.curve)}-{index}.log")

    def tell(self, note: Callable[[str], None]) -> None:
        """Have ``note`` told, from any thread, when a reward does not answer and when it does again.

        Without this call, the log is.
        """
        for lane in self._lanes:
            lane.outage.note = note

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
        for pending in [lane.check(request) for lane in self._lanes]:
            pending.result()

    def submit(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        groups: Sequence[SampleGroup] | None = None,
        *,
        abandoned: Callable[[], bool] = lambda: False,
        gradients: bool = False,
    ) -> Future[RewardBatch]:
        """Score samples in the background; see :meth:`submit_each`.

        Returns:
            The results, in the order of ``images``; :class:`PoolClosedError` if the pool is closed first, and
            :class:`SampleAbandonedError` if a sample was.
        """
        pending = self.submit_each(
            images, prompts, metadata, groups, abandoned=abandoned, gradients=gradients
        )
        return _when_all(pending)

    def submit_each(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        groups: Sequence[SampleGroup] | None = None,
        *,
        abandoned: Callable[[], bool] = lambda: False,
        gradients: bool = False,
    ) -> list[Future[SampleResult]]:
        """Score samples in the background; each is done when every reward has scored it.

        Args:
            images: uint8 [height, width, 3], or [frames, height, width, 3]; must not be modified until the
                result is available.
            prompts: one per image.
            metadata: one per image, picklable values.
            groups: the group of each image, for rewards that compare; default: images of one prompt.
            abandoned: asked in other threads before a sample is scored; then it fails, SampleAbandonedError.
            gradients: of pictures, results have the gradient too, where all rewards that weigh in can.

        Raises:
            ValueError: arguments differ in length, or an image has the wrong type or shape.
            PoolClosedError: the pool is closed.
        """
        _require_pictures(images, len(prompts), len(metadata))
        if not images:
            return []
        if groups is None:
            sizes = Counter(prompts)
            groups = [SampleGroup(prompt, sizes[prompt]) for prompt in prompts]
        rewards = {lane.reward.curve: lane.reward for lane in self._lanes}
        pending = [
            PendingSample(Sample(image, prompt, record, gradients), rewards, abandoned)
            for image, prompt, record in zip(images, prompts, _plain(metadata), strict=True)
        ]
        for lane in self._lanes:
            lane.put(list(zip(pending, groups, strict=True)))
        return [each.result for each in pending]

    def score(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        groups: Sequence[SampleGroup] | None = None,
    ) -> RewardBatch:
        """Score samples and wait; see :meth:`submit_each`."""
        return self.submit(images, prompts, metadata, groups).result()

    def close(self) -> None:
        """Kill all processes and wait for them. Idempotent."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_part(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _shut_down(lanes: Sequence[RewardLane]) -> None:
    for lane in lanes:
        lane.interrupt()
    for lane in lanes:
        lane.close()


def _when_all(parts: Sequence[Future[SampleResult]]) -> Future[RewardBatch]:
    whole: Future[RewardBatch] = Future()
    whole.set_running_or_notify_cancel()  # its parts are already running: it cannot be cancelled
    missing = len(parts)
    lock = threading.Lock()
    if not parts:
        whole.set_result(RewardBatch(()))

    def one_done(_: Future[SampleResult]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(RewardBatch(tuple(part.result() for part in parts)))

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
