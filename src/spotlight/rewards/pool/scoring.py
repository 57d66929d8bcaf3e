"""Scoring one batch in one reward process: try it, retry it, then isolate the culprits sample by sample.

A batch that raised, crashed or hung is tried ``1 + retries`` times. Then each sample gets its own call, for
at most ``isolation_s`` (plus the last call). Total time: at most ``(2 + retries) deadlines + isolation_s``,
plus process starts. A result of the wrong type or length is the reward's fault, and is not retried.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TypeAlias

from spotlight.config.sections.rewards import RewardConfig
from spotlight.rewards.pool.channel import Batch, Blame, Failed, Score, Values, encode
from spotlight.rewards.pool.reward_process import ProcessLost, RewardProcess
from spotlight.rewards.results import FailureKind, RewardFailure
from spotlight.rewards.reward import RewardScore, RewardSetupError

logger = logging.getLogger(__name__)

Outcome: TypeAlias = RewardScore | RewardFailure


class SharedBatch:
    """A batch encoded once, by whichever reward's thread needs it first, and sent to all of them."""

    def __init__(self, batch: Batch) -> None:
        self.content = batch
        self._lock = threading.Lock()
        self._encoded: bytes | None = None

    def __len__(self) -> int:
        return len(self.content.images)

    @property
    def encoded(self) -> bytes:
        """The message. Raises ValueError if prompts or metadata cannot be pickled."""
        with self._lock:
            if self._encoded is None:
                self._encoded = encode(self.content)
            return self._encoded

    def only(self, index: int) -> SharedBatch:
        """The batch of one sample."""
        part, whole = slice(index, index + 1), self.content
        return SharedBatch(Batch(whole.images[part], whole.prompts[part], whole.metadata[part]))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A call without scores; ``again``: a retry might succeed."""

    failure: RewardFailure
    again: bool


def score_batch(process: RewardProcess, reward: RewardConfig, batch: SharedBatch) -> list[Outcome]:
    """Score a batch; one outcome per sample, in order.

    Raises:
        PoolClosedError: the pool was closed meanwhile.
        ValueError: prompts or metadata cannot be pickled.
    """
    samples = len(batch)
    whole = _attempt(process, reward, batch)
    for _ in range(reward.retries):
        if isinstance(whole, list) or not whole.again:
            break
        logger.warning(
            "reward %s failed on %d images, retrying: %s", reward.curve, samples, whole.failure.message
        )
        whole = _attempt(process, reward, batch)
    if isinstance(whole, list):
        return whole
    if samples == 1 or not whole.again or reward.isolation_limit_s == 0:
        return [whole.failure] * samples
    logger.warning(
        "reward %s failed on %d images, trying each: %s", reward.curve, samples, whole.failure.message
    )
    return _one_by_one(process, reward, batch, whole.failure)


def _one_by_one(
    process: RewardProcess, reward: RewardConfig, batch: SharedBatch, whole: RewardFailure
) -> list[Outcome]:
    end_s = time.monotonic() + reward.isolation_limit_s
    outcomes: list[Outcome] = []
    for index in range(len(batch)):
        if time.monotonic() >= end_s:
            message = (
                f"not reached: trying {len(batch)} images one by one took more than "
                f"isolation_s={reward.isolation_limit_s:g}, after their batch had failed: {whole.message}"
            )
            outcomes.append(RewardFailure(whole.kind, reward.curve, message))
            continue
        single = _attempt(process, reward, batch.only(index))
        outcomes.extend(single if isinstance(single, list) else [single.failure])
    return outcomes


def _attempt(process: RewardProcess, reward: RewardConfig, batch: SharedBatch) -> list[Outcome] | _Attempt:
    try:
        reply = process.ask(Score(reward.deadline_s), batch.encoded)
    except ProcessLost as lost:
        kind = FailureKind.TIMEOUT if lost.timed_out else FailureKind.ERROR
        return _Attempt(RewardFailure(kind, reward.curve, f"reward {reward.curve!r}: {lost}"), again=True)
    except RewardSetupError as error:  # it loaded before, but the restarted process could not
        return _Attempt(RewardFailure(FailureKind.ERROR, reward.curve, str(error)), again=False)
    if isinstance(reply, Failed):
        message = (
            reply.message
            if reply.blame in (Blame.INPUT, Blame.SETUP)
            else f"reward {reward.curve!r} {reply.message}"
        )
        again = reply.blame in (Blame.RAISED, Blame.INPUT)
        return _Attempt(RewardFailure(FailureKind.ERROR, reward.curve, message), again)
    assert isinstance(reply, Values), reply
    return [_outcome(reward.curve, reply, index) for index in range(len(batch))]


def _outcome(name: str, reply: Values, index: int) -> Outcome:
    if index in reply.failed:
        return RewardFailure(FailureKind.ERROR, name, f"reward {name!r}: {reply.failed[index]}")
    for curve, values in reply.curves.items():
        if not math.isfinite(values[index]):
            message = f"reward {name!r} returned {values[index]} as {curve!r}; expected a finite number"
            return RewardFailure(FailureKind.NOT_FINITE, name, message)
    details = {curve: values[index] for curve, values in reply.curves.items() if curve != "score"}
    return RewardScore(reply.curves["score"][index], details, reply.scored_by)
