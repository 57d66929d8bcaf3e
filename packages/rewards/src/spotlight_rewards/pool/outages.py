"""Patience with what scores and does not answer: samples are asked for again, with growing pauses.

A reward's threads share one :class:`Outage`, which says once that it waits, and once that scores come again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from spotlight_rewards.pool.scoring import Outcome
from spotlight_rewards.results import RewardFailure
from spotlight_rewards.reward import RewardScore
from spotlight_rewards.reward_config import RewardConfig

logger = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Before the first repetition, doubled before each further one."""


class Outage:
    """Of one reward.

    Attributes:
        note: told when it begins and when it is over, from any thread.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self.note: Callable[[str], None] = logger.warning
        self._lock, self._began_s = threading.Lock(), 0.0
        self._waiting, self._told_s = 0, 0.0
        self._over = threading.Event()

    def close(self) -> None:
        """End all pauses."""
        self._over.set()

    def outlast(
        self, score: Callable[[Sequence[int]], Sequence[Outcome]], samples: int, *, together: bool
    ) -> list[Outcome]:
        """The outcomes of ``samples``; those that are away are scored again for up to ``outage_s``.

        An outage that another call met before has begun then: who is away for good is not waited for batch by
        batch.

        Args:
            score: of the samples with these numbers, in this order.
            together: they are scored all or none.
        """
        outcomes = list(score(range(samples)))
        if any(map(_is_away, outcomes)) and self._reward.outage_s:
            with self._lock:
                self._waiting += 1
            try:
                outcomes = self._asked_again(score, outcomes, together)
            finally:
                with self._lock:
                    self._waiting -= 1
        if any(isinstance(each, RewardScore) for each in outcomes):
            self._scores()
        return outcomes

    def _asked_again(
        self, score: Callable[[Sequence[int]], Sequence[Outcome]], outcomes: list[Outcome], together: bool
    ) -> list[Outcome]:
        with self._lock:
            self._began_s = self._began_s or time.monotonic()
            end_s, pause_s = self._began_s + self._reward.outage_s, PAUSE_S
        turn = 0
        while away := [at for at, each in enumerate(outcomes) if _is_away(each)]:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return [self._given_up(each) for each in outcomes]
            self._tell(outcomes[away[0]])
            self._over.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            again = range(len(outcomes)) if together else away
            for at, outcome in zip(again, score(again), strict=True):
                outcomes[at] = outcome
            if not together:
                _look_for_one(score, outcomes, away, turn, end_s)
            turn += 1
        return outcomes

    def _tell(self, outcome: Outcome) -> None:
        assert isinstance(outcome, RewardFailure)
        with self._lock:
            known, self._told_s = self._told_s, self._told_s or time.monotonic()
        if not known:
            self.note(
                f"no scores at the moment: {_in_short(outcome.message)}\nIt is asked again, with growing "
                f"pauses, for up to {self._reward.outage_s:g} s (rewards[].outage_s of "
                f"{self._reward.curve!r}); samples that are made meanwhile wait."
            )

    def _scores(self) -> None:
        """Others may still wait, as for one of several servers: they have their own end, and tell once."""
        with self._lock:
            self._began_s = 0.0
            told_s, self._told_s = self._told_s, self._told_s if self._waiting else 0.0
            over = told_s and not self._waiting
        if over:
            self.note(f"reward {self._reward.curve!r} scores again, after {time.monotonic() - told_s:.0f} s")

    def _given_up(self, outcome: Outcome) -> Outcome:
        if not _is_away(outcome):
            return outcome
        assert isinstance(outcome, RewardFailure)
        limit = f"It did not answer for rewards[].outage_s={self._reward.outage_s:g}."
        return replace(outcome, message=f"{outcome.message}\n{limit}")


def _look_for_one(
    score: Callable[[Sequence[int]], Sequence[Outcome]],
    outcomes: list[Outcome],
    away: Sequence[int],
    turn: int,
    end_s: float,
) -> None:
    """One sample may hold up its whole batch: where another one alone is answered, all are asked alone, until
    the outage ends: each may take as long as a batch."""
    if len(away) == 1 or not all(_is_away(outcomes[at]) for at in away):
        return
    alone, *others = *away[turn % len(away) :], *away[: turn % len(away)]
    [outcomes[alone]] = score([alone])
    if not _is_away(outcomes[alone]):
        for at in others:
            if time.monotonic() >= end_s:
                break
            [outcomes[at]] = score([at])


def _is_away(outcome: Outcome) -> bool:
    return isinstance(outcome, RewardFailure) and outcome.away


def _in_short(message: str) -> str:
    """Of a traceback, the first and the last line."""
    first, *rest = message.strip().splitlines()
    return f"{first} ... {rest[-1].strip()}" if rest else first
