"""The learner's course for the head: begin, publish, checkpoint, restore, export, one task each.

A task whose learner is lost ends silently (``AbandonedError``); the loss is an event of its own, answered by
a rollback.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.learner.learner_rank import LearnerRank
from spotlight.cluster.learner.life import Life
from spotlight.cluster.remote_calls import AbandonedError, Conversations, Notify
from spotlight.cluster.workers.worker_weights import version_name
from spotlight.runtime.recorder import LEARNER_FOLDER
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import NodeId, PolicyVersion
from spotlight.store.checkpoints import CheckpointStore
from spotlight_rewards.base.prompts import PromptId
from spotlight_weights.bundle import WeightsManifest

T = TypeVar("T")
VERSIONS_KEPT = 2
"""Published versions, besides the newest, whose weights are retained."""


class PublishedVersions:
    """Weights digests of published versions; workers look versions up by name."""

    def __init__(self, store: BlobClient) -> None:
        self._store = store
        self._digests: dict[tuple[PolicyVersion, int], str] = {}

    def digest(self, version: PolicyVersion, lineage: int) -> str | None:
        """Digest of a version; None if it is not published."""
        return self._digests.get((version, lineage))

    async def announce(self, manifest: WeightsManifest) -> None:
        """Publish a manifest whose weights are already stored; drop old versions."""
        older = sorted(key for key in self._digests if key[0] < manifest.version)[:-VERSIONS_KEPT]
        dropped = {self._digests.pop(key) for key in older} - {*self._digests.values(), manifest.digest}
        self._digests[PolicyVersion(manifest.version), manifest.lineage] = manifest.digest
        if dropped:
            await self._store.drop("weights", list(dropped))
        if older:
            await self._store.drop("manifest", [version_name(*key) for key in older])
        name = version_name(manifest.version, manifest.lineage)
        await self._store.put("manifest", name, manifest.to_json().encode())

    def continue_in(self, lineage: int, version: PolicyVersion) -> None:
        """After a rollback: leases of this version continue, with the same weights."""
        known = max((key for key in self._digests if key[0] == version), default=None)
        if known is not None:
            self._digests[version, lineage] = self._digests[known]


@dataclass(slots=True)
class LearnerDriver:
    """The learner, as the head uses it. Head's event loop only.

    Attributes:
        prompts: all the run can use; their embeddings are stored when it begins.
        placed: called once the processes of a learner that moves are up; returns its ranks by machine.
    """

    controller: Controller
    learner: LearnerGroup
    published: PublishedVersions
    conversations: Conversations
    checkpoints: CheckpointStore
    prompts: tuple[PromptId, ...]
    put_event: Callable[[ev.Event], None]
    note: Notify
    placed: Callable[[], Mapping[NodeId, int]] | None = None
    _start_from: Path | None = None
    _begun: bool = False
    _exporting: bool = False
    _committed: bool = False
    _lost_meanwhile: str | None = None
    _restoring: int = 0
    _ranks: int | None = None
    _restored: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ranks(self) -> Life:
        """See :attr:`LearnerGroup.ranks`."""
        return self.learner.ranks

    def begin(self, checkpoint: Path | None) -> None:
        """Start the learner from ``checkpoint``; None starts the run afresh."""
        self._start_from = checkpoint
        self.conversations.start(self._begin())

    async def _begin(self) -> None:
        manifest = await self._restore(self._start_from, self.controller.cluster.lineage)
        life = self.learner.working_life
        await self.ranks.ask(LearnerRank.send_conditions, self.prompts)
        await self.published.announce(manifest)
        if self.learner.is_up and self.learner.working_life == life:  # else it was lost and is being restored
            self._begun = True
            self.put_event(ev.RunStarted(self._ranks))

    async def _restore(self, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        manifest = await self.learner.restore(checkpoint, lineage)
        if self.placed is not None:
            ranks = self.placed()
            self._ranks = sum(ranks.values())
            self.put_event(ev.LearnerStarted(ranks))
        self.conversations.start(self._await_loss())
        return manifest

    async def _await_loss(self) -> None:
        """Once per life."""
        detail = await self.learner.lost()
        if not self._committed:
            self.put_event(ev.LearnerLost(detail))
        self.note(f"the learner is lost and goes back to the last checkpoint: {detail}")
        if self._committed:
            self._lost_meanwhile = detail  # the saved checkpoint counts: report it first
        elif not self._begun:
            self.begin(self._start_from)
        elif self._exporting:
            self.restore(None, self.controller.cluster.lineage)

    async def publish(self, version: PolicyVersion, lineage: int) -> None:
        """Store the weights and announce their version to workers."""
        await self.published.announce(await self.ranks.publish(version, lineage))
        self.put_event(ev.WeightsPublished(version))

    # -- checkpoints -----------------------------------------------------------------------------------

    async def save(self, committing: AbstractContextManager[Path]) -> None:
        """Save the learner and commit the checkpoint; call :meth:`settle` once it is accounted for.

        If the learner is lost while saving, nothing is committed; a later loss is held back until
        :meth:`settle`.
        """
        async with _left_in_thread(committing) as directory:
            await self.learner.save(directory / LEARNER_FOLDER)
            self._committed = True

    def settle(self) -> None:
        """Report a loss that was held back since the save."""
        self._committed = False
        if self._lost_meanwhile is not None:
            self.put_event(ev.LearnerLost(self._lost_meanwhile))
            self._lost_meanwhile = None

    def restore(self, iteration: int | None, lineage: int) -> None:
        """Start the learner from the newest checkpoint, which must be of ``iteration`` (None: any)."""
        self._restoring += 1
        self.conversations.start(self._restore_newest(iteration, lineage))

    async def _restore_newest(self, iteration: int | None, lineage: int) -> None:
        try:
            await self._restore_checkpoint(iteration, lineage)
        finally:
            self._restoring -= 1
            self._restored.set()

    async def _restore_checkpoint(self, iteration: int | None, lineage: int) -> None:
        newest = await asyncio.to_thread(self.checkpoints.newest_valid)
        if lineage != self.controller.cluster.lineage:
            return  # it was lost again meanwhile: a later restore follows
        at = newest.header.iteration if newest else 0
        if iteration is not None and at != iteration:
            raise RuntimeError(
                f"the newest whole checkpoint is of iteration {at}, but {iteration} was committed: "
                "the run directory has changed behind this run's back"
            )
        manifest = await self._restore(newest.directory / LEARNER_FOLDER if newest else None, lineage)
        await self.published.announce(manifest)
        self.put_event(ev.LearnerRestored(lineage, self._ranks))

    async def prepare_second(self, number: int) -> None:
        """Form a second learner elsewhere, which :meth:`restore` takes; reported with its ``number``."""
        try:
            await self.learner.form_second()
        except AbandonedError:
            self.put_event(ev.LearnerPrepared(number, formed=False))
        else:
            self.put_event(ev.LearnerPrepared(number))

    async def export(self) -> Path:
        """Export the judged weights into the run directory, after the run; restores a lost learner first."""
        self._exporting = True
        while True:
            # The controller is over: nobody else restores it, nor reads of a loss that was just reported.
            if not (self.learner.is_up or self._restoring):
                self.restore(None, self.controller.cluster.lineage)
            self._restored.clear()
            try:
                exported = await self.ranks.ask(LearnerRank.export)
                assert exported is not None, "rank 0 exports"
                return exported
            except AbandonedError:
                await self._restored.wait()


@asynccontextmanager
async def _left_in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Exit ``manager`` in a thread on success, because committing writes to disk."""
    value = manager.__enter__()
    try:
        yield value
    except BaseException as error:
        manager.__exit__(type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
