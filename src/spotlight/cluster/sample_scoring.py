"""Accepts, scores and discards finished samples, whose values stay in the blob store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_store import BlobAddress
from spotlight.cluster.remote_calls import Conversations, Notify
from spotlight.rollout.serialization import unpack_image
from spotlight.runtime.observer import NotScored
from spotlight.runtime.recorder import Picture
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import ScoreSamples
from spotlight.scheduler.types import DropReason, Rollout, RolloutId, group_of
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.waiting import SampleGroup
from spotlight_rewards.results import SampleResult, ScoredSample

VALUES = ("sample", "image", "progress", "latent")
"""Kinds of blobs that belong to a rollout."""


@dataclass(slots=True)
class AcceptedSamples:
    """Accepted, undiscarded samples with their weights digests.

    Values are stored under rollout and digest, so two versions of one sample are never confused. Those of a
    sample that was kept stay under its preview's name, which a learner that is lost makes a preview's again.

    Attributes:
        previews: of the samples kept from one.
    """

    store: BlobClient
    digests: dict[RolloutId, str] = field(default_factory=dict)
    previews: dict[RolloutId, RolloutId] = field(default_factory=dict)

    def accept(self, rollouts: Sequence[RolloutId], weights_digest: str) -> None:
        """Add samples whose report the controller accepted."""
        self.digests |= dict.fromkeys(rollouts, weights_digest)

    def keep(self, preview: RolloutId, rollout: RolloutId) -> None:
        """A preview's sample becomes that of ``rollout``."""
        self.digests[rollout] = self.digests.pop(preview)
        self.previews[rollout] = preview

    def address(self, rollout: RolloutId) -> BlobAddress:
        """Where a sample's values are stored."""
        return BlobAddress(self.previews.get(rollout, rollout), self.digests[rollout])

    def by_digest(self, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
        """Accepted rollouts by weights digest."""
        grouped: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            grouped.setdefault(self.digests[rollout.id], []).append(rollout)
        return grouped

    async def pictures(self, made_with: Mapping[str, Sequence[Rollout]]) -> dict[RolloutId, Picture]:
        """Of rollouts as :meth:`by_digest` groups them; missing ones are left out."""
        found: dict[RolloutId, Picture] = {}
        for digest, rollouts in made_with.items():
            names = [self.previews.get(rollout.id, rollout.id) for rollout in rollouts]
            stored = zip(rollouts, await self.store.fetch("image", names, digest), strict=True)
            found |= {rollout.id: unpack_image(blob.data) for rollout, blob in stored if blob is not None}
        return found

    def forget(self, rollouts: Sequence[RolloutId]) -> None:
        """Remove discarded samples."""
        for rollout in rollouts:
            self.digests.pop(rollout, None)

    async def drop(self, rollouts: Sequence[RolloutId], last_put: int) -> None:
        """Delete the stored values of discarded rollouts, unless another sample's are the same.

        Args:
            last_put: the store's :attr:`~BlobClient.puts` when they were discarded. After a lost learner they
                are made again with the same weights, perhaps before the store hears of this.
        """
        names = [self.previews.pop(rollout, rollout) for rollout in rollouts]
        needed = {*self.digests, *self.previews.values()}
        unused = [name for name in names if name not in needed]
        for kind in VALUES:
            await self.store.drop(kind, unused, last_put)

    async def sweep(self, issued: Iterable[RolloutId]) -> None:
        """Delete values left by late reports: all except accepted and ``issued`` rollouts."""
        known = {*issued, *self.digests, *self.previews.values()}
        puts = self.store.puts  # by now, as ``known`` is: more may be issued while this is under way
        await asyncio.gather(*(self.store.keep_only(kind, known, puts) for kind in VALUES))


@dataclass(slots=True)
class SampleScoring:
    """Sends accepted samples through the reward pool in the background."""

    conversations: Conversations
    samples: AcceptedSamples
    pool: RewardPool
    prompts: Mapping[PromptId, Prompt]
    put_event: Callable[[ev.Event], None]
    note: Notify

    def score(self, effect: ScoreSamples) -> None:
        """Request scores, which arrive as events."""
        group, lineage = None, effect.lineage
        if effect.size is not None:
            group = SampleGroup(f"{group_of(effect.rollouts[0])} {lineage}", effect.size)
        self.conversations.start(self._score(effect.rollouts, lineage, group))

    async def _score(
        self, rollouts: Sequence[Rollout], lineage: int, group: SampleGroup | None = None
    ) -> None:
        pictures = await self.samples.pictures(self.samples.by_digest(rollouts))
        # A discarded sample needs no scores. For any other the controller would wait forever.
        lost = [each.id for each in rollouts if each.id not in pictures and each.id in self.samples.digests]
        if lost:
            raise RuntimeError(
                f"the blob store has lost the pictures of {len(lost)} samples, first {lost[0]}"
            )
        rollouts = [each for each in rollouts if each.id in pictures]
        if not rollouts:
            return
        prompts = [self.prompts[rollout.prompt_id] for rollout in rollouts]
        submitted = self.pool.submit_each(
            [pictures[rollout.id] for rollout in rollouts],
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            None if group is None else [group] * len(rollouts),
        )
        pending = {
            asyncio.wrap_future(each): rollout for each, rollout in zip(submitted, rollouts, strict=True)
        }
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            self._finish(
                {pending.pop(each): each.result() for each in list(pending) if each in done}, lineage
            )

    def _finish(self, results: Mapping[Rollout, SampleResult], lineage: int) -> None:
        scores: dict[RolloutId, Mapping[str, float]] = {}
        failed = NotScored()
        for rollout, result in results.items():
            if isinstance(result, ScoredSample):
                scores[rollout.id] = result.curves()
                continue
            detail = f"{result.reward}: {result.message}"
            reason = DropReason(f"reward_{result.kind}")
            failed.add(rollout.id, f"{reason.value}: {detail}")
            self.put_event(ev.RewardFailed(rollout.id, reason, detail, lineage))
        failed.tell(self.note)
        if scores:
            self.put_event(ev.SamplesRewarded(scores, lineage))
