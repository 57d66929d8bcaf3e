"""Scoring one batch in one reward process: try it, retry it, then isolate the culprits sample by sample.

A batch that raised, crashed or hung is tried ``1 + retries`` times. Then each sample gets its own call, for
at most ``isolation_s`` (plus the last call); a group, which has no meaning without its members, fails as a
whole. Total time: at most ``(2 + retries) deadlines + isolation_s``, plus process starts. A result of the
wrong type or length is the reward's fault, and is not retried. Attempts that were lost with their machine do
not count, up to ``PREEMPTIONS_MAX`` of them. What fails because a server does not answer is neither tried
again here nor one by one: ``outages.py``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from spotlight_rewards.pool.channel import Blame, Failed, Sample, Score, Values, encode
from spotlight_rewards.pool.reward_process import ProcessLost, Scorer
from spotlight_rewards.results import FailureKind, RewardFailure
from spotlight_rewards.reward import RewardScore, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig

logger = logging.getLogger(__name__)

Outcome: TypeAlias = RewardScore | RewardFailure


PREEMPTIONS_MAX = 20
"""Machines lost with one batch, retries included, that do not count as failures."""


@dataclass(slots=True)
class _Losses:
    """Machines lost so far with one batch."""

    machines: int = 0


class SharedSample:
    """A sample encoded once, by whichever reward's thread needs it first, and sent to all of them."""

    def __init__(self, sample: Sample) -> None:
        self.content = sample
        self._lock = threading.Lock()
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        """The message. Raises ValueError if prompt or metadata cannot be pickled."""
        with self._lock:
            if self._encoded is None:
                self._encoded = encode(self.content)
            return self._encoded


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A call without scores; ``again``: a retry might succeed."""

    failure: RewardFailure
    again: bool


def score_batch(
    process: Scorer, reward: RewardConfig, batch: Sequence[SharedSample], group_size: int | None = None
) -> list[Outcome]:
    """Score a batch; one outcome per sample, in order.

    Args:
        group_size: the batch is a group that should have had so many members.

    Raises:
        PoolClosedError: the pool was closed meanwhile.
        ValueError: prompts or metadata cannot be pickled.
    """
    outcomes = _score_batch(process, reward, batch, isolate=group_size is None)
    if group_size is None:
        return outcomes
    counts = {"members": float(len(batch)), "missing": float(group_size - len(batch))}
    return [
        replace(each, details={**each.details, **counts}) if isinstance(each, RewardScore) else each
        for each in outcomes
    ]


def _score_batch(
    process: Scorer, reward: RewardConfig, batch: Sequence[SharedSample], *, isolate: bool
) -> list[Outcome]:
    samples = len(batch)
    losses = _Losses()
    whole = _attempt(process, reward, batch, losses)
    for _ in range(reward.retries):
        if isinstance(whole, list) or not whole.again:
            break
        logger.warning(
            "reward %s failed on %d images, retrying: %s", reward.curve, samples, whole.failure.message
        )
        whole = _attempt(process, reward, batch, losses)
    if isinstance(whole, list):
        return whole
    if samples == 1 or not isolate or not whole.again or reward.isolation_limit_s == 0:
        return [whole.failure] * samples
    logger.warning(
        "reward %s failed on %d images, trying each: %s", reward.curve, samples, whole.failure.message
    )
    return _one_by_one(process, reward, batch, whole.failure, losses)


def _one_by_one(
    process: Scorer,
    reward: RewardConfig,
    batch: Sequence[SharedSample],
    whole: RewardFailure,
    losses: _Losses,
) -> list[Outcome]:
    end_s = time.monotonic() + reward.isolation_limit_s
    outcomes: list[Outcome] = []
    for sample in batch:
        if time.monotonic() >= end_s:
            message = (
                f"not reached: trying {len(batch)} images one by one took more than "
                f"isolation_s={reward.isolation_limit_s:g}, after their batch had failed: {whole.message}"
            )
            outcomes.append(RewardFailure(whole.kind, reward.curve, message))
            continue
        single = _attempt(process, reward, [sample], losses)
        outcomes.extend(single if isinstance(single, list) else [single.failure])
    return outcomes


def _attempt(
    process: Scorer, reward: RewardConfig, batch: Sequence[SharedSample], losses: _Losses
) -> list[Outcome] | _Attempt:
    try:
        # A judge of weight 0 only watches: its gradient would cost a backward pass, and could fail.
        score = Score(reward.deadline_s, len(batch), gradients=reward.weight != 0)
        reply = process.ask(score, [sample.encoded for sample in batch])
    except ProcessLost as lost:
        if lost.preempted and losses.machines < PREEMPTIONS_MAX:
            losses.machines += 1
            logger.warning("reward %s: %s; its %d images are scored again", reward.curve, lost, len(batch))
            return _attempt(process, reward, batch, losses)
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
        # Settings were right when the prompts were checked: a server's refusal now may be of the moment.
        again, away = reply.blame not in (Blame.RESULT, Blame.AWAY), reply.blame is Blame.AWAY
        return _Attempt(RewardFailure(FailureKind.ERROR, reward.curve, message, away), again)
    assert isinstance(reply, Values), reply
    return [_outcome(reward.curve, reply, index) for index in range(len(batch))]


def _outcome(name: str, reply: Values, index: int) -> Outcome:
    if index in reply.failed:
        message = f"reward {name!r}: {reply.failed[index]}"
        return RewardFailure(FailureKind.ERROR, name, message, index in reply.away)
    for curve, values in reply.curves.items():
        if not math.isfinite(values[index]):
            message = f"reward {name!r} returned {values[index]} as {curve!r}; expected a finite number"
            return RewardFailure(FailureKind.NOT_FINITE, name, message)
    gradient = reply.gradients[index] if reply.gradients else None
    if gradient is not None and not np.isfinite(gradient).all():
        message = f"reward {name!r} returned a gradient that is not finite; expected finite numbers"
        return RewardFailure(FailureKind.NOT_FINITE, name, message)
    details = {curve: values[index] for curve, values in reply.curves.items() if curve != "score"}
    return RewardScore(reply.curves["score"][index], details, reply.scored_by, gradient)
