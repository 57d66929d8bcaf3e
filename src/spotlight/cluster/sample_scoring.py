"""Finished samples to their scores: from the keeper, through the reward pool, back to the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from spotlight.cluster.loop import Calls
from spotlight.rewards.results import FailureKind, RewardBatch, ScoredSample
from spotlight.rewards.reward_pool import RewardPool
from spotlight.rollout.serialization import unpack_image
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import DropReason, Prompt, PromptId, Rollout, RolloutId

REASON = {
    FailureKind.ERROR: DropReason.REWARD_ERROR,
    FailureKind.TIMEOUT: DropReason.REWARD_TIMEOUT,
    FailureKind.NOT_FINITE: DropReason.REWARD_NOT_FINITE,
}
FETCH_S = 120.0
"""Longest that the keeper may take to hand over pictures."""


@dataclass(slots=True)
class Scoring:
    """Scores samples beside everything else. For the loop's thread only.

    Attributes:
        prompts: of the whole run.
        tell_head: hands an event to the controller.
        wanted: whether a sample is still to be scored.
        scored: told of every sample's curves.
        broken: told when pictures that were accepted cannot be had: the run cannot go on.
    """

    keeper: Any
    calls: Calls
    pool: RewardPool
    prompts: Mapping[PromptId, Prompt]
    tell_head: Callable[[ev.Event], None]
    wanted: Callable[[RolloutId], bool]
    scored: Callable[[RolloutId, Mapping[str, float]], None]
    note: Callable[[str], None]
    broken: Callable[[str], None]

    def score(self, rollouts: Sequence[Rollout], marks: Mapping[RolloutId, str], lineage: int) -> None:
        """Ask for the scores of samples; ``marks`` tell the weights that made each."""
        by_mark: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            by_mark.setdefault(marks[rollout.id], []).append(rollout)
        for mark, part in by_mark.items():
            self._fetch(part, mark, lineage)

    def _fetch(self, rollouts: list[Rollout], mark: str, lineage: int) -> None:
        names = [rollout.id for rollout in rollouts]
        self.calls.send(
            self.keeper.fetch.remote("image", names, mark),
            f"pictures of {len(names)} samples",
            FETCH_S,
            lambda kept: self._submit(rollouts, kept, lineage),
            lambda error: self.broken(f"the keeper does not hand over pictures: {error}"),
        )

    def _submit(self, rollouts: list[Rollout], kept: Sequence[Any], lineage: int) -> None:
        # A sample may have been discarded since: nobody waits for its scores then. Else it would be waited
        # for without an end.
        missing = [r.id for r, item in zip(rollouts, kept, strict=True) if item is None and self.wanted(r.id)]
        if missing:
            self.broken(f"the keeper has lost the pictures of {len(missing)} samples, first {missing[0]}")
            return
        held = [(rollout, item.data) for rollout, item in zip(rollouts, kept, strict=True) if item]
        if not held:
            return
        prompts = [self.prompts[rollout.prompt_id] for rollout, _ in held]
        future = self.pool.submit(
            [unpack_image(data) for _, data in held],
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
        )
        part = [rollout for rollout, _ in held]
        future.add_done_callback(
            lambda done: self.calls.loop.call_soon_threadsafe(self._collect, part, done, lineage)
        )

    def _collect(self, rollouts: Sequence[Rollout], future: Future[RewardBatch], lineage: int) -> None:
        scores: dict[RolloutId, Mapping[str, float]] = {}
        for rollout, result in zip(rollouts, future.result().samples, strict=True):
            if isinstance(result, ScoredSample):
                scores[rollout.id] = result.curves()
                self.scored(rollout.id, scores[rollout.id])
                continue
            detail = f"{result.reward}: {result.message}"
            self.note(f"{rollout.id} is not scored: {REASON[result.kind].value}: {detail.splitlines()[0]}")
            self.tell_head(ev.RewardFailed(rollout.id, REASON[result.kind], detail, lineage))
        if scores:
            self.tell_head(ev.SamplesRewarded(scores, lineage))
